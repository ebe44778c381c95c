"""Measures sensitivities: of blocks, by the SPD paper's sweep done cheaply, and of single sync points.

All models of a sweep agree with the dense one before their first changed block, so for each batch of windows there is
one dense pass, and L suffixes branch off it: L/2 forwards and one, instead of L + 1. Where models are aligned they have
weights of their own, and are made one after the other. What results is a table of negative log-likelihoods, windows x
models, from which everything else follows, and from which a killed run goes on.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ladderize import data
from ladderize.adapt.blockwise.windows import Windows
from ladderize.blocks import Blocks, open_checkpoint, read_windows, stored_dtype
from ladderize.checkpoint.llama import parameter_count
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.point_sensitivity import PointSensitivity, point_changes, point_costs
from ladderize.convert.sensitivity_file import (
    INTERVAL,
    CalibrationData,
    SensitivityDocument,
    SensitivityRun,
    UnfinishedSensitivity,
)
from ladderize.errors import UserError
from ladderize.eval.options import PointOptions, SensitivityOptions
from ladderize.eval.sensitivity import block_sensitivities, column_layouts, default_tau1
from ladderize.eval.window_table import fill_table, is_table
from ladderize.files.work import differences
from ladderize.layout import Layout
from ladderize.ranks.device import check_device
from ladderize.workflows.aligned_layouts import AlignedLayouts, describe_alignment, fill_aligned, windows_to_align_on

Save = Callable[[Mapping[str, Any]], None]  # gets the content of the file, every few seconds


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
    table is taken over; raises UserError if it measured anything else. windows: ids [windows, seq_len] that were drawn
    from the data before; sha256: of those data, if they are no single file.
    """
    checkpoint = open_dense(str(model), options)
    layers = int(checkpoint.config["num_hidden_layers"])
    layouts = column_layouts(options.mode, layers, options.sync_tp_size)
    layouts[0].check_model(checkpoint.config)
    drawn = _drawn_windows(checkpoint, options, windows, console)
    run = _run(checkpoint, str(model), options, drawn, sha256)
    rows = _filled_rows(checkpoint, run, layouts, drawn, options, previous, save, console)
    tau1 = options.tau1 if options.tau1 is not None else default_tau1(run.parameters)
    perplexities, entries = block_sensitivities(
        np.array(rows), run.data.seq_len - 1, options.mode, tau1=tau1, tau2=options.tau2
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
    drawn = _drawn_windows(checkpoint, options, None, console)
    run = _run(checkpoint, str(model), options, drawn, None)
    every = [*layouts, Layout.dense(layers)]
    rows = _filled_rows(checkpoint, run, every, drawn, options, previous, save, console)
    dense_nll, costs = point_costs(changes, np.array(rows), run.data.seq_len - 1)
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


@dataclass(frozen=True)
class DrawnWindows:
    """scored: ids [samples, seq_len]. aligned: others, to align models on; None: models are scored as they are."""

    scored: np.ndarray
    aligned: Windows | None


def _drawn_windows(
    checkpoint: Checkpoint,
    options: SensitivityOptions | PointOptions,
    drawn: np.ndarray | None,
    console: Console,
) -> DrawnWindows:
    """The first of all windows of the data, in an order drawn with the seed, and after them those to align on. drawn:
    these windows, if they were read before."""
    if drawn is None:
        drawn = read_windows(checkpoint, options.data, seq_len=options.seq_len, samples=None, seed=options.seed)
    scored = drawn[: options.samples]
    if not options.align:
        if len(scored) < options.samples:
            console.note(
                f"{options.data} gives {len(scored)} windows of {scored.shape[1]} tokens, fewer than the"
                f" {options.samples} of --samples: all are taken"
            )
        return DrawnWindows(scored, None)
    aligned = windows_to_align_on(checkpoint, drawn[options.samples :], options.align_samples)
    if aligned is None:
        raise UserError(
            f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens, too few for {options.samples} to"
            f" score, {options.align_samples or 1} others to align on and some that are held out; give more data, or"
            " lower --samples, --align-samples or --seq-len"
        )
    return DrawnWindows(scored, aligned)


def _run(
    checkpoint: Checkpoint,
    model: str,
    options: SensitivityOptions | PointOptions,
    drawn: DrawnWindows,
    sha256: str | None,
) -> SensitivityRun:
    """What is measured, on what."""
    return SensitivityRun(
        model=model,
        fingerprint=fingerprint(checkpoint),
        layout=str(Layout.from_config(checkpoint.config)),
        parameters=parameter_count(checkpoint.config),
        data=CalibrationData(
            file=options.data,
            sha256=sha256 or data.file_sha256(options.data),
            samples=len(drawn.scored),
            seq_len=drawn.scored.shape[1],
            seed=options.seed,
        ),
        mode=options.mode,
        sync_tp_size=options.sync_tp_size,
        dtype=stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype,
        aligned=describe_alignment(drawn.aligned) if drawn.aligned is not None else None,
    )


def _filled_rows(
    checkpoint: Checkpoint,
    run: SensitivityRun,
    layouts: list[Layout],
    drawn: DrawnWindows,
    options: SensitivityOptions | PointOptions,
    previous: Mapping[str, Any] | None,
    save: Save,
    console: Console,
) -> list[list[float]]:
    """The whole table, of which what ``previous`` has is not computed again."""
    about = {**run.to_dict(), **({"pairs": options.pairs} if isinstance(options, PointOptions) else {})}
    scored, what = drawn.scored, f"sensitivity ({run.mode})"
    rows = _rows_of(previous, about, len(layouts), len(scored)) if previous is not None else []
    blocks = Blocks(checkpoint, getattr(torch, run.dtype), torch.device(options.device))

    def keep(rows: Sequence[Sequence[float | None]]) -> None:
        nll = [list(row) for row in rows]
        save({**about, **UnfinishedSensitivity(**vars(run), complete=False, nll=nll).to_dict()})

    if drawn.aligned is not None:
        table = np.full((len(scored), len(layouts)), np.nan)
        table[: len(rows)] = np.array(rows, float).reshape(-1, len(layouts))
        if np.isnan(table).any():
            aligned = AlignedLayouts(blocks, drawn.aligned, options.batch_size)
            fill_aligned(table, aligned, layouts, scored, what=what, save=lambda: keep(_shown(table)), console=console)
        return cast(list[list[float]], table.tolist())
    whole = cast(list[list[float]], rows)
    if len(whole) < len(scored):
        fill_table(
            whole,
            blocks,
            layouts,
            scored,
            batch_size=options.batch_size,
            what=what,
            data=run.data.file,
            save=keep,
            console=console,
        )
    return whole


def _shown(table: np.ndarray) -> list[list[float | None]]:
    """As JSON holds it: null for what is not there."""
    return [[None if math.isnan(value) else value for value in row] for row in table.tolist()]


def _rows_of(
    previous: Mapping[str, Any], run: Mapping[str, Any], columns: int, samples: int
) -> list[list[float | None]]:
    """The table of a sensitivity.json as it lies there, which may be anybody's."""
    if different := differences(_decisive(previous), _decisive(run)):
        raise UserError(f"--out holds a measurement with another {different}; name another file, or pass --overwrite")
    rows = previous.get("nll")
    if not is_table(rows, columns, samples, gaps="aligned" in run):
        raise UserError(
            f"--out holds no table of at most {samples} rows of {columns} log-likelihoods; name another file, or pass"
            " --overwrite"
        )
    return cast(list[list[float | None]], rows)


def _decisive(run: Mapping[str, Any]) -> dict[str, Any]:
    """What rows have to agree in to stand in one table. Of the data not where they lie: the same bytes may by now lie
    elsewhere."""
    told = {key: run[key] for key in ("fingerprint", "mode", "pairs", "sync_tp_size", "dtype") if key in run}
    told["alignment"] = run.get("aligned")
    data = run.get("data")
    return (
        {**told, **{f"data {key}": data[key] for key in data if key != "file"}} if isinstance(data, Mapping) else told
    )
