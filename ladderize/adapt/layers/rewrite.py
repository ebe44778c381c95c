"""Methods that rewrite a checkpoint layer by layer: from models and data to a new checkpoint with its document."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from ladderize.adapt.layers.align import LayerReport, align
from ladderize.adapt.layers.assign import assign_layers
from ladderize.adapt.layers.distill import BlockReport, distill
from ladderize.adapt.layers.layer_files import Contender, LayerFiles, LayerJob, assigned_weights, heldout_measures
from ladderize.adapt.layers.options import (
    AlignOptions,
    BlockwiseOptions,
    SensitivityOptions,
    SpdOptions,
    WindowOptions,
    layers_to_rewrite,
)
from ladderize.adapt.layers.sensitivity import write_sensitivity
from ladderize.adapt.layers.windows import Windows, training_windows
from ladderize.adapt.options import ALIGN, BLOCKS
from ladderize.adapt.teacher import check_improved, check_pair, check_related, target_text
from ladderize.blocks import Blocks, compute_dtype
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.reading import TensorInfo
from ladderize.checkpoint.tensors import fingerprint, locate_tensors
from ladderize.console import SILENT, Console, code_span, to_json
from ladderize.convert.assignment import ASSIGNMENT, RankAssignment, assignment_of, read_assignment
from ladderize.convert.inspection import ALIGNMENT, DISTILLATION
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.sensitivity_file import ascending, read_sensitivity
from ladderize.data.files import data_files, source_sha256
from ladderize.errors import UserError
from ladderize.eval.results import Perplexity
from ladderize.files import output
from ladderize.files.documents import read_own, write_json
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.unfinished import RUN_SHA256, Unfinished, finished_before, run_digest, work_folder
from ladderize.layout import Layout, check_split, format_ranges
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks, join_ranks


@dataclass(frozen=True)
class LayerMethod:
    """A method that rewrites layers: its name in a checkpoint's history, the file of its document, the function that
    does a job, and sentences on the layers' errors, on what was done, and on what else to try."""

    noun: str
    file: str
    run: Callable[..., None]
    report: type[LayerReport] | type[BlockReport]
    errors: str
    done: str
    advice: str


METHODS = {
    ALIGN: LayerMethod(
        "alignment",
        ALIGNMENT,
        align,
        LayerReport,
        "errors: squared, on held-out tokens, in % of the squared values aimed at; reads: q, k, v; gate, up. writes: o;"
        " down; they aim at the dense model's stream",
        "**Alignment.** The projections of layers {} were solved anew by least squares, towards {} (`align`).",
        "align on more data, or on data like those that the model is for",
    ),
    BLOCKS: LayerMethod(
        "distillation",
        DISTILLATION,
        distill,
        BlockReport,
        "block error: error of the block's output on held-out windows, as % of what the dense block adds",
        "**Retraining.** Layers {} were distilled block by block from {} (`blocks`).",
        "train with a lower --lr or on other data",
    ),
}


@dataclass(frozen=True)
class WindowData(Record):
    """The data, and the numbers of windows to learn from and held out."""

    file: str
    sha256: str
    samples: int
    heldout: int
    seq_len: int


@dataclass(frozen=True)
class SpdBlock(Record):
    """A block as ``ladderize spd`` measured it, and if it was dropped."""

    block: int
    sensitivity: float
    dropped: bool


@dataclass(frozen=True)
class LayersDocument(Record):
    """The content of alignment.json and distillation.json; docs/files.md explains the keys."""

    LEFT_OUT: ClassVar = ("spd",)

    method: str
    model: str
    teacher: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    fingerprints: dict[str, str]
    data: WindowData
    options: dict[str, Any]
    dtype: str
    heldout_perplexity: dict[str, Perplexity]
    heldout_divergence: dict[str, float]
    layers: list[LayerReport] | list[BlockReport]
    spd: list[SpdBlock] | None = None

    def measured_rows(self) -> list[dict[str, str]]:
        return [
            {
                "held out": name,
                "perplexity": f"{value.perplexity:.4f}",
                "stderr": "" if value.stderr is None else f"{value.stderr:.4f}",
                "KL to dense": f"{self.heldout_divergence[name]:.4f}" if name in self.heldout_divergence else "",
            }
            for name, value in self.heldout_perplexity.items()
        ]

    @property
    def target(self) -> str:
        """The dense model's perplexity and the recovered share of the loss, in words."""
        return target_text(*(self.heldout_perplexity[name].perplexity for name in ("before", "after", "dense")))

    def note(self) -> str:
        """Return paragraphs for the model card that say what was done, and the held-out perplexities."""
        layers = format_ranges([report.layer for report in self.layers])
        steps = ", ".join(f"{value.perplexity:.4f} ({name})" for name, value in self.heldout_perplexity.items())
        return (
            f"{METHODS[self.method].done.format(layers, code_span(self.teacher))}\n\n"
            f"**Measured.** Perplexity on {self.data.heldout} held-out windows of {self.data.seq_len} tokens of"
            f" {code_span(self.data.file)}: {steps}."
        )


