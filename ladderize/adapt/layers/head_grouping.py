"""Head grouping: the choice of which KV groups, and which slice of the MLP, share a rank where their sum is dropped.

A permutation of KV groups changes nothing in a dense model. In an SPD block the MLP slice of rank m sees the heads of
rank m only, so the permutation decides what is lost. There are two criteria, both computed from the dense model's
inputs on calibration data:
* ``error``: the mean squared difference between the block's output and the dense block's is minimised. Descent
  exchanges KV groups, and all that ranks hold, between ranks; it starts from the given order and from the paper's.
* ``paper`` (arXiv 2502.20727, section 4.3): heads with unlike attention maps share a rank (the sum of pairwise
  distances within ranks is maximal), then a linear assignment to MLP slices maximises the sum of ||MLP_m(heads)||.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
GROUPING_WINDOWS = 32  # of calibration, for the distances of attention maps
GROUPING_TOKENS = 4096  # drawn from these windows, for everything that runs an MLP

Assignment = list[list[int]]  # the KV groups of each rank


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
    """Return the head map of ``layers`` of a dense model for ``sync_tp_size`` virtual ranks, which divide the KV heads.

    One layer is in memory at a time.

    windows: ids [windows, tokens], of which the first ``GROUPING_WINDOWS`` are read.
    advance: is called for each layer passed.
    """
    config, dense = blocks.config, Layout.dense(blocks.num_layers)
    check_split(config, sync_tp_size, name="--sync-tp-size")
    dropped = Layout.from_layers(blocks.num_layers, spd=range(blocks.num_layers), sync_tp_size=sync_tp_size)
    group_size = config["num_attention_heads"] // kv_head_count(config)
    orders: dict[int, tuple[int, ...]] = {}
    report: dict[int, GroupingReport] = {}
    with torch.no_grad():
        states = [blocks.embed(torch.from_numpy(window)[None]) for window in windows[:GROUPING_WINDOWS]]
        for index in range(max(layers, default=-1) + 1):
            weights = blocks.weights(index)
            if index in layers:
                distance, probe = observe(blocks, blocks.layer(index, dropped, weights), states, sync_tp_size, seed)
                assignment = assign(probe, distance, criterion, seed)
                orders[index] = head_order(assignment, group_size)
                report[index] = GroupingReport(probe.error(probe.identity), probe.error(assignment))
            layer = blocks.layer(index, dense, weights)
            states = [blocks.run(layer, state) for state in states]  # type: ignore[misc]
            advance(1)
    return HeadMap(sync_tp_size, orders, fingerprint(blocks.checkpoint), report)


def head_order(assignment: Assignment, group_size: int) -> tuple[int, ...]:
    """Return the head order that puts each rank's heads where it looks for them."""
    groups = (group for members in assignment for group in sorted(members))
    return tuple(head for group in groups for head in range(group * group_size, (group + 1) * group_size))


def permuted_weights(blocks: Blocks, orders: Mapping[int, Sequence[int]], layer: int) -> dict[str, Tensor]:
    """Return a layer's weights with its heads in the order that ``orders`` gives, unchanged where it gives none."""
    weights, config = blocks.weights(layer), blocks.config
    if layer not in orders:
        return weights
    return permute_heads(weights, orders[layer], config["num_attention_heads"], kv_head_count(config))


# ---- one layer ----


