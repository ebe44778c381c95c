"""What ``ladderize plan`` was asked for, and all that its arguments alone decide. Imports no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ladderize.checkpoint.llama import MOST_LAYERS
from ladderize.choices import Dtype, check_choices
from ladderize.errors import UsageError
from ladderize.eval.options import check_alignment
from ladderize.files.records import Record
from ladderize.planning.planner.document import LEAST_MEASUREMENTS, TimedPhase
from ladderize.runtime.bench.options import LAYOUT_NAMES, layout_names

MOST_ROWS = 1 << 20  # of a batch
BOUNDS = ("parallel", "no-comm")  # what is no layout: rows for comparison
WORKLOAD_KEYS = {"prompt": "prompt_len", "output": "output_len", "batch": "batch_size"}


@dataclass(frozen=True)
class PlanModel(Record):
    """What is to run: a checkpoint, or a shape without weights. None is what was not said.

    layout: as --layout has it: names of layouts, ``parallel`` and ``no-comm``.
    """

    model: str | None = None
    shape: str | None = None
    layout: str | None = None
    num_layers: int | None = None
    sync_tp_size: int | None = None
    dtype: Dtype = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        if (self.model is None) == (self.shape is None):
            raise UsageError("name a checkpoint, or a shape with --shape, and not both")
        if self.model is not None and self.num_layers is not None:
            raise UsageError("--num-layers goes with --shape; a checkpoint has its own layers")
        if self.shape is not None and self.revision is not None:
            raise UsageError("--revision has no effect with --shape")
        for name, most in (("num_layers", MOST_LAYERS), ("sync_tp_size", math.inf)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise UsageError(f"--{name.replace('_', '-')} {value} is not from 1 to {most:,}")

    @property
    def name(self) -> str:
        return str(self.model or self.shape)

    @property
    def rows(self) -> list[str]:
        """The names that --layout lists, in order; raises UsageError where it lists none, or one twice."""
        return [*LAYOUT_NAMES, *BOUNDS] if self.layout is None else layout_names(self.layout)


@dataclass(frozen=True)
class PlanOptions(Record):
    """Where it is to run, and what is to be served: ``options`` of plan.json. See ``ladderize plan --help``."""

    hardware: str
    tp_sizes: tuple[int, ...]
    link: str | None = None
    engine: str | None = None
    batch_sizes: tuple[int, ...] = (1,)
    prompt_len: int = 1024
    output_len: int = 512

    def __post_init__(self) -> None:
        for name, values in (("--tp-size", self.tp_sizes), ("--batch-size", self.batch_sizes)):
            if not values or any(type(value) is not int or value < 1 for value in values):
                raise UsageError(f"{name} {values} must name positive integers")
        if max(self.batch_sizes) > MOST_ROWS:
            raise UsageError(f"--batch-size must be at most {MOST_ROWS:,}")
        for name, least in (("prompt_len", 1), ("output_len", 2)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(self, name)}")
        if self.link is not None and max(self.tp_sizes) == 1:
            raise UsageError("--link has no effect with one rank, which sends nothing; leave it out or raise --tp-size")


@dataclass(frozen=True)
class PlanGoal:
    """Which layout to choose: by costs in accuracy (at least one of the two files), and one of the two targets.

    verify: the most layouts to measure; None: none is. Of these measurements: align, whether each layout is aligned
    before; align_samples, on so many windows; data, where the sensitivity's data lie now; held_out_data, to confirm a
    choice on; work_dir, where what was measured is kept; device, threads.
    """

    sensitivity: Path | None = None
    sweep: Path | None = None
    max_ppl_increase: str | None = None
    min_speedup: float | None = None
    phase: TimedPhase = "end_to_end"
    verify: int | None = None
    align: bool = False
    align_samples: int | None = None
    data: str | None = None
    held_out_data: str | None = None
    work_dir: Path | None = None
    device: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        check_alignment(self)
        if self.sensitivity is None and self.sweep is None:
            raise UsageError(
                "to choose a layout, costs in accuracy are needed: give --sensitivity FILE or --sweep FOLDER"
            )
        if self.verify is None:
            for name in ("align", "data", "held_out_data", "work_dir", "device", "threads"):
                if getattr(self, name) not in (None, False):
                    raise UsageError(f"--{name.replace('_', '-')} has no effect without --verify")
            return
        if self.sweep is not None:
            raise UsageError(
                "--verify measures layouts that were not retrained, and does not go with --sweep, whose costs are"
                " measured already; leave one of them out"
            )
        if self.sensitivity is None:
            raise UsageError("--verify measures what --sensitivity says, on its data; give that file")
        if self.verify < LEAST_MEASUREMENTS:
            raise UsageError(
                f"--verify {self.verify} is too few; {LEAST_MEASUREMENTS} is the least: one layout to choose, and to"
                " confirm it"
            )


def parse_workload(text: str) -> Mapping[str, int]:
    """``prompt=1024,output=512,batch=16``, in any order: as the options prompt_len, output_len and batch_size."""
    found: dict[str, int] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in WORKLOAD_KEYS or WORKLOAD_KEYS[key] in found or not re.fullmatch("[0-9]{1,12}", value):
            raise UsageError(f"--workload {text!r} is not of the form prompt=1024,output=512,batch=16")
        found[WORKLOAD_KEYS[key]] = int(value)
    if len(found) < len(WORKLOAD_KEYS):
        raise UsageError(f"--workload {text!r} must say all of {', '.join(WORKLOAD_KEYS)}")
    return found
