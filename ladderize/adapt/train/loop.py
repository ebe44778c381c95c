"""The training loop, on ``accelerate.Accelerator``.

Sums of losses are divided by the scored tokens of the whole step, so a step is the same however it is split. Step and
rank seed the random numbers (LoRA's dropout), and the seed decides the order of rows. So a resumed run makes the steps
of the uninterrupted run, bit for bit on a CPU.
"""

import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from torch import Tensor

from ladderize.adapt.train.states import Progress, Scores, TrainingFolder
from ladderize.adapt.train.task import Pace
from ladderize.adapt.train.training_model import TrainingModel
from ladderize.adapt.training_data import IGNORED_TARGET, collate
from ladderize.boundary import handled
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.memory import peak_bytes
from ladderize.ranks.environment import already_started
from ladderize.runtime.training.batch import Batch

HEARD = b"\nstopping after the step under way; the same command goes on from there (Ctrl-C again stops at once)\n"
FEW_SCORED = 0.05  # the share of scored tokens below which a warning is given
# A loss explodes where EXPLOSIONS in a row lie above three times the median of the RECENT ones before, and 4 nats.
RECENT, EXPLOSIONS = 50, 3
HUGE = 1e30
PASSED_ON_S = 1.0  # within which a launcher passes a signal on
HostBatch = Mapping[str, Tensor]  # of ``collate``


@contextmanager
def stop_signals(*, announce: bool) -> Iterator[Callable[[], bool]]:
    """Let SIGTERM and the first Ctrl-C ask to stop after the current step; yields a function that says whether one
    came. A second Ctrl-C interrupts. A terminal sends Ctrl-C to all processes: a rank that ladderize has started leaves
    it to the process that started it, which passes it on as SIGTERM."""
    received: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(time.monotonic())
        # torchrun passes a Ctrl-C on to ranks that had it from the terminal
        is_passed_on = already_started() and received[-1] < received[0] + PASSED_ON_S
        if len(received) > 1 and number == signal.SIGINT and not is_passed_on:
            raise KeyboardInterrupt
        if announce and len(received) == 1:
            os.write(2, HEARD)  # a handler may have interrupted a print, so it must not print itself

    left = multiprocessing.parent_process() is not None and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    with handled(note, signal.SIGTERM, *([] if left else [signal.SIGINT])):
        yield lambda: bool(received)


class StopRequested(Exception):
    """Raised on all ranks where a signal came during a validation."""


def row_order(rows: int, seed: int, first: int = 0) -> Iterator[int]:
    """Yield row numbers below ``rows`` endlessly, in a new order every epoch, from position ``first`` on."""
    epoch, done = divmod(first, rows)
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(rows)[done:].tolist()
        epoch, done = epoch + 1, 0


def micro_batches(rows: Any, pace: Pace, model: TrainingModel, first: int) -> Iterator[HostBatch]:
    """Yield this rank's micro-batches, from row ``first`` of the training on. Ranks of different data take turns. A
    stream is read by each of them from its beginning on: Accelerate would give each one files of its own."""
    numbered = hasattr(rows, "__len__")
    rest: Iterator[Any] = row_order(len(rows), pace.options.seed, first) if numbered else iter(rows.skip(first))
    for turn in itertools.count():
        batch = list(itertools.islice(rest, pace.micro_batch_size))
        if turn % model.data_size == model.data_rank:
            yield collate([rows[number] for number in batch] if numbered else batch)