class Probe:
    """The MLP half of one SPD block on tokens of the dense model.

    residual: [tokens, hidden], with o_proj's bias.
    partials: [KV groups, tokens, hidden], the part that each adds through o_proj.
    """

    def __init__(self, layer: Any, residual: Tensor, partials: Tensor, ranks: int) -> None:
        self.norm, self.mlp, self.scaled = layer.post_attention_layernorm, layer.mlp, layer.scaled
        self.residual, self.partials, self.ranks = residual, partials, ranks
        everything, zero = residual + partials.sum(0), torch.zeros((), device=residual.device)
        self.target = sum((self.slice(rank, everything) for rank in range(ranks)), zero)

    @property
    def identity(self) -> Assignment:
        """The assignment that changes nothing."""
        return np.arange(len(self.partials)).reshape(self.ranks, -1).tolist()

    def slice(self, rank: int, seen: Tensor) -> Tensor:
        """Return the rank's part of the MLP without down_proj's bias, where its residual stream is ``seen``: float32
        [tokens, hidden], so that sums are exact."""
        x = self.norm(seen)
        gate, up = (_rows(projection, rank, self.ranks, x) for projection in (self.mlp.gate_proj, self.mlp.up_proj))
        output = linear(self.mlp.act_fn(gate) * up, self.mlp.down_proj.weight.chunk(self.ranks, 1)[rank])
        return cast(Tensor, self.scaled(output.float()))

    def output(self, rank: int, members: Iterable[int]) -> Tensor:
        """Return the rank's part of the MLP when it has these KV groups."""
        return self.slice(rank, self.residual + self.partials[sorted(members)].sum(0))

    def error(self, assignment: Assignment) -> float:
        """Return the mean squared difference between the SPD block's output and the dense block's."""
        return _mean_square(sum((self.output(rank, members) for rank, members in enumerate(assignment)), -self.target))

    def norms(self, assignment: Assignment) -> np.ndarray:
        """Return ||MLP_m(members)|| for each entry of the assignment and each rank, averaged over tokens."""
        every = range(self.ranks)
        values = [self.output(rank, members).norm(dim=-1).mean() for members in assignment for rank in every]
        return torch.stack(values).double().view(self.ranks, self.ranks).cpu().numpy()  # one copy from the GPU


def _rows(projection: torch.nn.Linear, rank: int, ranks: int, x: Tensor) -> Tensor:
    bias = projection.bias.chunk(ranks)[rank] if projection.bias is not None else None
    return linear(x, projection.weight.chunk(ranks)[rank], bias)


def _mean_square(x: Tensor) -> float:
    return float(x.square().mean())


