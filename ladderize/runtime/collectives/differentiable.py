"""A sub-module's sum on its way into the residual stream, forward and backward.

Forward, *start* sends the partial sums and *wait* adds their sum to the stream. Backward wait's node starts the
all-reduce of the gradient of x, which each rank knows its part of, and start's node waits for it: what hides a message
on the way there hides the message on the way back.

x is the residual stream as a sub-module reads it, a tensor of its own: the part of the gradient that needs a sum
(through the sub-module) stays apart from the part that all ranks have alike. The sum is taken before the norm, whose
backward is linear in the gradient: a sub-module's whole backward sends one message.

A norm behind the sum has a graph of its own, since its gradient is known only where backward waits: in start's node."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ladderize.runtime.collectives.base import Collectives, Handle


class Unadded:
    """The residual stream [batch, tokens, hidden] and a sum that is not added to it yet: who reads the stream first may
    add it in a kernel that does something else, too. Then their total is the only one of ``summands``."""

    __slots__ = ("summands",)

    def __init__(self, stream: Tensor, added: Tensor) -> None:
        self.summands = [stream, added]


Stream = Tensor | Unadded


def whole(stream: Stream) -> Tensor:
    """Return the stream with its sum."""
    if isinstance(stream, Tensor):
        return stream
    if len(stream.summands) == 2:
        stream.summands = [stream.summands[0] + stream.summands[1]]
    return stream.summands[0]


class PendingSum:
    """The sum over the ranks of a partial product [batch, tokens, hidden], added to ``residual`` with ``bias``. The
    message belongs to this object, and with gradients to the nodes of the graph; nothing else holds it.

    behind: the norm, which has a ``weight``, of the sum with its bias before it is added.
    blocking: nothing is computed before the wait.
    """

    __slots__ = ("behind", "bias", "handle", "link", "residual", "sent")

    def __init__(
        self,
        collectives: Collectives,
        residual: Stream | None,
        bias: Tensor | None,
        product: Tensor,
        *,
        behind: Any = None,
        blocking: bool = False,
    ) -> None:
        self.residual: Stream | None = residual
        self.bias, self.behind = bias, behind
        self.link: _Link | None = None
        self.sent: Tensor | None = None
        send = collectives.all_reduce_blocking if blocking else collectives.all_reduce_async
        if torch.is_grad_enabled():
            self.link = _Link(collectives)
            if residual is not None:  # made before the start, so that its backward comes after
                weight = None if behind is None else behind.weight
                self.residual = _Hold.apply(self.link, residual, bias, weight)
            self.sent = _Start.apply(self.link, send, product)
        else:
            self.handle = send(product)

    def wait(self, norm: Callable[[Any, Tensor], Tensor], *, unadded: bool) -> tuple[Stream, Stream]:
        """Return the residual stream with the sum and the bias, and the same as x.

        norm: computes ``behind``.
        unadded: leave the sum to the stream's reader where nothing else is to be added.
        """
        if self.link is not None:
            after, x = _Wait.apply(self.link, norm, self.behind, self.bias, self.residual, self.sent)
            self.sent = self.residual = None
            return after, x
        residual = None if self.residual is None else whole(self.residual)
        if self.behind is not None and residual is not None:
            total = self.handle.wait(self.bias)
            return (residual + norm(self.behind, total),) * 2
        if unadded and residual is not None and self.bias is None:
            return (Unadded(residual, self.handle.wait()),) * 2
        after = self.handle.wait(residual)
        return (after if self.bias is None else after + self.bias,) * 2


class _Gradients(NamedTuple):
    """The gradients of a stream behind a sum, of the sum with its bias, and of the weight of the norm between."""

    stream: Tensor | None
    total: Tensor | None
    weight: Tensor | None


class _Normed:
    """The norm behind a sum, with a graph that ends at the sum and at the norm's weight."""

    __slots__ = ("added", "total", "weight")

    def __init__(self, norm: Callable[[Any, Tensor], Tensor], behind: Any, total: Tensor) -> None:
        with torch.enable_grad():
            self.total, self.weight = total.detach().requires_grad_(), behind.weight
            self.added = norm(behind, self.total)

    def gradients(self, of_stream: Tensor) -> _Gradients:
        wanted = [self.total, self.weight] if self.weight.requires_grad else [self.total]
        total, *weight = torch.autograd.grad(self.added, wanted, of_stream)
        return _Gradients(of_stream, total, weight[0] if weight else None)


class _Link:
    """The messages of one sum, which its nodes share: first that of forward, then that of backward."""

    __slots__ = ("__weakref__", "collectives", "direct", "gradients", "handle", "held", "normed")

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.held = False  # gradients beside the sum's are needed
        self.handle: Handle | None = None
        self.normed: _Normed | None = None
        self.direct: Tensor | None = None  # the gradient of the stream, which all ranks have alike
        self.gradients: _Gradients | None = None  # once they have arrived, if they are needed again

    def arrived(self) -> _Gradients:
        """Return the gradients: the stream's is all ranks' alike, plus the ranks' sum, for which it waits."""
        handle, self.handle = self.handle, None
        stream, self.direct = self.direct, None
        normed, self.normed = self.normed, None
        if handle is not None:
            summed = handle.wait()
            stream = summed if stream is None else summed + stream
        return _Gradients(stream, stream, None) if normed is None or stream is None else normed.gradients(stream)


class _Hold(Function):
    """The stream before a sum. Its backward runs after that of the start, and so knows the whole gradient."""

    @staticmethod
    def forward(ctx: Any, link: _Link, residual: Tensor, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.link = link
        link.held = any(ctx.needs_input_grad)
        return residual.view_as(residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        link: _Link = ctx.link
        # a product without a gradient has no backward
        (stream, total, weight), link.gradients = link.gradients or link.arrived(), None
        bias = total.flatten(0, -2).sum(0) if total is not None and ctx.needs_input_grad[2] else None
        return None, stream if ctx.needs_input_grad[1] else None, bias, weight


class _Start(Function):
    """The start of a product's message. Its output stands for the sum and must not be read."""

    @staticmethod
    def forward(ctx: Any, link: _Link, send: Callable[[Tensor], Handle], product: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.link = link
        link.handle = send(product.detach())
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        link: _Link = ctx.link
        arrived = link.arrived()
        if link.held:
            link.gradients = arrived
        return None, None, arrived.total


class _Wait(Function):
    """The wait for the sum. Returns the stream with the sum twice, as the stream and as x. All ranks have the sum
    alike, like the stream."""

    @staticmethod
    def forward(
        ctx: Any,
        link: _Link,
        norm: Callable[[Any, Tensor], Tensor],
        behind: Any,
        bias: Tensor | None,
        residual: Tensor | None,
        sent: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.link = link
        assert link.handle is not None
        after, link.handle = link.handle.wait(), None
        if behind is not None:
            link.normed = _Normed(norm, behind, after if bias is None else after + bias)
            after, bias = link.normed.added.detach(), None
        if residual is not None:
            after = residual + after
        if bias is not None:
            after = after + bias
        return after, after.view_as(after)  # a tensor of its own also where nothing was added

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        link, (link.direct, of_x) = ctx.link, gradients
        if of_x is not None:
            link.handle = link.collectives.all_reduce_async(of_x.contiguous())
        # the nodes before this one find their gradients in the link: autograd never touches a message on its way
        return (None,) * 6