COMMAND = "adapt --method align or blocks, or spd"  # whose unfinished work lies beside OUT


@dataclass(frozen=True)
class LayerTask:
    """A run that rewrites layers of ``model`` after the dense ``teacher``, both opened and checked."""

    model: str
    teacher: str
    out: str
    converted: Blocks
    dense: Blocks
    windows: Windows
    data: WindowData
    options: WindowOptions
    ranks: Ranks
    console: Console
    overwrite: bool
    verify: bool

    @property
    def method(self) -> LayerMethod:
        return METHODS[self.options.method]

    def about(self) -> dict[str, Any]:
        """Return what decides the result besides the models and the layers."""
        dtype = str(self.dense.dtype).removeprefix("torch.")
        return {"data": self.data.to_dict(), "options": self.options.recorded(), "dtype": dtype}

    def fingerprints(self) -> dict[str, str]:
        return {"model": fingerprint(self.converted.checkpoint), "teacher": fingerprint(self.dense.checkpoint)}

    def once(self, identity: Mapping[str, Any], make: Callable[[Path], LayersDocument | None]) -> LayersDocument | None:
        """Return what ``make`` returns of a folder for unfinished work, or the document of the run with this identity
        that wrote OUT before; None on other ranks than 0."""
        ranks, overwrite, console, file = self.ranks, self.overwrite, self.console, self.method.file
        earlier: dict[str, Any] = {}
        if ranks.is_main:
            run = file, run_digest(identity), COMMAND, identity
            earlier = finished_before(resolved(self.out), *run, overwrite=overwrite, console=console)
        if earlier := ranks.broadcast(earlier):
            return LayersDocument.from_dict(earlier, file) if ranks.is_main else None
        for source in (self.converted, self.dense):
            output.check_target(Path(self.out), source.checkpoint.folder, overwrite=overwrite)
        with ranks.main_first():
            work = Unfinished(work_folder(self.out), COMMAND, identity, main=ranks.is_main, console=console)
        with work:
            return make(work.folder)


def open_layer_task(
    model: str, out: str, teacher: str, options: WindowOptions, console: Console, *, overwrite: bool, verify: bool
) -> LayerTask:
    """Return the task with its data read. Raises UserError for models that are no pair, or an OUT that must stay."""
    data_files(options.data)  # raises UserError where they are missing
    ranks = join_ranks(options.device)
    source, dense = open_checkpoint(model), open_checkpoint(teacher)
    check_pair(source, dense, model, teacher)
    check_related(source, dense, model, teacher)
    if overwrite or not any(RUN_SHA256 in read_own(resolved(out) / method.file) for method in METHODS.values()):
        for checkpoint in (source, dense):
            output.check_target(Path(out), checkpoint.folder, overwrite=overwrite)
    with console.stage("reading the data"):
        windows = training_windows(dense, options, console)
    dtype = compute_dtype(options.dtype, stored_dtype(dense))
    converted, teacher_blocks = Blocks(source, dtype, ranks.device), Blocks(dense, dtype, ranks.device)
    data = WindowData(options.data, source_sha256(options.data), *windows.sizes)
    models = model, teacher, out, converted, teacher_blocks
    return LayerTask(*models, windows, data, options, ranks, console, overwrite, verify)


def adapt_layers(
    model: str | Path,
    out: str | Path,
    dense: str | Path,
    options: WindowOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    console: Console = SILENT,
) -> LayersDocument | None:
    """Rewrite ``model``'s layers after the dense model that it was converted from, and write ``out``: AlignOptions
    solve projections by least squares, BlockwiseOptions distil each block. Returns the document; None on other ranks
    than 0. Several processes (accelerate launch, torchrun) share the work; rank 0 writes. A killed run resumes."""
    layout = Layout.from_config(open_checkpoint(str(model)).config)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to distil; convert it first")
    layers = layers_to_rewrite(options, layout)  # faults of the layers and of OUT are told before the data are read
    task = open_layer_task(str(model), str(out), str(dense), options, console, overwrite=overwrite, verify=verify)
    # a fingerprint tells no layout, and the data's not which rows are read
    target = {"method": options.method, "layout": str(layout), "layers": list(layers), "spare": options.spare}
    identity = {**target, **task.fingerprints(), **task.about()}
    return task.once(identity, lambda folder: rewrite_layers(task, folder, layout, layers, identity))


