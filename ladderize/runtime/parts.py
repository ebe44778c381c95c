"""The tokens of a forward pass, and how a schedule cuts them into parts: by rows, or one row along its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.schedule import Schedule


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass stand.

    rope_factors: complex [batch or 1, tokens, 1, head_dim / 2]. columns: the first cache column of the tokens, or a
    tensor of their columns: [tokens], or [batch, tokens] where rows differ. length: the columns of the cache that
    attention sees; 0: a prompt, which sees itself alone. mask: bool [batch or 1, 1, tokens, columns in view], True
    where a token may look; None: everything, or with ``causal`` everything up to itself.
    """

    rope_factors: Tensor
    columns: int | Tensor
    length: int
    mask: Tensor | None = None
    causal: bool = False


@dataclass(frozen=True)
class Part:
    """Some rows, or some tokens of one row, of a forward pass."""

    ids: Tensor
    step: Step
    cache: KVCache


def split_parts(ids: Tensor, step: Step, cache: KVCache, schedule: Schedule) -> list[Part]:
    """Cut a pass over ids [batch, tokens] as ``schedule`` says: as evenly as it goes, larger parts first.

    One row is cut along its tokens: a later part sees the keys and values of the earlier ones.
    """
    rows, tokens = ids.shape
    count = schedule.parts(rows, tokens)
    if count == 1:
        return [Part(ids, step, cache)]
    if rows > 1:
        return [Part(ids[a:b], _rows(step, a, b, rows), cache.batch_rows(a, b)) for a, b in _bounds(rows, count)]
    cache = cache.for_parts()
    return [Part(ids[:, a:b], _tokens(step, a, b, tokens), cache) for a, b in _bounds(tokens, count)]


def join_parts(results: Sequence[Tensor], rows: int) -> Tensor:
    """What the parts' walks returned, [rows, tokens, hidden] each, as one. rows: of the whole batch."""
    return results[0] if len(results) == 1 else torch.cat(list(results), 0 if rows > 1 else 1)


def _bounds(size: int, count: int) -> list[tuple[int, int]]:
    small, larger = divmod(size, count)
    ends = [number * small + min(number, larger) for number in range(count + 1)]
    return list(pairwise(ends))


def _rows(step: Step, begin: int, end: int, rows: int) -> Step:
    def own(tensor: Tensor) -> Tensor:
        return tensor[begin:end] if tensor.shape[0] == rows else tensor

    columns = step.columns
    if not isinstance(columns, int) and columns.ndim == 2:
        columns = columns[begin:end]
    mask = None if step.mask is None else own(step.mask)
    return replace(step, rope_factors=own(step.rope_factors), columns=columns, mask=mask)


def _tokens(step: Step, begin: int, end: int, tokens: int) -> Step:
    before = max(0, step.length - tokens)  # columns of the cache that are older than this pass
    length = before + end
    columns = step.columns + begin if isinstance(step.columns, int) else step.columns[..., begin:end]
    mask, causal = step.mask, step.causal
    if mask is not None:
        mask = mask[:, :, begin:end, :length]
    elif causal and before + begin:
        seen = torch.arange(length, device=step.rope_factors.device)
        mask, causal = (seen <= seen[before + begin :, None])[None, None], False
    factors = step.rope_factors[:, begin:end]
    return Step(factors, columns, length, mask, causal)
