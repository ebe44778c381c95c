"""One layer of the converted model, solved anew towards the dense one.

A converted sub-module reads another stream than the one it was made for: a stale one (ladder), or one that has this
rank's partial sum only (spd). The best linear repair needs no gradient. With x the normed inputs, h the inputs of
o_proj and down_proj, r the complete stream and a what a sub-module adds, of the dense model T and the converted one S:

* the projections that read (q, k, v; gate, up) minimise |W x_S - W_T x_T|^2, in a dropped layer each virtual rank's
  rows with the input of its own;
* the projections that write (o, down) minimise |W h_S - (r_T + a_T - r_S)|^2, which also repairs what earlier layers
  left wrong.

Relatives: ReplaceMe (arXiv 2505.02819) puts a linear map in the place of pruned blocks; GPTAQ (arXiv 2504.02692)
calibrates quantised weights against the full-precision model's own inputs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ladderize.adapt.align.reports import (
    READS_ATTENTION,
    READS_MLP,
    WRITES_ATTENTION,
    WRITES_MLP,
    ProjectionReport,
)
from ladderize.adapt.align.ridge import Products, solve, squared_errors
from ladderize.adapt.align.sides import Side
from ladderize.adapt.align.streams import Streams
from ladderize.errors import UserError
from ladderize.layout import BLOCKING
from ladderize.ranks.group import Ranks

# Of the error that a stronger ridge takes away, what a weaker one must take away besides: weights nearer to the dense
# ones come out better in the whole model, and train better (docs/results.md)
WORTH_LESS_RIDGE = 0.02

# Batches of tokens: the inputs [tokens, width] of each virtual rank, and the targets [tokens, outputs] of all of them
Batches = Iterable[tuple[Sequence[Tensor], Tensor]]


def affine(projections: Sequence[nn.Linear], part: int = 0, parts: int = 1) -> Tensor:
    """Weights, and as a last column biases where there are any, of the ``part``-th of ``parts`` of each projection's
    rows, one projection after the other: float32 [outputs, width]."""
    blocks = []
    for projection in projections:
        columns = [projection.weight] if projection.bias is None else [projection.weight, projection.bias[:, None]]
        blocks.append(torch.cat(columns, 1).chunk(parts)[part].float())
    return torch.cat(blocks)


def with_ones(inputs: Tensor, projection: nn.Linear) -> Tensor:
    """float32 [tokens, width] of [..., width], with a column of ones where the projection has a bias."""
    flat = inputs.flatten(0, -2).float()
    return flat if projection.bias is None else torch.cat([flat, flat.new_ones(len(flat), 1)], 1)


@dataclass
class RankRows:
    """What one virtual rank has of the projections: its products and its rows [outputs, width] as they were. readout:
    targets are ``readout`` times what ``Products`` and samples hold as such; None: these themselves."""

    products: Products
    prior: Tensor
    readout: Tensor | None = None

    def targets(self, values: Tensor) -> Tensor:
        return values if self.readout is None else linear(values, self.readout)

    def solve(self, ridge: float) -> Tensor | None:
        cross = self.products.cross if self.readout is None else self.readout @ self.products.cross
        return solve(self.products.gram, cross, self.prior, ridge)


def refit(
    names: Sequence[str],
    projections: Sequence[nn.Linear],
    parts: Sequence[RankRows],
    heldout: Callable[[], Batches],
    ridges: Sequence[float],
    ranks: Ranks,
    stored: torch.dtype,
) -> list[ProjectionReport]:
    """Solve the projections anew in place; each keeps what it had unless that lowers its error on held-out tokens.

    parts: of the virtual ranks. heldout: makes the held-out batches; the ranks hold different tokens. ridges: the
    strongest first; a weaker one must gain more by ``WORTH_LESS_RIDGE``. stored: the dtype that weights are rounded to.
    """
    for part in parts:
        part.products.reduce(ranks)
    sizes = [projection.out_features // len(parts) for projection in projections]

    def errors(weights: Sequence[Tensor]) -> Tensor:
        sums = torch.zeros(2, len(sizes), dtype=torch.float64, device=weights[0].device)
        for inputs, values in heldout():
            for own, part, x in zip(weights, parts, inputs, strict=True):
                sums += squared_errors(own, x, part.targets(values), sizes)
        return ranks.sum(sums).cpu()

    before, power = errors([part.prior for part in parts])
    best = before.clone()
    chosen: list[float | None] = [None] * len(sizes)
    for ridge in ridges:
        solved = [part.solve(ridge) for part in parts]
        failed = torch.tensor([float(any(weights is None for weights in solved))], device=before.device)
        if ranks.sum(failed):  # on any rank: unlike machines round otherwise
            continue
        rounded = [weights.to(stored).float() for weights in solved if weights is not None]
        del solved
        found, _ = errors(rounded)
        for number, projection in enumerate(projections):
            if found[number] < best[number] - WORTH_LESS_RIDGE * (before[number] - best[number]):
                best[number], chosen[number] = found[number], ridge
                rows = torch.cat([weights.split(sizes)[number] for weights in rounded])
                _assign(projection, rows)
    return [
        ProjectionReport(name, ridge, _share(was, total), _share(now, total))
        for name, ridge, was, now, total in zip(names, chosen, before, best, power, strict=True)
    ]


def _assign(projection: nn.Linear, rows: Tensor) -> None:
    width = projection.in_features
    projection.weight.data = rows[:, :width].to(projection.weight.dtype)
    if projection.bias is not None:
        projection.bias.data = rows[:, width].to(projection.bias.dtype)


def _share(error: Tensor, power: Tensor) -> float:
    return float(error / power) if power else 0.0


Sampler = Callable[[bool], Batches]  # whether of held-out windows -> their tokens


class LayerAlignment:
    """A layer of both models, and the streams that enter it. ``run`` leaves in the streams what leaves it."""

    def __init__(
        self, dense: Side, own: Side, streams: Streams, *, ridges: Sequence[float], stored: torch.dtype
    ) -> None:
        self.dense, self.own, self.streams, self.ridges, self.stored = dense, own, streams, ridges, stored

    @torch.no_grad()
    def run(self, *, solve: bool) -> list[ProjectionReport]:
        """solve: False passes the streams through as the layer is."""
        reports = self.fit_attention_inputs() if solve else []
        reports += self.attend(solve=solve)
        reports += self.fit_mlp_inputs() if solve else []
        reports += self.pass_mlp(solve=solve)
        self.advance()
        return reports

    @torch.no_grad()
    def pass_through(self) -> list[ProjectionReport]:
        """Where both models' streams and weights are still the same: one pass for both."""
        own, streams = self.own, self.streams
        for rows in streams.batches():
            before = streams.read("dense", rows)
            reads, attended, without = own.after_attention(before, own.heads(before))
            complete = attended + own.mlp_output(own.inner(reads))
            streams.write("dense", rows, complete)
            streams.write("complete", rows, complete)
            streams.write("visible", rows, complete if own.mlp_sync == BLOCKING else without)
        return []

    def fit_attention_inputs(self) -> list[ProjectionReport]:
        own, dense, streams = self.own, self.dense, self.streams
        projection = own.projection(READS_ATTENTION[0])

        def tokens(heldout: bool) -> Batches:
            for rows in streams.batches(heldout=heldout):
                x = own.attention_input(streams.read("visible", rows))
                y = dense.attention_input(streams.read("dense", rows))
                yield [with_ones(x, projection)], with_ones(y, projection)

        return self._fit(READS_ATTENTION, tokens)

    def attend(self, *, solve: bool) -> list[ProjectionReport]:
        """Attention of both; then ``dense`` is the stream after it, and ``heads`` what o_proj reads."""
        own, dense, streams = self.own, self.dense, self.streams
        for rows in streams.batches():
            before = streams.read("dense", rows)
            _, attended, _ = dense.after_attention(before, dense.heads(before))
            streams.write("heads", rows, own.heads(streams.read("visible", rows)))
            streams.write("dense", rows, attended)
        if not solve:
            return []
        projection = own.projection(WRITES_ATTENTION[0])

        def tokens(heldout: bool) -> Batches:
            for rows in streams.batches(heldout=heldout):
                target = streams.read("dense", rows) - streams.read("complete", rows)
                yield [with_ones(streams.read("heads", rows), projection)], target.flatten(0, -2)

        return self._fit(WRITES_ATTENTION, tokens)

    def fit_mlp_inputs(self) -> list[ProjectionReport]:
        own, dense, streams = self.own, self.dense, self.streams
        projection = own.projection(READS_MLP[0])

        def tokens(heldout: bool) -> Batches:
            for rows in streams.batches(heldout=heldout):
                reads, _, _ = own.after_attention(streams.read("complete", rows), streams.read("heads", rows))
                y = dense.mlp_input(streams.read("dense", rows))
                yield [with_ones(x, projection) for x in own.mlp_input(reads)], with_ones(y, projection)

        return self._fit(READS_MLP, tokens, parts=own.virtual_ranks)

    def pass_mlp(self, *, solve: bool) -> list[ProjectionReport]:
        """The dense MLP; then ``dense`` is the stream that leaves the layer."""
        own, dense, streams = self.own, self.dense, self.streams
        for rows in streams.batches():
            attended = streams.read("dense", rows)
            streams.write("dense", rows, attended + dense.mlp_output(dense.inner(attended[None])))
        if not solve:
            return []
        projection = own.projection(WRITES_MLP[0])

        def tokens(heldout: bool) -> Batches:
            for rows in streams.batches(heldout=heldout):
                reads, attended, _ = own.after_attention(streams.read("complete", rows), streams.read("heads", rows))
                target = streams.read("dense", rows) - attended
                yield [with_ones(own.inner(reads), projection)], target.flatten(0, -2)

        return self._fit(WRITES_MLP, tokens)

    def advance(self) -> None:
        """The converted model's streams that leave the layer."""
        own, streams = self.own, self.streams
        for rows in streams.batches():
            reads, attended, without = own.after_attention(streams.read("complete", rows), streams.read("heads", rows))
            complete = attended + own.mlp_output(own.inner(reads))
            streams.write("complete", rows, complete)
            streams.write("visible", rows, complete if own.mlp_sync == BLOCKING else without)

    def _fit(self, names: Sequence[str], tokens: Sampler, parts: int = 1) -> list[ProjectionReport]:
        """Sum the products of each part and solve the projections. Raises UserError where they are no numbers."""
        projections = [self.own.projection(name) for name in names]
        teachers = [self.dense.projection(name) for name in names] if names in (READS_ATTENTION, READS_MLP) else None
        rows = []
        for number in range(parts):
            prior = affine(projections, number, parts)
            readout = None if teachers is None else affine(teachers, number, parts)
            targets = len(prior) if readout is None else readout.shape[1]
            rows.append(RankRows(Products(prior.shape[1], targets, prior.device), prior, readout))
        for inputs, values in tokens(False):
            for own, x in zip(rows, inputs, strict=True):
                own.products.add(x, values)
        ranks = self.streams.ranks
        reports = refit(names, projections, rows, lambda: tokens(True), self.ridges, ranks, self.stored)
        for report in reports:
            if not math.isfinite(report.error_before):
                raise UserError(
                    f"layer {self.own.index}: {report.projection} of the dense or the converted model has NaN or"
                    " infinite weights or inputs; check the weights, or compute in float32"
                )
        return reports
