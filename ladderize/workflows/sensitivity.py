"""Measures sensitivities: of blocks, by the SPD paper's sweep done cheaply, and of single sync points.

All models of a sweep agree with the dense one before their first changed block, so for each batch of windows there is
one dense pass, and L suffixes branch off it: L/2 forwards and one, instead of L + 1. Where models are aligned they have
weights of their own, and are made one after the other. What results is a table of negative log-likelihoods, windows x
models, from which everything else follows, and from which a killed run goes on.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ladderize import data
from ladderize.adapt.blockwise.windows import Windows
from ladderize.blocks import Blocks, open_checkpoint, read_windows, stored_dtype
from ladderize.checkpoint.config import parameter_count
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.point_sensitivity import PointSensitivity, point_changes, point_document
from ladderize.convert.sensitivity_file import (
    CalibrationData,
    SensitivityDocument,
    SensitivityRun,
    UnfinishedSensitivity,
    block_document,
    column_layouts,
)
from ladderize.errors import UserError
from ladderize.eval.options import PointOptions, SensitivityOptions
from ladderize.eval.suffixes import fill_table, is_table
from ladderize.files.documents import check_writable, read_json, write_json
from ladderize.files.work import WorkFolder, differences, work_folder
from ladderize.layout import Layout
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks, join_ranks
from ladderize.workflows.aligned_layouts import AlignedLayouts, describe_alignment, fill_aligned, windows_to_align_on

Content = Mapping[str, Any]  # of the file
Save = Callable[[Content], None]  # gets the content of the file, every few seconds
Options = SensitivityOptions | PointOptions
Measured = TypeVar("Measured", SensitivityDocument, PointSensitivity)


def measure_sensitivity(
    model: str | Path,
    options: SensitivityOptions,
    *,
    console: Console = SILENT,
    windows: np.ndarray | None = None,
    sha256: str | None = None,
    ranks: Ranks | None = None,
    previous: Content | None = None,
    save: Save = lambda content: None,
) -> SensitivityDocument:
    """Fill the table and return the document of sensitivity.json.

    ranks: share the work, and all return the same; None: this process alone. ``save`` gets, on rank 0, the content of
    the file every few seconds. ``previous``: the content of an unfinished run's, whose table is taken over; raises
    UserError if it measured anything else. windows: ids [windows, seq_len] that were drawn from the data before;
    sha256: of those data, if they are no single file.
    """
    checkpoint = open_dense(str(model), options)
    layouts = column_layouts(options.mode, int(checkpoint.config["num_hidden_layers"]), options.sync_tp_size)
    run, rows = _measured(checkpoint, str(model), options, layouts, windows, sha256, ranks, previous, save, console)
    return block_document(run, rows, tau1=options.tau1, tau2=options.tau2)


def measure_points(
    model: str | Path,
    options: PointOptions,
    *,
    console: Console = SILENT,
    ranks: Ranks | None = None,
    previous: Content | None = None,
    save: Save = lambda content: None,
) -> PointSensitivity:
    """What each change of single sync points costs, measured in one run; see ``measure_sensitivity``.

    Without a sync_tp_size nothing is dropped.
    """
    checkpoint = open_dense(str(model), options)
    layers = int(checkpoint.config["num_hidden_layers"])
    changes = point_changes(layers, dropped=options.sync_tp_size is not None, pairs=options.pairs)
    layouts = [*(change.layout(layers, options.sync_tp_size) for change in changes), Layout.dense(layers)]
    run, rows = _measured(checkpoint, str(model), options, layouts, None, None, ranks, previous, save, console)
    return point_document(run, changes, rows, num_layers=layers, pairs=options.pairs)


def open_dense(model: str, options: Options) -> Checkpoint:
    """The checkpoint; raises UserError unless it is a dense model."""
    check_device(options.device)
    checkpoint = open_checkpoint(model, options.revision)
    layout = Layout.from_config(checkpoint.config)
    if not layout.is_dense:
        raise UserError(f"{model} is not dense ({layout}); a sensitivity is measured on the dense model")
    return checkpoint


def _measured(
    checkpoint: Checkpoint,
    model: str,
    options: Options,
    layouts: list[Layout],
    windows: np.ndarray | None,
    sha256: str | None,
    ranks: Ranks | None,
    previous: Content | None,
    save: Save,
    console: Console,
) -> tuple[SensitivityRun, list[list[float]]]:
    """What was measured on what, and the table: of each window its negative log-likelihood under each of ``layouts``,
    of which what ``previous`` has is not computed again. The other arguments are those of ``measure_sensitivity``."""
    for layout in layouts:
        layout.check_model(checkpoint.config)
    scored, to_align = _drawn_windows(checkpoint, options, windows, console)
    run = SensitivityRun(
        model=model,
        fingerprint=fingerprint(checkpoint),
        layout=str(Layout.from_config(checkpoint.config)),
        parameters=parameter_count(checkpoint.config),
        data=CalibrationData(
            file=options.data,
            sha256=sha256 or data.file_sha256(options.data),
            samples=len(scored),
            seq_len=scored.shape[1],
            seed=options.seed,
        ),
        mode=options.mode,
        sync_tp_size=options.sync_tp_size,
        dtype=stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype,
        aligned=describe_alignment(to_align) if to_align is not None else None,
    )
    about = {**run.to_dict(), **({"pairs": options.pairs} if isinstance(options, PointOptions) else {})}
    table = np.full((len(scored), len(layouts)), np.nan)
    if previous is not None:
        rows = _rows_of(previous, about, len(layouts), len(scored))
        table[: len(rows)] = np.array(rows, float).reshape(-1, len(layouts))
    ranks = ranks or Ranks(0, 1, torch.device(options.device))
    blocks = Blocks(checkpoint, getattr(torch, run.dtype), ranks.device)

    def keep() -> None:
        if ranks.is_main:
            nll = [[None if math.isnan(value) else value for value in row] for row in table.tolist()]
            save({**about, **UnfinishedSensitivity(**vars(run), complete=False, nll=nll).to_dict()})

    if np.isnan(table).any():
        how: dict[str, Any] = {"what": f"sensitivity ({run.mode})", "ranks": ranks, "save": keep, "console": console}
        if to_align is not None:
            fill_aligned(table, AlignedLayouts(blocks, to_align, options.batch_size), layouts, scored, **how)
        else:
            fill_table(table, blocks, layouts, scored, batch_size=options.batch_size, data=run.data.file, **how)
    return run, table.tolist()


def _drawn_windows(
    checkpoint: Checkpoint, options: Options, drawn: np.ndarray | None, console: Console
) -> tuple[np.ndarray, Windows | None]:
    """The first of all windows of the data, in an order drawn with the seed, to score: ids [samples, seq_len]; and of
    those after them some to align models on, None where models are scored as they are. drawn: all windows, if they were
    read before."""
    if drawn is None:
        drawn = read_windows(checkpoint, options.data, seq_len=options.seq_len, samples=None, seed=options.seed)
    scored = drawn[: options.samples]
    if not options.align:
        if len(scored) < options.samples:
            console.note(
                f"{options.data} gives {len(scored)} windows of {scored.shape[1]} tokens, fewer than the"
                f" {options.samples} of --samples: all are taken"
            )
        return scored, None
    aligned = windows_to_align_on(checkpoint, drawn[options.samples :], options.align_samples)
    if aligned is None:
        raise UserError(
            f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens, too few for {options.samples} to"
            f" score, {options.align_samples or 1} others to align on and some that are held out; give more data, or"
            " lower --samples, --align-samples or --seq-len"
        )
    return scored, aligned


def _rows_of(previous: Content, run: Content, columns: int, samples: int) -> list[list[float | None]]:
    """The table of a sensitivity.json as it lies there, which may be anybody's."""
    if different := differences(_decisive(previous), _decisive(run)):
        raise UserError(f"--out holds a measurement with another {different}; name another file, or pass --overwrite")
    rows = previous.get("nll")
    if not is_table(rows, columns, samples, gaps=previous.get("complete") is not True):
        raise UserError(
            f"--out holds no table of at most {samples} rows of {columns} log-likelihoods; name another file, or pass"
            " --overwrite"
        )
    return cast(list[list[float | None]], rows)


