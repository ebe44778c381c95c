"""A product whose weight's gradient is computed later than its input's, under whose sum over the ranks it runs.

The weight enters through a node of its own, made before the sum that the product's input waits for. Autograd runs nodes
in reverse: the gradients of the inputs, the start of their sum, the gradients of the weights, and only then the wait
(Domino, arXiv 2409.15241, section 3.3)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from ladderize.runtime.layers import Linear


class LaterLinear(Linear):
    """A product y = x W^T + b with gradients; one object for each use. ``value`` is the parameter in the dtype that is
    computed in."""

    __slots__ = ("use",)

    def __init__(self, parameter: Tensor, value: Tensor, bias: Tensor | None, gradient: "WeightGradient") -> None:
        super().__init__(value, bias)
        self.use: WeightUse | None = None
        if torch.is_grad_enabled() and parameter.requires_grad:
            self.use = WeightUse(gradient)
            self.weight = _Enter.apply(self.use, parameter, value.detach())

    def __call__(self, x: Tensor) -> Tensor:
        if self.use is None:
            return F.linear(x, self.weight, self.bias)
        if not self.use.counted:  # a product computed again (activation checkpointing) does not count again
            self.use.counted = True
            self.use.gradient.uses += 1
        product: Tensor = _Product.apply(self.use, x, self.weight, self.bias)
        return product


class WeightGradient:
    """The gradient of a weight in one pass. Its uses add their products in place, so a part of the batch costs no
    copy."""

    __slots__ = ("total", "uses")

    def __init__(self) -> None:
        self.uses = 0
        self.total: Tensor | None = None

    def add(self, products: list[tuple[Tensor, Tensor]], parameter: Tensor) -> Tensor | None:
        """Add one use's products; return the sum with the last use, None before."""
        for gradient, x in products:
            left, right = gradient.flatten(0, -2).t(), x.flatten(0, -2)
            if self.total is None:
                self.total = (left @ right).to(parameter.dtype)
            elif left.dtype == parameter.dtype:
                self.total.addmm_(left, right)
            else:
                self.total += left @ right
        self.uses -= 1
        if self.uses:
            return None
        total, self.total = self.total, None
        return total


class WeightUse:
    """One use's share of a weight's gradient, until it is added. A weight that is not multiplied is not used."""

    __slots__ = ("__weakref__", "counted", "gradient", "products")

    def __init__(self, gradient: WeightGradient) -> None:
        self.gradient, self.counted = gradient, False
        self.products: list[tuple[Tensor, Tensor]] = []  # the gradient of each product, and its input


class _Enter(Function):
    """The weight's entry into a product. Its gradient does not come from the product but is computed here."""

    @staticmethod
    def forward(ctx: Any, use: WeightUse, parameter: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.use, ctx.like = use, parameter.detach()
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        products, ctx.use.products = ctx.use.products, []
        return None, ctx.use.gradient.add(products, ctx.like), None


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, use: WeightUse, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        ctx.use.products.append((gradient, x))
        of_input = gradient @ weight if ctx.needs_input_grad[1] else None
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        # autograd is told of the weight's part of the graph, not of its gradient
        return None, of_input, None, bias