def rewrite_layers(
    task: LayerTask,
    folder: Path,
    layout: Layout,
    layers: tuple[int, ...],
    identity: Mapping[str, Any],
    *,
    assignment: RankAssignment | None = None,
    blocks: list[SpdBlock] | None = None,
    extra_files: Mapping[str, str] | None = None,
) -> LayersDocument | None:
    """Rewrite layers for a layout, measure the model on held-out windows, and write OUT. All ranks call it. Returns the
    document; None on other ranks than 0."""
    files, method, about = LayerFiles(folder), task.method, task.about()
    students = assignment_of(task.converted.checkpoint) if assignment is None else assignment
    weights = partial(assigned_weights, task.converted, assignment, as_stored=True)
    dense_weights = partial(assigned_weights, task.dense, students, as_stored=True)
    models = task.dense, task.converted, layout, layers, weights, dense_weights
    job = LayerJob(*models, task.windows, task.ranks, files, task.console)
    method.run(job, task.options)
    task.ranks.barrier()
    before = partial(assigned_weights, task.converted, assignment)

    def after(layer: int) -> Mapping[str, torch.Tensor]:
        if layer not in layers:
            return before(layer)
        blocks, rewritten = task.converted, files.weights(layer)
        return {name: tensor.to(blocks.device, blocks.dtype) for name, tensor in rewritten.items()}

    contenders = {
        "dense": Contender(task.dense, Layout.dense(layout.num_layers), task.dense.weights),
        "before": Contender(task.converted, layout, before),
        "after": Contender(task.converted, layout, after),
    }
    perplexity, divergence = heldout_measures(contenders, task.windows.heldout, task.ranks, task.console)
    if not task.ranks.is_main:
        return None
    if task.options.write == "best":
        values = divergence["before"], divergence["after"]
        check_improved("KL", *values, work=folder, advice=method.advice, method=method.noun)
    elif perplexity["after"].perplexity > perplexity["before"].perplexity:
        task.console.warn(f"the held-out perplexity rose: {method.advice}")
    reports: Any = [files.report(method.report, layer) for layer in layers]
    document = LayersDocument(
        method=task.options.method,
        model=task.model,
        teacher=task.teacher,
        out=task.out,
        layout=str(layout),
        fingerprints=task.fingerprints(),
        data=task.data,
        options=about["options"],
        dtype=about["dtype"],
        heldout_perplexity=perplexity,
        heldout_divergence=divergence,
        layers=reports,
        spd=blocks,
        **layout.to_config(),
    )
    rewritten: dict[str, TensorInfo] = {}
    for layer in layers:
        rewritten |= locate_tensors(files.path(layer))
    text = to_json({**document.to_dict(), RUN_SHA256: run_digest(identity)}) + "\n"
    record = {"teacher": task.teacher, "fingerprints": document.fingerprints, "layers": format_ranges(layers), **about}
    changes = Changes(
        assignment=assignment,
        replace=rewritten,
        record={method.noun: record},
        extra_files={**(extra_files or {}), method.file: text},
        note=document.note(),
    )
    overwrite, verify = task.overwrite, task.verify
    convert_checkpoint(task.model, task.out, layout, changes, overwrite=overwrite, verify=verify, console=task.console)
    return document


# ---- ``ladderize spd`` ----

SENSITIVITY = "sensitivity.json"  # in the work folder, and in OUT
CALIBRATION = 128  # windows for sensitivity, the paper's


def spd(options: SpdOptions, *, console: Console = SILENT) -> LayersDocument | None:
    """Make the SPD checkpoint ``options.out`` of a dense model: sensitivity, assignment, repair and conversion.

    The paper's recipe (arXiv 2502.20727, section 4) with three changes: every dropped block is repaired, also
    insensitive ones; by default by alignment (least squares) instead of distillation; and neurons change ranks along
    with heads. Returns the document of its repair; None on other ranks
    than 0. Several processes (accelerate launch, torchrun) share the work; rank 0 writes. A killed run resumes."""
    model, size = options.model, options.sync_tp_size
    checkpoint = open_checkpoint(model)
    dense = Layout.from_config(checkpoint.config)
    if not dense.is_dense:
        raise UserError(
            f"{model} is not dense ({dense}); only a dense model has sync points to drop by their sensitivity"
        )
    check_split(checkpoint.config, size, name="--sync-tp-size")
    files = options.data, options.samples, options.heldout, options.seq_len
    shared: dict[str, Any] = {"dtype": options.dtype, "write": "last", "seed": options.seed}
    shared["device"] = options.device or default_device()
    blockwise = BlockwiseOptions(*files, **shared, epochs=options.epochs, lr=options.lr)
    repair: WindowOptions = AlignOptions(*files, **shared) if options.repair == ALIGN else blockwise
    overwrite, verify = options.overwrite, options.verify
    task = open_layer_task(model, options.out, model, blockwise, console, overwrite=overwrite, verify=verify)
    asked = {name: getattr(options, name) for name in ("sync_tp_size", "spd_fraction", "repair", "assign")}
    identity = {"method": "spd", **task.fingerprints(), **task.about(), **asked}
    windows, ranks, train = task.windows, task.ranks, task.windows.train
    tokens = repair.least_tokens(checkpoint.config)
    if tokens is not None and options.samples is None:
        train = train[: max(1, tokens // train.shape[1])]
    data = replace(task.data, samples=len(train))
    task = replace(task, options=repair, windows=Windows(train, windows.heldout), data=data)

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
