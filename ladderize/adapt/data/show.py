"""``--show-data``: a batch as a person can read it, to see whether the chat template, the loss mask and the packing are
what was meant."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.adapt.data.packing import IGNORED_TARGET, PackedRow, segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST, LAST = 400, 100  # tokens of a segment that are shown, if it has more
MARKS = "[[", "]]"


@dataclass(frozen=True)
class Segment:
    """One example of a row, and where it begins there. ids: int64 [tokens]; scored: bool [tokens], whether the loss
    counts a token as a target."""

    origin: str
    position: int
    ids: np.ndarray
    scored: np.ndarray


def split_row(row: PackedRow) -> list[Segment]:
    """The examples that were packed into a row, as the model will see them."""
    # a target belongs to the token after it
    scored = np.append(False, row.targets[:-1] != IGNORED_TARGET)
    return [
        Segment(origin, part.start, row.ids[part], scored[part])
        for origin, part in zip(row.origins, segments(row), strict=True)
    ]


def show_batch(rows: Sequence[PackedRow], tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """Every row's segments with their origin and text; tokens that the loss counts stand in double brackets.

    Control characters are escaped. Of a segment of more than 500 tokens the middle is left out, and said to be.
    tokenizer: None shows ids.
    """
    left, right = MARKS
    lines = [f"{left}...{right}: tokens that the loss counts"]
    for number, row in enumerate(rows, start=1):
        parts = split_row(row)
        counted = int((row.targets != IGNORED_TARGET).sum())
        lines += [
            "",
            (
                f"row {number}: {len(row)} tokens, {counted} scored, {len(parts)}"
                f" {'example' if len(parts) == 1 else 'examples'}"
            ),
        ]
        for part in parts:
            lines.append(f"  {part.origin}: {len(part.ids)} tokens, {int(part.scored.sum())} scored")
            lines.append(f"    {_marked(part, tokenizer)}")
    return "\n".join(lines)


def batch_document(rows: Sequence[PackedRow], tokenizer: "PreTrainedTokenizerBase | None") -> list[dict[str, Any]]:
    """The same for --json, whole: each segment's ids, which of them are scored, and its text in runs of tokens scored
    or not."""
    return [
        {
            "tokens": len(row),
            "scored_tokens": int((row.targets != IGNORED_TARGET).sum()),
            "examples": [
                {
                    "where": part.origin,
                    "position": part.position,
                    "tokens": len(part.ids),
                    "scored_tokens": int(part.scored.sum()),
                    "input_ids": part.ids.tolist(),
                    "scored": part.scored.astype(int).tolist(),
                    "text": None
                    if tokenizer is None
                    else [{"scored": scored, "text": text} for scored, text in _runs(part.ids, part.scored, tokenizer)],
                }
                for part in split_row(row)
            ],
        }
        for row in rows
    ]


def _marked(part: Segment, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    def marked(ids: np.ndarray, scored: np.ndarray) -> str:
        runs = _runs(ids, scored, tokenizer)
        return "".join(f"{MARKS[0]}{_escaped(text)}{MARKS[1]}" if counts else _escaped(text) for counts, text in runs)

    missing = len(part.ids) - FIRST - LAST
    if missing <= 0:
        return marked(part.ids, part.scored)
    first, last = marked(part.ids[:FIRST], part.scored[:FIRST]), marked(part.ids[-LAST:], part.scored[-LAST:])
    return f"{first} ... {missing} tokens left out ... {last}"


def _runs(ids: np.ndarray, scored: np.ndarray, tokenizer: "PreTrainedTokenizerBase | None") -> list[tuple[bool, str]]:
    """Tokens scored, not scored, scored, ... with the text of each run."""
    runs, begin, before = [], 0, ""
    for counts, group in groupby(scored.tolist()):
        end = begin + len(list(group))
        if tokenizer is None:
            runs.append((counts, (" " if begin else "") + " ".join(map(str, ids[begin:end].tolist()))))
        else:
            # decoded with all that comes before it, since some tokenizers drop the space before a text's first word
            whole = _decode(tokenizer, ids[:end])
            text = whole[len(before) :] if whole.startswith(before) else _decode(tokenizer, ids[begin:end])
            runs.append((counts, text))
            before = whole
        begin = end
    return runs


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _escaped(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
