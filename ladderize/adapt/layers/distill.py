"""``ladderize adapt --method blocks``: block-to-block distillation (SPD, arXiv 2502.20727, section 4.2).

Every converted block learns the output of the dense block. Block i reads the input of the dense model's block i, and
the loss is the mean squared difference between their outputs. So each block is trained alone: one in memory at a time,
in any order, on any rank, and each resumes separately. An SPD block reads the dense residual stream. A ladder block
reads the pair of streams that a ladder layer reads: the dense stream after attention i-1, and the complete one. In a
delayed block each virtual rank reads the former with its own part of MLP i-1.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ladderize.adapt.layers.align_layer import located, place_of_states
from ladderize.adapt.layers.layer_files import LayerJob, StudentBlocks
from ladderize.adapt.layers.options import PAPERS_LR, PAPERS_WIDTH, TOKENS_PER_STEP, BlockwiseOptions
from ladderize.blocks import Blocks, State, check_finite, complete
from ladderize.console import human_bytes
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.layout import BLOCKING, DELAYED, Layout, format_ranges

WARMUP, EVALUATIONS_PER_EPOCH = 0.05, 4
MAX_GRADIENT = 1.0
BLOCK_ERROR = "block error: error of the block's output on held-out windows, as % of what the dense block adds"
PATIENCE = 2  # epochs without a better held-out loss, after which a block is left as it was best


@dataclass(frozen=True)
class BlockReport(Record):
    """The training of one block.

    loss_before, loss_after: held-out mean squared difference to the dense block's output, after: with the weights as
    stored.
    share_lost_before, share_lost_after: the loss as a share of what the dense block adds to the stream.
    curve: (step, held-out loss).
    """

    layer: int
    loss_before: float
    loss_after: float
    share_lost_before: float
    share_lost_after: float
    steps: int
    best_step: int
    stopped_early: bool
    seconds: float
    curve: list[tuple[int, float]]

    def row(self) -> dict[str, str]:
        return {
            "block": str(self.layer),
            "loss (MSE) before": f"{self.loss_before:.3e}",
            "after": f"{self.loss_after:.3e}",
            "block error before": f"{self.share_lost_before:.2%}",
            "after distillation": f"{self.share_lost_after:.2%}",
            "steps": str(self.steps) + (" (stopped early)" if self.stopped_early else ""),
        }


class States:
    """The complete stream [windows, tokens, width], and as many visible ones as a layer reads at most."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, visible: int, place: torch.device) -> None:
        self.windows = shape[0]
        self.tensors = [torch.empty(shape, dtype=dtype, device=place) for _ in range(1 + visible)]

    def write(self, first: int, state: State) -> None:
        """Write the rows from ``first`` on; raises UserError for NaN or infinite states.

        Visible streams that the state does not have stay as they are: nothing was in flight before it.
        """
        check_finite(float(complete(state).sum()), "the residual stream of the dense model")
        parts = [complete(state)]
        if isinstance(state, tuple):
            parts += [*state[1]] if state[1].ndim == 4 else [state[1]]
        for tensor, part in zip(self.tensors, parts, strict=False):
            tensor[first : first + len(part)] = part.to(tensor.device)

    def read(self, rows: Tensor, device: torch.device, visible: int = 0) -> State:
        """Return the states of these windows, on ``device``, with so many visible streams."""
        whole, *seen = (tensor[rows].to(device) for tensor in self.tensors[: 1 + visible])
        return whole if not seen else (whole, seen[0] if len(seen) == 1 else torch.stack(seen))


