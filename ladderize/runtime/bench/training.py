"""``ladderize bench --train``: training steps of each model by each schedule."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.layout import OVERLAPPED
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    PASSES,
    TrainingBenchDocument,
    TrainingRow,
    VariantRow,
    timed_figures,
    variant_name,
)
from ladderize.runtime.bench.options import ModelChoice, TrainingBenchOptions, check_training_usage
from ladderize.runtime.bench.plan import (
    BenchPlan,
    check_bench_memory,
    check_cuts,
    chosen_models,
    make_profile_folder,
    parsed_link,
)
from ladderize.runtime.bench.report import run_and_show
from ladderize.runtime.bench.rounds import Variant
from ladderize.runtime.bench.run import RuntimeRun
from ladderize.runtime.bench.training_step import (
    Blocking,
    check_outcome,
    outcome_of,
    step_opener,
    trained_key,
)
from ladderize.runtime.schedule import SEQUENTIAL
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
    return run_and_show(measure_training, plan, options.device, out, console)


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


def training_bytes(specs: Sequence[ModelSpec], ranks: int) -> int:
    """Return the bytes of one rank's float32 weights and of one model's gradients. Weights that layouts share count
    once."""
    weights = {}
    for spec in specs:
        shape = Shape.from_config(spec.config, tp_size=ranks, rank=0)
        weights[trained_key(spec, shape)] = weight_bytes(shape, 4, packed=False)
    return sum(weights.values()) + max(weights.values())


def measure_training(group: Ranks, plan: BenchPlan[TrainingBenchOptions], console: Console) -> TrainingBenchDocument:
    """Check every variant and time those that pass. All ranks call it.

    Raises UserError if none passes, or if a model does not fit into memory.
    """
    check_bench_memory(training_bytes(plan.specs, plan.options.ranks), group)
    run = TrainingRun(group, plan, console)
    document: TrainingBenchDocument = run.measure()
    run.collectives.close()
    return document


class TrainingRun(RuntimeRun[TrainingBenchOptions]):
    """A run of training steps."""

    document_class = TrainingBenchDocument

    def __init__(self, group: Ranks, plan: BenchPlan[TrainingBenchOptions], console: Console) -> None:
        super().__init__(group, plan, console)
        self.specs, self.open_step = plan.specs, step_opener(group, self.options.ranks)

    def open_variants(self, batch: int) -> list[Variant]:
        """Open every model with every schedule, and leave out those whose gradients are not the sequential schedule's.

        Raises UserError if one sends other messages than its layout asks for.
        """
        with self.console.stage(f"opening and checking the schedules, batch {batch}"):
            return [variant for spec in self.specs for variant in self._variants_of(spec, batch)]

    def _variants_of(self, spec: ModelSpec, rows: int) -> Iterator[Variant]:
        options, group = self.options, self.group
        batch = Batch.random(spec.config["vocab_size"], rows, options.seq_len, options.seed, group.device)
        wanted = None
        if options.check:
            blocking = self.open_step(spec, SEQUENTIAL, Blocking(self.collectives), batch)
            wanted = outcome_of(blocking.in_float32(), group)
        for schedule in options.timed_schedules:
            timed, silent = (self.open_step(spec, schedule, one, batch) for one in (self.collectives, self.silence))
            name = variant_name(spec.name, schedule.name)
            messages = timed.recorded_messages(name)
            if wanted is not None:
                agreement = check_outcome(outcome_of(timed.in_float32(), group), wanted, group)
                if isinstance(agreement, str):
                    self.failed[f"{name}, {rows} rows"] = f"{name}, {rows} rows: {agreement}"
                    continue
                self.checks[f"{name}, {rows} rows"] = agreement
            overlapping = {"backward"}  # always, under the products of weights' gradients
            overlapping |= {"forward"} if schedule.is_domino or spec.layout.count(OVERLAPPED) else set()
            more: dict[str, Any] = {"schedule": schedule.name, "overlapping": overlapping, "messages": messages}
            yield Variant(spec.name, spec, timed, silent, **more)

    def rows_of(self, variants: Sequence[Variant], batch: int) -> list[VariantRow]:
        options = self.options
        silent_ms = {id(one): sum(map(one.silent.median_ms, PASSES)) for one in variants}
        rows: list[VariantRow] = []
        for variant in variants:
            timed = variant.timed
            figures = timed_figures(timed.seconds, variants[0].timed.seconds, dict.fromkeys(PASSES, 1), "step")
            # a model's fastest step without communication, whatever the schedule
            bound = min(silent_ms[id(one)] for one in variants if one.spec is variant.spec)
            rows.append(
                TrainingRow(
                    **variant.row_figures(options.ranks, batch),
                    **figures,
                    tokens_per_s=1e3 * batch * options.seq_len / figures["step_ms"],
                    no_communication_ms=silent_ms[id(variant)],
                    bound_ms=bound,
                    bound_share=bound / figures["step_ms"],
                    weight_bytes=timed.own_bytes,
                    communication={part: self.communication(variant, part) for part in PASSES},
                    no_communication_samples_ms=variant.silent.samples_ms(),
                )
            )
        return rows

    def document(self, *, complete: bool, **more: Any) -> TrainingBenchDocument:
        document: TrainingBenchDocument = super().document(complete=complete, checked=self.options.check, **more)
        return document
