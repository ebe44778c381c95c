"""How much each block's perplexity suffers when its sync points are dropped or overlapped: the SPD paper's sweep, done
cheaply.

S[i] = PPL(changed: blocks i..L-1) - PPL(changed: blocks i+1..L-1), arXiv 2502.20727: one sweep from the last block
backwards. All L + 1 models agree with the dense one before their first changed block, so for each batch of windows one
dense pass keeps the state at every boundary, and L suffixes run from there: L/2 forwards and one, instead of L + 1.
What results is a table of negative log-likelihoods, windows x (L + 1), from which everything else follows, and from
which a killed run goes on.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladderize import data
from ladderize.blocks import (
    Blocks,
    State,
    check_finite,
    complete,
    layer_seconds,
    open_checkpoint,
    read_windows,
    stored_dtype,
)
from ladderize.checkpoint.fingerprint import fingerprint
from ladderize.checkpoint.llama import parameter_count
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console, human_bytes, human_seconds
from ladderize.convert.sensitivity_file import (
    CLASSES,
    INTERVAL,
    RESAMPLES,
    BlockSensitivity,
    CalibrationData,
    SensitivityDocument,
    SensitivityRun,
    UnfinishedSensitivity,
    changes_to_ladder,
)
from ladderize.errors import UserError
from ladderize.eval.options import SensitivityOptions
from ladderize.files.work import differences
from ladderize.layout import BLOCKING, OVERLAPPED, Layout
from ladderize.memory import check_room
from ladderize.ranks.device import check_device

TAU1, TAU1_LARGE, LARGE = 0.05, 0.02, 30_000_000_000  # the paper's, and from how many parameters on the lower one holds
TOKENS_PER_PASS = 4096
SAVE_SECONDS = 2.0


def column_layouts(mode: str, num_layers: int, sync_tp_size: int | None) -> list[Layout]:
    """The L + 1 models of the table: column k < L changes blocks k..L-1 (or, with each, block k alone), column L is
    dense."""
    kind = "ladder" if changes_to_ladder(mode) else "spd"
    ranks = sync_tp_size if kind == "spd" else None
    layouts = []
    for first in range(num_layers):
        changed = [first] if mode.startswith("each") else list(range(first, num_layers))
        layouts.append(Layout.from_layers(num_layers, **{kind: changed}, sync_tp_size=ranks))
    return [*layouts, Layout.dense(num_layers)]


class Suffixes:
    """Every column of the table for a batch of windows, with all weights in memory once."""

    def __init__(self, blocks: Blocks, layouts: list[Layout]) -> None:
        self.blocks, self.layouts = blocks, layouts
        layers = blocks.num_layers
        self.weights = [blocks.weights(index) for index in range(layers)]
        self.built: dict[tuple[int, str, str], torch.nn.Module] = {}
        # a dense layer that hands on its stream with and without its MLP's output, for a suffix whose entering sync
        # point is overlapped
        overlapping = any(OVERLAPPED in layout.mlp_sync + layout.attention_sync for layout in layouts)
        self.prefix = (
            Layout((BLOCKING,) * layers, (OVERLAPPED,) * (layers - 1) + (BLOCKING,)) if overlapping else layouts[-1]
        )

    def layer(self, index: int, layout: Layout) -> torch.nn.Module:
        key = (index, layout.attention_sync[index], layout.mlp_sync[index])
        if key not in self.built:
            self.built[key] = self.blocks.layer(index, layout, self.weights[index])
        return self.built[key]

    def __call__(self, ids: torch.Tensor) -> np.ndarray:
        """ids: [batch, tokens] -> summed negative log-likelihoods in nats, float64 [batch, L + 1]."""
        layers = self.blocks.num_layers
        with torch.no_grad():
            boundaries: list[State] = [self.blocks.embed(ids)]
            for index in range(layers):
                boundaries.append(self.blocks.run(self.layer(index, self.prefix), complete(boundaries[-1])))
            columns = []
            for first, layout in enumerate(self.layouts):
                boundary = boundaries[first]
                state = boundary if first < layers and layout.entering(first) == OVERLAPPED else complete(boundary)
                for index in range(first, layers):
                    state = self.blocks.run(self.layer(index, layout), state)
                columns.append(self.blocks.nll(complete(state), ids))
        return torch.stack(columns, 1).cpu().numpy()


def measure_sensitivity(
    model: str | Path,
    options: SensitivityOptions,
    *,
    console: Console = SILENT,
    windows: np.ndarray | None = None,
    sha256: str | None = None,
    previous: Mapping[str, Any] | None = None,
    save: Callable[[Mapping[str, Any]], None] = lambda content: None,
) -> SensitivityDocument:
    """Fill the table and return the document of sensitivity.json.

    ``save`` gets the content of the file every few seconds. ``previous``: the content of an unfinished run's, whose
    rows are taken over; raises UserError if it measured anything else. windows: ids [samples, seq_len] that were read
    from the data before; sha256: of those data, if they are no single file.
    """
    model = str(model)
    check_device(options.device)
    checkpoint = open_checkpoint(model, options.revision)
    check_measurable(checkpoint, model, options)
    if windows is None:
        drawn = read_windows(checkpoint, options.data, seq_len=options.seq_len, samples=None, seed=options.seed)
        windows = drawn[: options.samples]
        if len(windows) < options.samples:
            console.note(
                f"{options.data} gives {len(windows)} windows of {windows.shape[1]} tokens, fewer than the"
                f" {options.samples} of --samples: all are taken"
            )
    run = sensitivity_run(checkpoint, model, options, windows, sha256)
    layers = int(checkpoint.config["num_hidden_layers"])
    rows = _rows_of(previous, run, layers) if previous is not None else []
    if len(rows) < len(windows):
        blocks = Blocks(checkpoint, getattr(torch, run.dtype), torch.device(options.device))
        _fill_table(rows, blocks, run, windows, options, console, save)
    tau1 = options.tau1 if options.tau1 is not None else default_tau1(run.parameters)
    perplexities, entries = block_sensitivities(
        np.array(rows), windows.shape[1] - 1, options.mode, tau1=tau1, tau2=options.tau2
    )
    document = SensitivityDocument(
        **vars(run),
        complete=True,
        tau1=tau1,
        tau2=options.tau2,
        interval=INTERVAL,
        perplexity=perplexities,
        blocks=entries,
        nll=rows,
    )
    save(document.to_dict())
    return document


def _fill_table(
    rows: list[list[float]],
    blocks: Blocks,
    run: SensitivityRun,
    windows: np.ndarray,
    options: SensitivityOptions,
    console: Console,
    save: Callable[[Mapping[str, Any]], None],
) -> None:
    """Add the rows of the windows that have none yet. windows: ids [samples, seq_len]."""
    if rows:
        console.note(f"resuming after {len(rows)} of {len(windows)} windows")
    batch_size = min(options.batch_size or max(1, TOKENS_PER_PASS // windows.shape[1]), len(windows))
    check_room(
        _memory(blocks, run, batch_size * windows.shape[1]),
        blocks.device,
        f"sensitivity with {batch_size:,} windows of {windows.shape[1]:,} tokens at a time",
        "lower --batch-size or --seq-len" if batch_size > 1 else "choose a machine with more",
    )
    with console.stage("loading the weights"):
        suffixes = Suffixes(blocks, column_layouts(run.mode, blocks.num_layers, run.sync_tp_size))
    console.note(_estimate(suffixes, windows, len(rows), batch_size))
    saved_at = time.monotonic()
    left = windows[len(rows) :]
    with console.progress(f"sensitivity ({run.mode})", len(left)) as advance:
        for batch in np.split(left, range(batch_size, len(left), batch_size)):
            rows += suffixes(torch.from_numpy(batch)).tolist()
            check_finite(sum(map(sum, rows[-len(batch) :])), f"the log-likelihood of {run.data.file} under {run.model}")
            if time.monotonic() - saved_at > SAVE_SECONDS:
                save(UnfinishedSensitivity(**vars(run), complete=False, nll=rows).to_dict())
                saved_at = time.monotonic()
            advance(len(batch))


def check_measurable(checkpoint: Checkpoint, model: str, options: SensitivityOptions) -> None:
    """Raise UserError or LayoutError unless this is a dense model with sync points to change as ``options`` say."""
    layout = Layout.from_config(checkpoint.config)
    if not layout.is_dense:
        raise UserError(f"{model} is not dense ({layout}); a sensitivity is measured on the dense model")
    column_layouts(options.mode, layout.num_layers, options.sync_tp_size)[0].check_model(checkpoint.config)


def sensitivity_run(
    checkpoint: Checkpoint, model: str, options: SensitivityOptions, windows: np.ndarray, sha256: str | None
) -> SensitivityRun:
    """What is measured, on what. windows: int64 [samples, seq_len]."""
    return SensitivityRun(
        model=model,
        fingerprint=fingerprint(checkpoint),
        layout=str(Layout.from_config(checkpoint.config)),
        parameters=parameter_count(checkpoint.config),
        data=CalibrationData(
            file=options.data,
            sha256=sha256 or data.file_sha256(options.data),
            samples=len(windows),
            seq_len=windows.shape[1],
            seed=options.seed,
        ),
        mode=options.mode,
        sync_tp_size=options.sync_tp_size,
        dtype=stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype,
    )


def _rows_of(previous: Mapping[str, Any], run: SensitivityRun, layers: int) -> list[list[float]]:
    """The table of a sensitivity.json as it lies there, which may be anybody's."""
    if different := differences(_decisive(previous), _decisive(run.to_dict())):
        raise UserError(f"--out holds a measurement with another {different}; name another file, or pass --overwrite")
    rows = previous.get("nll")
    columns, samples = len(column_layouts(run.mode, layers, run.sync_tp_size)), run.data.samples
    if not isinstance(rows, list) or len(rows) > samples or not all(_is_row(row, columns) for row in rows):
        raise UserError(
            f"--out holds no table of at most {samples} rows of {columns} log-likelihoods; name another file, or pass"
            " --overwrite"
        )
    return rows


