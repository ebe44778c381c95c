"""What methods that rewrite a checkpoint layer by layer have in common: from the two checkpoints and the data to the
new checkpoint, with work that a killed run goes on from."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from ladderize.adapt.blockwise.block_trainer import StudentBlocks
from ladderize.adapt.blockwise.documents import BlockwiseRun, HeldoutMeasures, RewrittenLayers
from ladderize.adapt.blockwise.folder import BlockFolder, LayerFiles
from ladderize.adapt.blockwise.options import TOKENS_PER_STEP, WindowOptions
from ladderize.adapt.blockwise.windows import Windows
from ladderize.adapt.teacher import check_improved, check_pair, check_related
from ladderize.blocks import Blocks, open_checkpoint, stored_dtype, window_streams
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import Console, to_json
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.eval.perplexity import perplexity_from_nlls
from ladderize.files import output
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.work import FINISHED, RUN, EarlierRun, run_digest, work_folder
from ladderize.layout import Layout, format_ranges
from ladderize.ranks.group import Ranks, join_ranks
from ladderize.ranks.training import compute_dtype

MethodOptions = TypeVar("MethodOptions", bound=WindowOptions)
Document = TypeVar("Document", bound=RewrittenLayers)
LayerAt = Callable[[int], torch.nn.Module]


@dataclass(frozen=True)
class Rewriting(Generic[MethodOptions]):
    """What a method works on. teacher, own: the dense and the converted model, in the dtype that is computed in.
    student: the layers to rewrite, with weights as they are stored. record: what the result depends on besides the
    models."""

    model: str
    teacher_name: str
    out: str
    options: MethodOptions
    layout: Layout
    layers: tuple[int, ...]
    teacher: Blocks
    own: Blocks
    student: StudentBlocks
    windows: Windows
    identity: BlockwiseRun
    record: Record
    work: BlockFolder
    ranks: Ranks
    console: Console

    @property
    def about(self) -> dict[str, object]:
        """The fields that documents have in common, but for what was measured."""
        return {
            "model": self.model,
            "teacher": self.teacher_name,
            "out": self.out,
            "layout": str(self.layout),
            **self.layout.to_config(),
            "fingerprints": self.identity,
            **vars(self.record),
        }


class LayerMethod(ABC, Generic[MethodOptions, Document]):
    """A method. name: of ``--method``. document: the file with its document. key: of its record in ladderize.yaml, and
    what it is called in messages. advice: what to try where it did not help. needs_source: whether the dense model has
    to be the converted one's source or a relative of it."""

    name: str
    document: str
    key: str
    kind: type[Document]
    advice: str
    needs_source: bool = False

    @abstractmethod
    def layers(self, layout: Layout, ranges: str | None) -> tuple[int, ...]:
        """The layers to rewrite; raises UserError for one that cannot be."""

    @abstractmethod
    def windows(self, teacher: Checkpoint, options: MethodOptions) -> Windows:
        """The data."""

    @abstractmethod
    def record(self, windows: Windows, options: MethodOptions, dtype: torch.dtype) -> Record:
        """What the result depends on besides the models and the layers."""

    @abstractmethod
    def work(self, job: Rewriting[MethodOptions]) -> None:
        """Make every layer that ``files`` does not hold yet. All ranks call it."""

    @abstractmethod
    def files(self, work: BlockFolder) -> LayerFiles:
        """Where finished layers lie."""

    @abstractmethod
    def describe(self, job: Rewriting[MethodOptions], measured: HeldoutMeasures) -> Document:
        """The document of what was done."""


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
    """Rewrite ``model``'s layers with the dense ``teacher_name`` at hand and write the result to ``out``; returns the
    document, on other ranks than 0 None.

    Several processes (accelerate launch, torchrun) share the work; rank 0 writes. A killed run goes on where it was.
    """
    model, out, teacher_name = str(model), str(out), str(teacher_name)
    options.source.files()  # that they are there
    ranks = join_ranks(options.device)
    student_checkpoint, teacher_checkpoint = open_checkpoint(model, revision), open_checkpoint(teacher_name)
    layout = check_pair(student_checkpoint, teacher_checkpoint, model, teacher_name)
    if layout.is_dense:
        raise UserError(f"{model} is dense; there is nothing to distil; convert it first")
    if method.needs_source:
        check_related(student_checkpoint, teacher_checkpoint, model, teacher_name)
    layers = method.layers(layout, options.layers)
    folder = work_folder(out, options.work_dir, student_checkpoint.folder, teacher_checkpoint.folder)
    earlier = EarlierRun(resolved(out), method.document, folder, overwrite=overwrite)
    maybe_done = ranks.broadcast(earlier.may_have_finished())  # then OUT may be full
    if not maybe_done:
        check_targets(out, student_checkpoint, teacher_checkpoint, overwrite=overwrite)
    with console.stage("reading the data"):
        windows = method.windows(teacher_checkpoint, options)
    dtype = compute_dtype(options.dtype, stored_dtype(teacher_checkpoint))
    teacher, own = (Blocks(checkpoint, dtype, ranks.device) for checkpoint in (teacher_checkpoint, student_checkpoint))
    stored = Blocks(student_checkpoint, getattr(torch, stored_dtype(student_checkpoint)), ranks.device)
    identity = BlockwiseRun(method.name, fingerprint(student_checkpoint), fingerprint(teacher_checkpoint))
    record = method.record(windows, options, dtype)
    digest = run_digest({**identity.to_dict(), **record.to_dict(), "layers": list(layers)})
    if maybe_done:
        if ranks.broadcast(earlier.finished(digest)):
            if not ranks.is_main:
                return None
            return method.kind.from_dict(earlier.tidy(BlockFolder, identity.to_dict(), console), method.document)
        check_targets(out, student_checkpoint, teacher_checkpoint, overwrite=overwrite)
    with ranks.main_first():
        work = BlockFolder(folder, identity.to_dict(), main=ranks.is_main)
    with work:
        if teacher.ends_differ(own):
            console.note(
                f"{model} has a different embedding, final norm or LM head than {teacher_name}: its blocks will read"
                " what they do not expect"
            )
        job = Rewriting(
            model,
            teacher_name,
            out,
            options,
            layout,
            layers,
            teacher,
            own,
            StudentBlocks(layout, layers, stored.weights),
            windows,
            identity,
            record,
            work,
            ranks,
            console,
        )
        method.work(job)
        ranks.barrier()
        if not ranks.is_main:
            return None
        with console.stage("measuring held-out perplexities"):
            files = method.files(work)
            measured = before_and_after(teacher, own, layout, layers, files, windows.heldout, method.kind.RESULT)
        if options.write == "best":
            before, after = (measured.perplexity[name].perplexity for name in ("before", method.kind.RESULT))
            check_improved(before, after, work=folder, advice=method.advice, what=method.key)
        document = method.describe(job, measured)
        work.write_about(**{FINISHED: digest})  # a run that is killed from here on may find OUT complete
        convert_checkpoint(
            model,
            out,
            Recipe(),
            revision=revision,
            overwrite=overwrite,
            verify=verify,
            changes=Changes(
                replace=files.tensors(layers),
                record={
                    method.key: {
                        "teacher": teacher_name,
                        "fingerprints": identity.to_dict(),
                        "layers": format_ranges(layers),
                        **record.to_dict(),
                    }
                },
                extra_files={method.document: to_json({**document.to_dict(), RUN: digest}) + "\n"},
                note=document.card_note,
            ),
            console=console,
        )
        work.remove()
    return document


