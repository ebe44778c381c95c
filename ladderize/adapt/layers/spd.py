"""``ladderize spd``: sensitivity, assignment to ranks, repair and conversion in one command.

The paper's recipe (arXiv 2502.20727, section 4) with three changes: every dropped block is repaired, also insensitive
ones; by default by alignment (least squares) instead of distillation; and neurons change ranks along with heads.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ladderize.adapt.layers.assign import assign_layers
from ladderize.adapt.layers.document import LayersDocument, SpdBlock
from ladderize.adapt.layers.layer_files import LayerFolder
from ladderize.adapt.layers.options import (
    AlignOptions,
    BlockwiseOptions,
    SpdOptions,
    WindowOptions,
    default_tokens,
    layers_to_rewrite,
)
from ladderize.adapt.layers.rewrite import LayerTask, open_layer_task, rewrite_layers
from ladderize.adapt.layers.sensitivity import measure_sensitivity
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import SILENT, Console
from ladderize.convert.assignment import ASSIGNMENT, RankAssignment, read_assignment
from ladderize.convert.sensitivity_file import LayerCost, ascending, read_sensitivity
from ladderize.errors import UserError
from ladderize.eval.options import SensitivityOptions
from ladderize.files.documents import write_json
from ladderize.layout import Layout, check_split

SENSITIVITY = "sensitivity.json"  # in the work folder, and in OUT
CALIBRATION = 128  # windows for sensitivity, the paper's


def spd(
    model: str | Path,
    out: str | Path,
    options: SpdOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    console: Console = SILENT,
) -> LayersDocument | None:
    """Make the SPD checkpoint ``out`` of the dense ``model``.

    Returns the document of its repair; None on other ranks than 0. A work folder keeps every step until OUT is written,
    so a killed run resumes. Several processes (accelerate launch, torchrun) share the work, and rank 0 writes.
    Raises UserError.
    """
    model, revision = str(model), options.revision
    checkpoint = open_checkpoint(model, revision)
    dense = Layout.from_config(checkpoint.config)
    if not dense.is_dense:
        raise UserError(
            f"{model} is not dense ({dense}); only a dense model has sync points to drop by their sensitivity"
        )
    check_split(checkpoint.config, options.sync_tp_size, name="--sync-tp-size")
    how: dict[str, Any] = {"overwrite": overwrite, "verify": verify, "revision": revision}
    task = open_layer_task(model, str(out), model, options, console, **how)
    asked = {name: getattr(options, name) for name in ("sync_tp_size", "spd_fraction", "repair", "assign")}
    identity = {"method": "spd", **task.fingerprints(), **task.about(), **asked}
    windows, task = task.windows, with_repair(task, options)
    opened = task.open_work(identity)
    if opened is None:
        return task.written()
    with opened as work:
        measure(task, options, windows.train[:CALIBRATION], work)
        costs = read_sensitivity(work.folder / SENSITIVITY).costs
        dropped = least_sensitive(costs, options.spd_fraction)
        layout = Layout.from_layers(dense.num_layers, spd=dropped, sync_tp_size=options.sync_tp_size)
        assignment = assign(task, layout, options, windows, work) if options.assign else None
        return rewrite_layers(
            task,
            work,
            layout,
            layers_to_rewrite(task.options, layout),
            identity,
            assignment=assignment,
            blocks=[SpdBlock(cost.layer, cost.sensitivity, cost.layer in dropped) for cost in costs],
            extra_files={SENSITIVITY: (work.folder / SENSITIVITY).read_text()},
        )


def with_repair(task: LayerTask, options: SpdOptions) -> LayerTask:
    """Return the task with the options and windows of ``options.repair``."""
    kind = AlignOptions if options.repair == "align" else BlockwiseOptions
    shared = {each.name: getattr(options, each.name) for each in fields(kind) if hasattr(options, each.name)}
    repair: WindowOptions = kind(**shared)
    train, heldout = task.windows.train, task.windows.heldout
    if options.repair == "align" and options.samples is None:
        train = train[: max(1, default_tokens(task.dense.config) // train.shape[1])]
    data = replace(task.data, samples=len(train))
    return replace(task, options=repair, windows=Windows(train, heldout), data=data)


def measure(task: LayerTask, options: SpdOptions, calibration: Tensor, work: LayerFolder) -> None:
    """Measure the backward sweep and write sensitivity.json, unless it is there."""
    path, ranks = work.folder / SENSITIVITY, task.ranks
    if ranks.broadcast(path.is_file()):
        return
    sweep = SensitivityOptions(
        data=options.data,
        mode="sweep",
        sync_tp_size=options.sync_tp_size,
        samples=len(calibration),
        seed=options.seed,
        dtype=task.about()["dtype"],
        device=str(ranks.device),
        revision=options.revision,
    )
    drawn = calibration.numpy(), task.data.sha256
    document = measure_sensitivity(task.model, sweep, console=task.console, drawn=drawn, ranks=ranks)
    if ranks.is_main:
        write_json(path, document.to_dict())
    ranks.barrier()


def least_sensitive(costs: Sequence[LayerCost], fraction: float) -> list[int]:
    """Return the layers to drop, ascending: the least sensitive ``fraction`` of all, at least one."""
    return sorted(cost.layer for cost in ascending(costs)[: max(1, round(fraction * len(costs)))])


def assign(task: LayerTask, layout: Layout, options: SpdOptions, windows: Windows, work: LayerFolder) -> RankAssignment:
    """Return the assignment of the dropped blocks' heads and neurons. One that is there already is read."""
    path = work.folder / ASSIGNMENT
    if task.ranks.is_main and not path.is_file():
        blocks = Blocks(task.dense, task.dtype, task.ranks.device)
        made = assign_layers(blocks, layout, options.assign, windows, seed=options.seed, console=task.console)
        write_json(path, made.to_dict())
    task.ranks.barrier()
    return read_assignment(path)
