"""The data of a retraining: the rows of all sources become examples, then packed rows and batches of them, by
``datasets``, in whose cache the next run of the same command finds both.

A packed row has three columns. ``input_ids``. ``targets``: at each position the NEXT token of the same example where
the loss counts it, else -100, so no shift is needed later. ``lengths``: the tokens of each example. Examples are kept
apart by position ids that begin at 0 with every example. transformers makes a block-diagonal mask of them, but only if
the model is called with ``use_cache=False`` and without an attention mask
(transformers.masking_utils.find_packed_sequence_indices).
"""

import contextlib
import glob
import hashlib
import os
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from ladderize.adapt.examples import COLUMNS, Encoder
from ladderize.console import SILENT, Console, sentence
from ladderize.data.files import HUB, ID_SUFFIXES, data_files, hub_dataset, split_weight
from ladderize.data.rows import FIRST_ROWS, TRAINING, file_rows, tell_left_out
from ladderize.errors import UserError
from ladderize.files.regular import split_name
from ladderize.runtime.training.batch import ANSWERS, LIKELIEST

LOADERS = {".txt": "text", ".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json"}


@contextlib.contextmanager
def quiet_datasets() -> Iterator[None]:
    """Silence the progress bars and log lines of ``datasets`` in the block."""
    import datasets
    from datasets.utils import logging

    bars, level = not datasets.are_progress_bars_disabled(), logging.get_verbosity()
    datasets.disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


@quiet_datasets()
def open_rows(name: str, option: str = "--data") -> Any:
    """Return the rows of one source as a ``datasets.Dataset``, those of the hub as an ``IterableDataset``."""
    import datasets

    hub = hub_dataset(name) if option == "--data" else None
    files = data_files(name, option) if hub is None else []
    try:
        rows = _open_files(files) if hub is None else datasets.load_dataset(*hub[:2], split=hub[2], streaming=True)
        columns = column_names(rows) if rows else []
    except UserError:
        raise
    except Exception as error:  # of datasets, pyarrow, pandas or the network, nested
        for file in files if len(files) > 1 else ():
            open_rows(file, option)  # raises the error of the broken file by its name
        problem = sentence(error.__cause__ or error)[:200]
        raise UserError(f"{option} {name} cannot be read ({problem}); is it there, and complete?") from None
    if not columns:
        raise UserError(f"{option} {name} holds no rows")
    if TRAINING.find(columns) is None:
        raise UserError(f"{option} {name} has the columns {', '.join(columns)}; rows need {TRAINING}")
    return rows


def _open_files(files: list[str]) -> Any:
    """Return the rows of files of one kind; None where all are empty."""
    import datasets

    paths = [split_name(file)[0] for file in files]
    full = [glob.escape(os.path.abspath(path)) for path in paths if path.stat().st_size]  # datasets takes patterns
    suffix = paths[0].suffix
    if suffix in ID_SUFFIXES:
        ids = [row.values["input_ids"] for file in files for row in file_rows(file)]
        return datasets.Dataset.from_dict({"input_ids": [row for row in ids if len(row)]}).with_format("numpy")
    if not full:
        return None
    as_documents = {"sample_by": "document", "encoding": "utf-8-sig"} if suffix == ".txt" else {}
    return datasets.load_dataset(LOADERS[suffix], data_files=full, split="train", **as_documents)


def column_names(rows: Any) -> list[str]:
    """Return the columns of a dataset; of a stream that does not know them, those of its first row."""
    return rows.column_names or list(next(iter(rows), ()))


# Targets below 0 are not scored: the next token is not scored, or the position is padding.
IGNORED_TARGET, PADDING_TARGET = -100, -101


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Return the numbers of the examples in each row, by best-fit decreasing: the longest example comes first, and each
    goes into the fullest row that has room for it."""
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
    """Return packed rows of at most ``seq_len`` tokens, by column, of the ids and masks of examples."""
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
    """Return input_ids, position_ids and targets, int64 [rows, tokens of the longest] each, padded on the right, and a
    teacher's answers, where rows have them, side by side.

    Padding has the id 0, the target -101, and positions that continue the row's last example. Its tokens do not see the
    padding, so a row of one example needs no mask. No rows become one padded token: a rank without rows adds nothing.
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
    ``IterableDataset``, which has no counts. ``dropped_examples`` have nothing left to score.

    names: as --data has them, with or without weights, which are shares of the packed rows.
    tokenizer: of transformers; None if all rows are ids.
    heldout: examples of each source to hold out; None: ``usual_heldout``, of a stream the first 64.
    eval_names: data that are held out instead of a part of ``names``.
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
    """Return the examples to train on, and those held out: of the first drawn rows, and all that share turns with
    them."""
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
    """Return a random number for each row: those with the lowest are held out first, and aligned on last."""
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
