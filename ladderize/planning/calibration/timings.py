"""Timings that are there already, as observations: bench.json files, and tables of any engine."""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ladderize.checkpoint.config import check_config
from ladderize.checkpoint.opening import read_config
from ladderize.errors import UserError
from ladderize.files.documents import read_document
from ladderize.files.regular import read_text, resolved
from ladderize.layout import Layout, LayoutError
from ladderize.plan.passes import WIDTHS, Workload
from ladderize.planning.calibration.observations import (
    RUNTIME_ENGINES,
    Observation,
    Quantity,
    Variant,
    layout_observation,
)
from ladderize.runtime.bench.document import NO_COMM, PARALLEL, BenchDocument, BenchRow
from ladderize.runtime.bench.options import named_layout
from ladderize.runtime.collectives.links import LONGEST_US
from ladderize.runtime.shards import Shape, read_shape, with_layers

MODEL_COLUMNS = ("shape", "model")
COUNT_COLUMNS = {"tp_size": 1, "batch_size": 1, "prompt_len": 1, "output_len": 2}  # and the least of each
NAMED_COLUMNS = ("dtype", *COUNT_COLUMNS, "variant")
TIME_COLUMNS: dict[str, Quantity] = {
    "prefill_ms": "prefill",
    "decode_ms_per_token": "decode",
    "end_to_end_tokens_per_s": "end_to_end",
}
VARIANT_NAMES: dict[str, Variant] = {
    "no-comm": "no-comm",
    "parallel": "parallel",
    NO_COMM: "no-comm",
    PARALLEL: "parallel",
}
MAX_TIMINGS_BYTES = 64 << 20


def read_timings(path: Path, *, engine: str, shape: str | None) -> list[Observation]:
    """The timings of a file. engine: whose they are, unless it is a bench.json, which is ladderize's. shape: of rows
    that name none.

    Raises UserError for a file that is neither, and for numbers that no run gives.
    """
    path = resolved(path, "--timings ")
    is_table = path.suffix.lower() == ".csv"
    observations = list(_table(path, engine, shape) if is_table else _bench(path, shape))
    if not observations:
        raise UserError(f"--timings {path} holds no timings")
    return observations


# ---- tables ----


def _table(path: Path, engine: str, shape: str | None) -> Iterator[Observation]:
    text = read_text(path, MAX_TIMINGS_BYTES)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    reader = csv.DictReader(io.StringIO("\n".join(lines)))
    try:
        columns, rows = list(reader.fieldnames or []), list(reader)
    except csv.Error as error:
        raise UserError(f"--timings {path} is no table ({error}); correct it") from None
    _check_columns(path, columns, shape)
    configs: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows, 1):
        where = f"--timings {path}, row {number}"
        if None in row or None in row.values():
            raise UserError(f"{where} has not as many cells as the {len(columns)} columns; correct it")
        model = next((row[key] for key in MODEL_COLUMNS if row.get(key)), shape)
        if model is None:
            raise UserError(f"{where} names no shape; fill in the column shape, or give --shape")
        try:
            if model not in configs:
                configs[model] = _config(model)
            observations = list(_row(row, configs[model], engine))
        except (LayoutError, UserError) as error:
            raise UserError(f"{where}: {error}") from None
        if not observations:
            raise UserError(f"{where} has no time; fill in {' or '.join(TIME_COLUMNS)}, or delete the row")
        yield from observations


def _check_columns(path: Path, columns: list[str], shape: str | None) -> None:
    known = (*MODEL_COLUMNS, *NAMED_COLUMNS, *TIME_COLUMNS)
    if unknown := [name for name in columns if name not in known]:
        raise UserError(f"--timings {path} has the column {unknown[0]!r}, which is none of {', '.join(known)}")
    if missing := [name for name in NAMED_COLUMNS if name not in columns]:
        raise UserError(f"--timings {path} has no column {missing[0]}; add it")
    if not set(columns) & set(TIME_COLUMNS):
        raise UserError(f"--timings {path} has no column of times; add one of {', '.join(TIME_COLUMNS)}")
    if not set(columns) & set(MODEL_COLUMNS) and shape is None:
        raise UserError(f"--timings {path} has no column shape; add it, or give --shape")


def _row(row: Mapping[str, str], config: dict[str, Any], engine: str) -> Iterator[Observation]:
    counts = {name: _number(row, name) for name in COUNT_COLUMNS}
    for name, least in COUNT_COLUMNS.items():
        if counts[name] != int(counts[name]) or counts[name] < least:
            raise UserError(f"{name} is {row[name]}, but must be an integer of at least {least}")
    ranks, batch, prompt, output = map(int, counts.values())
    if row["dtype"] not in WIDTHS:
        raise UserError(f"dtype is {row['dtype']!r}, but must be one of {', '.join(WIDTHS)}")
    name, variant = row["variant"], VARIANT_NAMES.get(row["variant"], "layout")
    layout = named_layout(name if variant == "layout" else "dense", config["num_hidden_layers"], ranks)
    Shape.from_config(config, tp_size=ranks, rank=0, replicate_vocab=True)
    for column, quantity in TIME_COLUMNS.items():
        if row.get(column):
            value = _number(row, column)
            yield layout_observation(
                layout,
                quantity,
                batch * output / value if quantity == "end_to_end" else value / 1e3,
                ranks,
                variant,
                Workload(batch, prompt, output),
                engine,
                config=config,
                dtype=row["dtype"],
                name=name,
            )


def _number(row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = -1.0
    if not 0 < value <= LONGEST_US:
        raise UserError(f"{name} is {row[name]!r}, but must be a positive number")
    return value


def _config(model: str) -> dict[str, Any]:
    config = dict(read_shape(model, "shape"))
    check_config(config)
    return config


# ---- bench.json ----


def _bench(path: Path, shape: str | None) -> Iterator[Observation]:
    document = BenchDocument.from_dict(read_document(path, "bench.json"), path)
    if document.emulated:
        raise UserError(f"--timings {path} was emulated, so its messages are those of --link; name a measured one")
    options = document.options
    for row in document.rows:
        config = _row_config(row, path, shape)
        # what a schedule hides of a prefill is no property of the link
        phases: tuple[Quantity, ...] = ("prefill", "decode") if row.schedule == "sequential" else ("decode",)
        for quantity in phases:
            seconds = row.total_ms(quantity) / 1e3
            if not 0 < seconds < LONGEST_US:
                raise UserError(f"--timings {path}: a {quantity} of {row.model} took {seconds:g} s; time it again")
            yield layout_observation(
                Layout(tuple(row.attention_sync), tuple(row.mlp_sync), row.sync_tp_size),
                quantity,
                seconds,
                row.tp_size,
                "layout" if row.is_model else VARIANT_NAMES.get(row.model, "layout"),
                Workload(row.batch_size, options.prompt_len, options.output_len),
                RUNTIME_ENGINES[document.environment.device],
                config=config,
                dtype=row.dtype,
                name=row.model,
            )


def _row_config(row: BenchRow, path: Path, shape: str | None) -> dict[str, Any]:
    where, layers = f"--timings {path}", len(row.attention_sync)
    if not row.is_random:
        config = read_config(Path(row.weights))
        if config["num_hidden_layers"] != layers:
            raise UserError(f"{where}: {row.weights} has {config['num_hidden_layers']} layers now, and had {layers}")
        return config
    if shape is None:
        raise UserError(f"{where} has random weights and names no shape; give --shape")
    try:
        return with_layers(_config(shape), layers)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
