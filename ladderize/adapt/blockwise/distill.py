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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.blockwise.folder import BlockFolder
from ladderize.adapt.blockwise.hidden_states import StateStore
from ladderize.blocks import Blocks, State, complete, layer_seconds, timed
from ladderize.console import Console, UserError
from ladderize.layout import BLOCKING, OVERLAPPED, Layout, format_ranges

# The paper's learning rate at LLaMA2-7B's width; a step of Adam moves a sum over twice the width twice as far.
PAPERS_LR, PAPERS_WIDTH = 5e-5, 4096
TOKENS_PER_STEP = 2048  # the paper's: one sequence
WARMUP, EVALUATIONS_PER_EPOCH = 0.05, 4
MAX_GRADIENT = 1.0


@dataclass(frozen=True)
class DistillOptions:
    """epochs: at most; training ends when ``patience`` epochs brought no better held-out loss. lr, batch_size: None
    takes the default for the model's width and the windows' length. max_memory: bytes of teacher states before they go
    to disk."""

    epochs: int = 10
    patience: int = 2
    lr: float | None = None
    batch_size: int | None = None
    max_memory: int = 8_000_000_000
    seed: int = 0

    def record(self) -> dict[str, Any]:
        """What decides the result, for the record and for resuming: not how much memory it may take."""
        return {key: value for key, value in asdict(self).items() if key != "max_memory"}

    def resolve(self, hidden: int, seq_len: int) -> "DistillOptions":
        """The same with every default worked out."""
        return replace(
            self,
            lr=self.lr if self.lr is not None else PAPERS_LR * PAPERS_WIDTH / hidden,
            batch_size=self.batch_size or max(1, TOKENS_PER_STEP // seq_len),
        )


@dataclass(frozen=True)
class Windows:
    """Token ids for training, and others for the held-out loss and the perplexities: [windows, tokens] each."""

    train: Tensor
    heldout: Tensor

    @property
    def all(self) -> Tensor:
        return torch.cat([self.train, self.heldout])


@dataclass(frozen=True)
class StudentBlocks:
    """What is to be trained: the layout, the blocks, and each block's initial weights (their dtype is what is
    stored)."""

    layout: Layout
    layers: tuple[int, ...]
    weights: Callable[[int], Mapping[str, Tensor]]


def needs_pair(layout: Layout, layer: int) -> bool:
    """Whether the layer reads the stream without the MLP before it: the sync point that enters it is overlapped."""
    return layout.entering(layer) == OVERLAPPED


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
    stores = [
        StateStore(shape, blocks.dtype, pairs, max_memory=max_memory // 2, path=path.with_name(f"{path.name}-{number}"))
        for number in range(2)
    ]
    batch = max(1, 4 * TOKENS_PER_STEP // windows.shape[1])
    try:
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
            raise UserError(
                "the dense model's states are NaN or infinite; are its weights sound, and is the dtype wide enough?"
            )
        store.write(int(rows[0]), state)


def distill(
    teacher: Blocks,
    student: StudentBlocks,
    windows: Windows,
    options: DistillOptions,
    work: BlockFolder,
    console: Console,
    *,
    about: Mapping[str, Any],
    rank: int = 0,
    ranks: int = 1,
) -> None:
    """Train every block of ``student.layers`` that ``work`` does not hold yet; of several ranks each takes every
    ``ranks``-th block.

    about: what the result depends on besides the student; a block in ``work`` that was trained from anything else is
    trained anew. Raises UserError if a loss becomes NaN; what was trained before is kept in ``work``.
    """
    keys = {layer: partial(block_key, student, layer, about) for layer in student.layers}
    done = [layer for layer in student.layers if work.has(layer, keys[layer])]
    if done:
        console.note(f"blocks {format_ranges(done)} are done already")
    mine = [layer for number, layer in enumerate(student.layers) if number % ranks == rank and layer not in done]
    if not mine:
        return
    pairs = any(needs_pair(student.layout, layer) for layer in mine)
    options = options.resolve(int(teacher.config["hidden_size"]), windows.train.shape[1])
    steps = options.epochs * math.ceil(len(windows.train) / (options.batch_size or 1))
    with console.progress("distilling", len(mine) * steps) as advance:
        passes = teacher_pass(
            teacher, windows.all, mine, pairs, max_memory=options.max_memory, path=work.folder / f"states-{rank}"
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


def estimate(
    teacher: Blocks, student: StudentBlocks, windows: Windows, options: DistillOptions
) -> tuple[float, int, int]:
    """Seconds at most (all epochs), bytes of states, and bytes of one block in training; from a step timed here and
    now."""
    options = options.resolve(int(teacher.config["hidden_size"]), windows.train.shape[1])
    batch_size = options.batch_size or 1
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


class BlockTrainer:
    """One block, its teacher's states, and the loop. Windows from number ``trained`` on are held out."""

    def __init__(
        self,
        teacher: Blocks,
        student: StudentBlocks,
        index: int,
        before: StateStore,
        after: StateStore,
        trained: int,
        options: DistillOptions,
    ) -> None:
        self.blocks, self.index, self.options = teacher, index, options
        self.before, self.after = before, after
        self.trained, self.heldout = torch.arange(trained), torch.arange(trained, before.windows)
        self.pair = needs_pair(student.layout, index)
        self.initial = {name: tensor.clone() for name, tensor in student.weights(index).items()}
        # float32 to learn in; what the block computes in is autocast's business
        self.layer = teacher.layer(
            index, student.layout, {name: tensor.float().clone() for name, tensor in self.initial.items()}
        )
        self.batch_size = options.batch_size or 1

    def loss(self, rows: Tensor) -> Tensor:
        """Mean squared difference to the dense block's output on these windows."""
        device = self.blocks.device
        # wide from here on: what the block adds is small beside the stream, and would drown in the rounding of their
        # sum
        state = self.before.read(rows, device)
        target = complete(self.after.read(rows, device))
        entering: State = (
            (state[0].float(), state[1].float()) if self.pair and isinstance(state, tuple) else complete(state).float()
        )
        with torch.autocast(device.type, dtype=self.blocks.dtype, enabled=self.blocks.dtype != torch.float32):
            output = complete(self.blocks.run(self.layer, entering))
        return (output - target.float()).square().mean()

    def heldout_loss(self) -> float:
        with torch.no_grad():
            losses = [float(self.loss(rows)) * len(rows) for rows in self.heldout.split(self.batch_size)]
        return sum(losses) / len(self.heldout)

    def own_part(self) -> float:
        """Mean square of what the dense block adds to the stream: a loss of this size is a block that does nothing."""
        total = 0.0
        for rows in self.heldout.split(self.batch_size):
            difference = (
                complete(self.after.read(rows, self.blocks.device)).float()
                - complete(self.before.read(rows, self.blocks.device)).float()
            )
            total += float(difference.square().mean()) * len(rows)
        return total / len(self.heldout)

    def train(self, advance: Callable[[int], None]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns the best weights seen, in the dtype that is stored, and a report. Never worse on held-out windows
        than before."""
        options, begin = self.options, time.perf_counter()
        assert options.lr is not None
        before = self.heldout_loss()
        self._check(before, 0)
        per_epoch = math.ceil(len(self.trained) / self.batch_size)
        total, every = options.epochs * per_epoch, max(1, per_epoch // EVALUATIONS_PER_EPOCH)
        optimizer = self.optimizer()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, total))
        generator = torch.Generator().manual_seed(
            options.seed * 10_007 + self.index
        )  # the same whatever was trained before
        best, best_weights, best_step, step, curve = before, self.initial, 0, 0, [[0, before]]
        while step < total and step - best_step <= options.patience * per_epoch:
            for rows in self.trained[torch.randperm(len(self.trained), generator=generator)].split(self.batch_size):
                self._check(self.step(optimizer, rows), step)
                schedule.step()
                step += 1
                advance(1)
                if step % every == 0 or step == total:
                    value = self.heldout_loss()
                    self._check(value, step)
                    curve.append([step, value])
                    if value < best:
                        best, best_step, best_weights = value, step, self._stored()
        advance(total - step)
        after, best_weights = self._confirmed(best_weights, before)
        own = self.own_part()
        return best_weights, {
            "block": self.index,
            "loss_before": before,
            "loss_after": after,
            "share_lost_before": before / own,
            "share_lost_after": after / own,
            "steps": step,
            "best_step": best_step,
            "stopped_early": step < total,
            "seconds": time.perf_counter() - begin,
            "curve": curve,
        }

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.layer.parameters(), lr=self.options.lr or 0.0, betas=(0.9, 0.95), weight_decay=0.0
        )

    def step(self, optimizer: torch.optim.Optimizer, rows: Tensor) -> float:
        """One step on these windows; returns the loss before it. NaN changes no weight."""
        loss = self.loss(rows)
        value = float(loss.detach())
        if math.isfinite(value):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.layer.parameters(), MAX_GRADIENT)
            optimizer.step()
            optimizer.zero_grad()
        return value

    def _stored(self) -> dict[str, Tensor]:
        """The weights as they will be stored: rounded, and out of the optimizer's reach."""
        return {
            name: tensor.detach().to(self.initial[name].dtype, copy=True)
            for name, tensor in self.layer.state_dict().items()
        }

    def _confirmed(self, weights: dict[str, Tensor], before: float) -> tuple[float, dict[str, Tensor]]:
        """The held-out loss of the weights as stored; rounding may have cost more than training won."""
        self.layer.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        after = self.heldout_loss()
        return (after, weights) if after < before else (before, self.initial)

    def _check(self, loss: float, step: int) -> None:
        if not math.isfinite(loss):
            raise UserError(
                f"block {self.index}: the loss is NaN or infinite after {step} steps; "
                + (
                    "are the weights sound, and is the dtype wide enough?"
                    if step == 0
                    else f"take a smaller --lr (this one was {self.options.lr:g})"
                )
            )


def _schedule(step: int, total: int) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup = max(1, int(WARMUP * total))
    return (
        (step + 1) / warmup
        if step < warmup
        else 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    )
