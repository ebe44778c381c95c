"""The training loop.

One step: ``batch_size`` packed rows, the same for any number of ranks; each rank takes its part in micro-batches; sums
of losses are divided by the tokens that count in the whole step, so a step is the same however it is cut. Random
numbers (LoRA's dropout) are seeded by step and rank. So a run that goes on from a state makes the steps that the
uninterrupted run makes, bit for bit on a CPU.
"""

import json
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from ladderize.adapt.data.packing import IGNORED_TARGET, PackedRow, collate
from ladderize.adapt.data.stream import Stream, StreamPlace, rank_rows
from ladderize.adapt.retrain.engine import Engine
from ladderize.adapt.retrain.options import Objective, TrainOptions
from ladderize.adapt.retrain.state import Progress, TrainingFolder, cut_metrics, metric_lines
from ladderize.console import Advance, Console, human_bytes
from ladderize.errors import UserError
from ladderize.memory import peak_bytes

HEARD = b"\nstopping after the step under way, whose state is then saved (Ctrl-C again stops at once)\n"


@contextmanager
def stop_signals(*, announce: bool) -> Iterator[Callable[[], bool]]:
    """SIGTERM and the first Ctrl-C ask to stop after the step under way; yields whether one came. A second Ctrl-C
    interrupts. announce: say on stderr that the signal was understood.

    A rank that ladderize has started leaves Ctrl-C, which a terminal sends to all processes, to the one that started
    it: that one hands it on as SIGTERM.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if announce and len(received) == 1:
            os.write(2, HEARD)  # a handler may have interrupted a print, so it must not print itself

    try:
        left = multiprocessing.parent_process() is not None and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        heard = (signal.SIGTERM,) if left else (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, note) for number in heard}
    except ValueError:  # not the main thread: its owner handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


FEW_SCORED = 0.05  # a share of the tokens that is worth a word
RECENT, EXPLOSIONS = 50, 3  # steps that a loss is compared with; so many in a row far above them end the run


@dataclass(frozen=True)
class Scores:
    """Means per scored token, in nats; the hidden error is a mean over all tokens."""

    cross_entropy: float
    divergence: float
    tokens: int
    hidden_error: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(self.cross_entropy) if self.cross_entropy < 700 else math.inf

    def criterion(self, objective: Objective) -> float:
        """What decides which weights are best, the lower the better; infinite where it is no number."""
        value: float = objective.criterion.total(self.cross_entropy, self.divergence, 0.0)
        return value if math.isfinite(value) else math.inf

    def text(self, objective: Objective) -> str:
        """In words: the criterion, where that is more than the perplexity tells, and the perplexity."""
        known = f"{objective.criterion.label} {self.criterion(objective):.4g}, " if objective.distill_weight else ""
        return f"held-out {known}perplexity {self.perplexity:.4f}"


class Trainer:
    """Joins the parts; ``run`` trains until the budget is spent."""

    def __init__(
        self,
        engine: Engine,
        stream: Stream,
        heldout: Sequence[PackedRow],
        options: TrainOptions,
        folder: TrainingFolder,
        console: Console,
        log: Callable[[Mapping[str, float], int], None] = lambda values, step: None,
    ) -> None:
        self.engine, self.stream, self.heldout = engine, stream, list(heldout)
        self.options, self.folder, self.console, self.log = options, folder, console, log
        self.progress = Progress()

    def resume(self, path: Path) -> None:
        self.progress = self.folder.load(path, self.engine)
        assert self.progress.stream is not None
        self.stream.go_to(self.progress.stream)
        if self.engine.ranks.is_main:
            cut_metrics(self.folder.metrics, self.progress.step)
        if self.progress.before_loss is None and self.progress.before_perplexity is not None:
            self.recall_losses()

    def recall_losses(self) -> None:
        """For a state of an earlier version, which knows perplexities only: the criterion before the first step and the
        best of the steps that are kept, from metrics.jsonl."""
        found: dict[int, float] = {}
        if self.engine.ranks.is_main:
            kept = {0, *self.folder.saved_states()}
            for line in metric_lines(self.folder.metrics):
                if "heldout_cross_entropy" in line and line["step"] in kept:
                    # null: it was no number
                    values = [line.get(f"heldout_{name}") for name in ("cross_entropy", "divergence")]
                    entropy, divergence = (math.nan if value is None else value for value in values)
                    found[line["step"]] = Scores(entropy, divergence, 0).criterion(self.options.objective)
        found = self.engine.ranks.broadcast(found)
        self.progress.before_loss = found[0]
        self.progress.best_step, self.progress.best_loss = min(found.items(), key=lambda one: one[1])

    def run(self) -> Progress:
        """Train until the budget is spent. Raises UserError where the loss is no number or explodes, or on SIGTERM
        (after saving)."""
        progress, options = self.progress, self.options
        spent = options.budget.share(progress.step, progress.tokens)
        if progress.step == 0 and self.heldout:
            passes = 2 if self.engine.has_teacher else 1
            with self.console.progress("validating before the first step", passes * len(self.heldout)) as advance:
                scores = self.validate(advance, first=True)
            target = f"; dense model (target) {progress.dense_perplexity:.4f}" if progress.dense_perplexity else ""
            self.console.note(f"before training: {scores.text(options.objective)}{target}")
        total = options.budget.steps or options.budget.tokens or 1
        unit = "steps" if options.budget.steps else "tokens"
        done = progress.step if options.budget.steps else min(progress.tokens, total)
        with (
            stop_signals(announce=self.console.speaks) as stopped,
            self.console.progress(unit, total, done=done) as advance,
        ):
            begun = progress.step
            while spent < 1:
                before, scored = progress.tokens, progress.scored
                metrics = self.step(spent, stopped)
                if progress.step == begun + 1:
                    self.warn_of_few(progress.scored - scored, progress.tokens - before)
                spent = options.budget.share(progress.step, progress.tokens)
                detail = self.bar_detail(metrics)
                advance(1 if options.budget.steps else progress.tokens - before, detail=detail)
                asked_to_stop = metrics.pop("stop") > 0
                self.write(metrics)
                last = spent >= 1
                if self.heldout and (progress.step % options.eval_every == 0 or last):
                    scores = self.validate(self.countdown(advance, detail))
                    self.console.note(
                        f"step {progress.step}: {scores.text(options.objective)} after {progress.tokens:,} tokens"
                    )
                if progress.step % options.save_every == 0 or last or asked_to_stop:
                    advance(0, detail=f"{detail}, saving")
                    if asked_to_stop:
                        self.console.note(f"saving step {progress.step}")
                    self.save(self.stream.place())
                elif progress.best_step == progress.step:
                    self.save(self.stream.place(), weights_only=True)
                if asked_to_stop or (last and self.any_rank(stopped())):
                    raise UserError(
                        f"stopped by a signal after step {progress.step}, which is saved in {self.folder.folder}; run"
                        " the same command again to resume"
                    )
        return progress

    def step(self, spent: float, stopped: Callable[[], bool]) -> dict[str, float]:
        """One update; returns its metrics."""
        options, engine, progress = self.options, self.engine, self.progress
        begin = time.perf_counter()
        place = self.stream.place()
        try:
            rows = self.stream.take(options.batch_size)
        except UserError:
            self.save(place)  # every rank reads the same, so all are here
            raise
        scored = sum(int((row.targets != IGNORED_TARGET).sum()) for row in rows)
        tokens = sum(len(row.ids) for row in rows)
        # ranks draw different numbers, the same ones when a step is made again
        torch.manual_seed((options.seed * 1_000_003 + progress.step) * 4096 + engine.data.rank)
        sums = torch.zeros(4, device=engine.ranks.device, dtype=torch.float64)
        sums[3] = stopped()
        micros = rank_rows(rows, engine.data.rank, engine.data.size, options.micro_batch_size)
        for number, micro in enumerate(micros):
            batch = engine.to_device(collate(micro))
            with engine.accumulating(last=number == len(micros) - 1):
                losses = engine.losses(batch)
                means = (total / count for total, count in zip(losses, (scored, scored, tokens), strict=True))
                # ranks' gradients are averaged, and the mean over the step's tokens is meant
                (options.objective.total(*means) * engine.data.size).backward()
            sums[:3] += losses.detach()
        length = engine.clip(options.max_gradient).double()
        # here alone in a step the host waits for the device
        entropy, divergence, hidden, stop, norm = torch.cat((engine.sum(sums), length[None])).tolist()
        entropy, divergence, hidden = entropy / scored, divergence / scored, hidden / tokens
        loss = options.objective.total(entropy, divergence, hidden)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.save(place)
        self.check(loss, norm, rows)
        rate = options.schedule.rate(progress.step, spent)
        engine.step(rate)
        seconds = time.perf_counter() - begin
        progress.step += 1
        progress.tokens += tokens
        progress.scored += scored
        progress.seconds += seconds
        progress.recent = [*progress.recent, loss][-RECENT:]
        values = {"step": progress.step, "loss": loss, "cross_entropy": entropy}
        if options.objective.distill_weight:
            values["divergence"] = divergence
        if options.objective.hidden_weight:
            values["hidden_error"] = hidden
        return values | {
            "lr": rate,
            "gradient_norm": norm,
            "tokens": progress.tokens,
            "scored_tokens": progress.scored,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "peak_memory_bytes": peak_bytes(engine.ranks.device) or 0,
            "stop": stop,
        }

    def check(self, loss: float, norm: float, rows: Sequence[PackedRow]) -> None:
        """Raise UserError, before the update, where the loss or its gradient is no number, or for some steps far above
        what it was."""
        step, recent = self.progress.step + 1, self.progress.recent
        if math.isfinite(loss) and math.isfinite(norm):
            exploded = [
                value for value in [*recent, loss][-EXPLOSIONS:] if value > explosion_bound(recent[:-EXPLOSIONS])
            ]
            if len(exploded) < EXPLOSIONS:
                return
            values = ", ".join(f"{value:.3g}" for value in exploded)
            median = statistics.median(recent[:-EXPLOSIONS])
            what = (
                f"the loss exploded: {values} in steps {step - EXPLOSIONS + 1} to {step}, after a median of"
                f" {median:.3g}"
            )
        else:
            what = (
                f"the loss of step {step} is {loss}"
                if not math.isfinite(loss)
                else f"the gradient of step {step} is {norm}"
            )
        places = sorted({place for row in rows for place in row.origins})
        shown = ", ".join(places[:8]) + (f" and {len(places) - 8} more" if len(places) > 8 else "")
        state = self.folder.latest()
        advice = (
            f"resume from step {int(state.name[-8:])}, which is saved in {self.folder.folder},"
            if state is not None
            else "begin again"
        )
        raise UserError(
            f"{what}; step {step}, of {shown}, was not applied; {advice} with a lower --lr, or look at these rows"
        )

    def countdown(self, advance: Advance, detail: str) -> Callable[[int], None]:
        """For ``validate``: shows how many rows are done behind the ``detail`` of the progress."""
        done = 0

        def show(rows: int) -> None:
            nonlocal done
            done += rows
            advance(0, detail=f"{detail}, validating {done} of {len(self.heldout)} rows")

        show(0)
        return show

    def warn_of_few(self, scored: int, tokens: int) -> None:
        """Where hardly anything of the first step's rows counts: a mask, or a template, may be meant otherwise."""
        if scored < FEW_SCORED * tokens:
            self.console.warn(
                f"only {scored:,} of the {tokens:,} tokens of the first step count in the loss; --show-data shows which"
            )

    def any_rank(self, is_so: bool) -> bool:
        """Whether it is so on any rank; all of them ask."""
        return bool(self.engine.ranks.sum(torch.tensor([float(is_so)], device=self.engine.ranks.device))[0])

    def validate(self, advance: Callable[[int], None], *, first: bool = False) -> Scores:
        """Score the held-out rows, write the result down, and remember the best; ``first``: with the teacher's.
        advance: is told of the rows that were scored."""
        progress = self.progress
        scores = score(self.engine, self.heldout, self.options.micro_batch_size, advance)
        loss = scores.criterion(self.options.objective)
        if progress.best_loss is None or loss < progress.best_loss:
            progress.best_step, progress.best_loss = progress.step, loss
        values = {
            "step": progress.step,
            "heldout_perplexity": scores.perplexity,
            "heldout_cross_entropy": scores.cross_entropy,
        }
        if self.engine.has_teacher:
            values["heldout_divergence"] = scores.divergence
        if self.engine.compared:
            values["heldout_hidden_error"] = scores.hidden_error
        if first:
            progress.before_loss, progress.before_perplexity = loss, scores.perplexity
            if self.engine.has_teacher:
                dense = score_teacher(self.engine, self.heldout, self.options.micro_batch_size, advance)
                progress.dense_perplexity = values["dense_heldout_perplexity"] = dense.perplexity
        self.write(values)
        return scores

    def bar_detail(self, metrics: Mapping[str, float]) -> str:
        """The moving part of the progress: the step where tokens are counted, the loss and the speed."""
        step = "" if self.options.budget.steps else f"step {self.progress.step}, "
        memory = f", {human_bytes(metrics['peak_memory_bytes'])}" if metrics["peak_memory_bytes"] else ""
        loss = f"loss ({self.options.objective.label}) {metrics['loss']:.4f}"
        return f"{step}{loss}, {metrics['tokens_per_s']:,.0f} tokens/s{memory}"

    def save(self, place: StreamPlace, *, weights_only: bool = False) -> None:
        """Keep the state; place: where the stream stands."""
        if self.progress.step == 0:
            return  # nothing was trained
        self.progress.stream = place
        self.folder.save(self.progress, self.engine, self.options.keep, weights_only=weights_only)

    def write(self, values: Mapping[str, float]) -> None:
        if self.engine.ranks.is_main:
            with self.folder.metrics.open("a") as file:
                file.write(
                    json.dumps({key: value if math.isfinite(value) else None for key, value in values.items()}) + "\n"
                )
            self.log({key: value for key, value in values.items() if key != "step"}, int(values["step"]))


