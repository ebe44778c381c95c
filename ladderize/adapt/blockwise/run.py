"""``ladderize adapt --method blocks``: distil a converted checkpoint's blocks one by one, and write the checkpoint
anew."""

from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.blockwise.block_trainer import StudentBlocks
from ladderize.adapt.blockwise.distill import distill, estimate
from ladderize.adapt.blockwise.documents import Distillation, HeldoutMeasures, TrainingRecord
from ladderize.adapt.blockwise.folder import BlockFolder, LayerFiles
from ladderize.adapt.blockwise.options import BlockwiseOptions
from ladderize.adapt.blockwise.rewrite import LayerMethod, Rewriting, rewrite
from ladderize.adapt.blockwise.windows import Windows, training_windows
from ladderize.adapt.methods import BLOCKS
from ladderize.blocks import Blocks
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console, human_bytes, human_seconds
from ladderize.errors import UserError
from ladderize.layout import Layout, format_ranges, parse_ranges
from ladderize.ranks.training import check_launch_of_blocks


def adapt_blocks(
    model: str | Path,
    out: str | Path,
    teacher_name: str | Path,
    options: BlockwiseOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
    console: Console = SILENT,
) -> Distillation | None:
    """Distil ``model``'s blocks against the dense ``teacher_name`` and write the result to ``out``; returns the
    document of distillation.json, on other ranks than 0 None.

    Several processes (accelerate launch, torchrun) share the blocks out; rank 0 writes. A killed run goes on where it
    was.
    """
    check_launch_of_blocks()
    return rewrite(
        Distilling(),
        model,
        out,
        teacher_name,
        options,
        overwrite=overwrite,
        verify=verify,
        revision=revision,
        console=console,
    )


class Distilling(LayerMethod[BlockwiseOptions, Distillation]):
    """Block-to-block distillation."""

    name, document, key, kind = BLOCKS, "distillation.json", "distillation", Distillation
    advice = "train with a lower --lr or on other data"

    def layers(self, layout: Layout, ranges: str | None) -> tuple[int, ...]:
        """The layers to train; raises UserError for one that computes what the dense model's does."""
        able = layout.converted_layers
        chosen = parse_ranges(ranges, layout.num_layers, option="--train") if ranges is not None else able
        if rest := sorted(set(chosen) - set(able)):
            raise UserError(
                f"--train: {format_ranges(rest)} are the same as in the dense model; only {format_ranges(able)} differ"
                " from it"
            )
        return tuple(chosen)

    def windows(self, teacher: Checkpoint, options: BlockwiseOptions) -> Windows:
        return training_windows(teacher, options, options.distill.seed)

    def record(self, windows: Windows, options: BlockwiseOptions, dtype: torch.dtype) -> TrainingRecord:
        return TrainingRecord.of(windows, options, dtype)

    def work(self, job: Rewriting[BlockwiseOptions]) -> None:
        announce_distillation(job.teacher, job.student, job.windows, job.options, job.console)
        distill(
            job.teacher,
            job.student,
            job.windows,
            job.options.distill,
            job.work,
            job.ranks,
            job.console,
            about=job.record.to_dict(),
        )

    def files(self, work: BlockFolder) -> LayerFiles:
        return work

    def describe(self, job: Rewriting[BlockwiseOptions], measured: HeldoutMeasures) -> Distillation:
        about: dict[str, Any] = job.about
        return Distillation(
            **about,
            blocks=[job.work.report(layer) for layer in job.layers],
            heldout_perplexity=measured.perplexity,
            heldout_divergence=measured.divergence,
        )


def announce_distillation(
    teacher: Blocks, student: StudentBlocks, windows: Windows, options: BlockwiseOptions, console: Console
) -> None:
    """Say what the training will take before it starts."""
    seconds, states, training = estimate(teacher, student, windows, options.distill)
    train, heldout = len(windows.train), len(windows.heldout)
    place = "in memory" if states <= options.distill.max_memory else "on disk"
    console.note(
        f"distilling {len(student.layers)} blocks on {train} windows of {windows.train.shape[1]} tokens, {heldout} held"
        f" out: at most about {human_seconds(seconds)} for {options.distill.epochs} epochs on {teacher.device},"
        f" {human_bytes(states)} of states {place}, {human_bytes(training)} for one block in training"
    )
