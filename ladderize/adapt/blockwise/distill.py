"""Block-to-block distillation (SPD, arXiv 2502.20727, section 4.2): every converted block learns to answer as the dense
block does.

Block i reads what the dense model's block i reads, and the loss is the mean squared difference between their outputs,
so every block is trained alone: one in memory at a time, in any order, on any rank, and each resumes by itself. An SPD
block reads the dense residual stream. A ladder block reads the pair that a ladder layer reads: the dense stream after
attention i-1, and the complete one.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.blockwise.block_trainer import EVALUATIONS_PER_EPOCH, BlockTrainer, StudentBlocks
from ladderize.adapt.blockwise.folder import BlockFolder
from ladderize.adapt.blockwise.hidden_states import StateStore, needs_pair
from ladderize.adapt.blockwise.options import TOKENS_PER_STEP, DistillOptions
from ladderize.adapt.blockwise.windows import Windows
from ladderize.blocks import Blocks, State, complete, layer_seconds, timed
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.layout import BLOCKING, OVERLAPPED, Layout, format_ranges
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks


def teacher_pass(
    blocks: Blocks, windows: Tensor, layers: Sequence[int], pairs: bool, *, max_memory: int, path: Path
) -> Iterator[tuple[int, StateStore, StateStore]]:
    """Run the dense model layer by layer; yields (i, states that enter block i, states that leave it) for i up to the
    last of ``layers``.

    pairs: states hold the stream without the last MLP's output too. Stores beyond ``max_memory`` bytes lie in files
    named after ``path``.
    """
    shape = (*windows.shape, int(blocks.config["hidden_size"]))
    count = blocks.num_layers
    layout = Layout((BLOCKING,) * count, (OVERLAPPED,) * (count - 1) + (BLOCKING,)) if pairs else Layout.dense(count)
    batch = max(1, 4 * TOKENS_PER_STEP // windows.shape[1])
    stores: list[StateStore] = []
    try:
        for number in range(2):
            file = path.with_name(f"{path.name}-{number}")
            stores.append(StateStore(shape, blocks.dtype, pairs, max_memory=max_memory // 2, path=file))
        _fill(stores[0], batch, lambda rows: blocks.embed(windows[rows]))
        for index in range(max(layers, default=-1) + 1):
            before, after = stores[index % 2], stores[1 - index % 2]
            teacher = blocks.layer(index, layout)
            _fill(after, batch, partial(_leaving, blocks, teacher, before))
            del teacher
            yield index, before, after
    finally:
        for store in stores:
            store.close()


def _leaving(blocks: Blocks, layer: torch.nn.Module, entering: StateStore, rows: Tensor) -> State:
    return blocks.run(layer, complete(entering.read(rows, blocks.device)))


@torch.no_grad()
def _fill(store: StateStore, batch: int, states: Callable[[Tensor], State]) -> None:
    """Compute every window's state; in a function, since a generator would leave no_grad on while its caller trains."""
    for rows in torch.arange(store.windows).split(batch):
        state = states(rows)
        if not torch.isfinite(complete(state)).all():
            raise UserError("the dense model's states are NaN or infinite; check its weights, or compute in float32")
        store.write(int(rows[0]), state)