def batch_windows(windows: Tensor) -> int:
    return max(1, TOKENS_PER_STEP // windows.shape[1])


def visible_streams(layout: Layout, layer: int) -> int:
    """Return the number of streams that the layer reads instead of the complete one: one without an overlapped MLP, or
    one of each virtual rank with its own part of a delayed one."""
    mode = layout.entering(layer)
    return 0 if mode == BLOCKING else (layout.sync_tp_size or 1) if mode == DELAYED else 1


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
    passing = math.ceil(len(windows.all) / batch_windows(windows.all) / 3)  # without gradients and updates
    with job.console.progress("distilling", len(mine) * steps + (max(mine, default=-1) + 1) * passing) as advance:
        for index, before, after in teacher_pass(teacher, windows.all, mine, student.layout, place):
            advance(passing)
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


# ---- one block ----


class BlockTrainer:
    """One block, its teacher's states, and the training loop. Windows from number ``trained`` on are held out.

    before, after: the dense model's states that enter and leave the block.
    """

    def __init__(
        self,
        teacher: Blocks,
        student: StudentBlocks,
        index: int,
        before: States,
        after: States,
        trained: int,
        options: BlockwiseOptions,
    ) -> None:
        self.blocks, self.index, self.options = teacher, index, options
        self.before, self.after = before, after
        self.trained, self.heldout = torch.arange(trained), torch.arange(trained, before.windows)
        self.visible = visible_streams(student.layout, index)
        self.initial = {name: tensor.clone() for name, tensor in student.weights(index).items()}
        # Weights are float32 to learn in; autocast decides the dtype of products.
        wide = {name: tensor.float().clone() for name, tensor in self.initial.items()}
        self.layer = teacher.layer(index, student.layout, wide)
        self.batch_size = batch_windows(before.tensors[0])
        width = int(teacher.config["hidden_size"])
        self.lr = options.lr if options.lr is not None else PAPERS_LR * PAPERS_WIDTH / width

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean squared difference to the dense block's output on these windows."""
        device = self.blocks.device
        # float32 from here on: a block adds little to the stream, and rounding of the sum would hide it.
        state = self.before.read(rows, device, self.visible)
        target = complete(self.after.read(rows, device))
        entering: State = (state[0].float(), state[1].float()) if isinstance(state, tuple) else state.float()
        with torch.autocast(device.type, dtype=self.blocks.dtype, enabled=self.blocks.dtype != torch.float32):
            output = complete(self.blocks.run(self.layer, entering))
        return (output - target.float()).square().mean()

    def added_part(self) -> float:
        """Return the mean square of what the dense block adds to the stream. A block that does nothing has a loss of
        this size."""

        def added(rows: Tensor) -> Tensor:
            before, after = (complete(store.read(rows, self.blocks.device)) for store in (self.before, self.after))
            return (after.float() - before.float()).square().mean()

        return self._heldout_mean(added)

    @torch.no_grad()
    def _heldout_mean(self, value: Callable[[Tensor], Tensor]) -> float:
        total = sum(float(value(rows)) * len(rows) for rows in self.heldout.split(self.batch_size))
        return total / len(self.heldout)

    def train(self, advance: Callable[[int], None]) -> tuple[dict[str, Tensor], BlockReport]:
        """Return the best weights seen, in the stored dtype, and a report.

        They are never worse on held-out windows than the initial ones.
        Raises UserError for a loss that is NaN or infinite.
        """
        options, begin = self.options, time.perf_counter()
        before = self._checked(self._heldout_mean(self.loss), 0)
        per_epoch = math.ceil(len(self.trained) / self.batch_size)
        total, every = options.epochs * per_epoch, max(1, per_epoch // EVALUATIONS_PER_EPOCH)
        parameters = self.layer.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total))
        # The order must not depend on which blocks were trained before.
        generator = torch.Generator().manual_seed(options.seed * 10_007 + self.index)
        best, best_weights, best_step, step, curve = before, self.initial, 0, 0, [(0, before)]
        while step < total and step - best_step <= PATIENCE * per_epoch:
            for rows in self.trained[torch.randperm(len(self.trained), generator=generator)].split(self.batch_size):
                self._checked(self.step(optimizer, rows), step)
                schedule.step()
                step += 1
                advance(1)
                if step % every == 0 or step == total:
                    value = self._checked(self._heldout_mean(self.loss), step)
                    curve.append((step, value))
                    if value < best:
                        best, best_step, best_weights = value, step, self._stored()
        advance(total - step)
        after, best_weights = self._confirmed(best_weights, before)
        added = self.added_part()
        return best_weights, BlockReport(
            layer=self.index,
            loss_before=before,
            loss_after=after,
            # A block that adds nothing, such as a new one of an expanded model, has nothing to lose.
            share_lost_before=before / added if added else 0.0,
            share_lost_after=after / added if added else 0.0,
            steps=step,
            best_step=best_step,
            stopped_early=step < total,
            seconds=time.perf_counter() - begin,
            curve=curve,
        )

    def step(self, optimizer: torch.optim.Optimizer, rows: Tensor) -> float:
        """Take one step on these windows; returns the loss before it. A NaN or infinite loss changes no weight."""
        loss = self.loss(rows)
        value = float(loss.detach())
        if math.isfinite(value):
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.layer.parameters(), MAX_GRADIENT)
            optimizer.step()
            optimizer.zero_grad()
        return value

    def _stored(self) -> dict[str, Tensor]:
        """Return copies of the weights as they will be stored, rounded."""
        current = self.layer.state_dict()
        return {name: current[name].detach().to(old.dtype, copy=True) for name, old in self.initial.items()}

    def _confirmed(self, weights: dict[str, Tensor], before: float) -> tuple[float, dict[str, Tensor]]:
        """Return the held-out loss and the weights as stored, or the initial ones where rounding cost more than
        training won."""
        self.layer.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        after = self._heldout_mean(self.loss)
        return (after, weights) if after < before else (before, self.initial)

    def _checked(self, loss: float, step: int) -> float:
        if math.isfinite(loss):
            return loss
        advice = "check the model's weights, or compute in float32"
        if step:
            advice = f"take a smaller --lr (this one was {self.lr:g})"
        raise UserError(f"block {self.index}: the loss is NaN or infinite after {step} steps; {advice}")


def lr_factor(step: int, total: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then a cosine to zero."""
    warmup = max(1, int(WARMUP * total))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
