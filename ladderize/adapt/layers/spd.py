"""``ladderize spd``: sensitivity, assignment to ranks, repair and conversion in one command.

The paper's recipe (arXiv 2502.20727, section 4) with three changes: every dropped block is repaired, also insensitive
ones; by default by alignment (least squares) instead of distillation; and neurons change ranks along with heads.
"""

from dataclasses import replace
from pathlib import Path

from ladderize.adapt.layers.assign import assign_layers
from ladderize.adapt.layers.options import SensitivityOptions, SpdOptions, layers_to_rewrite
from ladderize.adapt.layers.rewrite import LayersDocument, LayerTask, SpdBlock, open_layer_task, rewrite_layers
from ladderize.adapt.layers.sensitivity import write_sensitivity
from ladderize.adapt.layers.windows import Windows
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import SILENT, Console
from ladderize.convert.assignment import ASSIGNMENT, read_assignment
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
    windows, ranks, task = task.windows, task.ranks, with_repair(task, options)

    def make(folder: Path) -> LayersDocument | None:
        measured, assigned, assignment = folder / SENSITIVITY, folder / ASSIGNMENT, None
        if not ranks.broadcast(measured.is_file()):
            calibration = windows.train[:CALIBRATION]
            sweep = SensitivityOptions(
                model,
                options.data,
                measured,
                samples=len(calibration),
                seed=options.seed,
                sync_tp_size=size,
                mode="sweep",
                dtype=task.about()["dtype"],
            )
            drawn = calibration.numpy(), task.data.sha256
            write_sensitivity(sweep, drawn=drawn, ranks=ranks, console=console)
            ranks.barrier()
        costs = read_sensitivity(measured).costs
        count = max(1, round(options.spd_fraction * len(costs)))
        dropped = sorted(cost.layer for cost in ascending(costs)[:count])
        layout = Layout.from_layers(dense.num_layers, spd=dropped, sync_tp_size=size)
        if options.assign:
            if ranks.is_main and not assigned.is_file():
                made = assign_layers(task.dense, layout, options.assign, windows, seed=options.seed, console=console)
                write_json(assigned, made.to_dict())
            ranks.barrier()
            assignment = read_assignment(assigned)
        return rewrite_layers(
            task,
            folder,
            layout,
            layers_to_rewrite(task.options, layout),
            identity,
            assignment=assignment,
            blocks=[SpdBlock(cost.layer, cost.sensitivity, cost.layer in dropped) for cost in costs],
            extra_files={SENSITIVITY: measured.read_text()},
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
