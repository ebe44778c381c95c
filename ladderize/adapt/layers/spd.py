"""``ladderize spd``: sensitivity, classes, head grouping, repair and conversion in one command, with the gain of each
step.

The paper's recipe (arXiv 2502.20727, section 4): blocks with S <= tau1 are dropped as they are; those up to tau2 are
distilled; those above have their heads grouped first. With the criterion ``error`` heads are grouped for every block
that is repaired, since grouping costs nothing at inference. Repair is alignment (least squares), distillation, or both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.layers.align import align
from ladderize.adapt.layers.align_options import AlignSettings, default_tokens, layers_to_align
from ladderize.adapt.layers.align_reports import LayerReport
from ladderize.adapt.layers.block_trainer import BlockReport
from ladderize.adapt.layers.distill import distill
from ladderize.adapt.layers.head_grouping import Units, group_heads, permuted_weights
from ladderize.adapt.layers.layer_files import BlockFolder, StudentBlocks
from ladderize.adapt.layers.measures import HeldoutMeasures, LayerAt, heldout_measures, loaded
from ladderize.adapt.layers.options import DistillSettings
from ladderize.adapt.layers.rewrite import CheckpointRun, MethodRecord, WindowData, measured_note
from ladderize.adapt.layers.sensitivity import measure_sensitivity
from ladderize.adapt.layers.spd_options import SpdOptions
from ladderize.adapt.layers.windows import Windows, training_windows
from ladderize.blocks import Blocks, compute_dtype, open_checkpoint, stored_dtype
from ladderize.checkpoint.config import kv_head_count
from ladderize.checkpoint.tensors import fingerprint
from ladderize.choices import Dtype
from ladderize.console import SILENT, Console
from ladderize.convert.heads import HEAD_MAP, GroupingReport, HeadMap, read_head_map
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.convert.selection import SelectedBlock, Selection
from ladderize.convert.sensitivity_file import CLASSES, INSENSITIVE, classify, default_tau1, read_sensitivity
from ladderize.errors import UserError
from ladderize.eval.options import SensitivityOptions
from ladderize.eval.results import Perplexity
from ladderize.files.documents import read_json, write_json
from ladderize.files.records import Record
from ladderize.layout import Layout, check_split, format_ranges
from ladderize.ranks.group import Ranks, join_ranks

SPD_FILE = "spd.json"
# Advice where a step made the model worse.
ADVICE_AFTER = {
    "head grouping": "--head-grouping none",
    "alignment": "more --samples",
    "distillation": "a lower --lr, or more --samples",
}
SENSITIVITY = "sensitivity.json"  # in the work folder, and in OUT


@dataclass(frozen=True)
class SpdBlock(SelectedBlock):
    """A block of the selection with the steps that it got; None where it got none."""

    grouping: GroupingReport | None
    distillation: BlockReport | None
    alignment: LayerReport | None = None


@dataclass(frozen=True)
class SpdDocument(Record):
    """The content of spd.json: the steps that each block got and why, with their figures; docs/files.md explains the
    keys."""

    model: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    selection: Selection
    perplexity: dict[str, Perplexity]
    blocks: list[SpdBlock]
    data: WindowData
    options: DistillSettings
    dtype: str
    divergence: dict[str, float] = field(default_factory=dict)
    repair: str = "align"  # as SpdOptions has it

    def card_note(self) -> str:
        """Return the held-out figures, for the model card."""
        return measured_note(self.perplexity, self.data)


def spd(
    model: str | Path,
    out: str | Path,
    options: SpdOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    console: Console = SILENT,
) -> SpdDocument | None:
    """Make the SPD checkpoint ``out`` of the dense ``model``.

    Returns the document of spd.json; None on other ranks than 0. A work folder keeps every step until OUT is written,
    so a killed run resumes. Several processes (accelerate launch, torchrun) share the work, and rank 0 writes.
    Raises UserError.
    """
    model, out, training = str(model), str(out), options.training
    training.source.files()  # raises UserError where they are missing
    ranks = join_ranks(training.device)
    checkpoint = open_checkpoint(model, options.revision)
    dense = Layout.from_config(checkpoint.config)
    if not dense.is_dense:
        raise UserError(
            f"{model} is not dense ({dense}); only a dense model has sync points to drop by their sensitivity"
        )
    check_split(checkpoint.config, options.sync_tp_size, name="--sync-tp-size")
    run = CheckpointRun(out, SPD_FILE, training.work_dir, (checkpoint,), ranks, console, overwrite=overwrite)
    recipe = Recipe(
        spd="auto",
        sync_tp_size=options.sync_tp_size,
        sensitivity=str(run.folder / SENSITIVITY),
        spd_fraction=options.fraction,
        max_ppl_increase=options.max_ppl_increase,
    )
    with console.stage("reading the data"):
        windows = training_windows(checkpoint, training, training.distill.seed)
    calibration = windows.train[: options.calibration_samples].numpy()
    dtype = compute_dtype(training.dtype, stored_dtype(checkpoint))
    teacher = Blocks(checkpoint, dtype, ranks.device)
    stored = Blocks(checkpoint, getattr(torch, stored_dtype(checkpoint)), ranks.device)
    record = MethodRecord.of(windows, training, dtype)
    seed = training.distill.seed
    identity = {
        "method": "spd",
        "model": fingerprint(checkpoint),
        "sync_tp_size": options.sync_tp_size,
        "dtype": record.dtype,
        "calibration": {"sha256": record.data.sha256, "windows": list(calibration.shape), "seed": seed},
    }
    opened = run.open_work(identity, {**record.to_dict(), **options.choices()})
    if opened is None:
        return run.written(SpdDocument)
    with opened as work:
        fill_sensitivity(model, options, calibration, record, ranks, work, console)
        chosen, selection = recipe.resolve(dense)
        assert selection is not None
        # the work folder will be gone, and OUT has the file
        selection = replace(selection, sensitivity=replace(selection.sensitivity, file=SENSITIVITY))
        layout = chosen.layout(dense)
        head_map = group(teacher, selection, options, calibration, work, ranks, console)
        # Repair, by the options: alignment of layers from the first dropped one on, distillation of dropped ones.
        repaired = to_repair(selection, options)
        if not repaired:
            console.note(
                f"nothing to repair: all {len(selection.layers)} dropped blocks are {INSENSITIVE} (S at most tau1 ="
                f" {selection.sensitivity.tau1:g}); --distill all trains them anyway"
            )
        start = StudentBlocks(
            layout,
            layers_to_align(layout, None) if repaired and options.aligns else (),
            partial(permuted_weights, stored, orders_of(head_map)),
        )
        if start.layers:
            count = max(1, default_tokens(teacher.config) // windows.train.shape[1])
            settings = AlignSettings(seed=seed)
            align(
                teacher,
                teacher,
                start.weights,  # nothing has changed them yet
                start,
                Windows(windows.train[:count], windows.heldout),
                settings,
                work.aligned,
                ranks,
                console,
                about={"data": record.data.to_dict(), "options": settings.to_dict(), "dtype": record.dtype},
                max_memory=training.distill.max_memory,
            )
            ranks.barrier()
        student = StudentBlocks(
            layout,
            tuple(repaired) if options.distils else (),
            lambda layer: work.aligned.weights(layer) if layer in start.layers else start.weights(layer),
        )
        if student.layers:
            about = record.to_dict()
            distill(teacher, student, windows, training.distill, work.distilled, ranks, console, about=about)
        ranks.barrier()
        with console.stage("measuring held-out perplexities"):
            measured = measure_steps(teacher, layout, head_map, work, start, student, windows.heldout, ranks)
        if not ranks.is_main:
            return None
        if (worse := made_worse(measured.perplexity)) is not None:
            console.warn(worse)
        fields: dict[str, Any] = {**vars(record), **layout.to_config()}
        document = SpdDocument(
            model=model,
            out=out,
            layout=str(layout),
            selection=selection,
            perplexity=measured.perplexity,
            divergence=measured.divergence,
            blocks=block_table(selection, head_map, work, start, student),
            repair=options.repair,
            **fields,
        )
        told: dict[str, Any] = {"selection": selection.to_dict()}
        if start.layers:
            told["alignment"] = {"layers": format_ranges(start.layers), "data": record.data.to_dict()}
        if student.layers:
            told["distillation"] = {"layers": format_ranges(student.layers), **record.to_dict()}
        changes = Changes(
            head_map=head_map,
            replace={**work.aligned.tensors(start.layers), **work.distilled.tensors(student.layers)},
            record=told,
            extra_files={SENSITIVITY: (run.folder / SENSITIVITY).read_text()},
            note=document.card_note(),
        )
        run.write(work, model, chosen, document, changes, revision=options.revision, verify=verify)
    return document


def fill_sensitivity(
    model: str,
    options: SpdOptions,
    calibration: np.ndarray,
    record: MethodRecord,
    ranks: Ranks,
    work: BlockFolder,
    console: Console,
) -> None:
    """Measure the backward sweep and write sensitivity.json. An earlier measurement is only classified anew."""
    training, path = options.training, work.folder / SENSITIVITY
    if ranks.broadcast(path.is_file()):
        if ranks.is_main:
            before = read_sensitivity(path)
            tau1 = default_tau1(before.parameters) if options.tau1 is None else options.tau1
            costs = [
                replace(cost, sensitivity_class=classify(cost.sensitivity, tau1, options.tau2)) for cost in before.costs
            ]
            write_json(path, replace(before, tau1=tau1, tau2=options.tau2, costs=costs).to_dict())
        ranks.barrier()
        return
    measured = SensitivityOptions(
        data=training.data,
        mode="sweep",
        sync_tp_size=options.sync_tp_size,
        samples=len(calibration),
        seed=training.distill.seed,
        tau1=options.tau1,
        tau2=options.tau2,
        dtype=cast(Dtype, record.dtype),
        device=str(ranks.device),
        revision=options.revision,
    )
    sha256 = record.data.sha256
    document = measure_sensitivity(model, measured, windows=calibration, sha256=sha256, console=console, ranks=ranks)
    if ranks.is_main:
        write_json(path, document.to_dict())
    ranks.barrier()


def group(
    teacher: Blocks,
    selection: Selection,
    options: SpdOptions,
    calibration: np.ndarray,
    work: BlockFolder,
    ranks: Ranks,
    console: Console,
) -> HeadMap | None:
    """Return the head map of the blocks whose heads are grouped; None where there are none.

    The ranks share the blocks. A map that was computed for the same blocks by the same criterion is read.
    """
    layers, path = to_group(selection, options), work.folder / HEAD_MAP
    if not layers:
        return None
    asked = {"layers": layers, "criterion": options.head_grouping}
    if not ranks.broadcast(path.is_file() and read_json(path).get("asked") == asked):
        mine = layers[ranks.rank :: ranks.size]
        units = Units.of(teacher.config["num_attention_heads"], kv_head_count(teacher.config), options.sync_tp_size)
        console.note(f"grouping the heads of {len(layers)} blocks: {units.freedom}")
        with console.progress("grouping heads", max(mine, default=-1) + 1) as advance:
            part = group_heads(
                teacher,
                mine,
                options.sync_tp_size,
                calibration,
                criterion=options.head_grouping,
                seed=options.training.distill.seed,
                advance=advance,
            )
        for other in ranks.gather(part):
            part.orders.update(other.orders)
            part.report.update(other.report)
        if ranks.is_main:
            write_json(path, {**part.to_dict(), "asked": asked})
        ranks.barrier()
    return read_head_map(path)


def to_repair(selection: Selection, options: SpdOptions) -> list[int]:
    """Return the selected blocks that are repaired: all of them, or those that are not insensitive."""
    return [
        entry.block
        for entry in selection.blocks
        if entry.selected and (options.distill == "all" or entry.sensitivity_class != INSENSITIVE)
    ]


def to_group(selection: Selection, options: SpdOptions) -> list[int]:
    """Return the blocks whose heads are grouped: all that are repaired; with the paper's criterion only the extremely
    sensitive ones."""
    if options.head_grouping == "none":
        return []
    classes = CLASSES[-1:] if options.head_grouping == "paper" else CLASSES
    return [block for block in to_repair(selection, options) if selection.blocks[block].sensitivity_class in classes]


def orders_of(head_map: HeadMap | None) -> Mapping[int, tuple[int, ...]]:
    """Return the head order of each layer whose order differs from the dense model's."""
    return {} if head_map is None else head_map.orders


