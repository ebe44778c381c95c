"""What ``ladderize bench --train`` was asked for, and all that its arguments alone decide. No torch here."""

from dataclasses import dataclass
from typing import get_args

from ladderize.errors import UsageError
from ladderize.runtime.bench.options import (
    GroupOptions,
    ModelChoice,
    check_domino_usage,
    check_group_usage,
    check_model_choice,
    check_numbers,
)
from ladderize.runtime.schedule import Schedule, ScheduleName


@dataclass(frozen=True)
class TrainingBenchOptions(GroupOptions):
    """How to time training steps: ``options`` of its document. batch_sizes: rows of a step; seq_len: tokens of a row.

    schedules: each is timed with each model; the first with the first model is the reference.
    """

    batch_sizes: tuple[int, ...] = (2,)
    seq_len: int = 128
    schedules: tuple[str, ...] = ("sequential", "domino")

    @property
    def timed_schedules(self) -> list[Schedule]:
        return [self.scheduled(name) for name in self.schedules]

    @property
    def in_flight(self) -> int:
        """Messages that a rank may have sent before it waits for the first of them."""
        return max(schedule.in_flight for schedule in self.timed_schedules)


def parse_schedules(text: str) -> tuple[str, ...]:
    """``sequential,domino``, in this order however they are named."""
    known = get_args(ScheduleName)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UsageError(f"--schedules {text!r} is not a comma-separated list of {', '.join(known)}")
    return tuple(name for name in known if name in names)


def check_training_usage(choice: ModelChoice, options: TrainingBenchOptions, link: str | None) -> None:
    """Raise UsageError for arguments that do not go together or take no effect. link: of ``--link``."""
    check_model_choice(choice)
    check_numbers(options, {"seq_len": 2})
    if choice.dtype == "float16":
        raise UsageError("--dtype float16 has too small a range for training; use bfloat16 or float32")
    if not options.schedules or set(options.schedules) - set(get_args(ScheduleName)):
        raise UsageError(f"--schedules {options.schedules} must name {' or '.join(get_args(ScheduleName))}")
    if len(set(options.schedules)) < len(options.schedules):
        raise UsageError("--schedules names one twice; every variant is timed once")
    check_group_usage(options, link)
    check_domino_usage(options, options.schedules, "--schedules")
