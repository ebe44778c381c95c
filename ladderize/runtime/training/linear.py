"""A product whose weight's gradient is computed later than its input's.

The gradient of a sub-module's input has to be summed over the ranks, that of its weights has not. So the weight enters
a product through a node of its own (``WeightUse``), which is made before the sum that the product's input waits for.
Autograd runs nodes in the reverse of that order: first the gradients of the inputs, then the start of their sum, then
the gradients of the weights, and only then the wait (Domino, arXiv 2409.15241, section 3.3).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ladderize.runtime.layers import Linear


class LaterLinear(Linear):
    """y = x W^T + b with gradients; one object for each use. value: the parameter in the dtype that is computed in."""

    __slots__ = ("use",)

    def __init__(self, parameter: Tensor, value: Tensor, bias: Tensor | None) -> None:
        super().__init__(value, bias)
        self.use: WeightUse | None = None
        if torch.is_grad_enabled() and parameter.requires_grad:
            self.use = WeightUse()
            self.weight = _Enter.apply(self.use, parameter, value.detach())

    def __call__(self, x: Tensor) -> Tensor:
        (product,) = self.products(x, 1)
        return product

    def products(self, x: Tensor, columns: int) -> Iterator[Tensor]:
        width = self.out_features // columns
        for number in range(columns):
            rows = slice(number * width, (number + 1) * width) if columns > 1 else slice(None)
            bias = None if self.bias is None else self.bias[rows]
            if self.use is None:
                yield F.linear(x, self.weight[rows], bias)
            else:
                yield _Product.apply(self.use, x, self.weight[rows], bias, number)


class WeightUse:
    """What the gradient of one use of a weight is made of, until it is: for each part of the output's columns, the
    output's gradient and the input."""

    __slots__ = ("__weakref__", "parts")

    def __init__(self) -> None:
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}

    def gradient(self) -> Tensor | None:
        """[out, in]; None where no gradient came."""
        parts, self.parts = self.parts, {}
        blocks = [gradient.flatten(0, -2).t() @ x.flatten(0, -2) for _, (gradient, x) in sorted(parts.items())]
        if not blocks:
            return None
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


class _Enter(Function):
    """The weight of a product. Its gradient does not come from there but is computed here."""

    @staticmethod
    def forward(ctx: Any, use: WeightUse, parameter: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.use, ctx.dtype = use, parameter.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        gradient = ctx.use.gradient()
        return None, None if gradient is None else gradient.to(ctx.dtype), None


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, use: WeightUse, x: Tensor, weight: Tensor, bias: Tensor | None, number: int) -> Tensor:
        ctx.use, ctx.number = use, number
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        ctx.use.parts[ctx.number] = (gradient, x)
        own = gradient @ weight if ctx.needs_input_grad[1] else None
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        # autograd is told of the weight's part of the graph, not of its gradient
        return None, own, None, bias, None
