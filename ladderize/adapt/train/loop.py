"""The training loop, on ``accelerate.Accelerator``, and its states on disk: a folder for each saved step, and the
weights that may become OUT.

Sums of losses are divided by the scored tokens of the whole step, so a step is the same however it is split. Step and
rank seed the random numbers (LoRA's dropout), and the seed decides the order of rows. So a resumed run makes the steps
of the uninterrupted run, bit for bit on a CPU.
"""

import itertools
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from safetensors import SafetensorError
from torch import Tensor

from ladderize.adapt.options import METRICS, Objective
from ladderize.adapt.train.task import STATES_KEPT, Pace
from ladderize.adapt.train.training_model import TrainingModel
from ladderize.adapt.training_data import IGNORED_TARGET, collate
from ladderize.boundary import handled
from ladderize.checkpoint.tensors import write_tensors
from ladderize.console import Console, sentence, to_json
from ladderize.errors import UserError
from ladderize.files.documents import read_json
from ladderize.files.output import fsync, fsync_tree
from ladderize.files.records import Record
from ladderize.files.unfinished import Unfinished
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
TRAINING_COMMAND = "adapt --method full or lora"
STATE = "state.json"
DIGITS = 8 * "[0-9]"
STATES = f"step-{DIGITS}/{STATE}"
# what reading a state that is cut off, or of something else, raises
DAMAGED = OSError, ValueError, KeyError, RuntimeError, EOFError, UserError, SafetensorError, pickle.UnpicklingError


@dataclass(frozen=True)
class Scores(Record):
    """Held-out losses: means per scored token in nats."""

    cross_entropy: float
    divergence: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.cross_entropy) if self.cross_entropy < 700 else math.inf

    def criterion(self, objective: Objective) -> float:
        """Return the value by which the best weights are chosen, the lowest; infinite where it is not a number."""
        value = objective.total(self.cross_entropy, self.divergence)
        return value if math.isfinite(value) else math.inf

    def text(self, objective: Objective) -> str:
        criterion = f"{objective.label} {self.criterion(objective):.4g}, " if objective.distill_weight else ""
        return f"held-out {criterion}perplexity {self.perplexity:.4f}"


@dataclass
class Progress(Record):
    """The progress of a training.

    model: the fingerprint of the trained checkpoint, as it was at the beginning.
    seconds: spent in steps, over all runs.
    before, best, last: scores before the first step, at the best validation by the criterion, and at the last one.
    dense_perplexity: the teacher's, on the same rows.
    kept_step: the best step whose weights were saved.
    heldout_rows: scored at each validation; 0: not decided yet.
    unscored: True where a signal came before the validation of this step was done, which the next run then makes.
    recent: losses of the last steps.
    metrics_bytes: the length of metrics.jsonl.
    """

    model: str = ""
    step: int = 0
    tokens: int = 0
    scored: int = 0
    seconds: float = 0.0
    before: Scores | None = None
    best: Scores | None = None
    last: Scores | None = None
    dense_perplexity: float | None = None
    kept_step: int | None = None
    heldout_rows: int = 0
    unscored: bool = False
    recent: list[float] = field(default_factory=list)
    metrics_bytes: int = 0


class TrainingFolder(Unfinished):
    """An unfinished training: states named by their step, weights, and metrics.jsonl."""

    at: int | None = None  # the step of the state that this process wrote or read last

    @property
    def metrics(self) -> Path:
        return self.folder / METRICS

    def weights(self, step: int) -> Path:
        return self.folder / f"weights-{step:08d}.safetensors"

    def states(self) -> list[Path]:
        """Return the folders of whole states, the last one last."""
        return [path.parent for path in sorted(self.folder.glob(STATES))]

    def latest(self) -> int | None:
        """Return the last step from which training can resume; None where there is none."""
        states = self.states()
        return int(states[-1].name[len("step-") :]) if states else None

    def save(self, progress: Progress, model: TrainingModel) -> None:
        """Write this step's state, whole or not at all; delete older ones and other weights. All ranks call it."""
        if self.at == progress.step:
            return  # while it is written again a killed run would lose it
        accelerator, path = model.accelerator, self.folder / f"step-{progress.step:08d}"
        unfinished = path.with_suffix(".part")
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
        accelerator.wait_for_everyone()
        try:
            model.save(unfinished)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, RuntimeError | SafetensorError):  # a full disk, in the words of torch and safetensors
                raise UserError(
                    f"the state of step {progress.step} cannot be written to {self.folder}: {sentence(error)}; the run"
                    " goes on from the last saved one"
                ) from None
            raise
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self.metrics.touch()
            fsync(self.metrics)  # the metrics of the saved steps must be on disk before the state is
            progress.metrics_bytes = self.metrics.stat().st_size
            (unfinished / STATE).write_text(to_json(progress.to_dict()) + "\n")
            fsync_tree(unfinished)
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
            fsync(self.folder)
            for old in self.states()[:-STATES_KEPT]:
                shutil.rmtree(old)
            for old in self.folder.glob(f"weights-{DIGITS}.safetensors"):
                if old != self.weights(progress.kept_step or 0):
                    old.unlink()
        accelerator.wait_for_everyone()
        self.at = progress.step

    def load(self, step: int, model: TrainingModel) -> Progress:
        path = self.folder / f"step-{step:08d}"
        try:
            progress = Progress.from_dict(read_json(path / STATE), STATE)
            model.load(path)
        except DAMAGED as error:
            raise UserError(
                f"{path} is damaged ({sentence(error)[:200]}); delete it to resume from the state before it"
            ) from None
        self.at = step
        return progress

    def save_weights(self, step: int, model: TrainingModel) -> None:
        """Write the trained tensors in their stored dtypes. All ranks call it, which have parts."""
        infos = {name: (model.stored.get(name, torch.float32), shape) for name, shape in model.shapes.items()}
        if model.accelerator.is_main_process:
            unfinished = self.weights(step).with_suffix(".part")
            write_tensors(unfinished, infos, lambda name: model.whole(name).to(infos[name][0]))
            unfinished.replace(self.weights(step))
        else:
            for name in infos:
                model.whole(name)


def read_metrics(path: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row[key] for row in rows if row.get(key) is not None]


# ---- the loop ----


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
    """The training of a model on ``rows``, validated on ``heldout`` ones."""

    def __init__(
        self,
        model: TrainingModel,
        rows: Any,
        heldout: Sequence[Mapping[str, Any]],
        pace: Pace,
        folder: TrainingFolder,
        console: Console,
    ) -> None:
        self.model, self.rows, self.heldout, self.pace = model, rows, list(heldout), pace
        self.folder, self.console = folder, console
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
        with self.model.evaluating():
            progress.last = scores = self.score(advance)
            if progress.best is None or scores.criterion(objective) < progress.best.criterion(objective):
                progress.best = scores
                if progress.step:
                    self.folder.save_weights(progress.step, self.model)
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
