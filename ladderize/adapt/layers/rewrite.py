"""The frame of methods that rewrite a checkpoint layer by layer: from two checkpoints and data to a new checkpoint with
its document. A killed run resumes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch

from ladderize.adapt.data.sources import source_sha256
from ladderize.adapt.layers.layer_files import BlockFolder, LayerFiles, StudentBlocks
from ladderize.adapt.layers.measures import before_and_after
from ladderize.adapt.layers.options import WindowOptions
from ladderize.adapt.layers.windows import Windows
from ladderize.adapt.teacher import check_improved, check_pair, check_related, target_text
from ladderize.blocks import Blocks, compute_dtype, open_checkpoint, stored_dtype
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import Console, code_span, to_json
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


@dataclass(frozen=True)
class MethodRecord(Record):
    """The data, options and dtype that a result depends on, for ladderize.yaml and to recognise the work of a killed
    run.

    dtype: the one of the computation.
    """

    data: WindowData
    options: Record
    dtype: str

    @classmethod
    def of(cls, windows: Windows, options: WindowOptions, dtype: torch.dtype) -> "MethodRecord":
        """Return the record of a run; reads all data once."""
        sizes = len(windows.train), len(windows.heldout), windows.train.shape[1]
        data = WindowData(options.data, source_sha256(options.source), *sizes)
        return cls(data, options.settings(), str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class BlockwiseRun(Record):
    """The method and the fingerprints of the models that a run is about."""

    method: str
    model: str
    teacher: str


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
    fingerprints: BlockwiseRun
    data: WindowData
    dtype: str
    heldout_perplexity: dict[str, Perplexity]
    heldout_divergence: dict[str, float] = field(default_factory=dict, kw_only=True)

    @abstractmethod
    def rows(self) -> list[dict[str, str]]:
        """Return a table of layers for people."""

    @abstractmethod
    def done(self) -> str:
        """Return a paragraph for the model card that says what was done."""

    @property
    def card_note(self) -> str:
        """The paragraphs for the model card: what was done, and the figures."""
        return f"{self.done()}\n\n{measured_note(self.heldout_perplexity, self.data)}"

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


# ---- from a command to a checkpoint ----


class CheckpointRun:
    """A command that makes the checkpoint ``out`` with its ``document``, from work that a killed run resumes.

    All ranks make one.
    Raises UserError unless ``out`` may be written, and is none of ``sources``.
    """

    def __init__(
        self,
        out: str,
        document: str,
        work_dir: Path | None,
        sources: tuple[Checkpoint, ...],
        ranks: Ranks,
        console: Console,
        *,
        overwrite: bool,
    ) -> None:
        self.out, self.document, self.ranks, self.console, self.overwrite = out, document, ranks, console, overwrite
        self.sources = [source.folder for source in sources]
        self.folder = work_folder(out, work_dir, *self.sources)
        if ranks.is_main:
            output.clean_up(resolved(out))  # a killed swap may have set OUT aside
        self.earlier = ranks.broadcast({} if overwrite else read_own(resolved(out) / document))
        self.maybe_done = RUN in self.earlier  # a finished run leaves OUT full
        if not self.maybe_done:
            self._check_target()

    def _check_target(self) -> None:
        for folder in self.sources:
            output.check_target(Path(self.out), folder, overwrite=self.overwrite)

    def open_work(self, identity: Mapping[str, Any], deciding: Mapping[str, Any]) -> BlockFolder | None:
        """Return the work folder for ``identity``; None where an earlier run of the same command already wrote ``out``.

        deciding: everything that decides the result besides ``identity``.
        Raises UserError unless ``out`` may be written.
        """
        self.identity, self.digest = identity, run_digest({**identity, **deciding})
        if self.maybe_done:
            if self.earlier[RUN] == self.digest:
                return None
            self._check_target()
        with self.ranks.main_first():
            return BlockFolder(self.folder, identity, main=self.ranks.is_main)

    def written(self, kind: type[OwnRecord]) -> OwnRecord | None:
        """Return the document of the earlier run that wrote ``out``, and remove what it left; None on other ranks than
        0."""
        if not self.ranks.is_main:
            return None
        BlockFolder.tidy(self.folder, self.identity, resolved(self.out), self.console)
        return kind.from_dict(self.earlier, self.document)

    def write(
        self,
        work: BlockFolder,
        model: str,
        recipe: Recipe,
        document: Record,
        changes: Changes,
        *,
        revision: str | None,
        verify: bool,
    ) -> None:
        """Write ``out``, whole or not at all, and remove the work. Raises UserError where it cannot be written."""
        text = to_json({**document.to_dict(), RUN: self.digest}) + "\n"
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


MethodOptions = TypeVar("MethodOptions", bound=WindowOptions)
Document = TypeVar("Document", bound=RewrittenLayers)


@dataclass(frozen=True)
class LayerJob(Generic[MethodOptions]):
    """The work of a method.

    teacher, own: the dense and the converted model, in the dtype of the computation.
    student: the layers to rewrite, with weights as stored.
    about: everything that the result depends on besides the models.
    files: the folder of finished layers.
    """

    options: MethodOptions
    teacher: Blocks
    own: Blocks
    student: StudentBlocks
    windows: Windows
    about: Mapping[str, Any]
    files: LayerFiles
    ranks: Ranks
    console: Console


class LayerMethod(ABC, Generic[MethodOptions, Document]):
    """A method that rewrites layers.

    name: of ``--method``.
    key: names its record in ladderize.yaml, its document's file, and the method in messages.
    reports: the document's field of reports, and their class.
    advice: what to try where it did not help.
    needs_source: the dense model must be the converted one's source or a relative of it.
    """

    name: str
    key: str
    kind: type[Document]
    reports: tuple[str, type[Record]]
    advice: str
    needs_source: bool = False

    @abstractmethod
    def layers(self, layout: Layout, ranges: str | None) -> tuple[int, ...]:
        """Return the layers to rewrite; raises UserError for one that cannot be."""

    @abstractmethod
    def windows(self, teacher: Checkpoint, options: MethodOptions) -> Windows:
        """Return the windows to learn from."""

    @abstractmethod
    def files(self, work: BlockFolder) -> LayerFiles:
        """Return the files of finished layers."""

    @abstractmethod
    def work(self, job: LayerJob[MethodOptions]) -> None:
        """Rewrite every layer that ``job.files`` does not hold yet. All ranks call it."""


def rewrite(
    method: LayerMethod[MethodOptions, Document],
    model: str | Path,
    out: str | Path,
    teacher_name: str | Path,
    options: MethodOptions,
    *,
    overwrite: bool,
    verify: bool,
    revision: str | None,
    console: Console,
) -> Document | None:
    """Rewrite ``model``'s layers after the dense ``teacher_name``, and write the result to ``out``.

    Returns the document; None on other ranks than 0. Several processes (accelerate launch, torchrun) share the work;
    rank 0 writes. A killed run resumes.
    Raises UserError.
    """
    model, out, teacher_name = str(model), str(out), str(teacher_name)
    options.source.files()  # raises UserError where they are missing
    ranks = join_ranks(options.device)
    checkpoint, dense = open_checkpoint(model, revision), open_checkpoint(teacher_name)
    layout = layout_to_rewrite(method, checkpoint, dense, model, teacher_name)
    layers = method.layers(layout, options.layers)
    run = CheckpointRun(
        out, f"{method.key}.json", options.work_dir, (checkpoint, dense), ranks, console, overwrite=overwrite
    )
    with console.stage("reading the data"):
        windows = method.windows(dense, options)
    dtype = compute_dtype(options.dtype, stored_dtype(dense))
    teacher, own = (Blocks(each, dtype, ranks.device) for each in (dense, checkpoint))
    stored = Blocks(checkpoint, getattr(torch, stored_dtype(checkpoint)), ranks.device)
    identity = BlockwiseRun(method.name, fingerprint(checkpoint), fingerprint(dense))
    record = MethodRecord.of(windows, options, dtype)
    about = record.to_dict()
    opened = run.open_work(identity.to_dict(), {**about, "layers": list(layers)})
    if opened is None:
        return run.written(method.kind)
    with opened as work:
        if teacher.ends_differ(own):
            console.note(
                f"{model} has a different embedding, final norm or LM head than {teacher_name}: its blocks will read"
                " what they do not expect"
            )
        files, student = method.files(work), StudentBlocks(layout, layers, stored.weights)
        method.work(LayerJob(options, teacher, own, student, windows, about, files, ranks, console))
        ranks.barrier()
        result = method.kind.RESULT
        with console.stage("measuring held-out perplexities"):
            measured = before_and_after(teacher, own, student, files, windows.heldout, result, ranks)
        if not ranks.is_main:
            return None
        if options.write == "best":
            before, after = (measured.divergence[name] for name in ("before", result))
            check_improved("KL", before, after, work=run.folder, advice=method.advice, what=method.key)
        reports, kind = method.reports
        fields: dict[str, Any] = {
            **vars(record),
            **layout.to_config(),
            reports: [files.report(kind, layer) for layer in layers],
            "heldout_perplexity": measured.perplexity,
            "heldout_divergence": measured.divergence,
        }
        document = method.kind(
            model=model, teacher=teacher_name, out=out, layout=str(layout), fingerprints=identity, **fields
        )
        told = {"teacher": teacher_name, "fingerprints": identity.to_dict(), "layers": format_ranges(layers), **about}
        changes = Changes(replace=files.tensors(layers), record={method.key: told}, note=document.card_note)
        run.write(work, model, Recipe(), document, changes, revision=revision, verify=verify)
    return document


def layout_to_rewrite(
    method: LayerMethod[Any, Any], checkpoint: Checkpoint, dense: Checkpoint, model: str, teacher_name: str
) -> Layout:
    """Return the layout of ``checkpoint``; raises UserError where ``method`` cannot be applied to the pair."""
    layout = check_pair(checkpoint, dense, model, teacher_name)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to distil; convert it first")
    if method.needs_source:
        check_related(checkpoint, dense, model, teacher_name)
    return layout
