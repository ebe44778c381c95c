"""From the options of ``ladderize bench --train`` to checked models: everything that can be wrong is found before any
process starts."""

from dataclasses import dataclass

from ladderize.errors import UserError
from ladderize.runtime.bench.options import ModelChoice
from ladderize.runtime.bench.plan import chosen_models, make_profile_folder
from ladderize.runtime.bench.training.options import TrainingBenchOptions, check_training_usage
from ladderize.runtime.collectives.links import Link, parse_link
from ladderize.runtime.launch import check_group_size
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.spec import ModelSpec

# float32 numbers of a token that the ranks tell each other for the losses, at most
LOSS_STATISTICS = 8


@dataclass(frozen=True)
class TrainingBenchPlan:
    """Checked models, how to time them, and the link that stands for the others of an emulated group."""

    specs: list[ModelSpec]
    options: TrainingBenchOptions
    link: Link | None = None

    @property
    def variants(self) -> list[tuple[ModelSpec, Schedule]]:
        """What is timed, in order: each model by each schedule."""
        return [(spec, schedule) for spec in self.specs for schedule in self.options.timed_schedules]

    @property
    def longest_message(self) -> int:
        """Bytes of it: the stream of all rows, or what the losses take. (What sums the norms' gradients at the end of a
        step goes another way.)"""
        rows = max(self.options.batch_sizes)
        return max(message_bytes(spec, rows * self.options.seq_len) for spec in self.specs)


def message_bytes(spec: ModelSpec, tokens: int) -> int:
    """Bytes of the longest message of a step over so many tokens, whatever the schedule."""
    return max(4 * int(spec.config["hidden_size"]) * tokens, 4 * LOSS_STATISTICS * tokens)


def plan_training_bench(
    choice: ModelChoice, options: TrainingBenchOptions, link: str | None = None
) -> TrainingBenchPlan:
    """Raises UsageError for what argv alone decides, UserError or LayoutError for the rest. link: as --link has it."""
    check_training_usage(choice, options, link)
    parsed = parse_link(link, options.ranks) if link is not None else None
    if options.emulate_tp is None:
        check_group_size(options.tp_size, options.device)
    plan = TrainingBenchPlan(chosen_models(choice, options), options, parsed)
    for spec in plan.specs:
        if spec.dtype == "float16":
            raise UserError(f"{spec.name}: float16 has too small a range for training; give --dtype bfloat16")
        if options.seq_len > spec.positions:
            raise UserError(f"{spec.name}: --seq-len {options.seq_len} is over the model's {spec.positions} positions")
        for schedule in options.timed_schedules:
            for rows in options.batch_sizes:
                hidden = int(spec.config["hidden_size"])
                schedule.check(rows, options.seq_len, hidden, rows_name="--batch-size", tokens_name="--seq-len")
    if parsed is not None:
        parsed.seconds(plan.longest_message)  # refuses what the link's time is not known for
    make_profile_folder(options.profile)
    return plan
