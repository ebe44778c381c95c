"""Timings that are there already, as observations: bench.json files, and tables of any engine. Imports no torch."""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ladderize.checkpoint.llama import check_config
from ladderize.checkpoint.reading import read_config
from ladderize.errors import UserError
from ladderize.files.documents import read_document
from ladderize.files.regular import read_text, resolved
from ladderize.layout import Layout, LayoutError
from ladderize.planning.calibration.observations import Observation, Quantity, Variant
from ladderize.planning.calibration.timed import RUNTIME_ENGINES, layout_observation
from ladderize.planning.passes import WIDTHS, Workload
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.options import named_layout
from ladderize.runtime.bench.speed_row import NO_COMM, PARALLEL
from ladderize.runtime.collectives.links import LONGEST_US
from ladderize.runtime.shapes import read_shape
from ladderize.runtime.shards import Shape

MODEL_COLUMNS = ("shape", "model")
NAMED_COLUMNS = ("dtype", "tp_size", "batch_size", "prompt_len", "output_len", "variant")
TIME_COLUMNS = ("prefill_ms", "decode_ms_per_token", "end_to_end_tokens_per_s")
BASELINE_VARIANTS: dict[str, Variant] = {"no-comm": "no-comm", "parallel": "parallel"}
ROW_VARIANTS: dict[str, Variant] = {PARALLEL: "parallel", NO_COMM: "no-comm"}
PASS_QUANTITIES: tuple[Quantity, ...] = ("prefill", "decode")
MAX_TIMINGS_BYTES = 64 << 20


def read_timings(path: Path, *, engine: str, shape: str | None) -> list[Observation]:
    """The timings of a file. engine: whose they are, unless it is a bench.json, which is ladderize's. shape: of rows
    that name none.

    Raises UserError for a file that is neither, and for numbers that no run gives.
    """
    path = resolved(path, "--timings ")
    if path.suffix.lower() == ".csv":
        observations = list(_table(path, engine, shape))
    else:
        observations = list(_bench(path, shape))
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
        if model not in configs:
            configs[model] = _config(model, where)
        yield from _row(row, configs[model], engine, where)


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


def _row(row: Mapping[str, str], config: dict[str, Any], engine: str, where: str) -> Iterator[Observation]:
    ranks, batch, prompt, output = (
        _count(row, name, least, where)
        for name, least in (("tp_size", 1), ("batch_size", 1), ("prompt_len", 1), ("output_len", 2))
    )
    if row["dtype"] not in WIDTHS:
        raise UserError(f"{where}: dtype is {row['dtype']!r}, but must be one of {', '.join(WIDTHS)}")
    times: dict[Quantity, float] = {}
    if row.get("prefill_ms"):
        times["prefill"] = _number(row, "prefill_ms", where) / 1e3
    if row.get("decode_ms_per_token"):
        times["decode"] = _number(row, "decode_ms_per_token", where) / 1e3
    if row.get("end_to_end_tokens_per_s"):
        times["end_to_end"] = batch * output / _number(row, "end_to_end_tokens_per_s", where)
    if not times:
        raise UserError(f"{where} has no time; fill in {' or '.join(TIME_COLUMNS)}, or delete the row")
    name = row["variant"]
    variant = BASELINE_VARIANTS.get(name, "layout")
    try:
        layers = config["num_hidden_layers"]
        layout = named_layout(name if variant == "layout" else "dense", layers, ranks)
        Shape.from_config(config, tp_size=ranks, rank=0, replicate_vocab=True)
    except (LayoutError, UserError) as error:
        raise UserError(f"{where}: {error}") from None
    for quantity, seconds in times.items():
        yield layout_observation(
            layout,
            quantity,
            seconds,
            ranks,
            variant,
            Workload(batch, prompt, output),
            engine,
            config=config,
            dtype=row["dtype"],
            name=name,
        )


def _count(row: Mapping[str, str], name: str, least: int, where: str) -> int:
    value = _number(row, name, where)
    if value != int(value) or value < least:
        raise UserError(f"{where}: {name} is {row[name]}, but must be an integer of at least {least}")
    return int(value)


def _number(row: Mapping[str, str], name: str, where: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = -1.0
    if not 0 < value <= LONGEST_US:
        raise UserError(f"{where}: {name} is {row[name]!r}, but must be a positive number")
    return value


def _config(model: str, where: str) -> dict[str, Any]:
    try:
        config = dict(read_shape(model, "shape"))
        check_config(config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return config


# ---- bench.json ----


def _bench(path: Path, shape: str | None) -> Iterator[Observation]:
    document = BenchDocument.from_dict(read_document(path, "bench.json"), path)
    if document.emulated:
        raise UserError(f"--timings {path} was emulated, so its messages are those of --link; name a measured one")
    engine = RUNTIME_ENGINES[document.environment.device]
    options = document.options
    for row in document.rows:
        config = _row_config(row, path, shape)
        workload = Workload(row.batch_size, options.prompt_len, options.output_len)
        layout = Layout(tuple(row.attention_sync), tuple(row.mlp_sync), row.sync_tp_size)
        variant = ROW_VARIANTS.get(row.model, "layout")
        for quantity in PASS_QUANTITIES:
            if quantity == "prefill" and row.schedule != "sequential":
                continue  # what a schedule hides is no property of the link
            seconds = row.total_ms(quantity) / 1e3
            if not 0 < seconds < LONGEST_US:
                raise UserError(f"--timings {path}: a {quantity} of {row.model} took {seconds:g} s; time it again")
            yield layout_observation(
                layout,
                quantity,
                seconds,
                row.tp_size,
                variant,
                workload,
                engine,
                config=config,
                dtype=row.dtype,
                name=row.model,
            )


def _row_config(row: BenchRow, path: Path, shape: str | None) -> dict[str, Any]:
    if row.is_random and shape is None:
        raise UserError(f"--timings {path} has random weights and names no shape; give --shape")
    where = f"--timings {path}"
    config = _config(shape, where) if row.is_random and shape is not None else read_config(Path(row.weights))
    layers = len(row.attention_sync)
    if not row.is_random and config["num_hidden_layers"] != layers:
        raise UserError(f"{where}: {row.weights} has {config['num_hidden_layers']} layers now, and had {layers}")
    return {**config, "num_hidden_layers": layers}
