"""``ladderize adapt --method blocks``: block-to-block distillation (SPD, arXiv 2502.20727, section 4.2).

Every converted block learns the output of the dense block. Block i reads the input of the dense model's block i, and
the loss is the mean squared difference between their outputs. So each block is trained alone: one in memory at a time,
in any order, on any rank, and each resumes separately. An SPD block reads the dense residual stream. A ladder block
reads the pair of streams that a ladder layer reads: the dense stream after attention i-1, and the complete one. In a
delayed block each virtual rank reads the former with its own part of MLP i-1.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ladderize.adapt.layers.align_layer import located, place_of_states
from ladderize.adapt.layers.block_trainer import BlockTrainer, States, batch_windows, visible_streams
from ladderize.adapt.layers.layer_files import LayerJob
from ladderize.adapt.layers.options import TOKENS_PER_STEP, BlockwiseOptions
from ladderize.blocks import Blocks, State, complete
from ladderize.console import human_bytes
from ladderize.layout import DELAYED, Layout, format_ranges


def distill(job: LayerJob, options: BlockwiseOptions) -> None:
    """Train every block of ``job.student.layers`` that ``job.files`` does not hold yet; the ranks take them in turn.

    Raises UserError for a loss that is NaN or infinite, and where the states do not fit in memory; finished blocks stay
    in ``job.files``.
    """
    teacher, student, windows, ranks = job.teacher, job.student, job.windows, job.ranks
    visible = max((visible_streams(student.layout, layer) for layer in student.layers), default=0)
    states = 2 * (1 + visible) * windows.all.numel() * int(teacher.config["hidden_size"]) * teacher.dtype.itemsize
    place = place_of_states(states, ranks)
    job.console.note(
        f"distilling {len(student.layers)} blocks on {len(windows.train)} windows of {windows.train.shape[1]} tokens,"
        f" {len(windows.heldout)} held out, for at most {options.epochs} epoch{'s' if options.epochs > 1 else ''} on"
        f" {ranks.words}; {human_bytes(states)} of states {located(place)}"
    )
    done = ranks.broadcast([layer for layer in student.layers if job.files.has(layer)])
    if done:
        job.console.note(f"blocks {format_ranges(done)} are already done")
    mine = [layer for layer in student.layers if layer not in done][ranks.rank :: ranks.size]
    steps = options.epochs * math.ceil(len(windows.train) / batch_windows(windows.train))
    with job.console.progress("distilling", len(mine) * steps) as advance:
        for index, before, after in teacher_pass(teacher, windows.all, mine, student.layout, place):
            if index in mine:
                trainer = BlockTrainer(teacher, student, index, before, after, len(windows.train), options)
                weights, report = trainer.train(advance)
                job.files.save(index, weights, report)


def teacher_pass(
    blocks: Blocks, windows: Tensor, layers: Sequence[int], layout: Layout, place: torch.device
) -> Iterator[tuple[int, States, States]]:
    """Run the dense model layer by layer; yields (i, states that enter block i, states that leave it).

    layers: the last of them ends the pass.
    layout: states also hold the streams that these layers read in it.
    place: where states lie.
    Raises UserError for NaN or infinite states.
    """
    shape = (*windows.shape, int(blocks.config["hidden_size"]))
    visible = max((visible_streams(layout, layer) for layer in layers), default=0)
    before, after = (States(shape, blocks.dtype, visible, place) for _ in range(2))
    if layers:
        _fill(before, lambda rows: blocks.embed(windows[rows]))
    for index in range(max(layers, default=-1) + 1):
        _run_layer(blocks, blocks.layer(index, _mlp_alone(layout, index)), before, after)
        yield index, before, after
        before, after = after, before


def _mlp_alone(layout: Layout, index: int) -> Layout:
    """Return the dense layout but for the mode of the MLP sync point behind layer ``index``."""
    mode, dense = layout.mlp_sync[index], Layout.dense(layout.num_layers)
    mlp = (*dense.mlp_sync[:index], mode, *dense.mlp_sync[index + 1 :])
    return Layout(dense.attention_sync, mlp, layout.sync_tp_size if mode == DELAYED else None)


def _run_layer(blocks: Blocks, layer: torch.nn.Module, before: States, after: States) -> None:
    _fill(after, lambda rows: blocks.run(layer, complete(before.read(rows, blocks.device))))


@torch.no_grad()
def _fill(store: States, states: Callable[[Tensor], State]) -> None:
    """Compute every window's state. This is a function, since a generator would leave no_grad on while its caller
    trains."""
    batch = max(1, 4 * TOKENS_PER_STEP // store.tensors[0].shape[1])
    for rows in torch.arange(store.windows).split(batch):
        store.write(int(rows[0]), states(rows))
