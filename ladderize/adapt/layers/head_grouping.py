"""Head grouping: the choice of which attention heads, and which slice of the MLP, share a rank where their sum is
dropped.

A permutation of heads changes nothing in a dense model. In an SPD block the MLP slice of rank m sees the heads of rank
m only, so the permutation decides what is lost. There are two criteria, both computed from the dense model's inputs on
calibration data:
* ``error``: the mean squared difference between the block's output and the dense block's is minimised. Descent
  exchanges heads, and whole groups, between ranks; it starts from the given order and from the paper's.
* ``paper`` (arXiv 2502.20727, section 4.3): heads with unlike attention maps are grouped (the sum of pairwise distances
  within groups is maximal), then a linear assignment of groups to MLP slices maximises the sum of ||MLP_m(group)||.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from ladderize.blocks import Blocks
from ladderize.checkpoint.config import kv_head_count
from ladderize.checkpoint.tensors import fingerprint
from ladderize.convert.heads import GroupingReport, HeadMap, permute_heads
from ladderize.layout import Layout, check_split

RESTARTS = 8
MIN_GAIN = 1e-9  # relative; less is rounding

Assignment = list[list[int]]  # the units of each rank


@dataclass(frozen=True)
class Units:
    """The units of heads that move as a whole, and the ranks that they move to.

    With at least as many KV heads as ranks, a unit is a KV group (one head without GQA) and may go to any rank: one
    family. With fewer, ranks share a replicated KV head: a unit is a query head, and a family, the query heads of one
    KV head, fills neighbouring ranks.
    """

    heads: list[list[int]]  # of each unit
    families: list[list[int]]  # units; all of one size
    ranks: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, ranks: int) -> "Units":
        groups = [list(range(first, first + heads // kv_heads)) for first in range(0, heads, heads // kv_heads)]
        if kv_heads % ranks == 0:
            return cls(groups, [list(range(kv_heads))], ranks)
        return cls([[head] for head in range(heads)], groups, ranks)

    @property
    def ranks_per_family(self) -> int:
        return self.ranks // len(self.families)

    @property
    def per_rank(self) -> int:
        return len(self.heads) // self.ranks

    @property
    def freedom(self) -> str:
        """The freedom of the choice, in words."""
        if self.ranks == 1:
            return "one rank: nothing can change"
        if self.per_rank > 1:
            return "which groups of heads share a rank can change, and which rank that is"
        group = "KV group" if len(self.families) == 1 else "group of query heads"
        return f"one {group} per rank: only the assignment of groups to ranks can change"

    def identity(self) -> Assignment:
        """Return the assignment that changes nothing."""
        units = [unit for family in self.families for unit in family]
        return [units[first : first + self.per_rank] for first in range(0, len(units), self.per_rank)]

    def order(self, assignment: Assignment) -> tuple[int, ...]:
        """Return the head order that puts each rank's heads where it looks for them."""
        return tuple(head for members in assignment for unit in sorted(members) for head in self.heads[unit])


def spread(distance: np.ndarray, groups: int, *, seed: int = 0) -> list[list[int]]:
    """Split units into ``groups`` of equal size so that the sum of pairwise distances within groups is large.

    A local search exchanges the best pair until none helps. It starts from the given order and from ``RESTARTS`` random
    ones, so the result is never worse than the given order.

    distance: [units, units], symmetric.
    """
    size = len(distance) // groups
    start = np.repeat(np.arange(groups), size)
    rng = np.random.default_rng(seed)
    found = [
        _exchange(distance, labels, groups) for labels in [start, *(rng.permutation(start) for _ in range(RESTARTS))]
    ]
    best = max(found, key=lambda labels: _within(distance, labels))
    return [np.flatnonzero(best == group).tolist() for group in range(groups)]


def _within(distance: np.ndarray, labels: np.ndarray) -> float:
    return float((distance * (labels[:, None] == labels)).sum() / 2)


