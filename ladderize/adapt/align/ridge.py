"""Ridge regression from sums of products: how every projection is solved anew.

W = argmin sum |W x - y|^2 + l |W - W_0|^2 with l = ridge * mean diagonal of sum x x^T has the closed form
W = (sum y x^T + l W_0) (sum x x^T + l I)^-1. What the data do not say stays as in W_0.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from ladderize.ranks.group import Ranks

OUTPUTS_AT_ONCE = 4096  # that are solved for together, in float64


class Products:
    """Sums over tokens, in float32: ``gram`` = sum x x^T [width, width] and ``cross`` = sum y x^T [outputs, width]."""

    def __init__(self, width: int, outputs: int, device: torch.device) -> None:
        self.gram = torch.zeros(width, width, device=device)
        self.cross = torch.zeros(outputs, width, device=device)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """inputs: [tokens, width], targets: [tokens, outputs], float32."""
        self.gram.addmm_(inputs.T, inputs)
        self.cross.addmm_(targets.T, inputs)

    def reduce(self, ranks: Ranks) -> None:
        """Sum over the ranks, which have added different tokens."""
        ranks.sum(self.gram)
        ranks.sum(self.cross)


def solve(gram: Tensor, cross: Tensor, prior: Tensor, ridge: float) -> Tensor | None:
    """The weights [outputs, width], solved in float64 and returned in float32; None where the products are singular
    even with the ridge.

    gram: [width, width]; cross, prior: [outputs, width].
    """
    penalty = ridge * float(gram.diagonal().double().mean())
    factor = gram.double()
    factor.diagonal().add_(penalty)
    failed = torch.zeros((), dtype=torch.int32, device=gram.device)
    torch.linalg.cholesky_ex(factor, out=(factor, failed))  # in place: of a wide projection it is gigabytes
    if penalty <= 0 or int(failed):
        return None
    weights = torch.empty_like(prior)
    for rows in torch.arange(len(prior)).split(OUTPUTS_AT_ONCE):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        right = cross[part].double().add_(prior[part], alpha=penalty)
        weights[part] = torch.cholesky_solve(right.T, factor).T
    return weights if bool(torch.isfinite(weights).all()) else None


def squared_errors(weights: Tensor, inputs: Tensor, targets: Tensor, sizes: list[int]) -> Tensor:
    """Of the rows of ``weights`` [outputs, width] in parts of ``sizes``: sum |W x - y|^2 and sum |y|^2 of each part,
    float64 [2, parts].

    inputs: [tokens, width], targets: [tokens, outputs], float32.
    """
    both = (linear(inputs, weights) - targets, targets)
    return torch.stack(
        [torch.stack([part.double().square().sum() for part in values.split(sizes, -1)]) for values in both]
    )
