"""``ladderize adapt --method blocks``: block-to-block distillation (SPD, arXiv 2502.20727, section 4.2).

Every converted block learns the output of the dense block. Block i reads the input of the dense model's block i, and
the loss is the mean squared difference between their outputs. So each block is trained alone: one in memory at a time,
in any order, on any rank, and each resumes separately. An SPD block reads the dense residual stream. A ladder block
reads the pair of streams that a ladder layer reads: the dense stream after attention i-1, and the complete one.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ladderize.adapt.layers.align import check_states_room
from ladderize.adapt.layers.block_trainer import BlockTrainer, States, batch_windows, needs_pair
from ladderize.adapt.layers.layer_files import LayerJob
from ladderize.adapt.layers.options import TOKENS_PER_STEP, BlockwiseOptions
from ladderize.blocks import Blocks, State, complete
from ladderize.console import human_bytes
from ladderize.layout import BLOCKING, OVERLAPPED, Layout, format_ranges


def distill(job: LayerJob, options: BlockwiseOptions) -> None:
    """Train every block of ``job.student.layers`` that ``job.files`` does not hold yet; the ranks take them in turn.

    Raises UserError for a loss that is NaN or infinite, and where the states do not fit in memory; finished blocks stay
    in ``job.files``.
    """
    teacher, student, windows, ranks = job.teacher, job.student, job.windows, job.ranks
    pairs = any(needs_pair(student.layout, layer) for layer in student.layers)
    states = 2 * (1 + pairs) * windows.all.numel() * int(teacher.config["hidden_size"]) * teacher.dtype.itemsize
    check_states_room(states, processes=ranks.local_size)
    job.console.note(
        f"distilling {len(student.layers)} blocks on {len(windows.train)} windows of {windows.train.shape[1]} tokens,"
        f" {len(windows.heldout)} held out, for at most {options.epochs} epoch{'s' if options.epochs > 1 else ''} on"
        f" {ranks.words}; {human_bytes(states)} of states in memory"
    )
    done = ranks.broadcast([layer for layer in student.layers if job.files.has(layer)])
    if done:
        job.console.note(f"blocks {format_ranges(done)} are already done")
    mine = [layer for layer in student.layers if layer not in done][ranks.rank :: ranks.size]
    steps = options.epochs * math.ceil(len(windows.train) / batch_windows(windows.train))
    with job.console.progress("distilling", len(mine) * steps) as advance:
        for index, before, after in teacher_pass(teacher, windows.all, mine, pairs):
            if index in mine:
                trainer = BlockTrainer(teacher, student, index, before, after, len(windows.train), options)
                weights, report = trainer.train(advance)
                job.files.save(index, weights, report)


def teacher_pass(
    blocks: Blocks, windows: Tensor, layers: Sequence[int], pairs: bool
) -> Iterator[tuple[int, States, States]]:
    """Run the dense model layer by layer; yields (i, states that enter block i, states that leave it).

    layers: the last of them ends the pass.
    pairs: states also hold the stream without the last MLP's output.
    Raises UserError for NaN or infinite states.
    """
    count = blocks.num_layers
    layout = Layout((BLOCKING,) * count, (OVERLAPPED,) * (count - 1) + (BLOCKING,)) if pairs else Layout.dense(count)
    shape = (*windows.shape, int(blocks.config["hidden_size"]))
    before, after = (States(shape, blocks.dtype, pairs) for _ in range(2))
    if layers:
        _fill(before, lambda rows: blocks.embed(windows[rows]))
    for index in range(max(layers, default=-1) + 1):
        _run_layer(blocks, blocks.layer(index, layout), before, after)
        yield index, before, after
        before, after = after, before


def _run_layer(blocks: Blocks, layer: torch.nn.Module, before: States, after: States) -> None:
    _fill(after, lambda rows: blocks.run(layer, complete(before.read(rows, blocks.device))))


@torch.no_grad()
def _fill(store: States, states: Callable[[Tensor], State]) -> None:
    """Compute every window's state. This is a function, since a generator would leave no_grad on while its caller
    trains."""
    batch = max(1, 4 * TOKENS_PER_STEP // store.tensors[0].shape[1])
    for rows in torch.arange(store.windows).split(batch):
        store.write(int(rows[0]), states(rows))
