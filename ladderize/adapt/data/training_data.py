"""What a retraining reads: packed rows of all sources, and others that are held out.

Each source becomes examples, then rows, by ``Dataset.map``, whose cache the next run of the same command finds: its key
is made of all that decides the result. Sources are packed by themselves and then joined, or mixed by their weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.adapt.data.examples import COLUMNS, Encoder, tokenizer_identity
from ladderize.adapt.data.packing import pack
from ladderize.adapt.data.sources import open_rows
from ladderize.adapt.data_specs import SourceSpec
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.rows import quiet_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ORDER = 4  # counts the ways in which rows were ever cut and packed: what another one left in the cache is not taken
ROWS_AT_ONCE, EXAMPLES_AT_ONCE = 128, 1000  # that are tokenised, and packed, together
SHUFFLED_AT_ONCE = 1000  # packed rows of a stream
STREAM_HELDOUT = 64  # examples


@dataclass(frozen=True)
class DataOptions:
    """seq_len: the most tokens of a row. packing: several examples a row. heldout: examples of each source to set
    aside, never trained on (None: a hundredth, at least 8 or a tenth of fewer, at most 256; of a stream 64)."""

    seq_len: int
    vocab_size: int
    seed: int
    packing: bool = True
    heldout: int | None = None

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UserError(f"--seq-len {self.seq_len} leaves nothing to predict; give at least 2")


@dataclass(frozen=True)
class SourceCounts(Record):
    """What one source holds for training; None where it is streamed. data: as it was given, without the weight."""

    data: str
    weight: float | None
    rows: int | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class DataCounts(Record):
    """What all sources hold for training, each once; None where one is streamed. dropped_examples: those of which
    nothing scored was left. padding_share: of the places in rows of ``seq_len``."""

    sources: list[SourceCounts]
    examples: int | None = None
    rows: int | None = None
    tokens: int | None = None
    truncated_examples: int | None = None
    dropped_examples: int | None = None
    padding_share: float | None = None


@dataclass(frozen=True)
class TrainingData:
    """train: ``datasets.Dataset`` of packed rows, in no order to train in, or, where a source is streamed, an endless
    ``IterableDataset`` of them, shuffled. heldout: packed rows (packing.py)."""

    train: Any
    heldout: list[dict[str, Any]]
    counts: DataCounts


@dataclass(frozen=True)
class _Source:
    """One source. rows: packed. heldout: its examples, by columns. tokens_of_row: on average. counts: of examples,
    truncated and dropped ones; None of a stream."""

    rows: Any
    heldout: Any
    tokens_of_row: float
    counts: tuple[int, int, int] | None = None


def open_data(
    specs: Sequence[SourceSpec],
    tokenizer: "PreTrainedTokenizerBase | None",
    options: DataOptions,
    eval_specs: Sequence[SourceSpec] = (),
) -> TrainingData:
    """All sources, ready to be trained on. eval_specs: files that are held out, in the place of a part of ``specs``.

    Raises UserError for what cannot be read or used, for a row that cannot, and where nothing is left to train on.
    """
    import datasets

    if streamed := next((spec for spec in eval_specs if spec.is_streamed), None):
        raise UserError(f"{streamed.name}: a stream cannot be used for validation; give a file")
    own = replace(options, heldout=0) if eval_specs else options
    with quiet_datasets():
        sources = [(_stream if spec.is_streamed else _map)(spec, tokenizer, own) for spec in specs]
        apart = [_examples(spec, tokenizer, options)[0] for spec in eval_specs] or [one.heldout for one in sources]
        rows = [source.rows for source in sources]
        if any(spec.is_streamed for spec in specs):
            rows = [
                one if spec.is_streamed else one.shuffle(seed=options.seed).to_iterable_dataset().repeat(None)
                for spec, one in zip(specs, rows, strict=True)
            ]
        train = rows[0]
        if len(rows) > 1 and specs[0].weight is None:
            train = datasets.concatenate_datasets(rows)
        elif len(rows) > 1:  # rows are drawn, and weights are shares of tokens
            shares = [(spec.weight or 0) / one.tokens_of_row for spec, one in zip(specs, sources, strict=True)]
            train = datasets.interleave_datasets(
                rows, [share / sum(shares) for share in shares], options.seed, stopping_strategy="all_exhausted"
            )
    heldout = _pack(*([value for one in apart for value in one[name]] for name in COLUMNS[:2]), options=options)
    packed = [dict(zip(heldout, values, strict=True)) for values in zip(*heldout.values(), strict=True)]
    return TrainingData(train, packed, _count(specs, sources, options))


def show_data(
    specs: Sequence[SourceSpec], tokenizer: "PreTrainedTokenizerBase | None", options: DataOptions, count: int
) -> list[dict[str, Any]]:
    """``count`` packed rows as training would meet them, drawn with the seed. Raises UserError as ``open_data`` does."""
    train = open_data(specs, tokenizer, options).train
    drawn = train if any(spec.is_streamed for spec in specs) else train.shuffle(seed=options.seed)
    return list(drawn.take(count))


def _examples(spec: SourceSpec, tokenizer: Any, options: DataOptions) -> tuple[Any, int]:
    """The examples of a source that have something to score, and how many have not (of a stream 0)."""
    from datasets.fingerprint import Hasher

    rows = open_rows(spec)
    encoder = Encoder(tokenizer, options.seq_len, options.vocab_size, spec.name)
    given: dict[str, Any] = {"batched": True, "batch_size": ROWS_AT_ONCE, "with_indices": True}
    if spec.is_streamed:
        columns = rows.column_names or list(next(iter(rows)))
        return rows.map(encoder, remove_columns=columns, **given).filter(_has_tokens), 0
    decides = [ORDER, rows._fingerprint, tokenizer_identity(tokenizer), options.seq_len, options.vocab_size]
    key = Hasher.hash(decides)
    every = rows.map(encoder, remove_columns=rows.column_names, new_fingerprint=key, **given).with_format(None)
    usable = np.flatnonzero(every["length"][:])
    if not len(usable):
        raise UserError(
            f"{spec.name} gives no example that can be scored: of {len(every)} nothing that counts is within --seq-len"
            f" {options.seq_len}"
        )
    return every.select(usable), len(every) - len(usable)


def _has_tokens(example: dict[str, Any]) -> bool:
    return bool(example["length"])


def _pack(ids: Sequence[Any], scored: Sequence[Any], *, options: DataOptions) -> dict[str, list[list[int]]]:
    return pack(ids, scored, options.seq_len if options.packing else None)


def _packing(options: DataOptions) -> dict[str, Any]:
    """The arguments of ``map`` that make packed rows of examples."""
    from datasets import Features, Sequence, Value

    return {
        "function": partial(_pack, options=options),
        "input_columns": list(COLUMNS[:2]),
        "remove_columns": list(COLUMNS),
        "batched": True,
        "batch_size": EXAMPLES_AT_ONCE,
        "features": Features({name: Sequence(Value("int32")) for name in ("input_ids", "targets", "lengths")}),
    }


def _map(spec: SourceSpec, tokenizer: Any, options: DataOptions) -> _Source:
    """A source of files; its held-out examples are drawn, and with each the others of the same conversation."""
    from datasets.fingerprint import Hasher

    examples, dropped = _examples(spec, tokenizer, options)
    total = len(examples)
    count = options.heldout
    if count is None:
        count = min(256, max(total // 100, min(8, total // 10), 1))
    drawn = np.zeros(total, dtype=bool)
    drawn[np.random.default_rng(options.seed).permutation(total)[:count]] = True
    conversation = np.asarray(examples["conversation"][:])
    drawn |= (conversation >= 0) & np.isin(conversation, conversation[drawn])
    if drawn.all():
        raise UserError(
            f"{spec.name} has {total} examples, and {count} held out leave none to train on; lower --heldout, or give"
            " --eval-data FILE"
        )
    kept = examples.select(np.flatnonzero(~drawn))
    key = Hasher.hash([examples._fingerprint, options.seed, options.packing, options.seq_len, count])
    rows = kept.map(**_packing(options), new_fingerprint=key)
    truncated = sum(kept["truncated"][:])
    return _Source(
        rows,
        examples.select(np.flatnonzero(drawn)),
        sum(kept["length"][:]) / len(rows),
        (len(kept), truncated, dropped),
    )


def _stream(spec: SourceSpec, tokenizer: Any, options: DataOptions) -> _Source:
    """A source on the hub; its first examples are held out."""
    examples, _ = _examples(spec, tokenizer, options)
    count = STREAM_HELDOUT if options.heldout is None else options.heldout
    first = list(examples.take(count + 1))
    if len(first) <= count:
        raise UserError(f"{spec.name} has {len(first)} examples, and {count} held out leave none to train on")
    tokens = options.seq_len if options.packing else sum(one["length"] for one in first) / len(first)
    rows = examples.skip(count).map(**_packing(options)).shuffle(seed=options.seed, buffer_size=SHUFFLED_AT_ONCE)
    heldout = {name: [one[name] for one in first[:count]] for name in COLUMNS}
    return _Source(rows.repeat(None), heldout, tokens)


def _count(specs: Sequence[SourceSpec], sources: Sequence[_Source], options: DataOptions) -> DataCounts:
    found = []
    for spec, one in zip(specs, sources, strict=True):
        known = (len(one.rows), round(one.tokens_of_row * len(one.rows))) if one.counts is not None else ()
        found.append(SourceCounts(spec.text, spec.weight, *known))
    counts = [one.counts for one in sources if one.counts is not None]
    if len(counts) < len(sources):
        return DataCounts(found)
    rows, tokens = (sum(getattr(one, name) for one in found) for name in ("rows", "tokens"))
    examples, truncated, dropped = map(sum, zip(*counts, strict=True))
    return DataCounts(found, examples, rows, tokens, truncated, dropped, 1 - tokens / (rows * options.seq_len))
