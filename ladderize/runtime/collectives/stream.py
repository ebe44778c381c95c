"""The residual stream, whose last sum may be left to its reader: a kernel less for each sum."""

from collections.abc import Callable

from torch import Tensor


class Unadded:
    """The residual stream [batch, tokens, hidden] and a sum that is not added to it yet: who reads the stream first may
    add it in a kernel that does something else, too."""

    __slots__ = ("parts", "total")

    def __init__(self, stream: Tensor, added: Tensor) -> None:
        self.parts: tuple[Tensor, Tensor] | None = (stream, added)
        self.total: Tensor | None = None

    def add_by(self, kernel: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Return what ``kernel`` makes of the stream beside the stream itself, with the sum. Only the first reader may
        ask."""
        assert self.parts is not None
        self.total, made = kernel(*self.parts)
        self.parts = None
        return made


Stream = Tensor | Unadded


def whole(stream: Stream) -> Tensor:
    """Return the stream with its sum."""
    if isinstance(stream, Tensor):
        return stream
    if stream.total is None:
        assert stream.parts is not None
        stream.total, stream.parts = stream.parts[0] + stream.parts[1], None
    return stream.total