def _exchange(distance: np.ndarray, labels: np.ndarray, groups: int) -> np.ndarray:
    labels = labels.copy()
    while True:
        to_group = distance @ (
            labels[:, None] == np.arange(groups)
        )  # [units, groups]: distance of a unit to all of a group
        own, other = to_group[np.arange(len(labels)), labels], to_group[:, labels]
        gain = other + other.T - own[:, None] - own - 2 * distance  # of exchanging a and b
        gain[labels[:, None] == labels] = 0.0
        a, b = np.unravel_index(np.argmax(gain), gain.shape)
        if gain[a, b] <= MIN_GAIN * max(1.0, float(np.abs(distance).sum())):
            return labels
        labels[a], labels[b] = labels[b], labels[a]


def match(units: Units, groups: Sequence[Sequence[Sequence[int]]], values: np.ndarray) -> Assignment:
    """Assign every group to a rank so that the sum of ``values`` is maximal; families stay on neighbouring ranks.

    groups: the groups of each family.
    values: [groups in order, ranks].
    """
    from scipy.optimize import linear_sum_assignment  # imported here, so that the rest runs without scipy

    count, width = len(groups), units.ranks_per_family
    inner = {}
    gains = np.zeros((count, count))
    for family, place in itertools.product(range(count), range(count)):
        part = values[family * width : (family + 1) * width, place * width : (place + 1) * width]
        rows, columns = linear_sum_assignment(part, maximize=True)
        inner[family, place] = columns
        gains[family, place] = part[rows, columns].sum()
    assignment: Assignment = [[] for _ in range(units.ranks)]
    for family, place in zip(*linear_sum_assignment(gains, maximize=True), strict=True):
        for group, column in zip(groups[family], inner[family, place], strict=True):
            assignment[place * width + column] = list(group)
    return assignment


class Probe:
    """The MLP half of one SPD block on tokens of the dense model.

    residual: [tokens, hidden], with o_proj's bias.
    partials: [units, tokens, hidden], the part that each unit adds through o_proj.
    """

    def __init__(self, layer: Any, residual: Tensor, partials: Tensor, ranks: int) -> None:
        self.norm, self.mlp, self.scaled = layer.post_attention_layernorm, layer.mlp, layer.scaled
        self.residual, self.partials, self.ranks = residual, partials, ranks
        everything = residual + partials.sum(0)
        self.target = sum(
            (self.slice(rank, everything) for rank in range(ranks)), torch.zeros((), device=residual.device)
        )

    def slice(self, rank: int, seen: Tensor) -> Tensor:
        """Return the rank's part of the MLP without down_proj's bias, where its residual stream is ``seen``: float32
        [tokens, hidden], so that sums are exact."""
        x = self.norm(seen)
        gate, up = (_rows(projection, rank, self.ranks, x) for projection in (self.mlp.gate_proj, self.mlp.up_proj))
        output = linear(self.mlp.act_fn(gate) * up, self.mlp.down_proj.weight.chunk(self.ranks, 1)[rank])
        return cast(Tensor, self.scaled(output.float()))

    def output(self, rank: int, members: Iterable[int]) -> Tensor:
        """Return the rank's part of the MLP when it has the heads of ``members``."""
        return self.slice(rank, self.residual + self.partials[sorted(members)].sum(0))

    def error(self, assignment: Assignment) -> float:
        """Return the mean squared difference between the SPD block's output and the dense block's."""
        return _mean_square(sum((self.output(rank, members) for rank, members in enumerate(assignment)), -self.target))

    def norms(self, groups: Sequence[Sequence[int]]) -> np.ndarray:
        """Return ||MLP_m(group)||, averaged over tokens: [groups, ranks]."""
        values = [self.output(rank, group).norm(dim=-1).mean() for group in groups for rank in range(self.ranks)]
        return torch.stack(values).double().view(len(groups), self.ranks).cpu().numpy()  # one copy from the GPU


def _rows(projection: torch.nn.Linear, rank: int, ranks: int, x: Tensor) -> Tensor:
    bias = projection.bias.chunk(ranks)[rank] if projection.bias is not None else None
    return linear(x, projection.weight.chunk(ranks)[rank], bias)


def _mean_square(x: Tensor | float) -> float:
    assert isinstance(x, Tensor)
    return float(x.square().mean())


