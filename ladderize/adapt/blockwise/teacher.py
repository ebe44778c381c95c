"""The dense model's pass over all windows, layer by layer: what every block is trained from."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ladderize.adapt.blockwise.hidden_states import StateStore
from ladderize.adapt.blockwise.options import TOKENS_PER_STEP
from ladderize.blocks import Blocks, State, complete
from ladderize.errors import UserError
from ladderize.layout import BLOCKING, OVERLAPPED, Layout


def teacher_pass(
    blocks: Blocks, windows: Tensor, layers: Sequence[int], pairs: bool, *, max_memory: int, path: Path
) -> Iterator[tuple[int, StateStore, StateStore]]:
    """Run the dense model layer by layer; yields (i, states that enter block i, states that leave it) for i up to the
    last of ``layers``.

    pairs: states hold the stream without the last MLP's output too. Stores beyond ``max_memory`` bytes lie in files
    named after ``path``.
    """
    shape = (*windows.shape, int(blocks.config["hidden_size"]))
    count = blocks.num_layers
    layout = Layout((BLOCKING,) * count, (OVERLAPPED,) * (count - 1) + (BLOCKING,)) if pairs else Layout.dense(count)
    batch = max(1, 4 * TOKENS_PER_STEP // windows.shape[1])
    stores: list[StateStore] = []
    try:
        for number in range(2):
            file = path.with_name(f"{path.name}-{number}")
            stores.append(StateStore(shape, blocks.dtype, pairs, max_memory=max_memory // 2, path=file))
        _fill(stores[0], batch, lambda rows: blocks.embed(windows[rows]))
        for index in range(max(layers, default=-1) + 1):
            before, after = stores[index % 2], stores[1 - index % 2]
            teacher = blocks.layer(index, layout)
            _fill(after, batch, partial(_leaving, blocks, teacher, before))
            del teacher
            yield index, before, after
    finally:
        for store in stores:
            store.close()


def _leaving(blocks: Blocks, layer: torch.nn.Module, entering: StateStore, rows: Tensor) -> State:
    return blocks.run(layer, complete(entering.read(rows, blocks.device)))


@torch.no_grad()
def _fill(store: StateStore, batch: int, states: Callable[[Tensor], State]) -> None:
    """Compute every window's state; in a function, since a generator would leave no_grad on while its caller trains."""
    for rows in torch.arange(store.windows).split(batch):
        state = states(rows)
        if not torch.isfinite(complete(state)).all():
            raise UserError("the dense model's states are NaN or infinite; check its weights, or compute in float32")
        store.write(int(rows[0]), state)