def measure_steps(
    blocks: Blocks,
    layout: Layout,
    head_map: HeadMap | None,
    work: BlockFolder,
    start: StudentBlocks,
    student: StudentBlocks,
    heldout: Tensor,
    ranks: Ranks,
) -> HeldoutMeasures:
    """Return held-out measures of the dense model and of the model after each step."""
    dense = Layout.dense(layout.num_layers)
    grouped = partial(permuted_weights, blocks, orders_of(head_map))

    def aligned(layer: int) -> dict[str, Tensor]:
        return loaded(work.aligned, layer, blocks) if layer in start.layers else grouped(layer)

    def distilled(layer: int) -> dict[str, Tensor]:
        return loaded(work.distilled, layer, blocks) if layer in student.layers else aligned(layer)

    steps: dict[str, Callable[[int], dict[str, Tensor]]] = {"sync points dropped": blocks.weights}
    if head_map is not None:
        steps["+ head grouping"] = grouped
    if start.layers:
        steps["+ alignment"] = aligned
    if student.layers:
        steps["+ distillation"] = distilled

    def with_weights(weights: Callable[[int], dict[str, Tensor]]) -> LayerAt:
        return lambda layer: blocks.layer(layer, layout, weights(layer))

    variants: dict[str, tuple[Blocks, LayerAt]] = {"dense": (blocks, lambda layer: blocks.layer(layer, dense))}
    variants |= {name: (blocks, with_weights(weights)) for name, weights in steps.items()}
    return heldout_measures(variants, heldout, ranks)


def made_worse(measured: Mapping[str, Perplexity]) -> str | None:
    """Return a warning where a step raised the held-out perplexity by as much as is shown; else None."""
    steps = list(measured.items())[1:]
    for (before, start), (name, end) in pairwise(steps):
        if not round(end.perplexity, 4) <= round(start.perplexity, 4):  # NaN is no improvement
            step = name.removeprefix("+ ")
            return (
                f"{step} raised the held-out perplexity from {start.perplexity:.4f} ({before}) to {end.perplexity:.4f};"
                f" try {ADVICE_AFTER[step]}"
            )
    return None


def block_table(
    selection: Selection, head_map: HeadMap | None, work: BlockFolder, start: StudentBlocks, student: StudentBlocks
) -> list[SpdBlock]:
    """Return each block of the selection with the reports of the steps that it got."""
    grouping = head_map.report if head_map is not None else {}
    return [
        SpdBlock(
            **vars(entry),
            grouping=grouping.get(entry.block),
            distillation=work.distilled.report(BlockReport, entry.block) if entry.block in student.layers else None,
            alignment=work.aligned.report(LayerReport, entry.block) if entry.block in start.layers else None,
        )
        for entry in selection.blocks
    ]