class Descent:
    """An assignment whose error is lowered step by step."""

    def __init__(self, probe: Probe, units: Units, start: Assignment) -> None:
        self.probe, self.units = probe, units
        self.held = [frozenset(members) for members in start]
        self.outputs = [probe.output(rank, members) for rank, members in enumerate(self.held)]
        self.difference = sum(self.outputs, -probe.target)
        self.error = _mean_square(self.difference)

    def attempt(self, change: Mapping[int, frozenset[int]]) -> bool:
        """Give some ranks other units if that lowers the error; return whether it did."""
        outputs = {rank: self.probe.output(rank, members) for rank, members in change.items()}
        difference = self.difference + sum(
            (output - self.outputs[rank] for rank, output in outputs.items()),
            torch.zeros((), device=self.difference.device),
        )
        error = _mean_square(difference)
        if not error < self.error * (1 - MIN_GAIN):
            return False
        self.difference, self.error = difference, error
        for rank, members in change.items():
            self.held[rank], self.outputs[rank] = members, outputs[rank]
        return True

    def exchanges(self, rng: np.random.Generator) -> Iterator[dict[int, frozenset[int]]]:
        """Yield every exchange of two units, of two ranks' groups, and of two families' ranks, each made from the
        current assignment."""
        if self.units.per_rank > 1:
            pairs = [pair for family in self.units.families for pair in itertools.combinations(family, 2)]
            for one, other in rng.permutation(pairs).tolist():
                a, b = (
                    next(rank for rank, members in enumerate(self.held) if unit in members) for unit in (one, other)
                )
                if a != b:
                    yield {a: self.held[a] - {one} | {other}, b: self.held[b] - {other} | {one}}
        width = self.units.ranks_per_family
        places = [range(first, first + width) for first in range(0, self.units.ranks, width)]
        for place in places:
            for a, b in itertools.combinations(place, 2):
                yield {a: self.held[b], b: self.held[a]}
        for one, other in itertools.combinations(places, 2):
            yield {a: self.held[b] for x, y in zip(one, other, strict=True) for a, b in ((x, y), (y, x))}


def descend(probe: Probe, units: Units, start: Assignment, *, seed: int = 0) -> Assignment:
    """Exchange units and groups between ranks until no exchange lowers the block's error.

    An exchange computes two slices of the MLP, so a pass over U units costs about as much as U^2 / N forward passes of
    the MLP.
    """
    descent, rng = Descent(probe, units, start), np.random.default_rng(seed)
    while sum(descent.attempt(change) for change in descent.exchanges(rng)):  # passes until one changes nothing
        pass
    return [sorted(members) for members in descent.held]


GROUPING_WINDOWS = 32  # of calibration, for the distances of attention maps
GROUPING_TOKENS = 4096  # drawn from these windows, for everything that runs an MLP


# ---- the whole model ----


def group_heads(
    blocks: Blocks,
    layers: Sequence[int],
    sync_tp_size: int,
    windows: np.ndarray,
    *,
    criterion: str = "error",
    seed: int = 0,
    advance: Callable[[int], None] = lambda count: None,
) -> HeadMap:
    """Return the head map of ``layers`` of a dense model for ``sync_tp_size`` virtual ranks.

    One layer is in memory at a time.

    windows: ids [windows, tokens], of which the first ``GROUPING_WINDOWS`` are read.
    advance: is called for each layer passed.
    Raises UserError where the heads cannot be split among the ranks.
    """
    config, dense = blocks.config, Layout.dense(blocks.num_layers)
    check_split(config, sync_tp_size, name="--sync-tp-size")
    dropped = Layout.from_layers(blocks.num_layers, spd=range(blocks.num_layers), sync_tp_size=sync_tp_size)
    units = Units.of(config["num_attention_heads"], kv_head_count(config), sync_tp_size)
    orders: dict[int, tuple[int, ...]] = {}
    report: dict[int, GroupingReport] = {}
    with torch.no_grad():
        states = [blocks.embed(torch.from_numpy(window)[None]) for window in windows[:GROUPING_WINDOWS]]
        for index in range(max(layers, default=-1) + 1):
            weights = blocks.weights(index)
            if index in layers:
                assignment, report[index] = _group_layer(
                    blocks, blocks.layer(index, dropped, weights), states, units, criterion, seed
                )
                orders[index] = units.order(assignment)
            layer = blocks.layer(index, dense, weights)
            states = [blocks.run(layer, state) for state in states]  # type: ignore[misc]
            advance(1)
    return HeadMap(sync_tp_size, orders, fingerprint(blocks.checkpoint), report)