def observe(blocks: Blocks, layer: Any, states: list[Tensor], ranks: int, seed: int) -> tuple[np.ndarray, Probe]:
    """Return the distances between the attention maps of KV groups over all windows [groups, groups], and a probe of
    tokens drawn from them.

    layer: a dropped one.
    states: of the dense model, that enter it.
    """
    between_heads = torch.zeros(())
    residuals, attended = [], []
    generator = torch.Generator().manual_seed(seed)
    bias, each = layer.self_attn.o_proj.bias, -(-GROUPING_TOKENS // len(states))
    for state in states:
        heads, maps = _attention(blocks, layer, state)
        flat = maps[0].flatten(1)
        between_heads = between_heads + torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").cpu()
        kept = torch.randperm(state.shape[1], generator=generator)[:each].to(state.device)
        residuals.append(state[0, kept] if bias is None else state[0, kept] + layer.scaled(bias))
        attended.append(heads[0, kept])
    # [heads, tokens, head_dim] and [heads, head_dim, hidden]
    by_head = torch.cat(attended).unflatten(-1, (-1, layer.self_attn.head_dim)).transpose(0, 1)
    columns = layer.self_attn.o_proj.weight.unflatten(1, (len(by_head), -1)).permute(1, 2, 0)
    groups = kv_head_count(blocks.config)
    partials = torch.stack([part.sum(0) for part in layer.scaled(by_head @ columns).chunk(groups)])
    between = (between_heads / len(states)).double().numpy()
    members = np.arange(len(between)).reshape(groups, -1)
    distance = np.array([[between[np.ix_(one, other)].sum() for other in members] for one in members])
    np.fill_diagonal(distance, 0.0)
    return distance, Probe(layer, torch.cat(residuals), partials, ranks)


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


def assign(probe: Probe, distance: np.ndarray, criterion: str, seed: int) -> Assignment:
    """Return the assignment that a criterion chooses."""
    papers = papers_assignment(probe, distance, seed=seed)
    if criterion == "paper":
        return papers
    return min(
        (probe.identity, *(descend(probe, start, seed=seed) for start in (probe.identity, papers))), key=probe.error
    )


# ---- the paper's criterion ----


def papers_assignment(probe: Probe, distance: np.ndarray, *, seed: int = 0) -> Assignment:
    """Return the paper's assignment: unlike heads together, then the matching with MLP slices."""
    from scipy.optimize import linear_sum_assignment  # imported here, so that the rest runs without scipy

    split = spread(distance, probe.ranks, seed=seed)
    assignment: Assignment = [[] for _ in split]
    for number, rank in zip(*linear_sum_assignment(probe.norms(split), maximize=True), strict=True):
        assignment[rank] = split[number]
    return assignment


def spread(distance: np.ndarray, ranks: int, *, seed: int = 0) -> Assignment:
    """Split KV groups into equal parts so that the sum of pairwise distances within parts is large.

    A local search exchanges the best pair until none helps. It starts from the given order and from ``RESTARTS`` random
    ones, so the result is never worse than the given order.

    distance: [groups, groups], symmetric.
    """
    start, rng = np.repeat(np.arange(ranks), len(distance) // ranks), np.random.default_rng(seed)
    starts = [start, *(rng.permutation(start) for _ in range(RESTARTS))]
    ends = [_exchange(distance, labels, ranks) for labels in starts]
    best = max(ends, key=lambda labels: float((distance * (labels[:, None] == labels)).sum() / 2))
    return [np.flatnonzero(best == rank).tolist() for rank in range(ranks)]


def _exchange(distance: np.ndarray, labels: np.ndarray, ranks: int) -> np.ndarray:
    """Exchange the best pair of labels until none adds to the distances within parts."""
    labels = labels.copy()
    while True:
        to_part = distance @ (labels[:, None] == np.arange(ranks))  # [groups, ranks]: distance to all of a part
        stay, move = to_part[np.arange(len(labels)), labels], to_part[:, labels]
        gain = move + move.T - stay[:, None] - stay - 2 * distance  # of exchanging a and b
        gain[labels[:, None] == labels] = 0.0
        a, b = np.unravel_index(np.argmax(gain), gain.shape)
        if gain[a, b] <= MIN_GAIN * max(1.0, float(np.abs(distance).sum())):
            return labels
        labels[a], labels[b] = labels[b], labels[a]


# ---- descent on the error ----


def descend(probe: Probe, start: Assignment, *, seed: int = 0) -> Assignment:
    """Give ranks other KV groups while that lowers the block's error.

    An exchange computes two slices of the MLP, so a pass over U groups costs about as much as U^2 / N forward passes of
    the MLP.
    """
    rng, members = np.random.default_rng(seed), [frozenset(each) for each in start]
    outputs = [probe.output(rank, each) for rank, each in enumerate(members)]
    difference = sum(outputs, -probe.target)
    error, changed = _mean_square(difference), True
    while changed:
        changed = False
        for change in exchanges(members, rng):
            new = {rank: probe.output(rank, each) for rank, each in change.items()}
            other = sum((output - outputs[rank] for rank, output in new.items()), difference)
            if _mean_square(other) < error * (1 - MIN_GAIN):
                difference, error, changed = other, _mean_square(other), True
                for rank, each in change.items():
                    members[rank], outputs[rank] = each, new[rank]
    return [sorted(each) for each in members]


def exchanges(members: Sequence[frozenset[int]], rng: np.random.Generator) -> Iterator[dict[int, frozenset[int]]]:
    """Yield every exchange of two KV groups, and of all that two ranks hold, each made from the ``members`` of now."""
    count, ranks = sum(map(len, members)), range(len(members))
    if count > len(members):
        for one, other in rng.permutation(list(itertools.combinations(range(count), 2))).tolist():
            a, b = (next(rank for rank in ranks if group in members[rank]) for group in (one, other))
            if a != b:
                yield {a: members[a] - {one} | {other}, b: members[b] - {other} | {one}}
    for a, b in itertools.combinations(ranks, 2):
        yield {a: members[b], b: members[a]}
