"""The data of a retraining: packed rows of all sources, and held-out ones.

``Dataset.map`` turns each source into examples, then into rows; the next run of the same command finds both in its
cache. Each source is packed separately, and the rows are joined: a source that is named twice counts twice.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ladderize.adapt.data.examples import COLUMNS, Encoder
from ladderize.adapt.data.packing import pack
from ladderize.adapt.data.sources import open_rows
from ladderize.errors import UserError
from ladderize.rows import quiet_datasets

ORDER = 5  # the version of how rows are cut and packed; rows that another version left in the cache are not used
ROWS_AT_ONCE, EXAMPLES_AT_ONCE = 128, 1000  # tokenised; packed


@quiet_datasets()
def open_data(
    names: Sequence[str],
    tokenizer: Any,
    *,
    seq_len: int,
    vocab_size: int,
    seed: int,
    heldout: int | None = None,
    eval_names: Sequence[str] = (),
) -> tuple[Any, list[dict[str, Any]], dict[str, int]]:
    """Return packed rows to train on, a ``datasets.Dataset`` that is not shuffled yet; those held out; and counts.

    The counts are of what is trained on, by name. ``dropped_examples`` have nothing left to score.

    tokenizer: of transformers; None if all rows are ids.
    seq_len: the most tokens of a row.
    heldout: examples of each source to hold out; None: a hundredth, at least 8 or a tenth of fewer, at most 256.
    eval_names: data that are held out instead of a part of ``names``.
    Raises UserError for a source or a row that cannot be used, and where nothing is left to train on.
    """
    from datasets import concatenate_datasets

    train, apart, dropped = [], [], 0
    for name in names:
        examples, without = _examples(name, tokenizer, seq_len, vocab_size)
        drawn = _drawn(examples, name, seed, 0 if eval_names else heldout)
        train.append(examples.select(np.flatnonzero(~drawn)))
        apart.append(examples.select(np.flatnonzero(drawn)))
        dropped += without
    if eval_names:
        apart = [_examples(name, tokenizer, seq_len, vocab_size, "--eval-data")[0] for name in eval_names]
    rows = concatenate_datasets([_packed(examples, seq_len) for examples in train])
    counts = {
        "examples": sum(map(len, train)),
        "rows": len(rows),
        "tokens": sum(sum(examples["length"][:]) for examples in train),
        "truncated_examples": sum(sum(examples["truncated"][:]) for examples in train),
        "dropped_examples": dropped,
    }
    ids, scored = ([value for examples in apart for value in examples[name]] for name in COLUMNS[:2])
    packed = pack(ids, scored, seq_len)
    return rows, [dict(zip(packed, values, strict=True)) for values in zip(*packed.values(), strict=True)], counts


def _examples(name: str, tokenizer: Any, seq_len: int, vocab_size: int, option: str = "--data") -> tuple[Any, int]:
    """Return the examples of a source that have something to score, and the number of those that have not."""
    rows = open_rows(name, option)
    encoder = Encoder(tokenizer, seq_len, vocab_size, f"{option} {name}")
    decides: list[Any] = [seq_len, vocab_size]
    if tokenizer is not None:  # datasets' hash of a tokenizer differs between processes
        ids = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
        decides += [type(tokenizer), ids, tokenizer.special_tokens_map, tokenizer.chat_template]
    try:
        every = rows.map(
            encoder,
            batched=True,
            batch_size=ROWS_AT_ONCE,
            with_indices=True,
            remove_columns=rows.column_names,
            new_fingerprint=_key(rows, *decides),
        ).with_format(None)
    except UnicodeDecodeError:  # datasets raises it while it reads a row
        raise UserError(f"{option} {name} holds text that is not UTF-8") from None
    usable = np.flatnonzero(every["length"][:])
    if not len(usable):
        why = f"of {len(every)} nothing that counts is within --seq-len {seq_len}"
        raise UserError(f"{option} {name} gives no example that can be scored: {why}")
    return every.select(usable), len(every) - len(usable)


def _drawn(examples: Any, name: str, seed: int, heldout: int | None) -> np.ndarray:
    """Return which examples are held out, bool [examples]: drawn ones, and all others of their conversations."""
    total = len(examples)
    count = min(256, max(total // 100, min(8, total // 10), 1)) if heldout is None else heldout
    drawn = np.zeros(total, dtype=bool)
    drawn[np.random.default_rng(seed).permutation(total)[:count]] = True
    conversation = np.asarray(examples["conversation"][:])
    drawn |= (conversation >= 0) & np.isin(conversation, conversation[drawn])
    if drawn.all():
        raise UserError(f"--data {name}: {count} of {total} examples held out leave none; lower --heldout")
    return drawn


def _packed(examples: Any, seq_len: int) -> Any:
    from datasets import Features, Sequence, Value

    return examples.map(
        partial(pack, seq_len=seq_len),
        batched=True,
        batch_size=EXAMPLES_AT_ONCE,
        input_columns=list(COLUMNS[:2]),
        remove_columns=list(COLUMNS),
        features=Features({name: Sequence(Value("int32")) for name in ("input_ids", "targets", "lengths")}),
        new_fingerprint=_key(examples, seq_len),
    )


def _key(rows: Any, *decides: Any) -> str:
    return hashlib.sha256(repr([ORDER, rows._fingerprint, *decides]).encode()).hexdigest()[:32]
