"""The states between two layers for all windows: in memory, or in files that the system pages in and out."""

import os
from pathlib import Path

import torch
from torch import Tensor

from ladderize.blocks import State
from ladderize.console import human_bytes, sentence
from ladderize.errors import UserError
from ladderize.layout import OVERLAPPED, Layout


class StateStore:
    """States [windows, tokens, hidden] that are written and read by rows; with ``pairs``, (complete, visible) of each.

    They lie in memory, or, where they exceed ``max_memory`` bytes, in files named after ``path``, which ``close``
    removes.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        pairs: bool,
        *,
        max_memory: int | None = None,
        path: Path | None = None,
    ) -> None:
        self.windows = shape[0]
        count = torch.Size(shape).numel()
        self.files: list[Path] = []
        if path is not None and max_memory is not None and count * dtype.itemsize * (1 + pairs) > max_memory:
            self.files = [path.with_name(f"{path.name}-{number}.bin") for number in range(1 + pairs)]
            try:
                for file in self.files:
                    _reserve(file, count * dtype.itemsize)
            except UserError:
                self.close()
                raise
            self.tensors = [
                torch.from_file(str(file), shared=True, size=count, dtype=dtype).view(shape) for file in self.files
            ]
        else:
            self.tensors = [torch.empty(shape, dtype=dtype) for _ in range(1 + pairs)]

    def write(self, first: int, state: State) -> None:
        """Rows from ``first`` on. A state that is no pair leaves the second part as it is: nothing before it was in
        flight."""
        parts = state if isinstance(state, tuple) else (state,)
        for tensor, part in zip(self.tensors, parts, strict=False):
            tensor[first : first + len(part)] = part.to(tensor.device)

    def read(self, rows: Tensor, device: torch.device) -> State:
        """The states of these windows, on ``device``."""
        parts = tuple(tensor[rows].to(device) for tensor in self.tensors)
        return parts if len(parts) == 2 else parts[0]

    def close(self) -> None:
        """Free memory and disk."""
        self.tensors = []
        for file in self.files:
            file.unlink(missing_ok=True)


def _reserve(file: Path, size: int) -> None:
    """Take the disk space now: writing to a mapped file for which there is none kills the process without a word."""
    with file.open("wb") as opened:
        try:
            os.posix_fallocate(opened.fileno(), 0, size)
        except OSError as error:
            raise UserError(
                f"the states of all windows need {human_bytes(size)} in {file}, which cannot be allocated"
                f" ({sentence(error)}); choose a --work-dir on another disk, or fewer --samples"
            ) from None


def needs_pair(layout: Layout, layer: int) -> bool:
    """Whether the layer reads the stream without the MLP before it: the sync point that enters it is overlapped."""
    return layout.entering(layer) == OVERLAPPED
