"""What ``ladderize bench --train`` was asked for, and all that its arguments alone decide. No torch here."""

from dataclasses import dataclass
from typing import get_args

from ladderize.choices import option
from ladderize.errors import UsageError
from ladderize.runtime.bench.options import (
    BATCH_SIZES,
    GroupOptions,
    ModelChoice,
    check_domino_usage,
    check_group_usage,
    check_model_choice,
    check_numbers,
)
from ladderize.runtime.schedule import Schedule, ScheduleName


def parse_schedules(text: str) -> tuple[str, ...]:
    """``sequential,domino``, in this order however they are named."""
    known = get_args(ScheduleName)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"--schedules {text!r} is not a comma-separated list of {', '.join(known)}")
    return tuple(name for name in known if name in names)


@dataclass(frozen=True)
class TrainingBenchOptions(GroupOptions):
    """How to time training steps: ``options`` of its document. Each schedule is timed with each model; the first with
    the first model is the reference."""

    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (2,))  # rows of a step
    seq_len: int = option("With --train: tokens per row.", 128, min=2)
    schedules: tuple[str, ...] = option(
        "With --train: schedules to time, of sequential and domino.",
        ("sequential", "domino"),
        metavar="A,B",
        shown="both",
        parse=parse_schedules,
    )

    @property
    def timed_schedules(self) -> list[Schedule]:
        return [self.scheduled(name) for name in self.schedules]

    @property
    def in_flight(self) -> int:
        """Messages that a rank may have sent before it waits for the first of them."""
        return max(schedule.in_flight for schedule in self.timed_schedules)


def check_training_usage(choice: ModelChoice, options: TrainingBenchOptions, link: str | None) -> None:
    """Raise UsageError for arguments that do not go together or take no effect. link: of ``--link``."""
    check_model_choice(choice)
    check_numbers(options)
    if choice.dtype == "float16":
        raise UsageError("--dtype float16 has too small a range for training; use bfloat16 or float32")
    if not options.schedules or set(options.schedules) - set(get_args(ScheduleName)):
        raise UsageError(f"--schedules {options.schedules} must name {' or '.join(get_args(ScheduleName))}")
    if len(set(options.schedules)) < len(options.schedules):
        raise UsageError("--schedules names one twice; every variant is timed once")
    check_group_usage(options, link)
    check_domino_usage(options, options.schedules, "--schedules")