def before_and_after(
    teacher: Blocks,
    own: Blocks,
    layout: Layout,
    layers: tuple[int, ...],
    files: LayerFiles,
    heldout: torch.Tensor,
    result: str,
) -> HeldoutMeasures:
    """Held-out measures of the dense model, of the converted one, and of that with its rewritten layers."""
    dense = Layout.dense(layout.num_layers)
    variants: dict[str, tuple[Blocks, LayerAt]] = {
        "dense": (teacher, lambda layer: teacher.layer(layer, dense)),
        "before": (own, lambda layer: own.layer(layer, layout)),
        result: (own, lambda layer: own.layer(layer, layout, loaded(files, layer, own) if layer in layers else None)),
    }
    return heldout_measures(variants, heldout)


def heldout_measures(variants: Mapping[str, tuple[Blocks, LayerAt]], ids: torch.Tensor) -> HeldoutMeasures:
    """Perplexity of held-out windows under variants of a model, each given by its blocks and layers, and the divergence
    from the first, the dense one; one layer in memory at a time."""
    batch_size = max(1, 2 * TOKENS_PER_STEP // ids.shape[1])
    perplexities, divergences, reference = {}, {}, None
    for name, (blocks, layer_at) in variants.items():
        begin = time.perf_counter()
        streams = window_streams(blocks, layer_at, ids, batch_size=batch_size)
        nlls, sums = [], []
        with torch.no_grad():
            for number, batch in enumerate(ids.split(batch_size)):
                own = streams[number].to(blocks.device)
                nlls.append(blocks.nll(own, batch))
                if reference is not None:
                    sums.append(blocks.divergence(reference[number].to(blocks.device), own))
        perplexities[name] = perplexity_from_nlls(
            torch.cat(nlls).cpu().numpy(), list(ids.numpy()), time.perf_counter() - begin
        )
        if reference is None:
            reference = streams
        else:
            divergences[name] = float(torch.cat(sums).sum()) / ids[:, 1:].numel()
    return HeldoutMeasures(perplexities, divergences)


def check_targets(out: str, *sources: Checkpoint, overwrite: bool) -> None:
    """Raise UserError unless ``out`` may be written, and is none of its sources."""
    for checkpoint in sources:
        output.check_target(Path(out), checkpoint.folder, overwrite=overwrite)


def loaded(files: LayerFiles, layer: int, blocks: Blocks) -> dict[str, torch.Tensor]:
    """A rewritten layer's weights, to compute with."""
    return {name: tensor.to(blocks.device, blocks.dtype) for name, tensor in files.weights(layer).items()}
