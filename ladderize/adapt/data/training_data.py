"""The data of a retraining: packed rows of all sources, and held-out ones.

``Dataset.map`` turns each source into examples, then into rows; the next run of the same command finds both in its
cache. Each source is packed separately; the rows are then joined, or mixed by the sources' weights.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ladderize.adapt.data.examples import COLUMNS, Encoder
from ladderize.adapt.data.packing import pack
from ladderize.adapt.data.sources import open_rows
from ladderize.adapt.data_specs import SourceSpec
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.rows import quiet_datasets

ORDER = 4  # the version of how rows are cut and packed; rows that another version left in the cache are not used
ROWS_AT_ONCE, EXAMPLES_AT_ONCE, SHUFFLED_AT_ONCE = 128, 1000, 1000  # tokenised; packed; packed rows of a stream


@dataclass(frozen=True)
class DataOptions:
    """The options that decide which rows a retraining reads.

    seq_len: the most tokens of a row.
    heldout: examples of each source to hold out of training; None: a hundredth, at least 8 or a tenth of fewer, at most
    256; of a stream 64.
    """

    seq_len: int
    vocab_size: int
    seed: int
    heldout: int | None = None


@dataclass(frozen=True)
class DataCounts(Record):
    """The size of the training part of all sources, each counted once; None where one is streamed.

    dropped_examples: those with nothing scored left.
    """

    examples: int | None = None
    rows: int | None = None
    tokens: int | None = None
    truncated_examples: int | None = None
    dropped_examples: int | None = None


@dataclass(frozen=True)
class TrainingData:
    """The rows to train on and those held out.

    train: a ``datasets.Dataset`` of packed rows (packing.py), not yet shuffled; where a source is streamed, an endless,
    shuffled ``IterableDataset``.
    heldout: packed rows.
    """

    train: Any
    heldout: list[dict[str, Any]]
    counts: DataCounts


@quiet_datasets()
def open_data(
    specs: Sequence[SourceSpec], tokenizer: Any, options: DataOptions, eval_specs: Sequence[SourceSpec] = ()
) -> TrainingData:
    """Return all sources, ready to be trained on.

    tokenizer: of transformers; None if all rows are ids.
    eval_specs: files that are held out instead of a part of ``specs``.
    Raises UserError for a source or a row that cannot be used, and where nothing is left to train on.
    """
    from datasets import concatenate_datasets, interleave_datasets

    if streamed := next((spec for spec in eval_specs if spec.is_streamed), None):
        raise UserError(f"{streamed.name}: a stream cannot be used for validation; give a file")
    parted = replace(options, heldout=0) if eval_specs else options
    found = [(_stream if spec.is_streamed else _map)(spec, tokenizer, parted) for spec in specs]
    rows, apart, tokens_of_row, counts = (list(column) for column in zip(*found, strict=True))
    apart = [_examples(spec, tokenizer, options)[0] for spec in eval_specs] or apart
    if not all(counts):  # if one is a stream, all must be
        pairs = zip(rows, counts, strict=True)
        rows = [one.shuffle(options.seed).to_iterable_dataset().repeat(None) if own else one for one, own in pairs]
    train = concatenate_datasets(rows) if len(rows) > 1 and specs[0].weight is None else rows[0]
    if len(rows) > 1 and specs[0].weight is not None:  # rows are drawn, but weights are shares of tokens
        shares = np.array([spec.weight for spec in specs]) / tokens_of_row
        probabilities = (shares / shares.sum()).tolist()
        train = interleave_datasets(rows, probabilities, options.seed, stopping_strategy="all_exhausted")
    ids, scored = ([value for one in apart for value in one[name]] for name in COLUMNS[:2])
    heldout = pack(ids, scored, options.seq_len)
    kept = [dict(zip(heldout, values, strict=True)) for values in zip(*heldout.values(), strict=True)]
    totals = DataCounts(*(sum(one) for one in zip(*counts, strict=True))) if all(counts) else DataCounts()
    return TrainingData(train, kept, totals)


def _examples(spec: SourceSpec, tokenizer: Any, options: DataOptions) -> tuple[Any, int]:
    """Return the examples of a source that have something to score, and the number of those that have not (0 for a
    stream)."""
    rows = open_rows(spec)
    columns = rows.column_names or list(next(iter(rows)))  # a stream may not know its columns
    encoder = Encoder(tokenizer, options.seq_len, options.vocab_size, spec.name)
    given = {"batched": True, "batch_size": ROWS_AT_ONCE, "with_indices": True, "remove_columns": columns}
    if spec.is_streamed:
        return rows.map(encoder, **given).filter(lambda example: example["length"] > 0), 0
    decides: list[Any] = [options.seq_len, options.vocab_size]
    if tokenizer is not None:  # datasets' hash of a tokenizer differs between processes
        ids = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
        decides += [type(tokenizer), ids, tokenizer.special_tokens_map, tokenizer.chat_template]
    try:
        every = rows.map(encoder, **given, new_fingerprint=_key(rows, *decides)).with_format(None)
    except UnicodeDecodeError:  # datasets raises it while it reads a row
        raise UserError(f"{spec.name} holds text that is not UTF-8") from None
    usable = np.flatnonzero(every["length"][:])
    if not len(usable):
        why = f"of {len(every)} nothing that counts is within --seq-len {options.seq_len}"
        raise UserError(f"{spec.name} gives no example that can be scored: {why}")
    return every.select(usable), len(every) - len(usable)


def _packed(examples: Any, options: DataOptions, **given: Any) -> Any:
    from datasets import Features, Sequence, Value

    features = Features({name: Sequence(Value("int32")) for name in ("input_ids", "targets", "lengths")})
    given |= {"input_columns": list(COLUMNS[:2]), "remove_columns": list(COLUMNS), "features": features}
    rows = partial(pack, seq_len=options.seq_len)
    return examples.map(rows, batched=True, batch_size=EXAMPLES_AT_ONCE, **given)


def _map(spec: SourceSpec, tokenizer: Any, options: DataOptions) -> tuple[Any, Any, float, tuple[int, ...]]:
    """Return the packed rows of a source of files, its held-out examples by column, the tokens of a row, and the first
    five of ``DataCounts``.

    Held-out examples are drawn; the other examples of the same conversation are held out with them.
    """
    examples, dropped = _examples(spec, tokenizer, options)
    total = len(examples)
    count = min(256, max(total // 100, min(8, total // 10), 1)) if options.heldout is None else options.heldout
    drawn = np.zeros(total, dtype=bool)
    drawn[np.random.default_rng(options.seed).permutation(total)[:count]] = True
    conversation = np.asarray(examples["conversation"][:])
    drawn |= (conversation >= 0) & np.isin(conversation, conversation[drawn])
    if drawn.all():
        raise UserError(f"{spec.name}: {count} of {total} examples held out leave none; lower --heldout")
    kept = examples.select(np.flatnonzero(~drawn))
    rows, tokens = _packed(kept, options, new_fingerprint=_key(kept, options)), sum(kept["length"][:])
    counts = (len(kept), len(rows), tokens, sum(kept["truncated"][:]), dropped)
    return rows, examples.select(np.flatnonzero(drawn)), tokens / len(rows), counts


def _stream(spec: SourceSpec, tokenizer: Any, options: DataOptions) -> tuple[Any, Any, float, tuple[()]]:
    """Return the same as ``_map`` for a source on the hub. Nothing of it is counted; its first examples are held
    out."""
    examples, _ = _examples(spec, tokenizer, options)
    count = 64 if options.heldout is None else options.heldout
    first = list(examples.take(count + 1))
    if len(first) <= count:
        raise UserError(f"{spec.name}: {count} of {len(first)} examples held out leave none; lower --heldout")
    rows = _packed(examples.skip(count), options).shuffle(seed=options.seed, buffer_size=SHUFFLED_AT_ONCE)
    return rows.repeat(None), {name: [one[name] for one in first[:count]] for name in COLUMNS}, options.seq_len, ()


def _key(rows: Any, *decides: Any) -> str:
    return hashlib.sha256(repr([ORDER, rows._fingerprint, *decides]).encode()).hexdigest()[:32]
