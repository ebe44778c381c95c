"""Windows of token ids for scoring, from text, jsonl or arrays of ids.

Only this module decides on joins and on the last window, and, for training's data (adapt/data) too, on BOS, lines and
ids.

* A ``.txt`` file is one document; each line of a ``.jsonl`` file is one (its ``input_ids`` if it has them, since text
  need not survive being decoded and encoded; else its ``text``); each row of a 2-D array of ids is one; a 1-D array is
  one.
* Text is tokenised document by document with the tokenizer's own special tokens, so a Llama's documents begin with BOS.
  Ids are taken as they are: nothing is added. Rows of empty text are no documents.
* Documents are joined in order to one stream, with nothing between them.
* The stream is cut into windows of ``seq_len`` that do not overlap. The last, partial window is kept if it has at least
  two tokens (one to read, one to score); a single leftover token is dropped.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.console import is_text
from ladderize.errors import UserError
from ladderize.files.id_arrays import open_ids, read_id_rows
from ladderize.files.parsing import parse_json
from ladderize.files.regular import check_regular, open_regular, read_lines, read_text, split_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIXES = (".txt", ".jsonl", ".npy", ".npz")
MAX_TEXT_BYTES = 1 << 30  # of a .txt file, which is one document, read and tokenised as a whole


def check_data_file(spec: str) -> None:
    """Raise UserError unless ``spec`` names a file that ``read_documents`` can read. It is cheap, for use before long
    work."""
    path, key = split_name(spec)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    check_regular(path)
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} is neither text (.txt, .jsonl) nor token ids (.npy, .npz)")
    if path.suffix == ".npz":
        open_ids(path, key)


def needs_tokenizer(spec: str) -> bool:
    """Return whether a tokenizer may be needed. A ``.jsonl`` file may hold ids only, which cannot be known before it is
    read."""
    return split_name(spec)[0].suffix not in (".npy", ".npz")


def read_documents(
    spec: str, tokenizer: "PreTrainedTokenizerBase | None", *, vocab_size: int | None = None
) -> list[np.ndarray]:
    """Return the documents of a file as int64 [tokens] each; raises UserError for a file that cannot be read."""
    path, key = split_name(spec)
    documents = list(_read_text(path, tokenizer)) if needs_tokenizer(spec) else read_id_rows(path, key)
    if not sum(map(len, documents)):
        raise UserError(f"{path} gives no tokens at all; is it empty?")
    highest = max(int(document.max(initial=0)) for document in documents)
    if vocab_size is not None and highest >= vocab_size:
        raise UserError(
            f"{path} holds the token id {highest}, but the model's vocabulary ends at {vocab_size - 1}; was it another"
            " tokenizer's?"
        )
    return documents


def _read_text(path: Path, tokenizer: "PreTrainedTokenizerBase | None") -> Iterator[np.ndarray]:
    """Yield the documents of a text or jsonl file. Raises UserError for a line that cannot be read."""

    def encoded(text: str, origin: str) -> np.ndarray:
        (ids,) = text_ids(need_tokenizer(tokenizer, origin), [text])
        return np.asarray(ids, dtype=np.int64)

    if path.suffix == ".txt":
        yield encoded(read_text(path, MAX_TEXT_BYTES), str(path))
        return
    for origin, row in json_lines(path):
        if isinstance(row, dict) and row.get("input_ids") is not None:
            yield as_ids(row["input_ids"], origin)
        elif isinstance(row, dict) and isinstance(row.get("text"), str):
            if row["text"].strip():
                yield encoded(row["text"], origin)
        else:
            raise UserError(f'{origin}: not a JSON object with "input_ids" or a "text"')


# ---- what scoring and training read alike ----


def need_tokenizer(tokenizer: "PreTrainedTokenizerBase | None", origin: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer, which the text at ``origin`` needs; raises UserError where the model has none."""
    if tokenizer is None:
        raise UserError(
            f"{origin} is text, but the model has no tokenizer; give token ids (input_ids, .npy or .npz) instead"
        )
    return tokenizer


def text_ids(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of texts, with the tokenizer's own special tokens (for Llama: BOS before each).

    A batch is several times as fast as single texts.
    """
    encoded = tokenizer(list(texts), verbose=False, return_attention_mask=False, return_token_type_ids=False)
    return encoded["input_ids"]


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each line of a ``.jsonl`` file that is not empty; raises UserError for a bad
    one."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        origin = f"{path}, line {number}"
        try:
            value = parse_json(line, constants=True)
        except ValueError as error:
            raise UserError(f"{origin}: is not JSON ({error})") from None
        if b"\\u" in line and not is_text(json.dumps(value, ensure_ascii=False)):
            raise UserError(f"{origin}: holds half of a surrogate pair, which is not a character")
        yield origin, value


def as_ids(value: Any, origin: str) -> np.ndarray:
    """Return a list of token ids as int64; raises UserError unless all are integers from 0 to 2**31 - 1."""
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.empty(0, dtype=object)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        if isinstance(value, list) and not value:
            return np.empty(0, dtype=np.int64)
        raise UserError(f"{origin}: its input_ids are not a list of integers")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
        raise UserError(f"{origin}: its input_ids hold a negative or an impossibly large token id")
    return array.astype(np.int64)


def default_seq_len(documents: list[np.ndarray], spec: str, max_positions: int) -> int:
    """Return the default length of windows.

    Rows of a 2-D array of ids are already windows, unless they have one id each. Otherwise it is 2048, or the model's
    positions if these are fewer.
    """
    rows = {len(document) for document in documents}
    if not needs_tokenizer(spec) and len(documents) > 1 and len(rows) == 1 and rows != {1}:
        return min(rows.pop(), max_positions)
    return min(2048, max_positions)


def windows(documents: list[np.ndarray], seq_len: int) -> list[np.ndarray]:
    """Return the joined documents in consecutive windows of ``seq_len`` ids. The last may be shorter, with at least 2
    ids.

    Raises UserError where there is none.
    """
    stream = np.concatenate(documents)
    cut = [stream[start : start + seq_len] for start in range(0, len(stream), seq_len)]
    if len(cut[-1]) < 2:
        cut.pop()
    if not cut:
        raise UserError(
            "the data gives no window of two tokens or more (the first of a window cannot be scored); give more text,"
            " or a longer --seq-len"
        )
    return cut


def draw_windows(
    documents: list[np.ndarray], *, spec: str, positions: int, seq_len: int | None, seed: int
) -> np.ndarray:
    """Return all full windows of the joined documents, in an order drawn with ``seed``: int64 [windows, seq_len].

    spec: the data as the user named them.
    positions: the most that the model reads.
    seq_len: None: ``default_seq_len``.
    Raises UserError where there is none.
    """
    seq_len = seq_len or default_seq_len(documents, spec, positions)
    if seq_len > positions:
        raise UserError(f"--seq-len {seq_len} is over the model's {positions} positions")
    stream = np.concatenate(documents)
    count = len(stream) // seq_len
    if not count:
        raise UserError(f"{spec} gives no window of {seq_len} tokens; give more data, or lower --seq-len")
    drawn = np.random.default_rng(seed).permutation(count)
    return stream[: count * seq_len].reshape(count, seq_len)[drawn]


def file_sha256(spec: str) -> str:
    """Return a hash of the file of ``spec`` and of the array chosen in it, to tell if two runs read the same data."""
    path, key = split_name(spec)
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    digest.update((key or "").encode())
    return digest.hexdigest()