def explosion_bound(recent: Sequence[float]) -> float:
    """A loss above this is far from those before: thrice their median, and never less than 4 nats above it."""
    if len(recent) < 10:
        return math.inf
    median = statistics.median(recent)
    return median + max(2 * median, 4.0)


def score(engine: Engine, rows: Sequence[PackedRow], micro_batch_size: int, advance: Callable[[int], None]) -> Scores:
    """Losses of rows under the model as it is; every rank takes its part and gets the whole result. advance: is told
    how many rows all ranks have scored."""
    sums = torch.zeros(5, device=engine.ranks.device, dtype=torch.float64)
    with engine.evaluating():
        for own in shares(engine, rows, micro_batch_size, advance):
            batch = engine.to_device(collate(own))
            sums[:3] += engine.losses(batch)
            sums[3] += len(batch.scored)
            sums[4] += sum(map(len, own))
    entropy, divergence, hidden, scored, tokens = engine.sum(sums).tolist()
    return Scores(entropy / scored, divergence / scored, round(scored), hidden / tokens)


def score_teacher(
    engine: Engine, rows: Sequence[PackedRow], micro_batch_size: int, advance: Callable[[int], None]
) -> Scores:
    """Cross-entropy of rows under the dense teacher; every rank takes its part and gets the whole result."""
    sums = torch.zeros(2, device=engine.ranks.device, dtype=torch.float64)
    for own in shares(engine, rows, micro_batch_size, advance):
        batch = engine.to_device(collate(own))
        sums[0] += engine.teacher_entropy(batch)
        sums[1] += len(batch.scored)
    entropy, tokens = engine.sum(sums).tolist()
    return Scores(entropy / tokens, 0.0, round(tokens))


