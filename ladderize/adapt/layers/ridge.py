"""Ridge regression from sums of products, by which every projection is solved anew.

W = argmin sum |W x - y|^2 + l |W - W_0|^2 with l = ridge * mean diagonal of sum x x^T has the closed form W = (sum y
x^T + l W_0) (sum x x^T + l I)^-1. Directions that the data do not determine stay as in W_0.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ladderize.files.records import Record
from ladderize.ranks.group import Ranks

OUTPUTS_AT_ONCE = 4096  # solved for together, in float64
GRAM_ROWS = 256  # of x x^T at a time: fewer make slow products, more compute much of what lies below the diagonal
# A weaker ridge must take away this share more of the error than a stronger one: weights nearer to the dense ones come
# out better in the whole model (in 10 of 12 cases), and train better.
WORTH_LESS_RIDGE = 0.02
# No weaker ridge is tried after one that raises all projections' errors by this share of what they were: it fits noise.
# Of 228 groups of projections (two models, six layouts) none would have taken a weaker one.
FITS_NOISE = 0.01

# Batches of tokens: the inputs [tokens, width] of each virtual rank, and the targets [tokens, outputs] of all of them
Batches = Iterable[tuple[Sequence[Tensor], Tensor]]


@dataclass(frozen=True)
class ProjectionReport(Record):
    """The result for one projection. Errors are squared, on held-out tokens, as a share of the squared targets. Without
    a ridge the old weights were kept, since none lowered the error."""

    projection: str  # such as self_attn.q_proj
    ridge: float | None
    error_before: float
    error_after: float


def affine(projections: Sequence[nn.Linear], rank: int = 0, ranks: int = 1) -> Tensor:
    """Return the rows that one of ``ranks`` has of each projection: float32 [outputs, width], biases a last column."""
    rows = []
    for projection in projections:
        columns = [projection.weight] if projection.bias is None else [projection.weight, projection.bias[:, None]]
        rows.append(torch.cat(columns, 1).chunk(ranks)[rank].float())
    return torch.cat(rows)


def with_ones(inputs: Tensor, projection: nn.Linear) -> Tensor:
    """Return the inputs [..., width] as float32 [tokens, width], with a column of ones where there is a bias."""
    flat = inputs.flatten(0, -2).float()
    return flat if projection.bias is None else torch.cat([flat, flat.new_ones(len(flat), 1)], 1)


def add_gram(gram: Tensor, inputs: Tensor) -> None:
    """Add sum x x^T to the rows of ``gram`` from the diagonal on; ``mirrored`` makes the rest, in half of the time."""
    for begin in range(0, len(gram), GRAM_ROWS):
        gram[begin : begin + GRAM_ROWS, begin:].addmm_(inputs[:, begin : begin + GRAM_ROWS].T, inputs[:, begin:])


def mirrored(gram: Tensor) -> Tensor:
    return gram.triu().add_(gram.triu(1).T)


class RankRows:
    """The rows W_0 [outputs, width] that one virtual rank has of some projections, with sums of products over tokens in
    float32: sum x x^T and sum y x^T. Targets are ``readout`` times the y, if there is one, else the y."""

    def __init__(self, prior: Tensor, readout: Tensor | None = None) -> None:
        self.prior, self.readout = prior, readout
        width, device = prior.shape[1], prior.device
        self.gram = torch.zeros(width, width, device=device)
        self.cross = torch.zeros(len(prior) if readout is None else readout.shape[1], width, device=device)

    def add(self, inputs: Tensor, values: Tensor) -> None:
        add_gram(self.gram, inputs)
        self.cross.addmm_(values.T, inputs)

    def sum(self, ranks: Ranks) -> None:
        """Sum the products over all ranks, those of the dense model's inputs read out."""
        self.gram = mirrored(ranks.sum(self.gram))
        self.cross = self.targets(ranks.sum(self.cross).T).T

    def targets(self, values: Tensor) -> Tensor:
        return values if self.readout is None else linear(values, self.readout)

    def solve(self, ridge: float) -> Tensor | None:
        """Return the weights [outputs, width], solved in float64 and rounded to float32; None where the products are
        singular even with the ridge."""
        penalty = ridge * float(self.gram.diagonal().double().mean())
        factor = self.gram.double()
        factor.diagonal().add_(penalty)
        failed = torch.zeros((), dtype=torch.int32, device=factor.device)
        torch.linalg.cholesky_ex(factor, out=(factor, failed))  # in place: of a wide projection it is gigabytes
        if penalty <= 0 or int(failed):
            return None
        weights = torch.empty_like(self.prior)
        for first in range(0, len(weights), OUTPUTS_AT_ONCE):
            rows = slice(first, first + OUTPUTS_AT_ONCE)
            right = self.cross[rows].double().add_(self.prior[rows], alpha=penalty)
            weights[rows] = torch.cholesky_solve(right.T, factor).T
        return weights if bool(torch.isfinite(weights).all()) else None


