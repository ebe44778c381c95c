"""The frame of methods that rewrite a checkpoint layer by layer: from models and data to a new checkpoint with its
document. ``align`` and ``distill`` make the layers; a killed run resumes after the last finished one."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.data.sources import source_sha256
from ladderize.adapt.data_files import data_files
from ladderize.adapt.layers.align import LayerReport, align
from ladderize.adapt.layers.distill import BlockReport, distill
from ladderize.adapt.layers.document import FILES, LayersDocument, SpdBlock, WindowData
from ladderize.adapt.layers.layer_files import LAYERS_COMMAND, LayerFolder, LayerJob, StudentBlocks, assigned_weights
from ladderize.adapt.layers.measures import Contender, heldout_measures
from ladderize.adapt.layers.options import AlignOptions, BlockwiseOptions, WindowOptions, layers_to_rewrite
from ladderize.adapt.layers.windows import Windows, training_windows
from ladderize.adapt.methods import ALIGN, BLOCKS
from ladderize.adapt.teacher import check_improved, check_pair, check_related
from ladderize.blocks import Blocks, compute_dtype, open_checkpoint
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, to_json
from ladderize.convert.assignment import RankAssignment, assignment_of
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.documents import read_own
from ladderize.files.regular import resolved
from ladderize.files.unfinished import RUN_SHA256, is_written_by, run_digest, tidy, work_folder
from ladderize.layout import Layout, format_ranges
from ladderize.ranks.group import Ranks, join_ranks

ADVICE_AFTER = {
    ALIGN: "align on more data, or on data like those that the model is for",
    BLOCKS: "train with a lower --lr or on other data",
}


@dataclass(frozen=True)
class LayerTask:
    """A run that rewrites layers of ``model`` after the dense ``teacher``, checked, and its data.

    source, dense: their checkpoints.
    options: of the method.
    """

    model: str
    teacher: str
    out: str
    source: Checkpoint
    dense: Checkpoint
    windows: Windows
    data: WindowData
    options: WindowOptions
    ranks: Ranks
    console: Console
    overwrite: bool
    verify: bool
    revision: str | None

    @property
    def method(self) -> str:
        return ALIGN if isinstance(self.options, AlignOptions) else BLOCKS

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.options.dtype, stored_dtype(self.dense))

    def about(self) -> dict[str, Any]:
        """Return what decides the result besides the models and the layers."""
        options: dict[str, Any] = {"seed": self.options.seed}
        if isinstance(self.options, BlockwiseOptions):
            options |= {"epochs": self.options.epochs, "lr": self.options.lr}
        return {"data": self.data.to_dict(), "options": options, "dtype": str(self.dtype).removeprefix("torch.")}

    def fingerprints(self) -> dict[str, str]:
        return {"model": fingerprint(self.source), "teacher": fingerprint(self.dense)}

    def open_work(self, identity: Mapping[str, Any]) -> LayerFolder | None:
        """Return the folder of finished work; None where an earlier run of the same command already wrote OUT.

        identity: everything that decides the result.
        Raises UserError where the folder holds work of another run, or OUT may not be written.
        """
        out, folder = resolved(self.out), work_folder(self.out)
        if self.ranks.is_main:
            output.clean_up(out)  # a killed swap may have set OUT aside
        earlier = self.ranks.broadcast({} if self.overwrite else read_own(out / FILES[self.method]))
        if is_written_by(earlier, out, run_digest(identity)):
            if self.ranks.is_main:
                tidy(folder, LAYERS_COMMAND, identity, out, self.console)
            return None
        for source in (self.source, self.dense):
            output.check_target(Path(self.out), source.folder, overwrite=self.overwrite)
        with self.ranks.main_first():
            return LayerFolder(folder, LAYERS_COMMAND, identity, main=self.ranks.is_main, console=self.console)

    def written(self) -> LayersDocument | None:
        """Return the document of the earlier run that wrote OUT; None on other ranks than 0."""
        file = FILES[self.method]
        return LayersDocument.from_dict(read_own(resolved(self.out) / file), file) if self.ranks.is_main else None


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
    """Return the task with its data read. All ranks call it.

    Raises UserError for models that are not a pair, and for an OUT that may not be written.
    """
    data_files(options.data)  # raises UserError where they are missing
    ranks = join_ranks(options.device)
    source, dense = open_checkpoint(model, revision), open_checkpoint(teacher, revision if teacher == model else None)
    check_pair(source, dense, model, teacher)
    check_related(source, dense, model, teacher)
    if overwrite or not any(RUN_SHA256 in read_own(resolved(out) / file) for file in FILES.values()):
        for checkpoint in (source, dense):
            output.check_target(Path(out), checkpoint.folder, overwrite=overwrite)
    with console.stage("reading the data"):
        windows = training_windows(dense, options, console)
    sizes = len(windows.train), len(windows.heldout), windows.train.shape[1]
    data = WindowData(options.data, source_sha256(options.data), *sizes)
    how = overwrite, verify, revision
    return LayerTask(model, teacher, out, source, dense, windows, data, options, ranks, console, *how)


def adapt_layers(
    model: str | Path,
    out: str | Path,
    dense: str | Path,
    options: AlignOptions | BlockwiseOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
    console: Console = SILENT,
) -> LayersDocument | None:
    """Rewrite ``model``'s layers after the dense model that it was converted from, and write ``out``.

    Returns the document; None on other ranks than 0. Several processes (accelerate launch, torchrun) share the work;
    rank 0 writes. A killed run resumes.

    options: AlignOptions solve projections by least squares, BlockwiseOptions distil each block.
    """
    layout = Layout.from_config(open_checkpoint(str(model), revision).config)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to distil; convert it first")
    layers = layers_to_rewrite(options, layout)  # faults of the layers and of OUT are told before the data are read
    how: dict[str, Any] = {"overwrite": overwrite, "verify": verify, "revision": revision}
    task = open_layer_task(str(model), str(out), str(dense), options, console, **how)
    # a fingerprint tells no layout, and the data's not which rows are read
    what = {"method": task.method, "layout": str(layout), "layers": list(layers), "spare": options.spare}
    identity = {**what, **task.fingerprints(), **task.about()}
    opened = task.open_work(identity)
    if opened is None:
        return task.written()
    with opened as work:
        return rewrite_layers(task, work, layout, layers, identity)


def rewrite_layers(
    task: LayerTask,
    work: LayerFolder,
    layout: Layout,
    layers: tuple[int, ...],
    identity: Mapping[str, Any],
    *,
    assignment: RankAssignment | None = None,
    blocks: list[SpdBlock] | None = None,
    extra_files: Mapping[str, str] | None = None,
) -> LayersDocument | None:
    """Rewrite layers, measure the model on held-out windows, write OUT and remove the work.

    Returns the document; None on other ranks than 0. All ranks call it.

    layout: of the result.
    identity: that the work was opened with.
    assignment: of heads and neurons to ranks, which they are moved to; None: they stay.
    blocks, extra_files: for the document and for OUT.
    """
    options, ranks, console = task.options, task.ranks, task.console
    teacher, converted = (Blocks(each, task.dtype, ranks.device) for each in (task.dense, task.source))
    student = StudentBlocks(layout, layers, partial(assigned_weights, converted, assignment, as_stored=True))
    students = assignment_of(task.source) if assignment is None else assignment
    dense_weights = partial(assigned_weights, teacher, students, as_stored=True)
    job = LayerJob(teacher, converted, student, dense_weights, task.windows, work.files, ranks, console)
    if isinstance(options, BlockwiseOptions):
        distill(job, options)
    else:
        align(job, options.seed)
    ranks.barrier()
    before = partial(assigned_weights, converted, assignment)

    def rewritten(layer: int) -> Mapping[str, torch.Tensor]:
        return work.files.loaded(layer, converted) if layer in layers else before(layer)

    contenders = {
        "dense": Contender(teacher, Layout.dense(layout.num_layers), teacher.weights),
        "before": Contender(converted, layout, before),
        "after": Contender(converted, layout, rewritten),
    }
    perplexity, divergence = heldout_measures(contenders, task.windows.heldout, ranks, console)
    if not ranks.is_main:
        return None
    key, kind = Path(FILES[task.method]).stem, LayerReport if task.method == ALIGN else BlockReport
    if options.write == "best":
        kl = divergence["before"], divergence["after"]
        check_improved("KL", *kl, work=work.folder, advice=ADVICE_AFTER[task.method], method=key)
    elif perplexity["after"].perplexity > perplexity["before"].perplexity:
        console.warn(f"the held-out perplexity rose: {ADVICE_AFTER[task.method]}")
    about = task.about()
    reports: Any = [work.files.report(kind, layer) for layer in layers]
    document = LayersDocument(
        method=task.method,
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
        replace=work.files.tensors(layers),
        record={key: record},
        extra_files={**(extra_files or {}), FILES[task.method]: text},
        note=document.note(),
    )
    recipe = Recipe() if blocks is None else Recipe.from_layout(layout)
    how: dict[str, Any] = {name: getattr(task, name) for name in ("overwrite", "verify", "revision", "console")}
    convert_checkpoint(task.model, task.out, recipe, changes, **how)
    return document
