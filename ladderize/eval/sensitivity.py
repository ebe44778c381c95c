"""How much each block's perplexity suffers when its sync points are dropped or overlapped: the SPD paper's sweep, done
cheaply.

S[i] = PPL(changed: blocks i..L-1) - PPL(changed: blocks i+1..L-1), arXiv 2502.20727: one sweep from the last block
backwards. All L + 1 models agree with the dense one before their first changed block, so for each batch of windows
there is one dense pass, and L suffixes branch off it: L/2 forwards and one, instead of L + 1. What results is a table
of negative log-likelihoods, windows x (L + 1), from which everything else follows, and from which a killed run goes on.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ladderize import data
from ladderize.blocks import Blocks, open_checkpoint, read_windows, stored_dtype
from ladderize.checkpoint.fingerprint import fingerprint
from ladderize.checkpoint.llama import parameter_count
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console
from ladderize.convert.point_sensitivity import PointSensitivity, point_changes, point_costs
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
from ladderize.eval.options import PointOptions, SensitivityOptions
from ladderize.eval.window_table import fill_table, is_table
from ladderize.files.work import differences
from ladderize.layout import Layout
from ladderize.ranks.device import check_device

TAU1, TAU1_LARGE, LARGE = 0.05, 0.02, 30_000_000_000  # the paper's, and from how many parameters on the lower one holds
Save = Callable[[Mapping[str, Any]], None]  # gets the content of the file, every few seconds


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


def measure_sensitivity(
    model: str | Path,
    options: SensitivityOptions,
    *,
    console: Console = SILENT,
    windows: np.ndarray | None = None,
    sha256: str | None = None,
    previous: Mapping[str, Any] | None = None,
    save: Save = lambda content: None,
) -> SensitivityDocument:
    """Fill the table and return the document of sensitivity.json.

    ``save`` gets the content of the file every few seconds. ``previous``: the content of an unfinished run's, whose
    rows are taken over; raises UserError if it measured anything else. windows: ids [samples, seq_len] that were read
    from the data before; sha256: of those data, if they are no single file.
    """
    checkpoint = open_dense(str(model), options)
    layers = int(checkpoint.config["num_hidden_layers"])
    layouts = column_layouts(options.mode, layers, options.sync_tp_size)
    layouts[0].check_model(checkpoint.config)
    if windows is None:
        windows = _drawn_windows(checkpoint, options, console)
    run = sensitivity_run(checkpoint, str(model), options, windows, sha256)
    rows = _filled_rows(checkpoint, run, layouts, windows, options, previous, save, console)
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


def measure_points(
    model: str | Path,
    options: PointOptions,
    *,
    console: Console = SILENT,
    previous: Mapping[str, Any] | None = None,
    save: Save = lambda content: None,
) -> PointSensitivity:
    """What each change of single sync points costs, measured in one run; see ``measure_sensitivity``.

    Without a sync_tp_size nothing is dropped.
    """
    checkpoint = open_dense(str(model), options)
    layers = int(checkpoint.config["num_hidden_layers"])
    changes = point_changes(layers, dropped=options.sync_tp_size is not None, pairs=options.pairs)
    layouts = [change.layout(layers, options.sync_tp_size) for change in changes]
    for layout in layouts:
        layout.check_model(checkpoint.config)
    windows = _drawn_windows(checkpoint, options, console)
    run = sensitivity_run(checkpoint, str(model), options, windows, None)
    every = [*layouts, Layout.dense(layers)]
    rows = _filled_rows(checkpoint, run, every, windows, options, previous, save, console)
    dense_nll, costs = point_costs(changes, np.array(rows), windows.shape[1] - 1)
    document = PointSensitivity(
        **vars(run),
        complete=True,
        num_layers=layers,
        pairs=options.pairs,
        interval=INTERVAL,
        dense_nll=dense_nll,
        costs=costs,
        nll=rows,
    )
    save(document.to_dict())
    return document


def open_dense(model: str, options: SensitivityOptions | PointOptions) -> Checkpoint:
    """The checkpoint; raises UserError unless it is a dense model."""
    check_device(options.device)
    checkpoint = open_checkpoint(model, options.revision)
    layout = Layout.from_config(checkpoint.config)
    if not layout.is_dense:
        raise UserError(f"{model} is not dense ({layout}); a sensitivity is measured on the dense model")
    return checkpoint


def _drawn_windows(checkpoint: Checkpoint, options: SensitivityOptions | PointOptions, console: Console) -> np.ndarray:
    """The first of all windows of the data, in an order drawn with the seed: ids [samples, seq_len]."""
    drawn = read_windows(checkpoint, options.data, seq_len=options.seq_len, samples=None, seed=options.seed)
    windows = drawn[: options.samples]
    if len(windows) < options.samples:
        console.note(
            f"{options.data} gives {len(windows)} windows of {windows.shape[1]} tokens, fewer than the"
            f" {options.samples} of --samples: all are taken"
        )
    return windows


def _filled_rows(
    checkpoint: Checkpoint,
    run: SensitivityRun,
    layouts: list[Layout],
    windows: np.ndarray,
    options: SensitivityOptions | PointOptions,
    previous: Mapping[str, Any] | None,
    save: Save,
    console: Console,
) -> list[list[float]]:
    """The whole table, of which the rows of ``previous`` are not computed again."""
    about = {**run.to_dict(), **({"pairs": options.pairs} if isinstance(options, PointOptions) else {})}
    rows = _rows_of(previous, about, len(layouts), len(windows)) if previous is not None else []
    if len(rows) < len(windows):
        fill_table(
            rows,
            Blocks(checkpoint, getattr(torch, run.dtype), torch.device(options.device)),
            layouts,
            windows,
            batch_size=options.batch_size,
            what=f"sensitivity ({run.mode})",
            data=run.data.file,
            save=lambda rows: save({**about, **UnfinishedSensitivity(**vars(run), complete=False, nll=rows).to_dict()}),
            console=console,
        )
    return rows


def sensitivity_run(
    checkpoint: Checkpoint,
    model: str,
    options: SensitivityOptions | PointOptions,
    windows: np.ndarray,
    sha256: str | None,
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


def _rows_of(previous: Mapping[str, Any], run: Mapping[str, Any], columns: int, samples: int) -> list[list[float]]:
    """The table of a sensitivity.json as it lies there, which may be anybody's."""
    if different := differences(_decisive(previous), _decisive(run)):
        raise UserError(f"--out holds a measurement with another {different}; name another file, or pass --overwrite")
    rows = previous.get("nll")
    if not is_table(rows, columns, samples):
        raise UserError(
            f"--out holds no table of at most {samples} rows of {columns} log-likelihoods; name another file, or pass"
            " --overwrite"
        )
    return cast(list[list[float]], rows)


def _decisive(run: Mapping[str, Any]) -> dict[str, Any]:
    """What rows have to agree in to stand in one table. Of the data not where they lie: the same bytes may by now lie
    elsewhere."""
    told = {key: run[key] for key in ("fingerprint", "mode", "pairs", "sync_tp_size", "dtype") if key in run}
    data = run.get("data")
    return (
        {**told, **{f"data {key}": data[key] for key in data if key != "file"}} if isinstance(data, Mapping) else told
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