def _decisive(run: Mapping[str, Any]) -> dict[str, Any]:
    """What rows have to agree in to stand in one table. Of the data not where they lie: the same bytes may by now lie
    elsewhere."""
    told = {key: run[key] for key in ("fingerprint", "mode", "sync_tp_size", "dtype") if key in run}
    data = run.get("data")
    return (
        {**told, **{f"data {key}": data[key] for key in data if key != "file"}} if isinstance(data, Mapping) else told
    )


def _is_row(row: object, columns: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == columns
        and all(type(value) is float and math.isfinite(value) for value in row)
    )


def sweep_seconds(layer_seconds: float, layers: int, windows: int, batch_size: int) -> float:
    """What a sweep takes: one pass over the model and L suffixes, for each batch."""
    return layer_seconds * math.ceil(windows / batch_size) * (layers + layers * (layers + 1) / 2)


def _memory(blocks: Blocks, run: SensitivityRun, tokens: int) -> int:
    """Bytes of the weights, and of a pass over ``tokens`` tokens: the state at every block, and one block's work."""
    hidden, intermediate = int(blocks.config["hidden_size"]), int(blocks.config["intermediate_size"])
    states = (blocks.num_layers + 1) * hidden
    block = 4 * hidden * (run.sync_tp_size or 1) + 3 * intermediate
    return (parameter_count(blocks.config) + tokens * (states + block)) * blocks.dtype.itemsize


