"""The choice of the KV groups and MLP neurons that share a virtual rank, where an attention's sum is late or dropped.

A permutation of either changes nothing in a dense model. In such a block the MLP's neurons of rank r see r's own heads
only. With act_n the input of down_proj that neuron n gives, it costs on rank r

    E[(act_n with all heads - act_n with the heads of r)^2] * |down[:, n]|^2.

For given heads of all ranks the cheapest balanced assignment of the neurons is exact (``cheapest_ranks``). The heads of
ranks are exchanged while the cheapest assignment gets cheaper. Relatives: head grouping of Sync-Point Drop (arXiv
2502.20727), and arXiv 2609.13846.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from ladderize.adapt.layers.layer_files import Contender, assigned_weights, heldout_measures
from ladderize.adapt.layers.options import HEADS, NEURONS, SHORT, AssignOptions
from ladderize.adapt.layers.windows import Windows, read_rows, split_windows
from ladderize.blocks import Blocks, State, check_finite, compute_dtype, projection_of
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
MIN_GAIN = 1e-9  # relative; less is rounding
BLOCK_TOKENS = 2048
ALL = slice(None)  # neurons
Members = tuple[tuple[int, ...], ...]  # the head units of each rank, ascending


@dataclass(frozen=True)
class BlockTokens:
    """Tokens that enter a block of the dense model: the residual stream [tokens, hidden], with o_proj's bias, and the
    inputs of o_proj [tokens, heads * head_dim]."""

    residual: Tensor
    heads: Tensor

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.residual.split(BLOCK_TOKENS), self.heads.split(BLOCK_TOKENS), strict=True)

    def sample(self, count: int) -> "BlockTokens":
        """Return ``count`` tokens at most, evenly spread."""
        step = -(-len(self.residual) // count)
        return BlockTokens(self.residual[::step], self.heads[::step])


class ApartBlock:
    """A block with a dropped attention sum, whose heads come in ``units`` that may change ranks."""

    def __init__(self, layer: Any, ranks: int, units: int) -> None:
        self.layer, self.ranks, self.units = layer, ranks, units
        self.neurons = int(layer.mlp.down_proj.in_features)

    @property
    def members(self) -> Members:
        """The units of each rank as the model lies."""
        return tuple(map(tuple, np.arange(self.units).reshape(self.ranks, -1).tolist()))

    @property
    def neuron_ranks(self) -> np.ndarray:
        """The rank of each neuron as the model lies."""
        return np.arange(self.neurons) // (self.neurons // self.ranks)

    def partials(self, heads: Tensor) -> Tensor:
        """Return what each unit adds through o_proj: [units, tokens, hidden]."""
        columns = self.layer.self_attn.o_proj.weight.unflatten(1, (self.units, -1))
        return self.layer.scaled(torch.einsum("tud,hud->uth", heads.unflatten(1, (self.units, -1)), columns))

    def inner(self, stream: Tensor, neurons: Tensor | slice = ALL) -> Tensor:
        """Return the inputs of down_proj [tokens, neurons] from the stream that the MLP reads."""
        x = self.layer.read_by_mlp(stream)
        projections = [projection_of(self.layer, name) for name in ("mlp.gate_proj", "mlp.up_proj")]
        gate, up = (
            linear(x, projection.weight[neurons], projection.bias[neurons] if projection.bias is not None else None)
            for projection in projections
        )
        return self.layer.activation(gate) * up

    def costs(self, tokens: BlockTokens, sets: Sequence[tuple[int, ...]], neurons: Tensor | slice = ALL) -> np.ndarray:
        """Return what each neuron costs where it sees a set of units instead of all: float64 [neurons, sets]. Raises
        UserError for NaN or infinite activations."""
        down = self.layer.scaled(self.layer.mlp.down_proj.weight[:, neurons]).float()
        total = torch.zeros(len(sets), down.shape[1], device=down.device, dtype=torch.float64)
        for residual, heads in tokens.batches():
            partials = self.partials(heads)
            full = self.inner(residual + partials.sum(0), neurons)
            for number, units in enumerate(sets):
                seen = self.inner(residual + partials[list(units)].sum(0), neurons)
                total[number] += (full - seen).float().square().sum(0)
        costs = total / len(tokens.residual) * down.square().sum(0)
        check_finite(float(costs.sum()), f"an activation in layer {self.layer.self_attn.layer_idx}")
        return costs.T.cpu().numpy()

    def error(self, tokens: BlockTokens, members: Members, neuron_ranks: np.ndarray) -> float:
        """Return the mean squared difference between the block's output with dropped sum and the dense block's."""
        device = tokens.heads.device
        ranks = [torch.from_numpy(np.flatnonzero(neuron_ranks == rank)).to(device) for rank in range(self.ranks)]
        down, total = self.layer.mlp.down_proj.weight, 0.0
        for residual, heads in tokens.batches():
            partials = self.partials(heads)
            everything = residual + partials.sum(0)
            difference = torch.zeros_like(residual, dtype=torch.float32)
            for units, neurons in zip(members, ranks, strict=True):
                seen = self.inner(residual + partials[list(units)].sum(0), neurons)
                lost = linear(seen - self.inner(everything, neurons), down[:, neurons])
                difference += self.layer.scaled(lost.float())
            total += float(difference.double().square().sum())
        return total / tokens.residual.numel()


# ---- neurons ----


def cheapest_ranks(costs: np.ndarray) -> np.ndarray:
    """Return the rank of each neuron, as many on each, for the smallest sum of costs [neurons, ranks], exactly: every
    neuron begins where it is cheapest, then the cheapest chain of moves from a rank with too many to one with too few
    is made until all have equally many. ``linear_sum_assignment`` would need a matrix of 1.6 GB for 14336 neurons."""
    neurons, ranks = costs.shape
    rank_of, share = costs.argmin(1), neurons // ranks
    held = np.bincount(rank_of, minlength=ranks)
    least, mover = np.full((ranks, ranks), np.inf), np.zeros((ranks, ranks), int)  # the cheapest move between two ranks
    tolerance = 1e-12 * float(np.abs(costs).max(initial=0.0))  # what is shorter by rounding alone may be a cycle

    def renew(rank: int) -> None:
        members = np.flatnonzero(rank_of == rank)
        least[rank] = np.inf
        if len(members):
            extra = costs[members] - costs[members, rank][:, None]
            best = extra.argmin(0)
            least[rank], mover[rank] = extra[best, np.arange(ranks)], members[best]

    for rank in range(ranks):
        renew(rank)
    while (held > share).any():
        length, before = np.where(held > share, 0.0, np.inf), np.full(ranks, -1)
        for _ in range(ranks):
            through = length[:, None] + least
            best = through.argmin(0)
            shortest = through[best, np.arange(ranks)]
            shorter = shortest < length - tolerance
            if not shorter.any():
                break
            length, before = np.where(shorter, shortest, length), np.where(shorter, best, before)
        chain = [int(np.where(held < share, length, np.inf).argmin())]
        while before[chain[-1]] >= 0:
            chain.append(int(before[chain[-1]]))
        chain.reverse()
        moved = [int(mover[source, target]) for source, target in itertools.pairwise(chain)]
        rank_of[moved] = chain[1:]
        held[chain[0]] -= 1
        held[chain[-1]] += 1
        for rank in chain:
            renew(rank)
    return rank_of


# ---- heads ----


def exchanged(members: Members, rng: np.random.Generator) -> Iterator[Members]:
    """Yield every result of exchanging two units, or all that two ranks hold, in a drawn order."""
    rank_of = {unit: rank for rank, units in enumerate(members) for unit in units}
    pairs = list(itertools.combinations(sorted(rank_of), 2))
    for number in rng.permutation(len(pairs)):
        a, b = pairs[number]
        if rank_of[a] != rank_of[b]:
            changed = [set(units) for units in members]
            changed[rank_of[a]] ^= {a, b}
            changed[rank_of[b]] ^= {a, b}
            yield tuple(tuple(sorted(units)) for units in changed)
    for a, b in itertools.combinations(range(len(members)), 2):
        swapped = list(members)
        swapped[a], swapped[b] = members[b], members[a]
        yield tuple(swapped)


# ---- a block ----


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

    # exchange units between ranks while that lowers the cost
    drawn, members, least, is_lower = np.random.default_rng(seed), block.members, cost(block.members), True
    while is_lower:
        is_lower = False
        for other in exchanged(members, drawn):
            value = cost(other)
            if value < least * (1 - MIN_GAIN):
                members, least, is_lower = other, value, True
                break
    return members


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


# ---- a model ----


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
