"""The data of a retraining: packed rows of all sources, and held-out ones.

``Dataset.map`` turns each source into examples, then into rows; the next run of the same command finds both in its
cache. Each source is packed separately. The rows are then joined (a source that is named twice counts twice), or mixed
by weights.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ladderize.adapt.data.examples import COLUMNS, Encoder
from ladderize.adapt.data.packing import pack
from ladderize.adapt.data.sources import column_names, open_rows, quiet_datasets
from ladderize.console import SILENT, Console
from ladderize.data.files import HUB, split_weight
from ladderize.data.rows import FIRST_ROWS, tell_left_out
from ladderize.errors import UserError

ORDER = 7  # the version of how rows are cut and packed; rows that another version left in the cache are not used
ROWS_AT_ONCE, EXAMPLES_AT_ONCE, SHUFFLED_AT_ONCE = 128, 1000, 1000  # tokenised; packed; packed rows of a stream
FIRST_HELD_OUT = 64  # examples of a stream


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
    console: Console = SILENT,
) -> tuple[Any, list[dict[str, Any]], dict[str, int]]:
    """Return packed rows to train on, those held out, and counts.

    The rows are a ``datasets.Dataset`` that is not shuffled yet; where a source is streamed, an endless, shuffled
    ``IterableDataset``. The counts are of what is trained on, by name, each source once; empty where a source is
    streamed. ``dropped_examples`` have nothing left to score. A warning tells of rows that are left out.

    names: as --data has them, with or without weights, which are shares of the packed rows.
    tokenizer: of transformers; None if all rows are ids.
    seq_len: the most tokens of a row.
    heldout: examples of each source to hold out; None: a hundredth, at least 8 or a tenth of fewer, at most 256; of a
    stream the first 64.
    eval_names: data that are held out instead of a part of ``names``.
    Raises UserError for a source or a row that cannot be used, and where nothing is left to train on.
    """
    from datasets import concatenate_datasets, interleave_datasets

    sources = [split_weight(name) for name in names]
    counts: dict[str, int] = {}
    train: list[Any] = []
    apart: list[dict[str, Any]] = []
    dropped = 0
    for name, _ in sources:
        examples, without = _examples(name, tokenizer, seq_len, vocab_size, console)
        set_apart = _first_apart if name.startswith(HUB) else _some_apart
        rest, held = set_apart(examples, name, seed, 0 if eval_names else heldout)
        train.append(rest)
        apart += held
        dropped += without
    for name in eval_names:  # then nothing else is held out
        apart += _examples(name, tokenizer, seq_len, vocab_size, console, "--eval-data")[0]
    packs = [_packed(examples, seq_len) for examples in train]
    if any(name.startswith(HUB) for name, _ in sources):
        streams = [rows.to_iterable_dataset() if hasattr(rows, "__len__") else rows for rows in packs]
        packs = [stream.shuffle(seed=seed, buffer_size=SHUFFLED_AT_ONCE).repeat(None) for stream in streams]
    else:
        counts = {
            "examples": sum(map(len, train)),
            "rows": sum(map(len, packs)),
            "tokens": sum(sum(examples["length"][:]) for examples in train),
            "truncated_examples": sum(sum(examples["truncated"][:]) for examples in train),
            "dropped_examples": dropped,
        }
    weights = [weight for _, weight in sources if weight is not None]
    if weights:
        shares = [weight / sum(weights) for weight in weights]
        rows = interleave_datasets(packs, shares, seed, stopping_strategy="all_exhausted")
    else:
        rows = concatenate_datasets(packs)
    packed = pack([example["input_ids"] for example in apart], [example["scored"] for example in apart], seq_len)
    return rows, [dict(zip(packed, values, strict=True)) for values in zip(*packed.values(), strict=True)], counts


def _examples(
    name: str, tokenizer: Any, seq_len: int, vocab_size: int, console: Console, option: str = "--data"
) -> tuple[Any, int]:
    """Return the examples of a source that have something to score, and the number of others (0 of a stream)."""
    rows, source = open_rows(name, option), f"{option} {name}"
    encoder = Encoder(tokenizer, seq_len, vocab_size, source)
    options = {"batched": True, "batch_size": ROWS_AT_ONCE, "with_indices": True, "remove_columns": column_names(rows)}
    if name.startswith(HUB):
        first = [*rows.take(FIRST_ROWS).map(encoder, **options)]
        problems = {example["row"]: example["problem"] for example in first}
        tell_left_out(f"{source}, its beginning", [*problems.values()], console)
        return rows.map(encoder, **options).filter(lambda example: example["length"] > 0), 0
    decides: list[Any] = [seq_len, vocab_size]
    if tokenizer is not None:  # datasets' hash of a tokenizer differs between processes
        ids = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
        decides += [type(tokenizer), ids, tokenizer.special_tokens_map, tokenizer.chat_template]
    try:
        every = rows.map(encoder, **options, new_fingerprint=_key(rows, *decides)).with_format(None)
    except UnicodeDecodeError:  # datasets raises it while it reads a row
        raise UserError(f"{source} holds text that is not UTF-8") from None
    problems = dict(zip(every["row"][:], every["problem"][:], strict=True))
    unusable = tell_left_out(source, [*problems.values()], console)
    usable = np.flatnonzero(every["length"][:])
    if not len(usable):
        why = f"of {len(every)} nothing that counts is within --seq-len {seq_len}"
        raise UserError(f"{source} gives no example that can be scored: {why}")
    return every.select(usable), len(every) - len(usable) - unusable


def _some_apart(examples: Any, name: str, seed: int, heldout: int | None) -> tuple[Any, Any]:
    """Return the examples of files to train on, and those held out: of the first drawn rows, and all that share turns
    with them."""
    total = len(examples)
    count = max(1, usual_heldout(total)) if heldout is None else heldout
    drawn, rows = np.zeros(total, dtype=bool), np.asarray(examples["row"][:])
    within = np.random.default_rng(seed).random(total)  # a long text may have more pieces than are held out
    drawn[np.lexsort((within, drawn_numbers(int(rows.max()) + 1, seed)[rows]))[:count]] = True
    drawn |= np.asarray(examples["shares_turns"][:]) & np.isin(rows, rows[drawn])
    if drawn.all():
        raise UserError(f"--data {name}: {count} of {total} examples held out leave none; lower --heldout")
    return examples.select(np.flatnonzero(~drawn)), examples.select(np.flatnonzero(drawn))


def usual_heldout(total: int) -> int:
    """Return how many of ``total`` rows or examples are held out where nothing else is said."""
    return min(256, max(total // 100, min(8, total // 10)))


def drawn_numbers(rows: int, seed: int) -> np.ndarray:
    """Return a random number for each row: those with the lowest are held out first, and aligned on last. Alignment,
    which reads whole rows, and a retraining, which drops those with nothing to score, draw alike."""
    return np.random.default_rng(seed).random(rows)


def _first_apart(examples: Any, name: str, seed: int, heldout: int | None) -> tuple[Any, list[Any]]:
    """Return the examples of a stream to train on, and those held out, which are its first."""
    count = FIRST_HELD_OUT if heldout is None else heldout
    first = list(examples.take(count + 1))
    if len(first) <= count:
        raise UserError(f"--data {name}: {count} of {len(first)} examples held out leave none; lower --heldout")
    return examples.skip(count), first[:count]


def _packed(examples: Any, seq_len: int) -> Any:
    from datasets import Features, Sequence, Value

    is_stream = not hasattr(examples, "__len__")
    return examples.map(
        partial(pack, seq_len=seq_len),
        batched=True,
        batch_size=EXAMPLES_AT_ONCE,
        input_columns=list(COLUMNS[:2]),
        remove_columns=list(COLUMNS),
        features=Features({name: Sequence(Value("int32")) for name in ("input_ids", "targets", "lengths")}),
        **({} if is_stream else {"new_fingerprint": _key(examples, seq_len)}),
    )


def _key(rows: Any, *decides: Any) -> str:
    return hashlib.sha256(repr([ORDER, rows._fingerprint, *decides]).encode()).hexdigest()[:32]
