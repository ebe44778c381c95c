"""``ladderize bench --train``: a sample is one training step, by models and schedules."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.layout import OVERLAPPED
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import Overlap, speedup_interval
from ladderize.runtime.bench.options import ModelChoice, TrainingBenchOptions, check_training_usage
from ladderize.runtime.bench.plan import (
    BenchPlan,
    check_bench_memory,
    check_cuts,
    chosen_models,
    make_profile_folder,
    parsed_link,
)
from ladderize.runtime.bench.report import check_sound, run_and_show
from ladderize.runtime.bench.rounds import BenchRun, TimedVariant, both, synchronize, time_rounds
from ladderize.runtime.bench.trace import trace
from ladderize.runtime.bench.training.check import check_step, reference_outcome, step_name
from ladderize.runtime.bench.training.document import (
    STEP_PASSES,
    GradientAgreement,
    TrainingBenchDocument,
    TrainingBenchRow,
    show_training_bench,
)
from ladderize.runtime.bench.training.steps import ModelStep, OpenStep, TimedStep, step_opener, trained_key
from ladderize.runtime.collectives.observed import Traced
from ladderize.runtime.shards import Shape, weight_bytes
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.training.batch import Batch

LOSS_STATISTICS = 8  # float32 numbers of a token that the ranks exchange for the losses, at most


def bench_training(
    choice: ModelChoice,
    options: TrainingBenchOptions,
    link: str | None = None,
    *,
    out: Path | None = None,
    console: Console = SILENT,
) -> TrainingBenchDocument:
    """Check and time training steps of the chosen models by the chosen schedules, and return the result; a console that
    speaks shows it.

    Raises UsageError or UserError if something cannot be measured, a schedule gives other gradients than the sequential
    one, or a trace disproves an overlap. What was measured by then is kept in ``out`` and shown.

    link: of the ranks that ``options.emulate_tp`` emulates, as ``--link`` takes it.
    out: a JSON file, written after each batch size, and before traces are made.
    """
    check_device(options.device)
    plan = plan_training_bench(choice, options, link)
    document = run_and_show(measure_training, plan, options.device, out, console, show_training_bench)
    check_sound(document, "the schedule")
    return document


def plan_training_bench(
    choice: ModelChoice, options: TrainingBenchOptions, link: str | None = None
) -> BenchPlan[TrainingBenchOptions]:
    """Return the checked plan. Raises UsageError for faults of the arguments alone, UserError or LayoutError for
    others.

    link: as --link has it.
    """
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
    # the stream of all rows, or the statistics of the losses; gradients are summed at the end of a step by another way
    numbers = max(LOSS_STATISTICS, *(int(spec.config["hidden_size"]) for spec in specs))
    longest = 4 * numbers * max(options.batch_sizes) * options.seq_len
    if parsed is not None:
        parsed.seconds(longest)  # raises for a size that the link's time is not known for
    make_profile_folder(options.profile)
    in_flight = max(schedule.in_flight for schedule in options.timed_schedules)
    return BenchPlan(specs, options, parsed, longest, in_flight)


def measure_training(group: Ranks, plan: BenchPlan[TrainingBenchOptions], console: Console) -> TrainingBenchDocument:
    """Check every variant and time those that pass. All ranks call it.

    Raises UserError if none passes, or if a model does not fit into memory.
    """
    options = plan.options
    check_bench_memory(training_bytes(plan.specs, options.ranks), group)
    run, open_step = BenchRun.open(group, plan, console), step_opener(group, options.ranks)
    rows: list[TrainingBenchRow] = []
    checks: list[GradientAgreement] = []
    failed: dict[str, str] = {}

    def document(*, complete: bool) -> TrainingBenchDocument:
        kept: dict[str, Any] = {"rows": list(rows), "failed": dict(failed), "checks": list(checks)}
        return TrainingBenchDocument(complete=complete, checked=options.check, **kept, **run.document_figures())

    for batch in options.batch_sizes:
        variants = _open_variants(run, plan.specs, open_step, batch)
        if options.check:
            with console.stage(f"checking the schedules' gradients, batch {batch}"):
                variants = _check(run, variants, open_step, checks, failed)
        if not variants:
            continue
        time_rounds(group, both(variants), options, console, f"timing, batch {batch}")
        done = len(rows)
        with console.stage("timing the communication alone"):
            rows += _rows(run, variants, batch)
        group.report(document(complete=False))
        if options.profile is not None:
            with console.stage(f"profiling, traces in {options.profile}"):
                for number, variant in enumerate(variants):
                    group.barrier()
                    path = variant.trace_path(options.profile, number, batch, group.rank)
                    variant.overlap = _trace(run, variant, open_step, path)
            rows[done:] = _rows(run, variants, batch)
            group.report(document(complete=False))
    if not rows:
        raise UserError(f"{next(iter(failed.values()))}, so nothing was timed")
    run.collectives.close()
    return document(complete=True)


def training_bytes(specs: Sequence[ModelSpec], ranks: int) -> int:
    """Return the bytes of one rank's float32 weights and of one model's gradients. Weights that layouts share count
    once."""
    weights = {}
    for spec in specs:
        shape = Shape.from_config(spec.config, tp_size=ranks, rank=0)
        weights[trained_key(spec, shape)] = weight_bytes(shape, 4, packed=False)
    return sum(weights.values()) + max(weights.values())


def _open_variants(
    run: BenchRun[TrainingBenchOptions], specs: Sequence[ModelSpec], open_step: OpenStep, rows: int
) -> list[TimedVariant]:
    """Open every model with every schedule. Raises UserError if one sends other messages than its layout asks for."""
    options, device, variants = run.options, run.group.device, []
    for spec in specs:
        batch = Batch.random(spec.config["vocab_size"], rows, options.seq_len, options.seed, device)
        for schedule in options.timed_schedules:
            timed, silent = (
                TimedStep(open_step(spec, schedule, collectives, batch), device)
                for collectives in (run.collectives, run.silence)
            )
            variant = TimedVariant(spec.name, spec, timed, silent, figures={"schedule": schedule})
            variant.messages = timed.step.record_messages(step_name(spec, schedule))
            variant.overlapping = {"backward"}  # always, under the products of weights' gradients
            variant.overlapping |= {"forward"} if schedule.is_domino or spec.layout.count(OVERLAPPED) else set()
            variants.append(variant)
    return variants


def _check(
    run: BenchRun[TrainingBenchOptions],
    variants: list[TimedVariant],
    open_step: OpenStep,
    checks: list[GradientAgreement],
    failed: dict[str, str],
) -> list[TimedVariant]:
    """Return the variants whose loss and gradients are those of their model's sequential schedule with blocking
    sums."""
    passed, reference, compared = [], None, None
    for variant in variants:
        step: ModelStep = variant.timed.step
        if reference is None or compared is not variant.spec:  # a model's variants stand together
            reference = reference_outcome(open_step, variant.spec, run.collectives, step.batch, run.group)
            compared = variant.spec
        rows = len(step.batch.input_ids)
        outcome = check_step(step, reference, variant.spec, step.schedule, rows, run.group)
        if isinstance(outcome, str):
            failed[f"{step_name(variant.spec, step.schedule)}, {rows} rows"] = outcome
        else:
            checks.append(outcome)
            passed.append(variant)
    return passed


def _rows(run: BenchRun[TrainingBenchOptions], variants: Sequence[TimedVariant], batch: int) -> list[TrainingBenchRow]:
    """Return the rows of one batch size. Speed-ups are over the first."""
    silent = {id(one): statistics.median(one.silent.step_seconds()) for one in variants}
    options, first, rows = run.options, variants[0].timed, []
    for variant in variants:
        timed, steps = variant.timed, variant.timed.step_seconds()
        step = statistics.median(steps)
        # a model's fastest step without communication, whatever the schedule
        bound = min(silent[id(one)] for one in variants if one.spec is variant.spec)
        rows.append(
            TrainingBenchRow(
                **variant.row_figures(options.ranks, batch),
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
                communication={name: run.communication(variant, name) for name in STEP_PASSES},
                no_communication_samples_ms=variant.silent.samples_ms(),
            )
        )
    return rows


def _trace(
    run: BenchRun[TrainingBenchOptions], variant: TimedVariant, open_step: OpenStep, path: Path
) -> dict[str, Overlap]:
    traced, step, device = Traced(run.collectives), variant.timed.step, run.group.device
    step = open_step(variant.spec, step.schedule, traced, step.batch)

    def passes() -> None:
        with record_function("forward"):
            loss = step.forward()
            synchronize(device)
        with record_function("backward"):
            step.backward(loss)
            synchronize(device)
        step.clear()

    return run.judged(trace(passes, STEP_PASSES, path, device, traced, run.alone_seconds), variant)