def distill(
    teacher: Blocks,
    student: StudentBlocks,
    windows: Windows,
    options: DistillOptions,
    work: BlockFolder,
    ranks: Ranks,
    console: Console,
    *,
    about: Mapping[str, Any],
) -> None:
    """Train every block of ``student.layers`` that ``work`` does not hold yet; the ranks take them in turn.

    about: what the result depends on besides the student; a block in ``work`` that was trained from anything else is
    trained anew. Raises UserError if a loss becomes NaN; what was trained before is kept in ``work``.
    """
    keys = {layer: partial(block_key, student, layer, about) for layer in student.layers}
    done = [layer for layer in student.layers if work.has(layer, keys[layer])]
    if done:
        console.note(f"blocks {format_ranges(done)} are already done")
    mine = [
        layer for number, layer in enumerate(student.layers) if number % ranks.size == ranks.rank and layer not in done
    ]
    if not mine:
        return
    pairs = any(needs_pair(student.layout, layer) for layer in mine)
    options = options.resolve(int(teacher.config["hidden_size"]), windows.train.shape[1])
    steps = options.epochs * math.ceil(len(windows.train) / (options.batch_size or 1))
    with console.progress("distilling", len(mine) * steps) as advance:
        passes = teacher_pass(
            teacher, windows.all, mine, pairs, max_memory=options.max_memory, path=work.folder / f"states-{ranks.rank}"
        )
        for index, before, after in passes:
            if index in mine:
                trainer = BlockTrainer(teacher, student, index, before, after, len(windows.train), options)
                weights, report = trainer.train(advance)
                work.save(index, weights, report, keys[index]())


def block_key(student: StudentBlocks, layer: int, about: Mapping[str, Any]) -> str:
    """A hash of all that a block's training starts from: its modes, its initial weights, and ``about``."""
    layout = student.layout
    modes = [layout.entering(layer), layout.attention_sync[layer], layout.mlp_sync[layer], layout.sync_tp_size]
    digest = hashlib.sha256(json.dumps([modes, about], sort_keys=True).encode())
    for name, tensor in sorted(student.weights(layer).items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_block_fits(teacher: Blocks, student: StudentBlocks, rows: int, tokens: int) -> None:
    """Raise UserError where a step on ``rows`` windows of ``tokens`` tokens cannot fit into memory."""
    hidden, intermediate = int(teacher.config["hidden_size"]), int(teacher.config["intermediate_size"])
    # numbers per token that are kept for the backward pass
    kept = 8 * hidden * (student.layout.sync_tp_size or 1) + 4 * intermediate
    check_room(
        4 * rows * tokens * kept,
        teacher.device,
        f"a step on {rows:,} windows of {tokens:,} tokens",
        "lower --batch-size or --seq-len",
    )


def estimate(
    teacher: Blocks, student: StudentBlocks, windows: Windows, options: DistillOptions
) -> tuple[float, int, int]:
    """Seconds at most (all epochs), bytes of states, and bytes of one block in training; from a step timed here and
    now."""
    options = options.resolve(int(teacher.config["hidden_size"]), windows.train.shape[1])
    batch_size = options.batch_size or 1
    check_block_fits(teacher, student, min(batch_size, len(windows.train)), windows.train.shape[1])
    rows, index = torch.arange(min(batch_size, len(windows.train))), student.layers[0]
    store = StateStore((len(rows), windows.train.shape[1], teacher.config["hidden_size"]), teacher.dtype, True)
    with torch.no_grad():
        state = teacher.embed(windows.train[rows])
        store.write(0, (state, state))
        forward = layer_seconds(teacher, teacher.layer(index, Layout.dense(teacher.num_layers)), windows.train[rows])
    trainer = BlockTrainer(teacher, student, index, store, store, len(rows), options)
    optimizer = trainer.optimizer()
    step = min(timed(lambda: trainer.step(optimizer, rows), teacher.device) for _ in range(3))
    store.close()
    per_epoch = math.ceil(len(windows.train) / batch_size)
    evaluations = forward * math.ceil(len(windows.heldout) / batch_size) * EVALUATIONS_PER_EPOCH
    passes = forward * math.ceil(len(windows.all) / batch_size) * (max(student.layers) + 1)
    seconds = len(student.layers) * options.epochs * (per_epoch * step + evaluations) + passes
    pairs = any(needs_pair(student.layout, layer) for layer in student.layers)
    states = 2 * (1 + pairs) * windows.all.numel() * int(teacher.config["hidden_size"]) * teacher.dtype.itemsize
    parameters = sum(parameter.numel() for parameter in trainer.layer.parameters())
    return seconds, states, 16 * parameters  # weights, gradients and Adam's two moments in float32
