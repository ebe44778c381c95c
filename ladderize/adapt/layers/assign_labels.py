"""The rank on which a layer has which of its sets of heads and neurons, where it reads the delayed sum of an MLP.

For the layer alone the ranks are interchangeable. But rank r reads its own part of the sum before, so the set that
misses least of the others' parts should lie there.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.layers.assign_layer import ApartBlock
from ladderize.adapt.layers.layer_files import assigned_weights
from ladderize.adapt.layers.measures import Contender, heldout_measures
from ladderize.blocks import Blocks, State
from ladderize.convert.assignment import RankAssignment
from ladderize.layout import DELAYED, Layout
from ladderize.ranks.group import Ranks


def better_labels(
    blocks: Blocks, layout: Layout, found: RankAssignment, fit: Tensor, heldout: Tensor
) -> RankAssignment:
    """Return the assignment with its ranks renamed layer by layer, or as it is, whichever brings the converted model
    nearer to the dense one.

    fit, heldout: ids [windows, tokens], to rename by and to compare on.
    """
    renamed = matched_labels(blocks, layout, found, fit)
    if renamed == found:
        return found
    contenders = {"dense": Contender(blocks, Layout.dense(layout.num_layers), blocks.weights)}
    for name, own in (("found", found), ("renamed", renamed)):
        contenders[name] = Contender(blocks, layout, partial(assigned_weights, blocks, own))
    _, divergence = heldout_measures(contenders, heldout, Ranks(0, 1, blocks.device))
    return renamed if divergence["renamed"] < divergence["found"] else found


@torch.no_grad()
def matched_labels(blocks: Blocks, layout: Layout, found: RankAssignment, ids: Tensor) -> RankAssignment:
    """Return the assignment with the ranks of each layer matched to those of the delayed MLP before it.

    One layer is in memory at a time.

    ids: [windows, tokens].
    """
    dense = Layout.dense(layout.num_layers)
    states: list[State] = [blocks.embed(rows) for rows in ids.split(max(1, 4096 // ids.shape[1]))]
    handed: list[State] = []  # what the layer before, as it is converted, hands on
    for index in range(max(found.heads, default=-1) + 1):
        weights = blocks.weights(index)
        if layout.entering(index) == DELAYED and index in found.heads and index in found.neurons:
            own = found.permuted(index, weights, blocks.config)
            found = relabelled(found, index, cheapest_labels(blocks, layout, index, own, states, handed))
        if layout.mlp_sync[index] == DELAYED:
            own = found.permuted(index, weights, blocks.config)
            layer = blocks.layer(index, layout, own)
            handed = [blocks.run(layer, state) for state in states]
        plain = blocks.layer(index, dense, weights)
        states = [blocks.run(plain, state) for state in states]
    return found


def cheapest_labels(
    blocks: Blocks,
    layout: Layout,
    index: int,
    weights: dict[str, Tensor],
    states: Sequence[State],
    handed: Sequence[State],
) -> list[int]:
    """Return the rank that each set of a layer's heads should lie on.

    weights: of the layer, as assigned.
    states: that enter it in the dense model.
    handed: (complete, visible) that enter it in the converted model.
    """
    from scipy.optimize import linear_sum_assignment  # imported here, so that the rest runs without scipy

    ranks = layout.sync_tp_size or 1
    every = range(layout.num_layers)
    layer: Any = blocks.layer(index, Layout.from_layers(layout.num_layers, spd=every, sync_tp_size=ranks), weights)
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


def relabelled(found: RankAssignment, layer: int, labels: Sequence[int]) -> RankAssignment:
    """Return the assignment with what rank k has in a layer on rank ``labels[k]``."""
    heads = np.array(found.heads[layer]).reshape(found.sync_tp_size, -1)[np.argsort(labels)].flatten()
    neurons = np.array(labels)[list(found.neurons[layer])]
    return replace(
        found,
        heads={**found.heads, layer: tuple(heads.tolist())},
        neurons={**found.neurons, layer: tuple(neurons.tolist())},
    )
