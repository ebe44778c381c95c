"""The frame of methods that rewrite a checkpoint layer by layer: from two checkpoints and data to a new checkpoint with
its document. A method makes the layers; a killed run resumes after the last finished one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from ladderize.adapt.data.sources import source_sha256
from ladderize.adapt.data_files import data_files
from ladderize.adapt.layers.head_grouping import permuted_weights
from ladderize.adapt.layers.layer_files import LayerFiles, LayerFolder, LayerWeights, StudentBlocks
from ladderize.adapt.layers.measures import Contender, heldout_measures, loaded
from ladderize.adapt.layers.options import WindowOptions
from ladderize.adapt.layers.windows import Windows, training_windows
from ladderize.adapt.teacher import check_improved, check_pair, check_related, target_text
from ladderize.blocks import Blocks, compute_dtype, open_checkpoint, stored_dtype
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, code_span, to_json
from ladderize.convert.heads import HEAD_MAP, read_head_map
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.eval.results import Perplexity
from ladderize.files import output
from ladderize.files.documents import read_own
from ladderize.files.records import OwnRecord, Record
from ladderize.files.regular import resolved
from ladderize.files.work import RUN, run_digest, work_folder
from ladderize.layout import Layout, format_ranges
from ladderize.ranks.group import Ranks, join_ranks

# ---- documents ----


@dataclass(frozen=True)
class WindowData(Record):
    """The data and its windows.

    samples: windows to learn from.
    heldout: windows held out.
    seq_len: tokens of each.
    """

    file: str
    sha256: str
    samples: int
    heldout: int
    seq_len: int

    @classmethod
    def of(cls, windows: Windows, options: WindowOptions) -> "WindowData":
        """Return the record of these windows; reads all data once."""
        sizes = len(windows.train), len(windows.heldout), windows.train.shape[1]
        return cls(options.data, source_sha256(options.data), *sizes)


@dataclass(frozen=True)
class RewrittenLayers(Record, ABC):
    """The common part of the documents of methods that rewrite layers one by one.

    RESULT: the name of the method's step among the held-out measures.
    MEANING: the explanation of the errors in ``rows``.
    """

    RESULT: ClassVar[str]
    MEANING: ClassVar[str]

    model: str
    teacher: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    fingerprints: dict[str, str]
    data: WindowData
    dtype: str
    heldout_perplexity: dict[str, Perplexity]
    heldout_divergence: dict[str, float]

    @abstractmethod
    def rows(self) -> list[dict[str, str]]:
        """Return a table of layers for people."""

    @abstractmethod
    def done(self) -> str:
        """Return a paragraph for the model card that says what was done."""

    @property
    def target(self) -> str:
        """The dense model's perplexity and the recovered share of the loss, in words."""
        return target_text(*(self.heldout_perplexity[name].perplexity for name in ("before", self.RESULT, "dense")))


def measured_note(perplexities: Mapping[str, Perplexity], data: WindowData) -> str:
    """Return a paragraph for a model card with the held-out perplexities of each step."""
    steps = ", ".join(f"{value.perplexity:.4f} ({name.removeprefix('+ ')})" for name, value in perplexities.items())
    return (
        f"**Measured.** Perplexity on {data.heldout} held-out windows of {data.seq_len} tokens of"
        f" {code_span(data.file)}: {steps}."
    )


def perplexity_rows(perplexities: Mapping[str, Perplexity], divergences: Mapping[str, float]) -> list[dict[str, str]]:
    """Return a table, for people, of held-out perplexities and of divergences from the first, dense model."""
    dense = next(iter(perplexities.values())).perplexity
    return [
        {
            "held out": name,
            "perplexity": f"{value.perplexity:.4f}",
            "stderr": "" if value.stderr is None else f"{value.stderr:.4f}",
            "difference": "" if number == 0 else f"{value.perplexity - dense:+.4f}",
            "KL to dense": f"{divergences[name]:.4f}" if name in divergences else "",
        }
        for number, (name, value) in enumerate(perplexities.items())
    ]


# ---- from work to a checkpoint ----


