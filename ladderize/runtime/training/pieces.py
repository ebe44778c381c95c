"""Where one rank's part of a checkpoint's tensor lies among its parameters, and how the ranks make it whole."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ladderize.ranks.group import Ranks
from ladderize.runtime.loader import pair_rope_rows, unpair_rope_rows

Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """One rank's part of the checkpoint's tensor of ``shape``.

    parts: the parameters that hold it, each with the rows that do, side by side along ``dim``, along which the ranks,
    too, hold parts of the tensor, ``start`` being this rank's first index. dim None: every rank holds all of it in one
    parameter. copies: so many neighbouring ranks hold the same. head_dim: of rows that are paired up for rope, else 0.

    Methods take ``of``, which picks what is meant of a parameter: itself, its gradient, a moment of the optimizer.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Tensor, slice], ...]
    dim: int | None = None
    start: int = 0
    copies: int = 1
    head_dim: int = 0

    def local(self, of: Pick) -> Tensor:
        """This rank's part, as the checkpoint orders it; of a padded vocabulary with the padding."""
        found = [of(parameter)[rows] for parameter, rows in self.parts]
        joined = found[0] if len(found) == 1 else torch.cat(found, self.dim or 0)
        return unpair_rope_rows(joined, self.head_dim) if self.head_dim else joined

    def whole(self, of: Pick, tensor: Ranks) -> Tensor:
        """The checkpoint's tensor, on every rank of ``tensor``; all of them call it."""
        local = self.local(of).detach()
        if self.dim is None or tensor.size == 1:
            return local if self.dim is None else local.narrow(self.dim, 0, self.shape[self.dim])
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(tensor.size)]
        dist.all_gather(parts, local.contiguous(), group=tensor.group)
        return torch.cat(parts[:: self.copies], self.dim).narrow(self.dim, 0, self.shape[self.dim])

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(parameter for parameter, _ in self.parts)

    @torch.no_grad()
    def assign(self, of: Pick, whole: Tensor) -> None:
        """Copy this rank's part of a whole tensor to where it lies."""
        targets = [of(parameter)[rows] for parameter, rows in self.parts]
        if self.dim is None:
            targets[0].copy_(whole)
            return
        size = sum(target.shape[self.dim] for target in targets)
        start = min(self.start, self.shape[self.dim])
        own = whole.narrow(self.dim, start, min(size, self.shape[self.dim] - start))
        if self.head_dim:
            own = pair_rope_rows(own, self.head_dim)
        for target in targets:  # the last rows of a padded vocabulary stand for no token
            width = min(target.shape[self.dim], own.shape[self.dim])
            target.narrow(self.dim, 0, width).copy_(own.narrow(self.dim, 0, width))
            own = own.narrow(self.dim, width, own.shape[self.dim] - width)
