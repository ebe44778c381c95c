"""The residual streams of the dense and the converted model side by side, for a rank's windows, between two
sub-modules."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ladderize.adapt.blockwise.hidden_states import StateStore
from ladderize.adapt.blockwise.windows import Windows
from ladderize.blocks import Blocks, State
from ladderize.errors import UserError
from ladderize.ranks.group import Ranks

STREAMS = ("dense", "complete", "visible", "heads")


class Streams:
    """States [windows, tokens, ...] of this rank's windows: those to align on first, then the held-out ones.

    dense: the dense model's stream. complete: the converted model's. visible: what its next attention reads, which
    lacks an MLP output that is still in flight. heads: the inputs of its o_proj, between attention and MLP. Streams are
    float32: what a sub-module adds is small beside them. What exceeds ``max_memory`` bytes lies in files named after
    ``path``.
    """

    def __init__(
        self,
        blocks: Blocks,
        windows: Windows,
        ranks: Ranks,
        *,
        batch_tokens: int,
        max_memory: int,
        path: Path,
    ) -> None:
        self.device = blocks.device
        self.ranks = ranks
        self.ids = torch.cat([part[ranks.rank :: ranks.size] for part in (windows.train, windows.heldout)])
        self.trained = len(windows.train[ranks.rank :: ranks.size])
        self.tokens = windows.train.shape[1]
        self.batch_size = max(1, batch_tokens // self.tokens)
        kinds = dict.fromkeys(STREAMS, (int(blocks.config["hidden_size"]), torch.float32))
        kinds["heads"] = heads_width(blocks), blocks.dtype
        whole = sum(width * dtype.itemsize for width, dtype in kinds.values())
        self.stores: dict[str, StateStore] = {}
        try:
            for name, (width, dtype) in kinds.items():
                self.stores[name] = StateStore(
                    (len(self.ids), self.tokens, width),
                    dtype,
                    False,
                    max_memory=max_memory * width * dtype.itemsize // whole,
                    path=path.with_name(f"{path.name}-{name}"),
                )
        except UserError:
            self.close()
            raise

    def batches(self, *, heldout: bool | None = None) -> Iterator[Tensor]:
        """Row numbers: of all windows, of those that are held out, or of the others. No batch has both kinds."""
        rows = torch.arange(len(self.ids))
        for kind, part in ((False, rows[: self.trained]), (True, rows[self.trained :])):
            if heldout in (None, kind) and len(part):
                yield from part.split(self.batch_size)

    def read(self, name: str, rows: Tensor) -> Tensor:
        """[rows, tokens, width] on the device."""
        state = self.stores[name].read(rows, self.device)
        assert isinstance(state, Tensor)
        return state

    def write(self, name: str, rows: Tensor, state: Tensor) -> None:
        """Raises UserError for what is no number."""
        if not math.isfinite(float(state.sum())):
            model = "dense" if name == "dense" else "converted"
            raise UserError(f"the {model} model's states are NaN or infinite; check its weights, or compute in float32")
        self.stores[name].write(int(rows[0]), state)

    def fill(self, name: str, state: Callable[[Tensor], State]) -> None:
        """Write what ``state`` makes of each batch's rows."""
        for rows in self.batches():
            made = state(rows)
            assert isinstance(made, Tensor)
            self.write(name, rows, made)

    def close(self) -> None:
        """Free memory and disk."""
        for store in self.stores.values():
            store.close()


def heads_width(blocks: Blocks) -> int:
    """What o_proj reads: query heads * head_dim."""
    return int(blocks.checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].shape[1])