class CheckpointRun:
    """A command that makes the checkpoint ``out`` with its ``document``, from work that a killed run resumes.

    All ranks make one.
    Raises UserError unless ``out`` may be written, and is none of ``sources``.
    """

    def __init__(
        self,
        out: str,
        document: str,
        sources: Sequence[Checkpoint],
        ranks: Ranks,
        console: Console,
        *,
        overwrite: bool,
    ) -> None:
        self.out, self.document, self.ranks, self.console, self.overwrite = out, document, ranks, console, overwrite
        self.sources = [source.folder for source in sources]
        self.folder = work_folder(out)
        self.identity: Mapping[str, Any] = {}
        if ranks.is_main:
            output.clean_up(resolved(out))  # a killed swap may have set OUT aside
        self.earlier = ranks.broadcast({} if overwrite else read_own(resolved(out) / document))
        if RUN not in self.earlier:  # a finished run leaves OUT full
            self._check_target()

    def _check_target(self) -> None:
        for folder in self.sources:
            output.check_target(Path(self.out), folder, overwrite=self.overwrite)

    def open_work(self, identity: Mapping[str, Any]) -> LayerFolder | None:
        """Return the work folder; None where an earlier run of the same command already wrote ``out``.

        identity: everything that decides the result.
        Raises UserError where the folder holds work of another run.
        """
        self.identity = identity
        if RUN in self.earlier and self.earlier[RUN] == run_digest(identity):
            if self.ranks.is_main:
                LayerFolder.tidy(self.folder, identity, resolved(self.out), self.console)
            return None
        self._check_target()
        with self.ranks.main_first():
            return LayerFolder(self.folder, identity, main=self.ranks.is_main)

    def written(self, kind: type[OwnRecord]) -> OwnRecord | None:
        """Return the document of the earlier run that wrote ``out``; None on other ranks than 0."""
        return kind.from_dict(self.earlier, self.document) if self.ranks.is_main else None

    def write(
        self,
        work: LayerFolder,
        model: str,
        recipe: Recipe,
        document: Record,
        changes: Changes,
        *,
        revision: str | None,
        verify: bool,
    ) -> None:
        """Write ``out``, whole or not at all, and remove the work. Raises UserError where it cannot be written."""
        text = to_json({**document.to_dict(), RUN: run_digest(self.identity)}) + "\n"
        convert_checkpoint(
            model,
            self.out,
            recipe,
            revision=revision,
            overwrite=self.overwrite,
            verify=verify,
            changes=replace(changes, extra_files={**changes.extra_files, self.document: text}),
            console=self.console,
        )
        work.remove()


# ---- methods ----

Document = TypeVar("Document", bound=RewrittenLayers)


@dataclass(frozen=True)
class LayerJob:
    """The work of a method.

    teacher, converted: the dense and the converted model, in the dtype of the computation.
    student: the layers to rewrite, with weights as stored.
    dense_weights: returns the dense model's stored weights of a layer, their heads in the student's order.
    files: the finished layers.
    """

    teacher: Blocks
    converted: Blocks
    student: StudentBlocks
    dense_weights: LayerWeights
    windows: Windows
    files: LayerFiles
    ranks: Ranks
    console: Console


@dataclass(frozen=True)
class LayerMethod(Generic[Document]):
    """A method that rewrites layers.

    name: of ``--method``.
    key: names its record in ladderize.yaml, its document's file, and the method in messages.
    reports: the document's field of reports, and their class.
    run: rewrites every layer of a job that its files do not hold yet, by ``WindowOptions.settings``. All ranks call it.
    advice: what to try where it did not help.
    needs_source: the dense model must be the converted one's source or a relative of it.
    """

    name: str
    key: str
    document: type[Document]
    reports: tuple[str, type[Record]]
    run: Callable[[LayerJob, Any], None]
    advice: str
    needs_source: bool = False