def shares(
    engine: Engine, rows: Sequence[PackedRow], micro_batch_size: int, advance: Callable[[int], None]
) -> Iterator[list[PackedRow]]:
    """A rank's part of rows in micro-batches, as many on every rank: FSDP gathers parameters in every forward, so a
    rank that has no rows left takes part with an empty one."""
    ranks = engine.data
    for start in range(0, len(rows), micro_batch_size * ranks.size):
        yield list(rows[start + ranks.rank * micro_batch_size : start + (ranks.rank + 1) * micro_batch_size])
        advance(min(len(rows) - start, micro_batch_size * ranks.size))


def probe_seconds(engine: Engine, rows: Sequence[PackedRow], options: TrainOptions) -> tuple[float, float]:
    """What a micro-batch of these rows takes in training, and in validation, here and now: the faster of two, whose
    gradients are thrown away. All ranks take part."""
    seconds = scoring = math.inf
    for _ in range(2):
        begin = time.perf_counter()
        with engine.accumulating(last=True):
            losses = engine.losses(engine.to_device(collate(list(rows))))
            options.objective.total(*losses).backward()
        float(losses.detach()[0])  # waits for the device
        seconds = min(seconds, time.perf_counter() - begin)
        begin = time.perf_counter()
        with engine.evaluating():
            float(engine.losses(engine.to_device(collate(list(rows))))[0])
        scoring = min(scoring, time.perf_counter() - begin)
    engine.zero_grad()
    return seconds, scoring
