"""``ladderize bench --train``: a sample is one training step, by models and schedules."""

import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import record_function

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.layout import OVERLAPPED
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.harness import KeptDocument, RuntimeBench, RuntimeVariant, check_overlaps
from ladderize.runtime.bench.messages import PassOperations, PassRecorder, synchronize
from ladderize.runtime.bench.options import ModelChoice, TrainingBenchOptions, check_training_usage
from ladderize.runtime.bench.plan import (
    BenchPlan,
    check_cuts,
    check_ranks_memory,
    chosen_models,
    make_profile_folder,
    parsed_link,
)
from ladderize.runtime.bench.rows import speedup_interval
from ladderize.runtime.bench.trace import Overlap, trace_passes
from ladderize.runtime.bench.training.check import (
    GradientAgreement,
    check_sent,
    check_step,
    reference_outcome,
    step_name,
)
from ladderize.runtime.bench.training.document import TrainingBenchDocument, TrainingBenchRow, show_training_bench
from ladderize.runtime.bench.training.steps import STEP_PASSES, ModelStep, TimedStep, step_opener, training_bytes
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.observed import Recording, Traced
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.training.batch import Batch

INSTRUMENTED_STEPS = 4
LOSS_STATISTICS = 8  # float32 numbers of a token that the ranks tell each other for the losses, at most


@dataclass
class StepVariant(RuntimeVariant):
    """A model by a schedule."""

    timed: TimedStep
    silent: TimedStep
    schedule: Schedule
    batch: Batch

    @property
    def stem(self) -> str:
        return f"{super().stem}-{self.schedule.name}"


def plan_training_bench(
    choice: ModelChoice, options: TrainingBenchOptions, link: str | None = None
) -> BenchPlan[TrainingBenchOptions]:
    """Raises UsageError for what argv alone decides, UserError or LayoutError for the rest. link: as --link has it."""
    check_training_usage(choice, options, link)
    parsed = parsed_link(options, link)
    specs = chosen_models(choice, options)
    for spec in specs:
        if spec.dtype == "float16":
            raise UserError(f"{spec.name}: float16 has too small a range for training; give --dtype bfloat16")
        if options.seq_len > spec.positions:
            raise UserError(f"{spec.name}: --seq-len {options.seq_len} is over the model's {spec.positions} positions")
        for schedule in options.timed_schedules:
            check_cuts(spec, schedule, options, options.seq_len, "--seq-len")
    # the stream of all rows, or what the losses take; what sums gradients at the end of a step goes another way
    numbers = max(LOSS_STATISTICS, *(int(spec.config["hidden_size"]) for spec in specs))
    longest = 4 * numbers * max(options.batch_sizes) * options.seq_len
    if parsed is not None:
        parsed.seconds(longest)  # refuses what the link's time is not known for
    make_profile_folder(options.profile)
    in_flight = max(schedule.in_flight for schedule in options.timed_schedules)
    return BenchPlan(specs, options, parsed, longest, in_flight)


class TrainingBench(RuntimeBench[StepVariant, TrainingBenchDocument, TrainingBenchOptions]):
    """Every variant is checked before it is timed. Raises UserError if one computes something else than the sequential
    schedule of its model."""

    def __init__(self, group: Ranks, plan: BenchPlan[TrainingBenchOptions], console: Console) -> None:
        super().__init__(group, plan, console)
        self.open_step = step_opener(group, plan.options.ranks)
        self.checks: list[GradientAgreement] = []

    def _batch(self, spec: ModelSpec, rows: int) -> Batch:
        vocab, options = spec.config["vocab_size"], self.options
        return Batch.random(vocab, rows, options.seq_len, options.seed, self.group.device)

    def _check(self, rows: int) -> None:
        """Every variant against the sequential schedule of its model whose sums block."""
        for spec in self.plan.specs:
            batch = self._batch(spec, rows)
            reference = reference_outcome(self.open_step, spec, self.collectives, batch, self.group)
            for schedule in self.options.timed_schedules:
                step = self.open_step(spec, schedule, self.collectives, batch)
                self.checks.append(check_step(step, reference, spec, schedule, rows, self.group))
                recording = Recording(self.collectives, time.perf_counter)
                recorded = self.open_step(spec, schedule, recording, batch)
                check_sent(recorded, recording, step_name(spec, schedule))

    def open(self, batch: int) -> list[StepVariant]:
        if self.options.check:
            with self.console.stage(f"checking the schedules' gradients, batch {batch}"):
                self._check(batch)
        variants = []
        for spec in self.plan.specs:
            ids = self._batch(spec, batch)
            for schedule in self.options.timed_schedules:
                timed, silent = (
                    TimedStep(self.open_step(spec, schedule, collectives, ids), self.group.device)
                    for collectives in (self.collectives, self.silence)
                )
                overlapping = {"backward"}  # always, under the products of weights' gradients
                overlapping |= {"forward"} if schedule.is_domino or spec.layout.count(OVERLAPPED) else set()
                variants.append(StepVariant(spec.name, spec, timed, silent, overlapping, schedule, ids))
        return variants

    def _step(self, variant: StepVariant, collectives: Collectives) -> ModelStep:
        return self.open_step(variant.spec, variant.schedule, collectives, variant.batch)

    def operations(self, variant: StepVariant) -> dict[str, PassOperations]:
        recorder = PassRecorder(self.silence, self.group.device)
        step = self._step(variant, recorder.recording)
        for _ in range(INSTRUMENTED_STEPS):
            loss = recorder.note("forward", step.forward)
            recorder.note("backward", functools.partial(step.backward, loss))
            step.clear()
        return {name: recorder.operations(name, self.alone) for name in STEP_PASSES}

    def trace(self, variant: StepVariant, path: Path) -> dict[str, Overlap]:
        traced, device = Traced(self.collectives), self.group.device
        step = self._step(variant, traced)

        def run() -> None:
            with record_function("forward"):
                loss = step.forward()
                synchronize(device)
            with record_function("backward"):
                step.backward(loss)
                synchronize(device)
            step.clear()

        found = trace_passes(run, STEP_PASSES, path, device, traced, self.alone_seconds)
        return {name: self.judged(one, promised=name in variant.overlapping) for name, one in found.items()}

    def rows(self, variants: list[StepVariant], batch: int) -> list[TrainingBenchRow]:
        return training_rows(variants, self.options, batch)

    def document(self, rows: list[TrainingBenchRow], *, complete: bool) -> TrainingBenchDocument:
        figures = self.document_figures(rows, complete=complete)
        return TrainingBenchDocument(**figures, checked=self.options.check, checks=self.checks)


