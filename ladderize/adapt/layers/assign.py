"""The choice of the KV groups and MLP neurons that share a virtual rank, where an attention's sum is late or dropped.

A permutation of either changes nothing in a dense model. In such a block a rank's neurons see that rank's heads alone,
so it decides what is lost. Relatives: head grouping of Sync-Point Drop (arXiv 2502.20727), and arXiv 2609.13846.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.layers.assign_layer import ApartBlock, BlockTokens, Members, cheapest_ranks, descend
from ladderize.adapt.layers.layer_files import Contender, assigned_weights, heldout_measures
from ladderize.adapt.layers.options import HEADS, NEURONS, SHORT, AssignOptions
from ladderize.adapt.layers.windows import Windows, read_rows, split_windows
from ladderize.blocks import Blocks, State, check_finite, compute_dtype
from ladderize.checkpoint.config import kv_head_count, most_positions, stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.assignment import ASSIGNMENT, AssignmentReport, RankAssignment
from ladderize.convert.inspection import read_retrainings
from ladderize.convert.recipe import Recipe
from ladderize.data.windows import draw_windows, row_of_ids
from ladderize.errors import UserError
from ladderize.layout import APART, DELAYED, Layout
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks

WINDOW_TOKENS = 512  # of windows, unless the data are rows of ids
# what the heads are chosen on; neurons and what is kept have all
SAMPLE_TOKENS, SAMPLE_NEURONS = 4096, 2048
WINDOWS_AT_ONCE_TOKENS = 4096


def assign_ranks(
    model: str | Path, recipe: Recipe, options: AssignOptions, *, console: Console = SILENT
) -> RankAssignment:
    """Return the assignment for what a recipe makes of a dense model, with one layer in memory at a time. Raises
    UserError where the model, the layout or the data leave nothing to assign."""
    checkpoint, layout = assignable(str(model), recipe)
    data, wanted, positions = options.data or "", assign_tokens(checkpoint.config), most_positions(checkpoint.config)
    with console.stage("reading the data"):
        rows = read_rows(checkpoint, data, console, enough=2 * wanted)
        length = row_of_ids([data]) or min(WINDOW_TOKENS, positions)
        count = sum(map(len, rows)) // length
        if count < 2:
            raise UserError(f"{data} gives {count} windows of {length} tokens, and one is held out; give more data")
        drawn = draw_windows(rows, spec=data, positions=positions, seq_len=length, seed=0)
    windows = split_windows(drawn, None, None, wanted)
    assert windows is not None  # there are two
    device = torch.device(options.device or default_device())
    blocks = Blocks(checkpoint, compute_dtype("auto", stored_dtype(checkpoint)), device)
    return assign_layers(blocks, layout, options.assign, windows, console=console)


def assign_tokens(config: Mapping[str, Any]) -> int:
    """Return the number of tokens to assign heads and neurons by."""
    return max(SHORT, int(config["intermediate_size"]))


def assignable(model: str, recipe: Recipe) -> tuple[Checkpoint, Layout]:
    """Return the dense checkpoint, and the layout that the recipe makes of it; UserError where nothing may move."""
    checkpoint = open_checkpoint(model)
    layout = recipe.layout(Layout.from_config(checkpoint.config))
    layout.check_model(checkpoint.config)
    if not apart_layers(layout):
        raise UserError(
            f"--assign has no effect on this layout ({layout}), which neither delays nor drops an attention's sum;"
            " name layers with --delayed or --spd"
        )
    if (checkpoint.folder / ASSIGNMENT).is_file():
        raise UserError(f"{model} has an {ASSIGNMENT} already; assign the dense model that it was made of")
    history = read_retrainings(checkpoint.folder)
    if history and history[-1].layout != str(Layout.dense(layout.num_layers)):
        raise UserError(
            f"{model} was adapted to another layout ({history[-1].layout}); assign the dense model, then adapt"
        )
    return checkpoint, layout


def apart_layers(layout: Layout) -> list[int]:
    """Return the layers whose MLP sees the own rank's heads alone."""
    return [layer for layer, mode in enumerate(layout.attention_sync) if mode in APART]


