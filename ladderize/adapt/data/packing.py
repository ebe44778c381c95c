"""Several examples side by side in a row of at most ``seq_len`` tokens, so that little of a batch is padding; and a
batch as a person can read it.

What keeps examples apart: position ids that begin at 0 with every example. transformers makes a block-diagonal mask of
them, but only if the model is called with ``use_cache=False`` and without an attention mask
(transformers.masking_utils.find_packed_sequence_indices).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ladderize.adapt.data.examples import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Targets below 0 do not count: of a position whose next token is not scored, and of padding.
IGNORED_TARGET, PADDING_TARGET = -100, -101
SHOWN_FIRST, SHOWN_LAST = 400, 100  # tokens of an example that --show-data shows, if it has more


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

    @property
    def scored_tokens(self) -> int:
        return int((self.targets != IGNORED_TARGET).sum())


def join(examples: Sequence[Example]) -> PackedRow:
    """These examples in one row, in this order."""
    targets = [np.append(np.where(one.scored[1:], one.ids[1:], IGNORED_TARGET), IGNORED_TARGET) for one in examples]
    return PackedRow(
        ids=np.concatenate([example.ids for example in examples]),
        positions=np.concatenate([np.arange(len(example.ids)) for example in examples]),
        targets=np.concatenate(targets),
        origins=tuple(example.origin for example in examples),
    )


def pack(examples: Sequence[Example], seq_len: int) -> list[PackedRow]:
    """Best-fit decreasing: the longest example first, each into the fullest row that has room for it. Rows in the order
    they were begun.

    Deterministic: of examples or rows alike the earlier comes first. Raises ValueError for an example longer than
    ``seq_len``.
    """
    rows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        length = len(example.ids)
        if length > seq_len:
            raise ValueError(f"an example is longer than {seq_len} tokens")
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


def collate(rows: Sequence[PackedRow]) -> dict[str, torch.Tensor]:
    """input_ids, position_ids and targets, int64 [rows, tokens of the longest] each, padded on the right.

    Padding has the id 0, the target -101, and positions that go on from the row's last example, whose tokens do not see
    what follows: so a row of one example needs no mask. No rows at all become one padded token, so that a rank without
    rows takes part in a step without adding to its loss.
    """
    longest = max((len(row) for row in rows), default=1)
    shape = (max(1, len(rows)), longest)
    ids, targets = np.zeros(shape, dtype=np.int64), np.full(shape, PADDING_TARGET, dtype=np.int64)
    positions = np.tile(np.arange(longest, dtype=np.int64), (shape[0], 1))
    for number, row in enumerate(rows):
        length = len(row)
        ids[number, :length], targets[number, :length] = row.ids, row.targets
        positions[number, :length] = row.positions
        positions[number, length:] = row.positions[-1] + 1 + np.arange(longest - length)
    batch = {"input_ids": ids, "position_ids": positions, "targets": targets}
    return {name: torch.from_numpy(value) for name, value in batch.items()}


# ---- --show-data: whether the chat template, the loss mask and the packing are what was meant ----


def show_batch(rows: Sequence[PackedRow], tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Every row's examples with their origin and text; tokens that the loss counts stand in double brackets.

    Control characters are escaped. Of an example of more than 500 tokens the middle is left out, and said to be.
    tokenizer: None shows ids.
    """

    def marked(ids: np.ndarray, scored: np.ndarray) -> str:
        runs = [(counts, _escaped(text)) for counts, text in _runs(ids, scored, tokenizer)]
        return "".join(f"[[{text}]]" if counts else text for counts, text in runs)

    lines = ["[[...]]: tokens that the loss counts"]
    for number, row in enumerate(rows, start=1):
        count = f"{len(row.origins)} example{'s' if len(row.origins) > 1 else ''}"
        lines += ["", f"row {number}: {len(row)} tokens, {row.scored_tokens} scored, {count}"]
        for origin, _, ids, scored in _examples(row):
            lines.append(f"  {origin}: {len(ids)} tokens, {scored.sum()} scored")
            text = marked(ids, scored)
            if (missing := len(ids) - SHOWN_FIRST - SHOWN_LAST) > 0:
                first, last = slice(None, SHOWN_FIRST), slice(-SHOWN_LAST, None)
                text = f"{marked(ids[first], scored[first])} ... {missing} tokens left out ..."
                text += f" {marked(ids[last], scored[last])}"
            lines.append(f"    {text}")
    return "\n".join(lines)


def batch_document(rows: Sequence[PackedRow], tokenizer: "PreTrainedTokenizerBase | None") -> list[dict[str, Any]]:
    """The same for --json, whole: each example's ids, which of them are scored, and its text in runs of tokens scored
    or not."""
    return [
        {
            "tokens": len(row),
            "scored_tokens": row.scored_tokens,
            "examples": [
                {
                    "where": origin,
                    "position": position,
                    "tokens": len(ids),
                    "scored_tokens": int(scored.sum()),
                    "input_ids": ids.tolist(),
                    "scored": scored.astype(int).tolist(),
                    "text": None
                    if tokenizer is None
                    else [{"scored": counts, "text": text} for counts, text in _runs(ids, scored, tokenizer)],
                }
                for origin, position, ids, scored in _examples(row)
            ],
        }
        for row in rows
    ]


def _examples(row: PackedRow) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """Of each example of a row its origin, where it begins, its ids, and which of them the loss counts as targets."""
    scored = np.append(False, row.targets[:-1] != IGNORED_TARGET)  # a target belongs to the token after it
    for origin, part in zip(row.origins, segments(row), strict=True):
        yield origin, part.start, row.ids[part], scored[part]


def _runs(
    ids: np.ndarray, scored: np.ndarray, tokenizer: "PreTrainedTokenizerBase | None"
) -> Iterator[tuple[bool, str]]:
    """Tokens scored, not scored, scored, ... with the text of each run."""

    def decode(part: np.ndarray) -> str:
        if tokenizer is None:
            return " ".join(map(str, part.tolist()))
        return str(tokenizer.decode(part.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    end, before = 0, ""
    for counts, group in groupby(scored.tolist()):
        begin, end = end, end + len(list(group))
        # decoded with all that comes before it, since some tokenizers drop the space before a text's first word
        whole = decode(ids[:end])
        yield counts, whole[len(before) :] if whole.startswith(before) else decode(ids[begin:end])
        before = whole


def _escaped(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
