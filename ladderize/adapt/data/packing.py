"""Several examples side by side in a row of at most ``seq_len`` tokens, so that little of a batch is padding.

What keeps them apart: position ids that begin at 0 with every example. transformers makes a block-diagonal mask of
them, but only if the model is called with ``use_cache=False`` and without an attention mask
(transformers.masking_utils.find_packed_sequence_indices).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ladderize.adapt.data.examples import Example

# Targets below 0 do not count: of a position whose next token is not scored, and of padding.
IGNORED_TARGET, PADDING_TARGET = -100, -101


@dataclass(frozen=True)
class PackedRow:
    """int64 [tokens] each. positions: begin at 0 with each example. targets: the NEXT token of the same example where
    the loss counts it, else -100; no shift is needed later, and no example is predicted from the one before it.
    origins: each example's.
    """

    ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    origins: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


def targets_of(example: Example) -> np.ndarray:
    """int64 [tokens]: what each position has to predict, -100 where that does not count."""
    following = np.where(example.scored[1:], example.ids[1:], IGNORED_TARGET)
    return np.append(following, IGNORED_TARGET)


def join(examples: Sequence[Example]) -> PackedRow:
    """These examples in one row, in this order."""
    return PackedRow(
        ids=np.concatenate([example.ids for example in examples]),
        positions=np.concatenate([np.arange(len(example.ids)) for example in examples]),
        targets=np.concatenate([targets_of(example) for example in examples]),
        origins=tuple(example.origin for example in examples),
    )


def unpacked(examples: Sequence[Example]) -> list[PackedRow]:
    """One example a row."""
    return [join([example]) for example in examples]


def pack(examples: Sequence[Example], seq_len: int) -> list[PackedRow]:
    """Best-fit decreasing: the longest example first, each into the fullest row that has room for it. Rows in the order
    they were begun.

    Deterministic: of examples or rows alike the earlier comes first. Raises ValueError for an example longer than
    ``seq_len``.
    """
    if any(len(example.ids) > seq_len for example in examples):
        raise ValueError(f"an example is longer than {seq_len} tokens")
    rows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        length = len(example.ids)
        place = bisect_left(room, (length, 0))
        if place == len(room):
            left, row = seq_len, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(example)
        if left - length >= 2:  # no example is shorter
            insort(room, (left - length, row))
    return [join(row) for row in rows]


def segments(row: PackedRow) -> list[slice]:
    """Where each example lies in a row."""
    starts = np.flatnonzero(row.positions == 0).tolist()
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(row)], strict=True)]


def collate(rows: Sequence[PackedRow], pad_id: int = 0) -> dict[str, torch.Tensor]:
    """input_ids, position_ids and targets, int64 [rows, tokens of the longest] each, padded on the right.

    Padding has the target -101, and positions that begin at 0 again: to the model it is one more example. No rows at
    all become one padded token, so that a rank without rows takes part in a step without adding to its loss.
    """
    longest = max((len(row) for row in rows), default=1)
    shape = (max(1, len(rows)), longest)
    ids, targets = np.full(shape, pad_id, dtype=np.int64), np.full(shape, PADDING_TARGET, dtype=np.int64)
    positions = np.tile(np.arange(longest, dtype=np.int64), (shape[0], 1))
    for number, row in enumerate(rows):
        length = len(row)
        ids[number, :length], targets[number, :length] = row.ids, row.targets
        positions[number, :length] = row.positions
        positions[number, length:] = np.arange(longest - length)
    return {
        name: torch.from_numpy(value)
        for name, value in (("input_ids", ids), ("position_ids", positions), ("targets", targets))
    }
