"""The positions of a forward pass's tokens, and the parts that a schedule cuts a pass into."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ladderize.families.base import Decoder
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.schedule import Schedule


@dataclass(frozen=True)
class Step:
    """The positions of one forward pass's tokens.

    rope_factors: complex [batch or 1, tokens, 1, head_dim / 2], of several rotations side by side.
    columns: the first cache column of the tokens, or a tensor of their columns, [tokens].
    length: the columns of the cache that attention sees; 0: a prompt, which sees itself alone.
    mask: bool [batch or 1, 1, tokens, columns in view], True where a token may look; None: everything, or with
    ``causal`` everything up to itself.
    near: the masks of layers with sliding windows, by window; see ``with_windows``.
    """

    rope_factors: Tensor
    columns: int | Tensor
    length: int
    mask: Tensor | None = None
    causal: bool = False
    near: Mapping[int, Tensor] = field(default_factory=dict)

    def rotation(self, decoder: Decoder, layer: int) -> Tensor | None:
        """Return the factors of a layer's rotation; None: its queries and keys do not rotate."""
        name, names = decoder.rope[layer], decoder.rotations
        return None if name is None else self.rope_factors.chunk(len(names), -1)[names.index(name)]

    def with_windows(self, windows: Iterable[int], tokens: int) -> "Step":
        """Return this step with a mask for each of ``windows`` that hides something: a token sees itself and window - 1
        before it. This pass has ``tokens`` in each row."""
        view, device = self.length or tokens, self.rope_factors.device
        limiting = [window for window in windows if window < view]
        if not limiting:
            return self
        columns = self.columns
        if isinstance(columns, int):
            columns = torch.arange(columns, columns + tokens, device=device)
        distance = (columns[:, None] - torch.arange(view, device=device))[None, None]
        seen = self.mask
        if seen is None and self.causal:
            seen = distance >= 0
        near = {window: distance < window for window in limiting}
        return replace(self, near=near if seen is None else {window: mask & seen for window, mask in near.items()})

    def with_masks(self, change: Callable[[Tensor], Tensor], **changes: Any) -> "Step":
        """Return this step with each of its masks changed by ``change``, and other fields by ``changes``."""
        near = {window: change(mask) for window, mask in self.near.items()}
        return replace(self, mask=None if self.mask is None else change(self.mask), near=near, **changes)

    def seen(self, window: int | None) -> tuple[Tensor | None, bool]:
        """Return ``mask`` and ``causal`` of a layer with this window; None: without one."""
        near = None if window is None else self.near.get(window)
        return (self.mask, self.causal) if near is None else (near, False)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as numbers, in the dtype of keys, that are added to scores. PyTorch's attention would make
    them anew in every layer, and keep each for a backward pass."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _with_additive_masks(step: Step, dtype: torch.dtype) -> Step:
    """Return ``step`` with additive masks, but for inference on a CPU, where our own attention of one token reads
    bool masks."""
    if step.rope_factors.device.type == "cpu" and not torch.is_grad_enabled():
        return step
    return step.with_masks(lambda mask: additive(mask, dtype))


def split_parts(ids: Tensor, step: Step, cache: KVCache, schedule: Schedule) -> list[tuple[Tensor, Step, KVCache]]:
    """Cut a pass over ids [batch, tokens] as ``schedule`` says: as evenly as it goes, larger parts first. One row is
    cut along its tokens: a later part sees the keys and values of the earlier ones."""
    rows, tokens = ids.shape
    count = schedule.parts(rows, tokens)
    if count == 1:
        chunks = [(ids, step, cache)]
    elif rows > 1:
        chunks = [(ids[a:b], _rows(step, a, b, rows), cache.batch_rows(a, b)) for a, b in _bounds(rows, count)]
    else:
        cache = cache.for_parts()
        chunks = [(ids[:, a:b], _tokens(step, a, b, tokens), cache) for a, b in _bounds(tokens, count)]
    return [(ids, _with_additive_masks(step, cache.keys.dtype), cache) for ids, step, cache in chunks]


def join_parts(results: list[Tensor], rows: int) -> Tensor:
    """Join the results of the parts' walks, [rows, tokens, hidden] each, to those of all ``rows`` of the batch."""
    if len(results) == 1:
        return results[0]
    return torch.cat(results, 0 if rows > 1 else 1)


def _bounds(size: int, count: int) -> list[tuple[int, int]]:
    small, larger = divmod(size, count)
    ends = [number * small + min(number, larger) for number in range(count + 1)]
    return list(pairwise(ends))


def _rows(step: Step, begin: int, end: int, rows: int) -> Step:
    def cut(tensor: Tensor) -> Tensor:
        return tensor[begin:end] if tensor.shape[0] == rows else tensor

    return step.with_masks(cut, rope_factors=cut(step.rope_factors))


def _tokens(step: Step, begin: int, end: int, tokens: int) -> Step:
    before = max(0, step.length - tokens)  # columns of the cache that are older than this pass
    length = before + end
    columns = step.columns + begin if isinstance(step.columns, int) else step.columns[begin:end]
    factors = step.rope_factors[:, begin:end]
    later = step.with_masks(
        lambda mask: mask[:, :, begin:end, :length], rope_factors=factors, columns=columns, length=length
    )
    if step.mask is not None or not step.causal or before + begin == 0:
        return later
    seen = torch.arange(length, device=step.rope_factors.device)
    return replace(later, mask=(seen <= seen[before + begin :, None])[None, None], causal=False)