def _decisive(run: Content) -> dict[str, Any]:
    """What rows have to agree in to stand in one table. Of the data not where they lie: the same bytes may by now lie
    elsewhere."""
    told = {key: run[key] for key in ("fingerprint", "mode", "pairs", "sync_tp_size", "dtype") if key in run}
    told["alignment"] = run.get("aligned")
    data = run.get("data")
    return told | ({f"data {key}": data[key] for key in data if key != "file"} if isinstance(data, Mapping) else {})


# ---- files ----


class SensitivityFolder(WorkFolder):
    """The table of a ``ladderize sensitivity`` while it grows, beside the file that it becomes."""

    TABLE = "table.json"
    COMMAND = "sensitivity"
    CONTENT = (*WorkFolder.CONTENT, TABLE)
    OPTION = "--out"

    @property
    def table(self) -> Path:
        return self.folder / self.TABLE


def write_sensitivity(
    model: str | Path,
    out: str | Path,
    options: SensitivityOptions,
    *,
    overwrite: bool = False,
    console: Console = SILENT,
) -> SensitivityDocument:
    """Measure the sensitivity of each block and write the JSON file ``out``, going on where a killed run was.

    model: a dense checkpoint, folder or hub id. overwrite: measure again, whatever ``out`` holds. Several processes
    (torchrun, accelerate launch) share the windows out, or with ``options.align`` the models; rank 0 writes, and all
    return the same. Raises UserError, also for a file that measures something else.
    """
    measure = partial(measure_sensitivity, model, options)
    return _written(measure, options, Path(out), overwrite, "; classes are those of --tau1 and --tau2", console)


def write_points(
    model: str | Path,
    out: str | Path,
    options: PointOptions,
    *,
    overwrite: bool = False,
    console: Console = SILENT,
) -> PointSensitivity:
    """Measure what single sync points cost and write the JSON file ``out``; the rest as in ``write_sensitivity``."""
    return _written(partial(measure_points, model, options), options, Path(out), overwrite, "", console)


def _written(
    measure: Callable[..., Measured],
    options: Options,
    out: Path,
    overwrite: bool,
    remark: str,
    console: Console,
) -> Measured:
    """What ``measure`` makes of an earlier content of the file, or of the work beside it. remark: about a file that is
    complete."""
    ranks = join_ranks(options.device)
    out = out.expanduser()
    if ranks.is_main:
        check_writable(out, inputs=[options.data])
    with SensitivityFolder(work_folder(str(out), None), {}, main=ranks.is_main) as work:
        known = [path for path in (work.table, out) if ranks.is_main and path.is_file() and not overwrite]
        previous = read_json(known[0], advice="name another file, or pass --overwrite") if known else None
        if previous is not None and known[0] == out and previous.get("complete") is True:
            console.note(f"{out} is complete, so nothing was measured (--overwrite measures again){remark}")
        else:
            console.note(f"what is measured is kept in {work.folder} until {out} is there; the same command goes on")
        save = partial(write_json, work.table)
        document = measure(ranks=ranks, previous=ranks.broadcast(previous), save=save, console=console)
        if ranks.is_main:
            write_json(out, document.to_dict())
            work.remove()
    return document