class HeldoutErrors:
    """The squared errors of any rows [outputs, width] on held-out tokens, from sums over these in float32.

    With D = W - W_0 and e = W_0 x - y it is sum |W x - y|^2 = sum |e|^2 + 2 <D, sum e x^T> + <D sum x x^T, D>: tokens
    are computed once, however many ridges are tried. sizes: rows of each projection.
    """

    def __init__(self, prior: Tensor, sizes: Sequence[int]) -> None:
        width, device = prior.shape[1], prior.device
        self.prior, self.sizes = prior, list(sizes)
        self.gram = torch.zeros(width, width, device=device)
        self.slope = torch.zeros_like(prior)
        self.before, self.power = torch.zeros(2, len(sizes), dtype=torch.float64, device=device)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        errors = linear(inputs, self.prior) - targets
        add_gram(self.gram, inputs)
        self.slope.addmm_(errors.T, inputs)
        self.before += self._by_projection(errors.square().sum(0, dtype=torch.float64))
        self.power += self._by_projection(targets.square().sum(0, dtype=torch.float64))

    def sum(self, ranks: Ranks) -> None:
        for sums in (self.gram, self.slope, self.before, self.power):
            ranks.sum(sums)
        self.gram = mirrored(self.gram)

    def of(self, weights: Tensor) -> Tensor:
        """Return the errors of rows in the place of the prior: float64 [projections]."""
        change = weights - self.prior
        added = (change @ self.gram).add_(self.slope, alpha=2).mul_(change)
        return (self.before + self._by_projection(added.sum(1, dtype=torch.float64))).clamp_(min=0.0)

    def _by_projection(self, rows: Tensor) -> Tensor:
        return torch.stack([projection.sum() for projection in rows.split(self.sizes)])


def refit(
    names: Sequence[str],
    projections: Sequence[nn.Linear],
    virtual: Sequence[RankRows],
    heldout: Batches,
    ridges: Sequence[float],
    ranks: Ranks,
    stored: Mapping[str, torch.dtype],
) -> list[ProjectionReport]:
    """Solve the projections anew in place; each keeps its old weights unless its error on held-out tokens falls.

    virtual: the rows of each virtual rank. ridges: the strongest first. stored: the dtypes that tensors are rounded to.
    """
    sizes = [projection.out_features // len(virtual) for projection in projections]
    errors = [HeldoutErrors(rows.prior, sizes) for rows in virtual]
    for rows in virtual:
        rows.sum(ranks)
    for inputs, values in heldout:
        for rows, error, x in zip(virtual, errors, inputs, strict=True):
            error.add(x, rows.targets(values))
    for error in errors:
        error.sum(ranks)
    before = torch.stack([error.before for error in errors]).sum(0).cpu()
    power = torch.stack([error.power for error in errors]).sum(0).cpu()
    best, last = before.clone(), torch.full_like(before, math.inf)
    chosen: list[float | None] = [None] * len(sizes)
    for ridge in ridges:
        attempts = [rows.solve(ridge) for rows in virtual]
        solved = [weights for weights in attempts if weights is not None]
        failed = torch.tensor([float(len(solved) < len(virtual))], device=before.device)
        if ranks.sum(failed):  # on any rank, since different machines round differently
            continue
        for weights in solved:
            for name, rows in zip(names, weights.split(sizes), strict=True):  # as they will be stored
                kinds = stored[f"{name}.weight"], stored.get(f"{name}.bias", torch.float32)
                for columns, dtype in zip(rows.tensor_split([projections[0].in_features], 1), kinds, strict=True):
                    columns.copy_(columns.to(dtype))
        now = torch.stack([error.of(weights) for error, weights in zip(errors, solved, strict=True)]).sum(0).cpu()
        if bool((now > last + FITS_NOISE * before).all()):
            break
        last = now
        for number, projection in enumerate(projections):
            if now[number] < best[number] - WORTH_LESS_RIDGE * (before[number] - best[number]):
                best[number], chosen[number] = now[number], ridge
                whole = torch.cat([weights.split(sizes)[number] for weights in solved])
                projection.weight.data.copy_(whole[:, : projection.in_features])  # in place: it may be rows of another
                if projection.bias is not None:
                    projection.bias.data = whole[:, -1].to(projection.bias.dtype)
    shares = [(squares / power).where(power != 0, 0.0).tolist() for squares in (before, best)]
    return [ProjectionReport(*entry) for entry in zip(names, chosen, *shares, strict=True)]
