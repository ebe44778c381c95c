"""``ladderize adapt --method blocks``: block-to-block distillation (SPD, arXiv 2502.20727, section 4.2).

Every converted block learns the output of the dense block. Block i reads the input of the dense model's block i, and
the loss is the mean squared difference between their outputs. So each block is trained alone: one in memory at a time,
in any order, on any rank, and each resumes separately. An SPD block reads the dense residual stream. A ladder block
reads the pair of streams that a ladder layer reads: the dense stream after attention i-1, and the complete one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ladderize.adapt.layers.block_trainer import BlockReport, BlockTrainer
from ladderize.adapt.layers.hidden_states import needs_pair, teacher_pass
from ladderize.adapt.layers.layer_files import BlockFolder, LayerFiles, StudentBlocks
from ladderize.adapt.layers.options import BlockwiseOptions, DistillOptions, DistillSettings
from ladderize.adapt.layers.rewrite import LayerJob, LayerMethod, RewrittenLayers, rewrite
from ladderize.adapt.layers.windows import Windows, training_windows
from ladderize.adapt.methods import BLOCKS
from ladderize.blocks import Blocks
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console, code_span, human_bytes
from ladderize.errors import UserError
from ladderize.layout import Layout, format_ranges, parse_ranges
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks

BLOCK_ERROR = "block error: error of the block's output on held-out windows, as % of what the dense block adds"


@dataclass(frozen=True)
class Distillation(RewrittenLayers):
    """The content of distillation.json; docs/files.md explains the keys."""

    RESULT = "distilled"
    MEANING = BLOCK_ERROR
    options: DistillSettings
    blocks: list[BlockReport]

    def rows(self) -> list[dict[str, str]]:
        return [
            {
                "block": str(report.block),
                "loss (MSE) before": f"{report.loss_before:.3e}",
                "after": f"{report.loss_after:.3e}",
                "block error before": f"{report.share_lost_before:.2%}",
                "after distillation": f"{report.share_lost_after:.2%}",
                "steps": str(report.steps) + (" (stopped early)" if report.stopped_early else ""),
            }
            for report in self.blocks
        ]

    def done(self) -> str:
        layers = format_ranges([block.block for block in self.blocks])
        return (
            f"**Retraining.** Layers {layers} were distilled block by block from {code_span(self.teacher)} (`blocks`)."
        )


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
    """Distil ``model``'s blocks from the dense ``teacher_name`` and write the result to ``out``.

    Returns the document of distillation.json; None on other ranks than 0. Several processes (accelerate launch,
    torchrun) share the blocks; rank 0 writes. A killed run resumes.
    Raises UserError.
    """
    how: dict[str, Any] = {"overwrite": overwrite, "verify": verify, "revision": revision, "console": console}
    return rewrite(Distilling(), model, out, teacher_name, options, **how)


class Distilling(LayerMethod[BlockwiseOptions, Distillation]):
    """Block-to-block distillation."""

    name, key, kind, reports = BLOCKS, "distillation", Distillation, ("blocks", BlockReport)
    advice = "train with a lower --lr or on other data"

    def layers(self, layout: Layout, ranges: str | None) -> tuple[int, ...]:
        """Return the layers to train; raises UserError for one that is the same as in the dense model."""
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

    def files(self, work: BlockFolder) -> LayerFiles:
        return work.distilled

    def work(self, job: LayerJob[BlockwiseOptions]) -> None:
        options = job.options.distill
        distill(job.teacher, job.student, job.windows, options, job.files, job.ranks, job.console, about=job.about)


def distill(
    teacher: Blocks,
    student: StudentBlocks,
    windows: Windows,
    options: DistillOptions,
    files: LayerFiles,
    ranks: Ranks,
    console: Console,
    *,
    about: Mapping[str, Any],
) -> None:
    """Train every block of ``student.layers`` that ``files`` does not hold yet; the ranks take them in turn.

    about: everything that the result depends on besides the student; a block trained with another one is trained anew.
    Raises UserError for a loss that is NaN or infinite; finished blocks stay in ``files``.
    """
    options = options.resolve(int(teacher.config["hidden_size"]), windows.train.shape[1])
    console.note(distillation_announcement(teacher, student, windows, options, ranks))
    keys = {layer: partial(student.key, layer, about) for layer in student.layers}
    done = ranks.broadcast([layer for layer in student.layers if files.has(layer, keys[layer])])
    if done:
        console.note(f"blocks {format_ranges(done)} are already done")
    mine = [layer for layer in student.layers if layer not in done][ranks.rank :: ranks.size]
    if not mine:
        return
    pairs = any(needs_pair(student.layout, layer) for layer in mine)
    steps = options.epochs * math.ceil(len(windows.train) / (options.batch_size or 1))
    path = files.folder / f"states-{ranks.rank}"
    with console.progress("distilling", len(mine) * steps) as advance:
        passes = teacher_pass(teacher, windows.all, mine, pairs, max_memory=options.max_memory, path=path)
        for index, before, after in passes:
            if index in mine:
                trainer = BlockTrainer(teacher, student, index, before, after, len(windows.train), options)
                weights, report = trainer.train(advance)
                files.save(index, weights, report, keys[index]())


def distillation_announcement(
    teacher: Blocks, student: StudentBlocks, windows: Windows, options: DistillOptions, ranks: Ranks
) -> str:
    """Return the announcement of which blocks are trained on which data.

    options: resolved ones.
    ranks: those that share the blocks.
    Raises UserError where a step does not fit in memory.
    """
    hidden, size, tokens = int(teacher.config["hidden_size"]), teacher.dtype.itemsize, windows.train.shape[1]
    infos, ids = teacher.checkpoint.tensors, windows.train[: options.batch_size or 1]
    block = sum(info.numel for name, info in infos.items() if name.startswith("model.layers.0."))
    # numbers per token that are kept for the backward pass
    kept = 8 * hidden * (student.layout.sync_tp_size or 1) + 4 * int(teacher.config["intermediate_size"])
    training = 16 * block  # weights, gradients and Adam's two moments in float32
    step_of = f"a step on {len(ids):,} windows of {tokens:,} tokens"
    advice = "lower --batch-size or --seq-len"
    needed = training + block * size + 4 * ids.numel() * kept
    check_room(needed, teacher.device, step_of, advice, processes=ranks.local_size)
    pairs = any(needs_pair(student.layout, layer) for layer in student.layers)
    states = 2 * (1 + pairs) * windows.all.numel() * hidden * size
    place = "in memory" if states <= options.max_memory else "on disk"
    return (
        f"distilling {len(student.layers)} blocks on {len(windows.train)} windows of {tokens} tokens,"
        f" {len(windows.heldout)} held out, for at most {options.epochs} epoch{'s' if options.epochs > 1 else ''} on"
        f" {ranks.words}; for each process {human_bytes(states)} of states {place}, {human_bytes(training)} for one"
        " block in training"
    )