def permuted_weights(blocks: Blocks, orders: Mapping[int, Sequence[int]], layer: int) -> dict[str, Tensor]:
    """Return a layer's weights with its heads in the order that ``orders`` gives, unchanged where it gives none."""
    weights, config = blocks.weights(layer), blocks.config
    if layer not in orders:
        return weights
    return permute_heads(weights, orders[layer], config["num_attention_heads"], kv_head_count(config))


def _group_layer(
    blocks: Blocks, layer: Any, states: list[Tensor], units: Units, criterion: str, seed: int
) -> tuple[Assignment, GroupingReport]:
    distance, probe = _observe(blocks, layer, states, units, seed)
    identity = units.identity()
    papers = papers_assignment(probe, units, distance, seed=seed)
    chosen = (
        papers
        if criterion == "paper"
        else min((descend(probe, units, start, seed=seed) for start in (identity, papers)), key=probe.error)
    )
    if criterion == "error" and probe.error(chosen) >= probe.error(identity):
        chosen = identity
    return chosen, GroupingReport(
        criterion=criterion,
        freedom=units.freedom,
        error_before=probe.error(identity),
        error_after=probe.error(chosen),
        error_of_paper=probe.error(papers),
        distance_before=_total(distance, identity),
        distance_after=_total(distance, chosen),
    )


def papers_assignment(probe: Probe, units: Units, distance: np.ndarray, *, seed: int = 0) -> Assignment:
    """Return the paper's assignment: unlike heads together, then the matching.

    distance: [units, units].
    """
    groups = []
    for family in units.families:
        split = spread(distance[np.ix_(family, family)], units.ranks_per_family, seed=seed)
        groups.append([[family[number] for number in group] for group in split])
    return match(units, groups, probe.norms([group for family in groups for group in family]))


def _total(distance: np.ndarray, assignment: Assignment) -> float:
    return float(sum(distance[np.ix_(members, members)].sum() / 2 for members in assignment))


def _observe(blocks: Blocks, layer: Any, states: list[Tensor], units: Units, seed: int) -> tuple[np.ndarray, Probe]:
    """Return the distances between units' attention maps over all windows [units, units], and a probe of tokens drawn
    from them."""
    between_heads = torch.zeros(())
    residuals, attended = [], []
    generator = torch.Generator().manual_seed(seed)
    bias = layer.self_attn.o_proj.bias
    for state in states:
        heads, maps = _attention(blocks, layer, state)
        flat = maps[0].flatten(1)
        between_heads = between_heads + torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").cpu()
        kept = torch.randperm(state.shape[1], generator=generator)[: -(-GROUPING_TOKENS // len(states))].to(
            state.device
        )
        residuals.append(state[0, kept] if bias is None else state[0, kept] + layer.scaled(bias))
        attended.append(heads[0, kept])
    by_head = (
        torch.cat(attended).unflatten(-1, (-1, layer.self_attn.head_dim)).transpose(0, 1)
    )  # [heads, tokens, head_dim]
    columns = layer.self_attn.o_proj.weight.unflatten(1, (len(by_head), -1)).permute(
        1, 2, 0
    )  # [heads, head_dim, hidden]
    products = layer.scaled(by_head @ columns)
    partials = torch.stack([products[members].sum(0) for members in units.heads])
    between = (between_heads / len(states)).double().numpy()
    distance = np.array([[between[np.ix_(one, other)].sum() for other in units.heads] for one in units.heads])
    np.fill_diagonal(distance, 0.0)
    return distance, Probe(layer, torch.cat(residuals), partials, units.ranks)


def _attention(blocks: Blocks, layer: Any, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the heads' outputs before o_proj, [1, tokens, heads * head_dim], and their maps, [1, heads, tokens,
    tokens] in float32."""
    attention, tokens = layer.self_attn, state.shape[1]
    x, rope = layer.input_layernorm(state), blocks.position_embeddings(tokens)
    seen = blocks.mask(attention.layer_idx, tokens)
    heads, _ = attention(x, position_embeddings=rope, attention_mask=seen)
    query, key, _ = attention.query_key_value(x, rope)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = (query @ key.transpose(-1, -2)).float() * attention.scaling
    if seen is None:
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
    return heads, scores.masked_fill(~seen, -torch.inf).softmax(-1)
