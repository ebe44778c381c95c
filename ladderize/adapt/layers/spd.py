"""``ladderize spd``: sensitivity, assignment to ranks, repair and conversion in one command.

The paper's recipe (arXiv 2502.20727, section 4) with three changes: every dropped block is repaired, also insensitive
ones; by default by alignment (least squares) instead of distillation; and neurons change ranks along with heads.
"""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ladderize.adapt.layers.assign import assign_layers
from ladderize.adapt.layers.options import SensitivityOptions, SpdOptions, layers_to_rewrite
from ladderize.adapt.layers.rewrite import LayersDocument, LayerTask, SpdBlock, open_layer_task, rewrite_layers
from ladderize.adapt.layers.sensitivity import write_sensitivity
from ladderize.adapt.layers.windows import Windows
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import SILENT, Console
from ladderize.convert.assignment import ASSIGNMENT, RankAssignment, read_assignment
from ladderize.convert.sensitivity_file import ascending, read_sensitivity
from ladderize.errors import UserError
from ladderize.files.documents import write_json
from ladderize.layout import Layout, check_split

SENSITIVITY = "sensitivity.json"  # in the work folder, and in OUT
CALIBRATION = 128  # windows for sensitivity, the paper's


def spd(options: SpdOptions, *, console: Console = SILENT) -> LayersDocument | None:
    """Make the SPD checkpoint ``options.out`` of a dense model. Returns the document of its repair; None on other ranks
    than 0. Several processes (accelerate launch, torchrun) share the work; rank 0 writes. A killed run resumes."""
    model, size = options.model, options.sync_tp_size
    checkpoint = open_checkpoint(model)
    dense = Layout.from_config(checkpoint.config)
    if not dense.is_dense:
        raise UserError(
            f"{model} is not dense ({dense}); only a dense model has sync points to drop by their sensitivity"
        )
    check_split(checkpoint.config, size, name="--sync-tp-size")
    blockwise, overwrite, verify = options.blockwise, options.overwrite, options.verify
    task = open_layer_task(model, options.out, model, blockwise, console, overwrite=overwrite, verify=verify)
    asked = {name: getattr(options, name) for name in ("sync_tp_size", "spd_fraction", "repair", "assign")}
    identity = {"method": "spd", **task.fingerprints(), **task.about(), **asked}
    windows, task = task.windows, with_repair(task, options)

    def make(folder: Path) -> LayersDocument | None:
        sensitivity = folder / SENSITIVITY
        measure(task, options, windows.train[:CALIBRATION], sensitivity)
        costs = read_sensitivity(sensitivity).costs
        count = max(1, round(options.spd_fraction * len(costs)))
        dropped = sorted(cost.layer for cost in ascending(costs)[:count])
        layout = Layout.from_layers(dense.num_layers, spd=dropped, sync_tp_size=size)
        return rewrite_layers(
            task,
            folder,
            layout,
            layers_to_rewrite(task.options, layout),
            identity,
            assignment=assign(task, layout, options, windows, folder / ASSIGNMENT) if options.assign else None,
            blocks=[SpdBlock(cost.layer, cost.sensitivity, cost.layer in dropped) for cost in costs],
            extra_files={SENSITIVITY: sensitivity.read_text()},
        )

    return task.once(identity, make)


def with_repair(task: LayerTask, options: SpdOptions) -> LayerTask:
    """Return the task with the options and windows of the repair."""
    repair, train = options.repairing, task.windows.train
    tokens = repair.least_tokens(task.dense.config)
    if tokens is not None and options.samples is None:
        train = train[: max(1, tokens // train.shape[1])]
    data = replace(task.data, samples=len(train))
    return replace(task, options=repair, windows=Windows(train, task.windows.heldout), data=data)


def measure(task: LayerTask, options: SpdOptions, calibration: Tensor, path: Path) -> None:
    """Measure the backward sweep and write sensitivity.json, unless it is there."""
    if task.ranks.broadcast(path.is_file()):
        return
    sweep = SensitivityOptions(
        options.model,
        options.data,
        path,
        samples=len(calibration),
        seed=options.seed,
        sync_tp_size=options.sync_tp_size,
        mode="sweep",
        dtype=task.about()["dtype"],
    )
    drawn = calibration.numpy(), task.data.sha256
    write_sensitivity(sweep, drawn=drawn, ranks=task.ranks, console=task.console)
    task.ranks.barrier()


def assign(task: LayerTask, layout: Layout, options: SpdOptions, windows: Windows, path: Path) -> RankAssignment:
    """Return the assignment of the dropped blocks' heads and neurons. One that is there already is read."""
    if task.ranks.is_main and not path.is_file():
        made = assign_layers(task.dense, layout, options.assign, windows, seed=options.seed, console=task.console)
        write_json(path, made.to_dict())
    task.ranks.barrier()
    return read_assignment(path)