def assign_layers(
    blocks: Blocks, layout: Layout, names: Sequence[str], windows: Windows, *, seed: int = 0, console: Console = SILENT
) -> RankAssignment:
    """Return the assignment of every layer of ``apart_layers`` of a dense model: of heads, neurons or both. It is
    chosen by the first training windows, and the held-out ones decide what is kept. Raises UserError for data with
    fewer tokens than a layer has neurons, and for NaN or infinite activations."""
    config, ranks, layers = blocks.config, layout.sync_tp_size or 1, apart_layers(layout)
    moves_heads, moves_neurons = HEADS in names and kv_head_count(config) % ranks == 0, NEURONS in names
    shared = f"{ranks} ranks share {kv_head_count(config)} KV heads"
    if not moves_heads and not moves_neurons:
        raise UserError(f"--assign heads: {shared}, so heads stay in their order; assign neurons")
    if HEADS in names and not moves_heads:
        console.note(f"heads stay in their order: {shared}")
    fit = windows.train[: -(-assign_tokens(config) // windows.train.shape[1])]
    heldout = windows.heldout[: -(-len(fit) // 4)]
    if moves_neurons and fit.numel() < config["intermediate_size"]:
        raise UserError(
            f"the data give {fit.numel():,} tokens to assign the {config['intermediate_size']:,} neurons of a layer by;"
            " give more data, or assign heads alone"
        )
    assignment = RankAssignment(ranks, fingerprint(blocks.checkpoint))
    at_once = max(1, WINDOWS_AT_ONCE_TOKENS // fit.shape[1])
    dense, apart = Layout.dense(layout.num_layers), apart_layout(layout.num_layers, ranks)
    with torch.no_grad(), console.progress("assigning", layers[-1] + 1) as advance:
        states = [blocks.embed(ids) for ids in (*fit.split(at_once), *heldout.split(at_once))]
        trained = len(fit.split(at_once))
        for index in range(layers[-1] + 1):
            weights = blocks.weights(index)
            if index in layers:
                layer = blocks.layer(index, apart, weights)
                block = ApartBlock(layer, ranks, kv_head_count(config) if moves_heads else ranks)
                members, neurons, report = assign_block(
                    block,
                    block_tokens(blocks, layer, states[:trained]),
                    block_tokens(blocks, layer, states[trained:]),
                    heads=moves_heads,
                    neurons=moves_neurons,
                    seed=seed,
                )
                if moves_heads:  # each rank's units lie where the rank looks for them
                    heads = np.arange(config["num_attention_heads"]).reshape(block.units, -1)
                    assignment.heads[index] = tuple(heads[np.concatenate(members)].flatten().tolist())
                if moves_neurons:
                    assignment.neurons[index] = tuple(neurons.tolist())
                assignment.report[index] = report
            plain = blocks.layer(index, dense, weights)
            states = [blocks.run(plain, state) for state in states]  # type: ignore[misc]
            advance(1)
    if moves_heads and moves_neurons and DELAYED in layout.mlp_sync:
        with console.stage("matching the ranks of neighbouring layers"):
            return better_labels(blocks, layout, assignment, fit[: -(-SAMPLE_TOKENS // fit.shape[1])], heldout)
    return assignment


def apart_layout(layers: int, ranks: int) -> Layout:
    return Layout.from_layers(layers, spd=range(layers), sync_tp_size=ranks)


def block_tokens(blocks: Blocks, layer: Any, states: Sequence[Tensor]) -> BlockTokens:
    """Return what the MLP of a layer with a dropped sum is computed from, of states [windows, tokens, hidden] that
    enter it. Raises UserError for NaN or infinite ones."""
    bias = layer.self_attn.o_proj.bias
    residual = torch.cat(list(states)).flatten(0, 1)
    heads = torch.cat([blocks.heads(layer, state) for state in states]).flatten(0, 1)
    tokens = BlockTokens(residual if bias is None else residual + layer.scaled(bias), heads)
    total = tokens.residual.double().sum() + tokens.heads.double().sum()
    check_finite(float(total), f"the dense model's stream in layer {layer.self_attn.layer_idx}")
    return tokens


def assign_block(
    block: ApartBlock, fit: BlockTokens, heldout: BlockTokens, *, heads: bool, neurons: bool, seed: int = 0
) -> tuple[Members, np.ndarray, AssignmentReport]:
    """Return the units and the neurons of each rank, where these may change ranks, with what they lose; never more than
    as the model lies."""
    members = choose_heads(block, fit, neurons=neurons, seed=seed) if heads else block.members
    candidates = [(block.members, block.neuron_ranks)]
    for units in dict.fromkeys((members, block.members)):
        ranks = cheapest_ranks(block.costs(fit, units)) if neurons else block.neuron_ranks
        candidates.append((units, ranks))
    errors = [block.error(heldout, *candidate) for candidate in candidates]
    best = int(np.argmin(errors))
    return *candidates[best], AssignmentReport(errors[0], errors[best])


def choose_heads(block: ApartBlock, fit: BlockTokens, *, neurons: bool, seed: int = 0) -> Members:
    """Return the units of each rank for which a sample of neurons, on a sample of tokens, costs the least; neurons are
    free to go where they are cheapest, or stay."""
    count = min(SAMPLE_NEURONS, block.neurons) // block.ranks * block.ranks
    sample = np.sort(np.random.default_rng(seed).choice(block.neurons, count, replace=False))
    rows = torch.from_numpy(sample).to(fit.heads.device)
    tokens = fit.sample(SAMPLE_TOKENS)
    costs_of: dict[tuple[int, ...], np.ndarray] = {}

    def cost(members: Members) -> float:
        missing = [units for units in members if units not in costs_of]
        if missing:
            costs_of.update(zip(missing, block.costs(tokens, missing, rows).T, strict=True))
        costs = np.stack([costs_of[units] for units in members], 1)
        ranks = cheapest_ranks(costs) if neurons else block.neuron_ranks[sample]
        return float(costs[np.arange(count), ranks].sum())

    return descend(block.members, cost, seed)


# ---- ranks of neighbouring layers ----


def better_labels(
    blocks: Blocks, layout: Layout, assignment: RankAssignment, fit: Tensor, heldout: Tensor
) -> RankAssignment:
    """Return the assignment with its ranks renamed layer by layer, or as it is, whichever brings the converted model
    nearer to the dense one on held-out ids. Where a layer reads the delayed sum of an MLP, rank r reads its own share
    of it, so the set of heads and neurons that misses least of the others' should lie there."""
    renamed = matched_labels(blocks, layout, assignment, fit)
    if renamed == assignment:
        return assignment
    contenders = {
        "dense": Contender(blocks, Layout.dense(layout.num_layers), blocks.weights),
        "assigned": Contender(blocks, layout, partial(assigned_weights, blocks, assignment)),
        "renamed": Contender(blocks, layout, partial(assigned_weights, blocks, renamed)),
    }
    _, divergence = heldout_measures(contenders, heldout, Ranks(0, 1, blocks.device))
    return renamed if divergence["renamed"] < divergence["assigned"] else assignment


@torch.no_grad()
def matched_labels(blocks: Blocks, layout: Layout, assignment: RankAssignment, ids: Tensor) -> RankAssignment:
    """Return the assignment with the ranks of each layer matched to those of the delayed MLP before it."""
    dense = Layout.dense(layout.num_layers)
    states: list[State] = [blocks.embed(rows) for rows in ids.split(max(1, WINDOWS_AT_ONCE_TOKENS // ids.shape[1]))]
    handed: list[State] = []  # what the layer before, as it is converted, hands on
    for index in range(max(assignment.heads, default=-1) + 1):
        weights = blocks.weights(index)
        if layout.entering(index) == DELAYED and index in assignment.heads and index in assignment.neurons:
            moved = assignment.permuted(index, weights, blocks.config)
            labels = cheapest_labels(blocks, layout, index, moved, states, handed)
            assignment = relabelled(assignment, index, labels)
        if layout.mlp_sync[index] == DELAYED:
            layer = blocks.layer(index, layout, assignment.permuted(index, weights, blocks.config))
            handed = [blocks.run(layer, state) for state in states]
        plain = blocks.layer(index, dense, weights)
        states = [blocks.run(plain, state) for state in states]
    return assignment


def cheapest_labels(
    blocks: Blocks,
    layout: Layout,
    index: int,
    weights: dict[str, Tensor],
    states: Sequence[State],
    handed: Sequence[State],
) -> list[int]:
    """Return the rank that each set of an assigned layer's heads should lie on. ``states`` enter it in the dense model,
    and ``handed`` in the converted one."""
    from scipy.optimize import linear_sum_assignment  # imported here, so that the rest runs without scipy

    ranks = layout.sync_tp_size or 1
    layer: Any = blocks.layer(index, apart_layout(layout.num_layers, ranks), weights)
    block, cost = ApartBlock(layer, ranks, ranks), np.zeros((ranks, ranks))

    def partials(stream: Tensor) -> Tensor:
        return block.partials(blocks.heads(layer, stream).flatten(0, 1)).float()

    for state, (_, visible) in zip(states, handed, strict=True):
        assert isinstance(state, Tensor)
        whole, weight = partials(state), 1 / state.float().square().mean(-1).flatten()
        for rank in range(ranks):
            lost = (partials(visible[rank]) - whole).square().mean(-1) * weight  # as large as a norm would see it
            cost[:, rank] += lost.double().sum(1).cpu().numpy()
    return linear_sum_assignment(cost)[1].tolist()


def relabelled(assignment: RankAssignment, layer: int, labels: Sequence[int]) -> RankAssignment:
    """Return the assignment with what rank k has in a layer on rank ``labels[k]``."""
    heads = np.array(assignment.heads[layer]).reshape(assignment.sync_tp_size, -1)[np.argsort(labels)].flatten()
    neurons = np.array(labels)[list(assignment.neurons[layer])]
    return replace(
        assignment,
        heads={**assignment.heads, layer: tuple(heads.tolist())},
        neurons={**assignment.neurons, layer: tuple(neurons.tolist())},
    )