class Loop:
    """The training of a model on ``rows``, validated on ``heldout`` ones.

    stored: the dtypes in which OUT holds trained tensors, by name; others are float32.
    """

    def __init__(
        self,
        model: TrainingModel,
        rows: Any,
        heldout: Sequence[Mapping[str, Any]],
        pace: Pace,
        folder: TrainingFolder,
        console: Console,
        stored: Mapping[str, torch.dtype],
    ) -> None:
        self.model, self.rows, self.heldout, self.pace = model, rows, list(heldout), pace
        self.folder, self.console, self.stored = folder, console, stored
        self.accelerator, self.objective = model.accelerator, pace.options.objective
        self.progress = Progress()
        self.signalled: Callable[[], bool] = lambda: False
        self.asked_to_stop = False

    def run(self) -> Progress:
        progress, pace, options, console = self.progress, self.pace, self.pace.options, self.console
        count = len(self.heldout)
        rows, times = pace.validations(count)
        progress.heldout_rows = progress.heldout_rows or rows  # those that an earlier run has scored
        self.heldout = [self.heldout[k] for k in np.linspace(0, count - 1, progress.heldout_rows, dtype=int)]
        if self.heldout:
            console.note(f"validating on {len(self.heldout)} of {count} held-out rows")
        if progress.step == 0 and self.heldout:
            self.validate_first()
        begun, total, unit, done = progress.step, options.max_steps, "steps", progress.step
        if total is None:
            total, unit, done = options.max_tokens or 1, "tokens", progress.tokens
        batches = micro_batches(self.rows, pace, self.model, begun * pace.batch_size)
        with (
            stop_signals(announce=console.speaks) as self.signalled,
            console.progress(unit, total, done=done) as advance,
        ):
            if progress.unscored:
                self.validate_step()
            share = pace.share(progress.step, progress.tokens)
            while share < 1 and not self.asked_to_stop:
                spent, tokens = share, progress.tokens
                metrics = self.step(batches, spent)
                self.write(metrics)
                if progress.step == begun + 1 and progress.scored < FEW_SCORED * progress.tokens:
                    console.warn(
                        f"only {progress.scored:,} of the {progress.tokens:,} tokens so far count in the loss; is the"
                        " loss_mask or the chat template right?"
                    )
                loss = f"loss ({self.objective.label}) {metrics['loss']:.4f}"
                detail = f"step {progress.step}, {loss}, {metrics['tokens_per_s']:,.0f} tokens/s"
                advance(1 if options.max_steps else progress.tokens - tokens, detail=detail)
                share = pace.share(progress.step, progress.tokens)
                if options.eval_every:
                    is_due = share == 1 or progress.step % options.eval_every == 0
                else:
                    is_due = share == 1 or int(share * times) > int(spent * times)
                progress.unscored = is_due and bool(self.heldout)
                if progress.unscored and not self.asked_to_stop:
                    self.validate_step()
                if is_due or self.asked_to_stop:
                    advance(0, detail=f"{detail}, saving")
                    self.folder.save(progress, self.model)
                    self.listen()
        if self.asked_to_stop:
            raise UserError(
                f"stopped by a signal after step {progress.step}, which is saved in {self.folder.folder}; run the same"
                " command again to resume"
            )
        return progress

    def listen(self) -> None:
        """Note whether a signal asked any rank to stop. All ranks call it."""
        signalled = torch.tensor([float(self.signalled())], device=self.accelerator.device)
        self.asked_to_stop = bool(self.model.sum(signalled) > 0)

    def step(self, batches: Iterator[HostBatch], spent: float) -> dict[str, float]:
        """Make one update and return its metrics. spent: the share of the budget spent before."""
        options, model, progress, accelerator = self.pace.options, self.model, self.progress, self.accelerator
        begin, device = time.perf_counter(), accelerator.device
        micros = list(itertools.islice(batches, accelerator.gradient_accumulation_steps))
        # Data-parallel ranks draw different numbers, and a repeated step the same ones.
        torch.manual_seed((options.seed * 1_000_003 + progress.step) * 4096 + model.data_rank)
        rate = self.pace.rate(progress.step, spent)
        for group in model.optimizer.param_groups:  # DeepSpeed updates within the last backward pass
            group["lr"] = rate
        targets = torch.cat([micro["targets"].flatten() for micro in micros])
        # scored targets, and all that are not padding
        counts = torch.stack([(targets >= 0).sum(), (targets >= IGNORED_TARGET).sum()]).double()
        scored, tokens = model.sum(counts.to(device))
        sums = torch.zeros(3, device=device, dtype=torch.float64)
        for micro in micros:
            batch = Batch.of(micro, device)
            with accelerator.accumulate(model.student):
                losses = model.losses(batch)
                # Gradients are averaged over ranks and micro-batches; multiplied so, they are those of the mean over
                # the step's tokens.
                scale = model.data_size * len(micros)
                accelerator.backward((self.objective.total(*losses / scored) * scale).float())
            sums[:2] += losses.detach()
        sums[2] = self.signalled()
        length = model.clip(options.max_grad_norm).double().to(device)
        # The only place in a step where the host waits for the device.
        together = torch.cat((model.sum(sums), length.reshape(1), scored[None], tokens[None]))
        entropy, divergence, stop, norm, scored, tokens = together.tolist()
        entropy, divergence = entropy / scored, divergence / scored
        loss = self.objective.total(entropy, divergence)
        self.check(loss, norm)
        model.optimizer.step()
        # DDP keeps gradients in its buckets: set to None, they would be allocated again beside these.
        model.optimizer.zero_grad(set_to_none=not hasattr(model.student, "no_sync"))
        seconds = time.perf_counter() - begin
        progress.step += 1
        progress.tokens += round(tokens)
        progress.scored += round(scored)
        progress.seconds += seconds
        progress.recent = [*progress.recent, loss][-RECENT:]
        self.asked_to_stop = stop > 0
        return {
            "step": progress.step,
            "loss": loss,
            "cross_entropy": entropy,
            **({"divergence": divergence} if self.objective.distill_weight else {}),
            "lr": rate,
            "gradient_norm": norm,
            "tokens": progress.tokens,
            "scored_tokens": progress.scored,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "peak_memory_bytes": peak_bytes(device) or 0,
        }

    def check(self, loss: float, norm: float) -> None:
        """Raise UserError, before the update, where loss or gradient is NaN or infinite, or the loss has exploded."""
        step, recent = self.progress.step + 1, self.progress.recent
        last, before = [*recent, loss][-EXPLOSIONS:], recent[:-EXPLOSIONS]
        median = statistics.median(before) if len(before) >= 10 else math.inf
        is_bad = not (math.isfinite(loss) and math.isfinite(norm))
        if not math.isfinite(loss):
            problem = f"the loss of step {step} is {loss}"
        elif is_bad:
            problem = f"the gradient of step {step} is {norm}"
        elif min(last) > median + max(2 * median, 4.0):
            values = ", ".join(f"{value:.3g}" for value in last)
            problem = f"the loss exploded: {values}, after a median of {median:.3g}"
        else:
            return
        if is_bad and step > 1 and self.accelerator.distributed_type != DistributedType.DEEPSPEED:  # which has updated
            self.folder.save(self.progress, self.model)  # the weights are still those of the step before
        state = self.folder.latest()
        advice = "begin again" if state is None else f"resume from step {state}, saved in {self.folder.folder},"
        raise UserError(f"{problem}; step {step} was not applied; {advice} with a lower --lr")

    # ---- validation ----

    def validate_first(self) -> None:
        progress, has_teacher, target = self.progress, self.pace.options.distill_from is not None, ""
        passes = 2 if has_teacher else 1
        with self.console.progress("validating before the first step", passes * len(self.heldout)) as advance:
            if has_teacher:
                dense = self.scores(advance, self.model.teacher_losses)
                progress.dense_perplexity = dense.perplexity
                target = f"; dense model (target) {dense.perplexity:.4f}"
            progress.before = self.validate(advance)
        self.console.note(f"before training: {progress.before.text(self.objective)}{target}")

    def validate_step(self) -> None:
        """Score the held-out rows after a step, unless a signal comes."""
        progress = self.progress
        with suppress(StopRequested):
            with self.console.progress("validating", len(self.heldout)) as advance:
                text = self.validate(advance).text(self.objective)
            progress.unscored = False
            self.console.note(f"step {progress.step}: {text} after {progress.tokens:,} tokens")

    def validate(self, advance: Callable[[int], None]) -> Scores:
        """Score the held-out rows with the weights as OUT would hold them, record that, and keep the best weights."""
        progress, objective = self.progress, self.objective
        with self.model.evaluating(self.stored):
            progress.last = scores = self.score(advance)
            if progress.best is None or scores.criterion(objective) < progress.best.criterion(objective):
                progress.best = scores
                if progress.step:
                    self.folder.save_weights(progress.step, self.model, self.stored)
                    progress.kept_step = progress.step
        values = {"step": progress.step, "heldout_perplexity": scores.perplexity}
        values["heldout_cross_entropy"] = scores.cross_entropy
        if self.pace.options.distill_from is not None:
            values["heldout_divergence"] = scores.divergence
        if not progress.step and progress.dense_perplexity is not None:
            values["dense_heldout_perplexity"] = progress.dense_perplexity
        self.write(values)
        return scores

    def score(self, advance: Callable[[int], None]) -> Scores:
        return self.scores(advance, self.model.losses)

    def scores(self, advance: Callable[[int], None], losses: Callable[[Batch], Tensor]) -> Scores:
        """Return the losses of the held-out rows, of which every rank scores as many micro-batches: FSDP gathers
        parameters in every forward pass, so a rank with no rows left takes part with an empty one."""
        size, model, device = self.pace.micro_batch_size, self.model, self.accelerator.device
        sums = torch.zeros(3, device=device, dtype=torch.float64)
        for start in range(0, len(self.heldout), size * model.data_size):
            begin = start + model.data_rank * size
            batch = Batch.of(collate(self.heldout[begin : begin + size]), device)
            sums[:2] += losses(batch)
            sums[2] += len(batch.scored)
            advance(min(len(self.heldout) - start, size * model.data_size))
            self.listen()
            if self.asked_to_stop:
                raise StopRequested
        # a state cannot hold what is not finite
        entropy, divergence, scored = model.sum(sums).nan_to_num(HUGE, HUGE).tolist()
        return Scores(entropy / scored, divergence / scored, round(scored))

    def write(self, values: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            # JSON has no infinity
            line = {key: value if math.isfinite(value) else None for key, value in values.items()}
            with self.folder.metrics.open("a") as file:
                file.write(json.dumps(line) + "\n")
        logged = dict(values)
        self.accelerator.log(logged, step=int(logged.pop("step")))