def training_rows(variants: list[StepVariant], options: TrainingBenchOptions, batch: int) -> list[TrainingBenchRow]:
    """The first variant is what speed-ups are over."""
    silent = {id(one): statistics.median(one.silent.step_seconds()) for one in variants}
    first, rows = variants[0].timed, []
    for variant in variants:
        timed, steps = variant.timed, variant.timed.step_seconds()
        step = statistics.median(steps)
        # a model's fastest step without communication, whatever the schedule
        bound = min(silent[id(one)] for one in variants if one.spec is variant.spec)
        rows.append(
            TrainingBenchRow(
                **variant.model_figures(options.ranks, batch),
                schedule=variant.schedule,
                checked=options.check,
                emulated=options.emulate_tp is not None,
                seq_len=options.seq_len,
                step_ms=1e3 * step,
                forward_ms=timed.median_ms("forward"),
                backward_ms=timed.median_ms("backward"),
                tokens_per_s=batch * options.seq_len / step,
                no_communication_ms=1e3 * silent[id(variant)],
                bound_ms=1e3 * bound,
                bound_share=bound / step,
                speedup=statistics.median(first.step_seconds()) / step,
                speedup_interval=speedup_interval(first.step_seconds(), steps),
                speedup_forward=first.median_ms("forward") / timed.median_ms("forward"),
                speedup_forward_interval=speedup_interval(first.seconds["forward"], timed.seconds["forward"]),
                weight_bytes=timed.step.own_bytes,
                peak_memory_bytes=timed.peak_memory_bytes,
                communication={name: variant.communication(name) for name in STEP_PASSES},
                samples_ms=timed.samples_ms(),
                no_communication_samples_ms=variant.silent.samples_ms(),
                overlap=variant.overlap,
            )
        )
    return rows


def measure_training(group: Ranks, plan: BenchPlan[TrainingBenchOptions], console: Console) -> TrainingBenchDocument:
    """One rank's part. Raises UserError if a model does not fit into memory, or is not to be timed."""
    weights, work = training_bytes(plan.specs, plan.options)
    check_ranks_memory(plan.specs[0].name, {"weights take": weights, "a step": work}, "--seq-len", group)
    return TrainingBench(group, plan, console).measure()


def bench_training(
    choice: ModelChoice,
    options: TrainingBenchOptions,
    link: str | None = None,
    *,
    out: Path | None = None,
    console: Console = SILENT,
) -> TrainingBenchDocument:
    """Check and time training steps of the chosen models by the chosen schedules; returns the result, and shows it
    where the console speaks.

    link: of the ranks that ``options.emulate_tp`` emulates, as ``--link`` takes it. out: a JSON file, which is written
    after each batch size, and before traces are made. Raises UsageError or UserError for what cannot be measured, where
    a schedule gives other gradients than the sequential one, and where a trace disproves an overlap; what was measured
    until then is kept in ``out`` and shown.
    """
    check_device(options.device)
    kept = KeptDocument(out, None, console, show_training_bench)
    document = kept.measured(measure_training, plan_training_bench(choice, options, link), device=options.device)
    check_overlaps(document.disproved, "the schedule")
    return document
