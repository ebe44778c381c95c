"""A sub-module's sum on its way into the residual stream, forward and backward.

Forward, *start* sends the partial sums and *wait* adds their sum to the stream. Backward it is the other way round:
wait's backward starts the all-reduce of the gradient of x, which each rank knows its part of, and start's backward
waits for it. Autograd runs the nodes in the reverse of the order in which forward made them. So whatever forward does
between a start and its wait has its backward between the backward's start and wait: what hides a message on the way
there hides the message on the way back.

x is the residual stream as a sub-module reads it. It is a tensor of its own, which keeps the part of the gradient that
needs a sum (through the sub-module) apart from the part that all ranks have alike (through the stream). The sum is
taken before the sub-module's norm, whose backward is linear in the gradient: a sub-module's whole backward sends one
message.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.stream import Stream, Unadded, whole


class PendingSum:
    """The sum over the ranks of partial products [batch, tokens, columns], side by side as wide as the stream.

    Each product is sent as soon as it is there. The messages belong to this object, and with gradients to the nodes of
    the graph; nothing else holds them.

    residual: the sum is added to it; None: to nothing.
    bias: is added once.
    take: receives the sum with the bias as soon as it is there.
    """

    __slots__ = ("bias", "handles", "link", "residual", "sent", "take")

    def __init__(
        self,
        collectives: Collectives,
        residual: Stream | None,
        bias: Tensor | None,
        products: Iterable[Tensor],
        take: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.residual: Stream | None = residual
        self.bias, self.take = bias, take
        self.link: _Link | None = None
        self.handles: list[Handle] = []
        self.sent: list[Tensor] = []
        if not torch.is_grad_enabled():
            for product in products:
                self.handles.append(collectives.all_reduce_async(product))
            return
        self.link = _Link(collectives)
        if residual is not None:  # made first, so that its backward comes last
            self.residual = _Hold.apply(self.link, residual, bias)
        for number, product in enumerate(products):
            self.sent.append(_Start.apply(self.link, number, product))

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return the residual stream with the sum and the bias, [batch, tokens, hidden], and the same as x."""
        if self.link is not None:
            after, x, *total = _Wait.apply(self.link, self.take is not None, self.bias, self.residual, *self.sent)
            self.sent, self.residual = [], None
        else:
            residual = None if self.residual is None else whole(self.residual)
            if len(self.handles) == 1 and self.take is None:  # nobody asks for the sum itself
                after = x = _added(self.handles[0].wait_added(residual), None, self.bias)
            else:
                total = [_joined([handle.wait() for handle in self.handles])]
                after = x = _added(total[0], residual, self.bias)
        if self.take is not None:
            self.take(total[0] if self.bias is None else total[0] + self.bias)
        return after, x

    def wait_unadded(self) -> tuple[Stream, Stream]:
        """Return what ``wait`` does, but leave the sum to the stream's reader where nothing else is to be added."""
        if self.residual is None or self.bias is not None or self.take is not None or len(self.handles) != 1:
            return self.wait()
        stream = Unadded(whole(self.residual), self.handles[0].wait())
        return stream, stream


class _Link:
    """The messages of one sum, which its nodes share: first those of forward, then those of backward."""

    __slots__ = ("__weakref__", "apart", "collectives", "direct", "handles", "held", "totals")

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.held = False  # True if a gradient of the stream before the sum is needed
        self.handles: dict[int, Handle] = {}
        self.direct: dict[int, Tensor] = {}
        self.apart: dict[int, Tensor] = {}  # gradients of the sum that was taken: of the products, not of the stream
        self.totals: dict[int, Tensor] = {}

    def total(self, number: int) -> Tensor | None:
        """Return the gradient of product ``number``: the stream's, plus the ranks' sum, for which it waits."""
        handle, direct = self.handles.pop(number, None), self.direct.pop(number, None)
        if handle is None:
            return direct
        summed = handle.wait()
        return summed if direct is None else summed + direct


class _Hold(Function):
    """The stream before a sum. Its backward runs after those of all starts, and so knows the whole gradient."""

    @staticmethod
    def forward(ctx: Any, link: _Link, residual: Tensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.link = link
        link.held = bool(ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        return residual.view_as(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        link: _Link = ctx.link
        # of products without a gradient, which have no backward; in the order of sending: the last product's first
        for number in sorted({*link.direct, *link.handles}, reverse=True):
            total = link.total(number)
            assert total is not None
            link.totals[number] = total
        parts = [link.totals.pop(number) for number in sorted(link.totals)]
        if not parts:
            return None, None, None
        total = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        bias = total.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return None, total if ctx.needs_input_grad[1] else None, bias


class _Start(Function):
    """The start of a product's message. Its output stands for the sum and must not be read."""

    @staticmethod
    def forward(ctx: Any, link: _Link, number: int, product: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.link, ctx.number = link, number
        link.handles[number] = link.collectives.all_reduce_async(product.detach())
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        link: _Link = ctx.link
        total = link.total(ctx.number)
        if link.held and total is not None:
            link.totals[ctx.number] = total
        apart = link.apart.pop(ctx.number, None)
        if apart is not None:
            total = apart if total is None else total + apart
        return None, None, total


class _Wait(Function):
    """The wait for the sum. Returns the stream with the sum twice, as the stream and as x; with ``taken`` also the sum
    itself.

    All ranks have the sum alike, like the stream.
    """

    @staticmethod
    def forward(
        ctx: Any, link: _Link, taken: bool, bias: Tensor | None, residual: Tensor | None, *sent: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.link = link
        ctx.products = len(sent)
        total = _joined([link.handles.pop(number).wait() for number in range(len(sent))])
        after = _added(total, residual, bias)
        # a tensor of its own also where nothing was added
        return (after, after.view_as(after), *([total.view_as(total)] if taken else []))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        link, (direct, own, *apart) = ctx.link, gradients
        if direct is not None:
            link.direct = dict(enumerate(direct.chunk(ctx.products, -1)))
        for total in apart:
            if total is not None:
                link.apart = dict(enumerate(total.chunk(ctx.products, -1)))
        if own is not None:
            # the last product's backward comes first: ranks wait in the order in which they send
            for number, part in reversed(list(enumerate(own.chunk(ctx.products, -1)))):
                link.handles[number] = link.collectives.all_reduce_async(part.contiguous())
        # the nodes before this one find their gradients in the link: autograd never touches a message on its way
        return (None,) * (4 + ctx.products)


def _joined(sums: list[Tensor]) -> Tensor:
    return sums[0] if len(sums) == 1 else torch.cat(sums, -1)


def _added(total: Tensor, residual: Tensor | None, bias: Tensor | None) -> Tensor:
    if residual is not None:
        total = residual + total
    return total if bias is None else total + bias


class ShareOfGradient(Function):
    """A function that passes a value on, and the part ``share`` of its gradient.

    It is for values that all ranks add alike, where gradients are summed over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.share, None
