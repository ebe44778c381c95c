"""``ladderize adapt --method align``: solve a converted checkpoint's projections anew, and write a new checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.align.align import align
from ladderize.adapt.align.estimate import announce_alignment
from ladderize.adapt.align.layers import layers_to_align
from ladderize.adapt.align.options import AlignOptions, AlignSettings, default_tokens
from ladderize.adapt.align.reports import GROUPS, LayerReport
from ladderize.adapt.blockwise.documents import HeldoutMeasures, RewrittenLayers, WindowData
from ladderize.adapt.blockwise.folder import BlockFolder, LayerFiles
from ladderize.adapt.blockwise.rewrite import LayerMethod, Rewriting, rewrite
from ladderize.adapt.blockwise.windows import Windows, training_windows
from ladderize.adapt.methods import ALIGN
from ladderize.blocks import Blocks, stored_dtype
from ladderize.checkpoint.llama import kv_head_count
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console
from ladderize.convert.heads import HEAD_MAP, permute_heads, read_head_map
from ladderize.files.records import Record
from ladderize.layout import Layout, format_ranges
from ladderize.ranks.training import check_launch_of_blocks


@dataclass(frozen=True)
class AlignRecord(Record):
    """What an alignment depends on besides the models. dtype: what is computed in."""

    data: WindowData
    options: AlignSettings
    dtype: str

    @classmethod
    def of(cls, windows: Windows, options: AlignOptions, dtype: torch.dtype) -> "AlignRecord":
        """Reads all data once."""
        return cls(WindowData.of(windows, options), options.settings(), str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Alignment(RewrittenLayers):
    """The document; docs/files.md says what the keys mean."""

    RESULT = "aligned"
    MEANING = (
        "errors: squared, on held-out tokens, in % of the squared values aimed at; reads: q, k, v; gate, up. writes:"
        " o; down; they aim at the dense model's stream"
    )
    options: AlignSettings
    layers: list[LayerReport]

    def rows(self) -> list[dict[str, str]]:
        """The error of each sub-module's reads and writes, before and after."""
        return [{"layer": str(one.layer), **{name: _errors(one, name) for name in GROUPS}} for one in self.layers]

    def done(self) -> str:
        layers = format_ranges([report.layer for report in self.layers])
        return (
            f"**Alignment.** The projections of layers {layers} were solved anew by least squares, towards"
            f" `{self.teacher}` (`align`)."
        )


def _errors(report: LayerReport, name: str) -> str:
    errors = report.errors(name)
    if errors is None:
        return ""
    before, after = errors
    kept = all(entry.ridge is None for entry in report.of_group(name))
    return f"{before:.1%}, kept" if kept else f"{before:.1%} to {after:.1%}"


def align_checkpoint(
    model: str | Path,
    out: str | Path,
    teacher_name: str | Path,
    options: AlignOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
    console: Console = SILENT,
) -> Alignment | None:
    """Align ``model`` with the dense ``teacher_name`` that it was converted from and write the result to ``out``;
    returns the document of alignment.json, on other ranks than 0 None.

    Several processes (accelerate launch, torchrun) share the windows out; rank 0 writes. A killed run goes on where it
    was.
    """
    check_launch_of_blocks()
    return rewrite(
        Aligning(),
        model,
        out,
        teacher_name,
        options,
        overwrite=overwrite,
        verify=verify,
        revision=revision,
        console=console,
    )


class Aligning(LayerMethod[AlignOptions, Alignment]):
    """Least squares, without gradients."""

    name, document, key, kind = ALIGN, "alignment.json", "alignment", Alignment
    advice = "align on more data, or on data like those that the model is for"
    needs_source = True

    def layers(self, layout: Layout, ranges: str | None) -> tuple[int, ...]:
        """The layers to solve: all whose input differs from the dense model's, if nothing was said; raises UserError
        for others."""
        return layers_to_align(layout, ranges)

    def windows(self, teacher: Checkpoint, options: AlignOptions) -> Windows:
        return training_windows(teacher, options, options.seed, options.tokens or default_tokens(teacher.config))

    def record(self, windows: Windows, options: AlignOptions, dtype: torch.dtype) -> AlignRecord:
        return AlignRecord.of(windows, options, dtype)

    def work(self, job: Rewriting[AlignOptions]) -> None:
        student, teacher, options = job.student, job.teacher, job.options
        announce_alignment(
            teacher, student, job.windows, options.settings(), options.max_memory, job.ranks, job.console
        )
        orders = heads_of(job.own.checkpoint)
        config = teacher.config
        stored = Blocks(teacher.checkpoint, getattr(torch, stored_dtype(teacher.checkpoint)), teacher.device)

        def dense_weights(layer: int) -> dict[str, torch.Tensor]:
            weights = stored.weights(layer)
            if layer not in orders:
                return weights
            return permute_heads(weights, orders[layer], config["num_attention_heads"], kv_head_count(config))

        align(
            teacher,
            job.own,
            dense_weights,
            student,
            job.windows,
            options.settings(),
            job.work.aligned,
            job.ranks,
            job.console,
            about=job.record.to_dict(),
            max_memory=options.max_memory,
        )

    def files(self, work: BlockFolder) -> LayerFiles:
        return work.aligned

    def describe(self, job: Rewriting[AlignOptions], measured: HeldoutMeasures) -> Alignment:
        about: dict[str, Any] = job.about
        return Alignment(
            **about,
            layers=[job.work.aligned.report_as(LayerReport, layer) for layer in job.layers],
            heldout_perplexity=measured.perplexity,
            heldout_divergence=measured.divergence,
        )


def heads_of(checkpoint: Checkpoint) -> dict[int, tuple[int, ...]]:
    """The order of heads in each layer that was stored in another one than the dense model's."""
    path = checkpoint.folder / HEAD_MAP
    return read_head_map(path).orders if path.is_file() else {}
