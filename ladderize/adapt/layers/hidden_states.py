"""The states between two layers for all windows: in memory, or in mapped files."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ladderize.adapt.layers.options import TOKENS_PER_STEP
from ladderize.blocks import Blocks, State, complete
from ladderize.console import human_bytes, sentence
from ladderize.errors import UserError
from ladderize.layout import BLOCKING, OVERLAPPED, Layout


class StateStore:
    """States [windows, tokens, width] that are written and read by rows; with ``pairs``, (complete, visible) of each.

    They lie in memory; more than ``max_memory`` bytes lie in files named after ``path``, which ``close`` removes.
    Raises UserError where the files cannot be allocated.
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
        if path is None or max_memory is None or count * dtype.itemsize * (1 + pairs) <= max_memory:
            self.tensors = [torch.empty(shape, dtype=dtype) for _ in range(1 + pairs)]
            return
        self.files = [path.with_name(f"{path.name}-{number}.bin") for number in range(1 + pairs)]
        try:
            for file in self.files:
                _reserve(file, count * dtype.itemsize)
        except UserError:
            self.close()
            raise
        mapped = [torch.from_file(str(file), shared=True, size=count, dtype=dtype) for file in self.files]
        self.tensors = [tensor.view(shape) for tensor in mapped]

    def write(self, first: int, state: State, model: str = "dense") -> None:
        """Write the rows from ``first`` on.

        A state that is no pair leaves the second part as it is: nothing was in flight before it.

        model: the one that it belongs to, for messages.
        Raises UserError for NaN or infinite states.
        """
        if not math.isfinite(float(complete(state).sum())):
            raise UserError(f"the {model} model's states are NaN or infinite; check its weights, or compute in float32")
        parts = state if isinstance(state, tuple) else (state,)
        for tensor, part in zip(self.tensors, parts, strict=False):
            tensor[first : first + len(part)] = part.to(tensor.device)

    def read(self, rows: Tensor, device: torch.device) -> State:
        """Return the states of these windows, on ``device``."""
        parts = tuple(tensor[rows].to(device) for tensor in self.tensors)
        return parts if len(parts) == 2 else parts[0]

    def close(self) -> None:
        """Free memory and disk."""
        self.tensors = []
        for file in self.files:
            file.unlink(missing_ok=True)


def _reserve(file: Path, size: int) -> None:
    """Allocate the disk space now: writing to a mapped file on a full disk kills the process without a message.

    Raises UserError where it cannot be allocated.
    """
    with file.open("wb") as opened:
        try:
            os.posix_fallocate(opened.fileno(), 0, size)
        except OSError as error:
            raise UserError(
                f"the states of all windows need {human_bytes(size)} in {file}, which cannot be allocated"
                f" ({sentence(error)}); name an OUT on another disk, or fewer --samples"
            ) from None


def needs_pair(layout: Layout, layer: int) -> bool:
    """Return whether the layer reads the stream without the MLP before it, since the sync point that enters it is
    overlapped."""
    return layout.entering(layer) == OVERLAPPED


def teacher_pass(
    blocks: Blocks, windows: Tensor, layers: Sequence[int], pairs: bool, *, max_memory: int, path: Path
) -> Iterator[tuple[int, StateStore, StateStore]]:
    """Run the dense model layer by layer; yields (i, states that enter block i, states that leave it).

    layers: the last of them ends the pass.
    pairs: states also hold the stream without the last MLP's output.
    max_memory: bytes of states; more lie in files named after ``path``.
    Raises UserError for NaN or infinite states.
    """
    shape = (*windows.shape, int(blocks.config["hidden_size"]))
    count = blocks.num_layers
    layout = Layout((BLOCKING,) * count, (OVERLAPPED,) * (count - 1) + (BLOCKING,)) if pairs else Layout.dense(count)
    stores: list[StateStore] = []
    try:
        for number in range(2):
            file = path.with_name(f"{path.name}-{number}")
            stores.append(StateStore(shape, blocks.dtype, pairs, max_memory=max_memory // 2, path=file))
        _fill(stores[0], lambda rows: blocks.embed(windows[rows]))
        for index in range(max(layers, default=-1) + 1):
            before, after = stores[index % 2], stores[1 - index % 2]
            _run_layer(blocks, blocks.layer(index, layout), before, after)
            yield index, before, after
    finally:
        for store in stores:
            store.close()


def _run_layer(blocks: Blocks, layer: torch.nn.Module, before: StateStore, after: StateStore) -> None:
    _fill(after, lambda rows: blocks.run(layer, complete(before.read(rows, blocks.device))))


@torch.no_grad()
def _fill(store: StateStore, states: Callable[[Tensor], State]) -> None:
    """Compute every window's state. This is a function, since a generator would leave no_grad on while its caller
    trains."""
    batch = max(1, 4 * TOKENS_PER_STEP // store.tensors[0].shape[1])
    for rows in torch.arange(store.windows).split(batch):
        store.write(int(rows[0]), states(rows))
