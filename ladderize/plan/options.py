"""The options of ``ladderize plan`` and ``calibrate``, and the checks that need nothing else. Imports no torch."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from ladderize.choices import (
    BACKEND,
    DEVICE,
    REVISION,
    SHAPE_NAMES,
    THREADS,
    Dtype,
    SendingBackend,
    argument,
    check_options,
    option,
    ppl_increase,
)
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.ranks.device import default_device
from ladderize.runtime.bench.options import (
    BATCH_SIZES,
    COUNTED_ROUNDS,
    LAYOUT_NAMES,
    OUTPUT_LEN,
    PROMPT_LEN,
    layout_names,
    parse_counts,
)

MOST_ROWS = 1 << 20  # of a batch
BOUNDS = ("parallel", "no-comm")  # rows for comparison, which are no layouts
TimedPhase = Literal["end_to_end", "prefill", "decode"]  # the part of a workload that is to be fast
PlanWeights = Literal["auto", "fp8", "float"]  # how the weights of projections are stored; float: as --dtype


@dataclass(frozen=True)
class PlanModel(Record):
    """The model: a checkpoint, or a shape without weights. None: not given."""

    model: str | None = argument("[MODEL]", "A checkpoint: folder or hub id. Its own layout is a row too.", None)
    shape: str | None = option(f"A shape instead of a checkpoint: {SHAPE_NAMES}.", metavar="CONFIG")
    layout: str | None = option(
        f"Rows of the tables: {', '.join(LAYOUT_NAMES)}, such a name with a range of layers, ladder=16:32, or"
        f" {' and '.join(BOUNDS)}, which are for comparison. dense is always there.",
        metavar="A,B",
        shown="all of them, for all layers",
    )
    sync_tp_size: int | None = option("Virtual ranks of spd in --layout.", min=1, shown="as many as ranks")
    dtype: Dtype = option(
        "float32, bfloat16, float16, or auto: as stored, bfloat16 for a shape.", "auto", metavar="DTYPE"
    )
    weights: PlanWeights = option(
        "fp8: projections multiply 8-bit floats, all-reduces stay as they are. auto: as a checkpoint stores them,"
        " floats for a shape.",
        "auto",
        metavar="auto|fp8|float",
    )
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.model is None) == (self.shape is None):
            raise UsageError("name a checkpoint, or a shape with --shape, and not both")

    @property
    def name(self) -> str:
        return str(self.model or self.shape)

    @property
    def rows(self) -> list[str]:
        """The names that --layout lists, in order. Raises UsageError where it lists none, or one twice."""
        return [*LAYOUT_NAMES, *BOUNDS] if self.layout is None else layout_names(self.layout)


@dataclass(frozen=True)
class PlanOptions(Record):
    """The hardware and the workload: ``options`` of plan.json."""

    hardware: str = option(
        "The device of one rank: a name that --list shows, or a file of calibrate or of your own.",
        ...,
        metavar="DEVICE",
        optional=True,
    )
    tp_sizes: tuple[int, ...] = option(
        "Tensor-parallel ranks: one number or several.",
        ...,
        metavar="A,B",
        flags="--tp-size",
        optional=True,
        parse=partial(parse_counts, option="--tp-size"),
    )
    link: str | None = option(
        "What joins the ranks: a name that --list shows, ALPHA_US,BETA_GB_S (see bench), or a file.",
        metavar="LINK",
        shown="that of --hardware's file",
    )
    engine: str | None = option(
        "Whose code is assumed: a name that --list shows.",
        metavar="NAME",
        shown="the one that the device's figures come from",
    )
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1,), shown="1")
    prompt_len: int = option(PROMPT_LEN, 1024)
    output_len: int = option(OUTPUT_LEN, 512)

    def __post_init__(self) -> None:
        check_options(self)
        for name, values in (("--tp-size", self.tp_sizes), ("--batch-size", self.batch_sizes)):
            if not values or any(type(value) is not int or value < 1 for value in values):
                raise UsageError(f"{name} {values} must name positive integers")
        if max(self.batch_sizes) > MOST_ROWS:
            raise UsageError(f"--batch-size must be at most {MOST_ROWS:,}")


@dataclass(frozen=True)
class ChoiceTarget(Record):
    """The bound that a layout has to meet: one of the two numbers.

    words: the option as it was given.
    """

    words: str
    max_nats: float | None = None
    min_speedup: float | None = None


@dataclass(frozen=True)
class PlanGoal:
    """The goal of a choice: the costs of its layers, and one of the two targets."""

    sensitivity: Path | None = option("Choose a layout: the file of `ladderize sensitivity`.", metavar="FILE")
    max_ppl_increase: str | None = option(
        "Choose the fastest within this increase: 2% of the dense perplexity, or 0.1 in perplexity.", metavar="X"
    )
    min_speedup: float | None = option("Choose the most accurate that is this fast: 1.2.")
    phase: TimedPhase = option(
        "What is to be fast: end_to_end, prefill or decode.", "end_to_end", metavar="PHASE", shown="end_to_end"
    )
    verify: int | None = option(
        "Measure at most N layouts: those near the choice, and the choice on held-out windows.", min=2
    )
    align: bool = option(
        "With --verify: measure each layout as `adapt --method align` leaves it.", False, needs="verify"
    )
    data: str | None = option(
        "With --verify: data to measure on.", metavar="FILE", shown="the sensitivity's", needs="verify"
    )
    device: str | None = option(DEVICE, help="With --verify: where to compute.", needs="verify")
    threads: int | None = option(THREADS, help="With --verify: CPU threads.", shown="all cores", needs="verify")

    def __post_init__(self) -> None:
        if self.sensitivity is None:
            raise UsageError("to choose a layout, the costs of its layers are needed: give --sensitivity FILE")
        check_options(self)
        if (self.max_ppl_increase is None) == (self.min_speedup is None):
            raise UsageError("give --max-ppl-increase or --min-speedup, one of them: what a layout has to meet")
        if self.min_speedup is not None and self.min_speedup <= 1:
            raise UsageError(f"--min-speedup must be a number above 1, such as 1.2, not {self.min_speedup:g}")
        self.target(0.0)

    def target(self, dense_nll: float) -> ChoiceTarget:
        """Return the bound to meet. Raises UsageError for a bad increase.

        dense_nll: of the dense model, in nats per token.
        """
        if self.max_ppl_increase is None:
            return ChoiceTarget(f"--min-speedup {self.min_speedup:g}", min_speedup=self.min_speedup)
        dense = math.exp(dense_nll)
        nats = math.log1p(ppl_increase(self.max_ppl_increase, dense) / dense)
        return ChoiceTarget(f"--max-ppl-increase {self.max_ppl_increase}", nats)


@dataclass(frozen=True)
class CalibrateOptions(Record):
    """The options of ``ladderize calibrate``."""

    tp_sizes: tuple[int, ...] = option(
        "Numbers of ranks to time, one after the other. Under torchrun: as many as it started.",
        (1,),
        metavar="A,B",
        flags="--tp-size",
        shown="1",
        parse=partial(parse_counts, option="--tp-size"),
    )
    dtype: Dtype = option("float32, bfloat16, float16, or auto: bfloat16.", "auto", metavar="DTYPE")
    backend: SendingBackend = option(BACKEND, "auto")
    repeat: int = option(COUNTED_ROUNDS, 7, help="Rounds that are counted. Medians are fitted.")
    hardware: str | None = option("A known device or a file: its data sheet is kept.", metavar="DEVICE")
    name: str = option("What the device and the link are called.", "this machine", metavar="TEXT")
    device: str = option(DEVICE, default_device)
    threads: int | None = option(THREADS)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.tp_sizes or min(self.tp_sizes) < 1:
            raise UsageError(f"--tp-size {self.tp_sizes} must name positive integers")
