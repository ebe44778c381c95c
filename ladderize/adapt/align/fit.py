"""Projections that read one input are solved together: one factorisation serves all of their rows."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ladderize.adapt.align.reports import ProjectionReport
from ladderize.adapt.align.ridge import Products, solve, squared_errors
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
