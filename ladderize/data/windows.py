"""Windows of token ids for scoring, from text, jsonl, parquet or arrays of ids.

Each row of a file is a document: its ``input_ids`` if it has them, since text need not survive being decoded and
encoded; else its ``text``, with the tokenizer's own special tokens. Documents are joined in order to one stream, with
nothing between them, which is cut into windows that do not overlap.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ladderize.data.files import HUB, ID_SUFFIXES, data_files, split_weight
from ladderize.data.rows import Formats, check_row, file_rows, open_ids, read_ids
from ladderize.errors import UserError
from ladderize.files.regular import split_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENT = Formats({"input_ids": ("input_ids",), "text": ("text",)})
USUAL_TOKENS = 2048  # of a window


def needs_tokenizer(name: str) -> bool:
    """Return whether a tokenizer may be needed: a ``.jsonl`` may hold ids only, which is not known before."""
    return split_name(name)[0].suffix not in ID_SUFFIXES


def read_documents(
    name: str, tokenizer: "PreTrainedTokenizerBase | None", *, vocab_size: int | None = None
) -> list[np.ndarray]:
    """Return the documents of a file as int64 [tokens] each."""
    documents = []
    for row in file_rows(name):
        if check_row(row, DOCUMENT) == "input_ids":
            documents.append(read_ids(row)[0])
        elif row.values["text"].strip():
            (ids,) = text_ids(need_tokenizer(tokenizer, row.origin), [row.values["text"]])
            documents.append(np.asarray(ids, dtype=np.int64))
    path = split_name(name)[0]
    if not sum(map(len, documents)):
        raise UserError(f"{path} gives no tokens at all; is it empty?")
    if vocab_size is not None:
        check_vocabulary(documents, vocab_size, str(path))
    return documents


def check_vocabulary(documents: Sequence[np.ndarray], vocab_size: int, origin: str) -> None:
    """Raise UserError for ids that the model does not have."""
    highest = max((int(ids.max(initial=0)) for ids in documents), default=0)
    if highest >= vocab_size:
        raise UserError(
            f"{origin} holds the token id {highest}, but the model's vocabulary ends at {vocab_size - 1}; was it"
            " another tokenizer's?"
        )


def need_tokenizer(tokenizer: "PreTrainedTokenizerBase | None", origin: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer, which the text at ``origin`` needs; raises UserError where the model has none."""
    if tokenizer is None:
        raise UserError(
            f"{origin} is text, but the model has no tokenizer; give token ids (input_ids, .npy or .npz) instead"
        )
    return tokenizer


def text_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts, with the tokenizer's own special tokens. A batch is several times as fast."""
    encoded = tokenizer(list(texts), verbose=False, return_attention_mask=False, return_token_type_ids=False)
    return encoded["input_ids"]


def row_of_ids(texts: Sequence[str]) -> int | None:
    """Return the number of ids in each row where all sources are arrays with rows of one length; else None."""
    names = [split_weight(text)[0] for text in texts]
    if any(name.startswith(HUB) for name in names):
        return None
    files = [split_name(file) for name in names for file in data_files(name)]
    shapes = {open_ids(path, key).shape[1:] if path.suffix in ID_SUFFIXES else () for path, key in files}
    lengths = shapes.pop() if len(shapes) == 1 else ()
    return lengths[0] if lengths and lengths[0] > 1 else None


def default_seq_len(names: Sequence[str], positions: int) -> int:
    """Return the default length of windows: of rows of ids, which are windows already, else 2048 tokens; no more than
    the model's positions."""
    return min(row_of_ids(names) or USUAL_TOKENS, positions)


def cut_windows(documents: list[np.ndarray], seq_len: int) -> list[np.ndarray]:
    """Return the joined documents in consecutive windows, the last with at least 2 ids: one to read, one to score."""
    stream = np.concatenate(documents)
    cut = [stream[start : start + seq_len] for start in range(0, len(stream) - 1, seq_len)]
    if not cut:
        raise UserError(
            "the data gives no window of two tokens or more (the first of a window cannot be scored); give more text,"
            " or a longer --seq-len"
        )
    return cut


def draw_windows(
    documents: list[np.ndarray], *, spec: str, positions: int, seq_len: int | None, seed: int
) -> np.ndarray:
    """Return all full windows of the joined documents of the data ``spec``, in an order drawn with ``seed``: int64
    [windows, seq_len]."""
    seq_len = seq_len or default_seq_len([spec], positions)
    if seq_len > positions:
        raise UserError(f"--seq-len {seq_len} is over the model's {positions} positions")
    stream = np.concatenate(documents)
    count = len(stream) // seq_len
    if not count:
        raise UserError(f"{spec} gives no window of {seq_len} tokens; give more data, or lower --seq-len")
    order = np.random.default_rng(seed).permutation(count)
    return stream[: count * seq_len].reshape(count, seq_len)[order]
