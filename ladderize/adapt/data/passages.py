"""How long the passages are that a long text or array is cut into, so that its rows can be shuffled over the whole.

A passage is about one row of the training: rows that come one after the other in the text would otherwise come together
in a step. Of a text only the bytes are known before it is tokenised, so a sample of it says how many make a row.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.data import text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_SAMPLES, SAMPLE_BYTES = 16, 8 << 10
LEAST_BYTES = 64


@dataclass(frozen=True)
class Passages:
    """Bytes of a passage of text, and ids of a passage of an array. The defaults are for readers that join passages
    again."""

    text_bytes: int = 16 << 10
    ids: int = 16 << 10


def row_passages(path: Path, tokenizer: "PreTrainedTokenizerBase | None", seq_len: int) -> Passages:
    """Passages of about ``seq_len`` tokens each; without a tokenizer, which a text needs, those of the ids are."""
    if path.suffix != ".txt" or tokenizer is None or not path.stat().st_size:
        return Passages(ids=seq_len)
    texts = text_sample(path)
    tokens = sum(map(len, text_ids(tokenizer, texts)))
    count = sum(len(text.encode()) for text in texts)
    # BOS, which begins every passage, takes a place of the row
    return Passages(max(LEAST_BYTES, round(count / max(1, tokens) * (seq_len - 1))), seq_len)


def text_sample(path: Path) -> list[str]:
    """Parts of a text from all over it; the same every time."""
    size, texts = path.stat().st_size, []
    with path.open("rb") as file:
        for number in range(TEXT_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (TEXT_SAMPLES - 1))
            texts.append(file.read(SAMPLE_BYTES).decode("utf-8", errors="ignore"))
    return texts