def rewrite(
    method: LayerMethod[Document],
    model: str | Path,
    out: str | Path,
    teacher_name: str | Path,
    options: WindowOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
    console: Console = SILENT,
) -> Document | None:
    """Rewrite ``model``'s layers after the dense ``teacher_name`` that it was converted from, and write ``out``.

    Returns the method's document; None on other ranks than 0. Several processes (accelerate launch, torchrun) share the
    work; rank 0 writes. A killed run resumes.
    Raises UserError.
    """
    model, out, teacher_name = str(model), str(out), str(teacher_name)
    data_files(options.data)  # raises UserError where they are missing
    ranks = join_ranks(options.device)
    checkpoint, dense = open_checkpoint(model, revision), open_checkpoint(teacher_name)
    layout = check_pair(checkpoint, dense, model, teacher_name)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to distil; convert it first")
    if method.needs_source:
        check_related(checkpoint, dense, model, teacher_name)
    layers, file = options.chosen_layers(layout), f"{method.key}.json"
    sources = (checkpoint, dense)
    run = CheckpointRun(out, file, sources, ranks, console, overwrite=overwrite)
    with console.stage("reading the data"):
        windows = training_windows(dense, options)
    dtype = compute_dtype(options.dtype, stored_dtype(dense))
    teacher, converted = (Blocks(each, dtype, ranks.device) for each in (dense, checkpoint))
    stored, stored_dense = (
        Blocks(each, getattr(torch, stored_dtype(each)), ranks.device) for each in (checkpoint, dense)
    )
    fingerprints = {"method": method.name, "model": fingerprint(checkpoint), "teacher": fingerprint(dense)}
    data, settings = WindowData.of(windows, options), options.settings()
    about: dict[str, Any] = {
        "data": data.to_dict(),
        "options": settings.to_dict(),
        "dtype": str(dtype).removeprefix("torch."),
    }
    opened = run.open_work({**fingerprints, **about, "layers": list(layers)})
    if opened is None:
        return run.written(method.document)
    with opened as work:
        if teacher.ends_differ(converted):
            console.note(
                f"{model} has a different embedding, final norm or LM head than {teacher_name}: its blocks will read"
                " what they do not expect"
            )
        dense_weights = partial(permuted_weights, stored_dense, heads_of(checkpoint))
        student = StudentBlocks(layout, layers, stored.weights)
        method.run(LayerJob(teacher, converted, student, dense_weights, windows, work.files, ranks, console), settings)
        ranks.barrier()

        def rewritten(layer: int) -> Mapping[str, torch.Tensor]:
            return loaded(work.files, layer, converted) if layer in layers else converted.weights(layer)

        result = method.document.RESULT
        with console.stage("measuring held-out perplexities"):
            variants = {
                "dense": Contender(teacher, Layout.dense(layout.num_layers)),
                "before": Contender(converted, layout),
                result: Contender(converted, layout, rewritten),
            }
            measured = heldout_measures(variants, windows.heldout, ranks)
        if not ranks.is_main:
            return None
        if options.write == "best":
            before, after = (measured.divergence[name] for name in ("before", result))
            check_improved("KL", before, after, work=run.folder, advice=method.advice, what=method.key)
        reports, kind = method.reports
        own_fields: dict[str, Any] = {
            "options": settings,
            reports: [work.files.report(kind, layer) for layer in layers],
        }
        document = method.document(
            model=model,
            teacher=teacher_name,
            out=out,
            layout=str(layout),
            fingerprints=fingerprints,
            data=data,
            dtype=about["dtype"],
            heldout_perplexity=measured.perplexity,
            heldout_divergence=measured.divergence,
            **layout.to_config(),
            **own_fields,
        )
        record = {"teacher": teacher_name, "fingerprints": fingerprints, "layers": format_ranges(layers), **about}
        note = f"{document.done()}\n\n{measured_note(measured.perplexity, data)}"
        changes = Changes(replace=work.files.tensors(layers), record={method.key: record}, note=note)
        run.write(work, model, Recipe(), document, changes, revision=revision, verify=verify)
    return document


def heads_of(checkpoint: Checkpoint) -> dict[int, tuple[int, ...]]:
    """Return the head order of each layer that is stored in another order than the dense model's."""
    path = checkpoint.folder / HEAD_MAP
    return read_head_map(path).orders if path.is_file() else {}
