"""The frame of methods that rewrite a checkpoint layer by layer: from models and data to a new checkpoint with its
document. A killed run resumes after the last finished layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.layers.document import METHODS, LayerMethod, LayersDocument, SpdBlock, WindowData
from ladderize.adapt.layers.layer_files import LayerFiles, LayerJob, assigned_weights
from ladderize.adapt.layers.measures import Contender, heldout_measures
from ladderize.adapt.layers.options import WindowOptions, layers_to_rewrite
from ladderize.adapt.layers.windows import Windows, training_windows
from ladderize.adapt.teacher import check_improved, check_pair, check_related
from ladderize.blocks import Blocks, compute_dtype
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, to_json
from ladderize.convert.assignment import RankAssignment, assignment_of
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.data.files import data_files, source_sha256
from ladderize.errors import UserError
from ladderize.eval.results import Perplexity
from ladderize.files import output
from ladderize.files.documents import read_own
from ladderize.files.regular import resolved
from ladderize.files.unfinished import RUN_SHA256, Unfinished, is_written_by, run_digest, tidy, work_folder
from ladderize.layout import Layout, format_ranges
from ladderize.ranks.group import Ranks, join_ranks

COMMAND = "adapt --method align or blocks, or spd"  # whose unfinished work lies beside OUT


@dataclass(frozen=True)
class LayerTask:
    """A run that rewrites layers of ``model`` after the dense ``teacher``, both opened and checked, with its data and
    the method's options."""

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
    revision: str | None

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
        that wrote OUT before; None on other ranks than 0. Raises UserError where the folder holds work of another run,
        or OUT may not be written."""
        out, folder, file = resolved(self.out), work_folder(self.out), self.method.file
        if self.ranks.is_main:
            output.clean_up(out)  # a killed swap may have set OUT aside
        earlier = self.ranks.broadcast({} if self.overwrite else read_own(out / file))
        if is_written_by(earlier, out, run_digest(identity)):
            if not self.ranks.is_main:
                return None
            tidy(folder, COMMAND, identity, out, self.console)
            return LayersDocument.from_dict(earlier, file)
        for source in (self.converted, self.dense):
            output.check_target(Path(self.out), source.checkpoint.folder, overwrite=self.overwrite)
        with self.ranks.main_first():
            unfinished = Unfinished(folder, COMMAND, identity, main=self.ranks.is_main, console=self.console)
        with unfinished as work:
            return make(work.folder)


def open_layer_task(
    model: str,
    out: str,
    teacher: str,
    options: WindowOptions,
    console: Console,
    *,
    overwrite: bool,
    verify: bool,
    revision: str | None,
) -> LayerTask:
    """Return the task with its data read. All ranks call it. Raises UserError for models that are not a pair, and for
    an OUT that may not be written."""
    data_files(options.data)  # raises UserError where they are missing
    ranks = join_ranks(options.device)
    source, dense = open_checkpoint(model, revision), open_checkpoint(teacher, revision if teacher == model else None)
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
    return LayerTask(*models, windows, data, options, ranks, console, overwrite, verify, revision)


def adapt_layers(
    model: str | Path,
    out: str | Path,
    dense: str | Path,
    options: WindowOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
    console: Console = SILENT,
) -> LayersDocument | None:
    """Rewrite ``model``'s layers after the dense model that it was converted from, and write ``out``: AlignOptions
    solve projections by least squares, BlockwiseOptions distil each block. Returns the document; None on other ranks
    than 0. Several processes (accelerate launch, torchrun) share the work; rank 0 writes. A killed run resumes."""
    layout = Layout.from_config(open_checkpoint(str(model), revision).config)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to distil; convert it first")
    layers = layers_to_rewrite(options, layout)  # faults of the layers and of OUT are told before the data are read
    task = open_layer_task(
        str(model), str(out), str(dense), options, console, overwrite=overwrite, verify=verify, revision=revision
    )
    # a fingerprint tells no layout, and the data's not which rows are read
    target = {"method": options.method, "layout": str(layout), "layers": list(layers), "spare": options.spare}
    identity = {**target, **task.fingerprints(), **task.about()}
    return task.once(identity, lambda folder: rewrite_layers(task, LayerFiles(folder), layout, layers, identity))


def rewrite_layers(
    task: LayerTask,
    files: LayerFiles,
    layout: Layout,
    layers: tuple[int, ...],
    identity: Mapping[str, Any],
    *,
    assignment: RankAssignment | None = None,
    blocks: list[SpdBlock] | None = None,
    extra_files: Mapping[str, str] | None = None,
) -> LayersDocument | None:
    """Rewrite layers for a layout, measure the model on held-out windows, and write OUT, with heads and neurons
    assigned, further files, and what is known of SPD blocks. All ranks call it. Returns the document; None on other
    ranks than 0."""
    students = assignment_of(task.converted.checkpoint) if assignment is None else assignment
    weights = partial(assigned_weights, task.converted, assignment, as_stored=True)
    dense_weights = partial(assigned_weights, task.dense, students, as_stored=True)
    models = task.dense, task.converted, layout, layers, weights, dense_weights
    job = LayerJob(*models, task.windows, task.ranks, files, task.console)
    task.method.run(job, task.options)
    task.ranks.barrier()
    perplexity, divergence = measured(job, assignment)
    if not task.ranks.is_main:
        return None
    if task.options.write == "best":
        before, after = divergence["before"], divergence["after"]
        advice, noun = task.method.advice, task.method.noun
        check_improved("KL", before, after, work=files.folder, advice=advice, method=noun)
    elif perplexity["after"].perplexity > perplexity["before"].perplexity:
        task.console.warn(f"the held-out perplexity rose: {task.method.advice}")
    reports: Any = [files.report(task.method.report, layer) for layer in layers]
    about = task.about()
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
    text = to_json({**document.to_dict(), RUN_SHA256: run_digest(identity)}) + "\n"
    record = {"teacher": task.teacher, "fingerprints": document.fingerprints, "layers": format_ranges(layers), **about}
    changes = Changes(
        assignment=assignment,
        replace=files.tensors(layers),
        record={task.method.noun: record},
        extra_files={**(extra_files or {}), task.method.file: text},
        note=document.note(),
    )
    convert_checkpoint(
        task.model,
        task.out,
        Recipe() if blocks is None else Recipe.from_layout(layout),
        changes,
        overwrite=task.overwrite,
        verify=task.verify,
        revision=task.revision,
        console=task.console,
    )
    return document


def measured(job: LayerJob, assignment: RankAssignment | None) -> tuple[dict[str, Perplexity], dict[str, float]]:
    """Return ``heldout_measures`` of the dense model, and of the converted one before and after."""
    before = partial(assigned_weights, job.converted, assignment)

    def after(layer: int) -> Mapping[str, torch.Tensor]:
        if job.files is None or layer not in job.layers:
            return before(layer)
        blocks, weights = job.converted, job.files.weights(layer)
        return {name: tensor.to(blocks.device, blocks.dtype) for name, tensor in weights.items()}

    contenders = {
        "dense": Contender(job.teacher, Layout.dense(job.layout.num_layers), job.teacher.weights),
        "before": Contender(job.converted, job.layout, before),
        "after": Contender(job.converted, job.layout, after),
    }
    return heldout_measures(contenders, job.windows.heldout, job.ranks, job.console)
