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

from ladderize.adapt.layers.align import device_of_states, located
from ladderize.adapt.layers.layer_files import LayerJob
from ladderize.adapt.layers.options import PAPERS_LR, PAPERS_WIDTH, TOKENS_PER_STEP, BlockwiseOptions
from ladderize.blocks import Blocks, State, check_finite, complete
from ladderize.console import human_bytes
from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.layout import BLOCKING, DELAYED, Layout, format_ranges

WARMUP, EVALUATIONS_PER_EPOCH = 0.05, 4
MAX_GRADIENT = 1.0
PATIENCE = 2  # epochs without a better held-out loss, after which a block is left as it was best


@dataclass(frozen=True)
class BlockReport(Record):
    """The training of one block. Losses are held-out mean squared differences to the dense block's output, after: with
    the weights as stored; shares are of what the dense block adds to the stream; the curve is (step, held-out loss)."""

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


def batch_windows(windows: Tensor) -> int:
    return max(1, TOKENS_PER_STEP // windows.shape[1])


def distill(job: LayerJob, options: BlockwiseOptions) -> None:
    """Train every block of the job that its files do not hold yet; the ranks take them in turn. Raises UserError for a
    loss that is NaN or infinite, and where the states do not fit in memory."""
    teacher, windows, ranks, layers = job.teacher, job.windows, job.ranks, job.layers
    streams = {BLOCKING: 1, DELAYED: 1 + (job.layout.sync_tp_size or 1)}  # of the others two: complete and visible
    most = max((streams.get(job.layout.entering(layer), 2) for layer in layers), default=1)
    states = 2 * most * windows.all.numel() * int(teacher.config["hidden_size"]) * teacher.dtype.itemsize
    device = device_of_states(states, ranks)
    job.console.note(
        f"distilling {len(layers)} blocks on {len(windows.train)} windows of {windows.train.shape[1]} tokens,"
        f" {len(windows.heldout)} held out, for at most {options.epochs} epoch{'s' if options.epochs > 1 else ''} on"
        f" {ranks.words}; {human_bytes(states)} of states {located(device)}"
    )
    done = job.finished()
    if done:
        job.console.note(f"blocks {format_ranges(done)} are already done")
    mine = [layer for layer in layers if layer not in done][ranks.rank :: ranks.size]
    steps = options.epochs * math.ceil(len(windows.train) / batch_windows(windows.train))
    passing = math.ceil(len(windows.all) / batch_windows(windows.all) / 3)  # without gradients and updates
    with job.console.progress("distilling", len(mine) * steps + (max(mine, default=-1) + 1) * passing) as advance:
        for index, before, after in teacher_pass(teacher, windows.all, mine, job.layout, device):
            advance(passing)
            if index in mine:
                weights, report = BlockTrainer(job, index, before, after, options).train(advance)
                job.files.save(index, weights, report)


def teacher_pass(
    blocks: Blocks, windows: Tensor, layers: Sequence[int], layout: Layout, device: torch.device
) -> Iterator[tuple[int, State, State]]:
    """Run the dense model up to the last of some layers; yields (i, the state of all windows that enters block i, the
    one that leaves it), with what the layers of a layout read. Raises UserError for NaN or infinite states."""
    dense = Layout.dense(layout.num_layers)
    if layers:
        before = _states(windows, lambda rows: blocks.embed(windows[rows]), device)
    for index in range(max(layers, default=-1) + 1):
        mode = layout.mlp_sync[index]  # the only one that is not the dense model's
        mlp_sync = (*dense.mlp_sync[:index], mode, *dense.mlp_sync[index + 1 :])
        alone = Layout(dense.attention_sync, mlp_sync, layout.sync_tp_size if mode == DELAYED else None)
        layer, stream = blocks.layer(index, alone), complete(before)

        def run(rows: Tensor, layer: torch.nn.Module = layer, stream: Tensor = stream) -> State:
            return blocks.run(layer, stream[rows].to(blocks.device))

        after = _states(windows, run, device)
        yield index, before, after
        before = after


@torch.no_grad()
def _states(windows: Tensor, run: Callable[[Tensor], State], device: torch.device) -> State:
    """Return the next state of all windows. A generator would leave no_grad on while its caller trains."""
    stores: list[Tensor] = []
    for rows in torch.arange(len(windows)).split(max(1, 4 * TOKENS_PER_STEP // windows.shape[1])):
        state = run(rows)
        check_finite(float(complete(state).sum()), "the residual stream of the dense model")
        streams = state if isinstance(state, tuple) else (state,)
        for number, stream in enumerate(streams):
            if number == len(stores):
                shape = (*stream.shape[:-3], len(windows), *stream.shape[-2:])
                stores.append(torch.empty(shape, dtype=stream.dtype, device=device))
            stores[number][..., rows, :, :] = stream.to(device)
    return (stores[0], stores[1]) if len(stores) > 1 else stores[0]


# ---- one block ----


class BlockTrainer:
    """One block, the dense model's states that enter and leave it, and the training loop."""

    def __init__(self, job: LayerJob, index: int, before: State, after: State, options: BlockwiseOptions) -> None:
        self.blocks, self.index, self.options = job.teacher, index, options
        self.before, self.after = before, after
        self.trained, self.heldout = torch.arange(len(job.windows.all)).tensor_split([len(job.windows.train)])
        self.initial = {name: tensor.clone() for name, tensor in job.weights(index).items()}
        # Weights are float32 to learn in; autocast decides the dtype of products.
        wide = {name: tensor.float().clone() for name, tensor in self.initial.items()}
        self.layer = job.teacher.layer(index, job.layout, wide)
        self.batch_size = batch_windows(job.windows.train)
        width = int(job.teacher.config["hidden_size"])
        self.lr = options.lr if options.lr is not None else PAPERS_LR * PAPERS_WIDTH / width

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean squared difference to the dense block's output on these windows."""
        # float32 from here on: a block adds little to the stream, and rounding of the sum would hide it.
        stream = self._stream(complete(self.before), rows)
        entering = (stream, self._stream(self.before[1], rows)) if isinstance(self.before, tuple) else stream
        with self.blocks.autocast():
            output = complete(self.blocks.run(self.layer, entering))
        return (output - self._stream(complete(self.after), rows)).square().mean()

    def added(self, rows: Tensor) -> Tensor:
        """Return the mean square of what the dense block adds to the stream: the loss of one that does nothing."""
        after, before = self._stream(complete(self.after), rows), self._stream(complete(self.before), rows)
        return (after - before).square().mean()

    def _stream(self, stream: Tensor, rows: Tensor) -> Tensor:
        return stream[..., rows, :, :].to(self.blocks.device).float()

    @torch.no_grad()
    def _heldout_mean(self, value: Callable[[Tensor], Tensor]) -> float:
        total = sum(float(value(rows)) * len(rows) for rows in self.heldout.split(self.batch_size))
        return total / len(self.heldout)

    def train(self, advance: Callable[[int], None]) -> tuple[dict[str, Tensor], BlockReport]:
        """Return the best weights seen, in the stored dtype, and a report. They are never worse on held-out windows
        than the initial ones."""
        options, begin = self.options, time.perf_counter()
        before = self._checked(self._heldout_mean(self.loss), 0)
        per_epoch = math.ceil(len(self.trained) / self.batch_size)
        total, every = options.epochs * per_epoch, max(1, per_epoch // EVALUATIONS_PER_EPOCH)
        optimizer = torch.optim.AdamW(self.layer.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        warmup = max(1, int(WARMUP * total))

        def factor(step: int) -> float:
            decay = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
            return (step + 1) / warmup if step < warmup else decay

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
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
                        current = self.layer.state_dict()
                        best, best_step = value, step
                        best_weights = {
                            name: current[name].detach().to(tensor.dtype, copy=True)
                            for name, tensor in self.initial.items()
                        }
        advance(total - step)
        # Rounding may cost more than training won.
        self.layer.load_state_dict({name: tensor.float() for name, tensor in best_weights.items()})
        after = self._heldout_mean(self.loss)
        if after >= before:
            after, best_weights = before, self.initial
        added = self._heldout_mean(self.added)
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

    def _checked(self, loss: float, step: int) -> float:
        if math.isfinite(loss):
            return loss
        advice = f"take a smaller --lr (this one was {self.lr:g})" if step else "check the model's weights"
        raise UserError(f"block {self.index}: the loss is NaN or infinite after {step} steps; {advice}")