def _estimate(suffixes: Suffixes, windows: np.ndarray, done: int, batch_size: int) -> str:
    """Time and memory of what is to come, from one layer timed here and now."""
    blocks, left = suffixes.blocks, len(windows) - done
    batch = torch.from_numpy(windows[:batch_size])
    seconds = sweep_seconds(
        layer_seconds(blocks, suffixes.layer(0, suffixes.layouts[-1]), batch), blocks.num_layers, left, batch_size
    )
    pairs = 2 if suffixes.prefix is not suffixes.layouts[-1] else 1
    states = pairs * (blocks.num_layers + 1) * batch.numel() * int(blocks.config["hidden_size"]) * blocks.dtype.itemsize
    return (
        f"{left} windows of {windows.shape[1]} tokens, {blocks.num_layers + 1} models: about {human_seconds(seconds)}"
        f" on {blocks.device}, {human_bytes(parameter_count(blocks.config) * blocks.dtype.itemsize)} of weights and"
        f" {human_bytes(states)} of states in memory"
    )


# ---- from the table to S ----


def perplexity_increases(perplexities: np.ndarray, mode: str) -> np.ndarray:
    """S of perplexities [..., L + 1]: against the next column in a sweep, against the dense one for each block
    alone."""
    return perplexities[..., :-1] - (perplexities[..., -1:] if mode.startswith("each") else perplexities[..., 1:])


def block_sensitivities(
    table: np.ndarray, tokens: int, mode: str, *, tau1: float, tau2: float
) -> tuple[list[float], list[BlockSensitivity]]:
    """Perplexities [L + 1], and S of each block with its bootstrap interval over windows and its class.

    table: [windows, L + 1] in nats; tokens: scored in each window.
    """
    perplexities = np.exp(table.mean(0) / tokens)
    rng = np.random.default_rng(0)
    counts = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=RESAMPLES)
    resampled = perplexity_increases(np.exp(counts @ table / len(table) / tokens), mode)
    low, high = np.quantile(resampled, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0)
    values = perplexity_increases(perplexities, mode).tolist()
    blocks = [
        BlockSensitivity(block, value, low=least, high=most, sensitivity_class=classify(value, tau1, tau2))
        for block, (value, least, most) in enumerate(zip(values, low.tolist(), high.tolist(), strict=True))
    ]
    return perplexities.tolist(), blocks


def default_tau1(parameters: int) -> float:
    return TAU1_LARGE if parameters >= LARGE else TAU1


def classify(sensitivity: float, tau1: float, tau2: float) -> str:
    """The paper's three classes: dropped as they are, distilled, regrouped and distilled."""
    return CLASSES[(sensitivity > tau1) + (sensitivity > tau2)]


def sensitivity_rows(document: SensitivityDocument) -> Iterator[dict[str, str]]:
    """One row per block for people."""
    for entry, perplexity in zip(document.blocks, document.perplexity, strict=False):
        yield {
            "block": str(entry.block),
            "S": f"{entry.sensitivity:+.4f}",
            f"{document.interval:.0%} interval": f"{entry.low:+.4f} to {entry.high:+.4f}",
            "class": entry.sensitivity_class,
            "perplexity": f"{perplexity:.4f}",
        }
