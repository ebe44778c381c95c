"""Packed rows, which hold several examples side by side in at most ``seq_len`` tokens, and batches of them.

A packed row has three columns. ``input_ids``. ``targets``: at each position the NEXT token of the same example where
the loss counts it, else -100, so no shift is needed later. ``lengths``: the tokens of each example. Examples are kept
apart by position ids that begin at 0 with every example. transformers makes a block-diagonal mask of them, but only if
the model is called with ``use_cache=False`` and without an attention mask
(transformers.masking_utils.find_packed_sequence_indices).
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ladderize.runtime.training.batch import ANSWERS, LIKELIEST

# Targets below 0 are not scored: the next token is not scored, or the position is padding.
IGNORED_TARGET, PADDING_TARGET = -100, -101


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Return the numbers of the examples in each row, by best-fit decreasing.

    The longest example comes first, and each goes into the fullest row that has room for it. Rows stay in the order
    they were begun; among equal examples or rows the earlier comes first.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        fullest = bisect_left(room, (lengths[number], 0))
        if fullest == len(room):
            rows.append([])
            room.append((seq_len, len(rows) - 1))
        left, row = room.pop(fullest)
        rows[row].append(number)
        if left - lengths[number] >= 2:  # no example is shorter
            insort(room, (left - lengths[number], row))
    return rows


def pack(ids: Sequence[Any], scored: Sequence[Any], seq_len: int) -> dict[str, list[list[int]]]:
    """Return packed rows, by column.

    ids, scored: of each example, which has at most ``seq_len`` tokens.
    seq_len: the most tokens of a row.
    """
    ids = [np.asarray(values, dtype=np.int64) for values in ids]
    scored = [np.asarray(values, dtype=bool) for values in scored]
    lengths = [len(values) for values in ids]
    packed: dict[str, list[list[int]]] = {"input_ids": [], "targets": [], "lengths": []}
    for numbers in best_fit(lengths, seq_len):
        row_lengths = [lengths[number] for number in numbers]
        joined = np.concatenate([ids[number] for number in numbers])
        counts = np.concatenate([scored[number] for number in numbers])
        counts[[0, *accumulate(row_lengths[:-1])]] = False  # nothing precedes an example's first token
        targets = np.append(np.where(counts[1:], joined[1:], IGNORED_TARGET), IGNORED_TARGET)
        packed["input_ids"].append(joined.tolist())
        packed["targets"].append(targets.tolist())
        packed["lengths"].append(row_lengths)
    return packed


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return input_ids, position_ids and targets, int64 [rows, tokens of the longest] each, padded on the right.

    Padding has the id 0, the target -101, and positions that continue the row's last example. Its tokens do not see the
    padding, so a row of one example needs no mask. No rows become one padded token: a rank without rows adds nothing.

    A teacher's answers, where rows have them, come side by side.
    """
    longest = max((len(row["input_ids"]) for row in rows), default=1)
    shape = (max(1, len(rows)), longest)
    ids, targets = np.zeros(shape, dtype=np.int64), np.full(shape, PADDING_TARGET, dtype=np.int64)
    positions = np.tile(np.arange(longest, dtype=np.int64), (shape[0], 1))
    for number, row in enumerate(rows):
        length, starts = len(row["input_ids"]), [0, *accumulate(row["lengths"][:-1])]
        ids[number, :length], targets[number, :length] = row["input_ids"], row["targets"]
        positions[number] -= np.repeat(starts, np.diff([*starts, longest]))
    arrays = {"input_ids": ids, "position_ids": positions, "targets": targets}
    batch = {name: torch.from_numpy(values) for name, values in arrays.items()}
    for name in (LIKELIEST, ANSWERS):
        if rows and name in rows[0]:
            batch[name] = torch.cat([row[name] for row in rows])
    return batch
