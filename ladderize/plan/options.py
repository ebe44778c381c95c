"""The options of ``ladderize plan`` and ``calibrate``, and the checks that need nothing else. Imports no torch."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
)
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.ranks.device import default_device
from ladderize.runtime.bench.options import (
    BATCH_SIZES,
    LAYOUT_NAMES,
    OUTPUT_LEN,
    PROMPT_LEN,
    parse_counts,
)

MOST_ROWS = 1 << 20  # of a batch
BOUND_NAMES = ("parallel", "no-comm")  # rows for comparison, which are no layouts


@dataclass(frozen=True)
class PlanModel(Record):
    """The model: a checkpoint, or a shape without weights. None: not given."""

    model: str | None = argument("[MODEL]", "A checkpoint: folder or hub id. Its own layout is a row too.", None)
    shape: str | None = option(f"A shape instead of a checkpoint: {SHAPE_NAMES}.", metavar="CONFIG")
    layout: str | None = option(
        f"Rows of the table: {', '.join(LAYOUT_NAMES)}, such a name with a range of layers, ladder=16:32, or"
        f" {' and '.join(BOUND_NAMES)}, which are for comparison. dense is always there.",
        metavar="A,B",
        shown="ladder and delayed on the upper half, spd on 70 %, and all layers",
    )
    sync_tp_size: int | None = option("Virtual ranks of delayed and spd in --layout.", min=1, shown="as many as ranks")
    dtype: Dtype = option(
        "float32, bfloat16, float16, or auto: as stored, bfloat16 for a shape.", "auto", metavar="DTYPE"
    )
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.model is None) == (self.shape is None):
            raise UsageError("name a checkpoint, or a shape with --shape, and not both")

    @property
    def name(self) -> str:
        return str(self.model or self.shape)


@dataclass(frozen=True)
class PlanOptions(Record):
    """The hardware and the workload: ``options`` of plan.json."""

    hardware: str = option(
        "The device of one rank: h100-sxm, rtx-4090, l40s or another known one (docs/planning.md), or a file of"
        " calibrate or of your own.",
        ...,
        metavar="DEVICE",
    )
    tp_sizes: tuple[int, ...] = option(
        "Tensor-parallel ranks: one number or several.",
        ...,
        metavar="A,B",
        flags="--tp-size",
        parse=partial(parse_counts, option="--tp-size"),
    )
    link: str | None = option(
        "What joins the ranks: a known link, such as nccl_pcie4, ALPHA_US,BETA_GB_S (see bench), or a file.",
        metavar="LINK",
        shown="the engine's fastest on such devices, or that of --hardware's file",
    )
    outer_link: str | None = option(
        "What joins machines, such as nccl_two_nodes_ib_ndr: --link is within one then. With --sync-tp-size it joins as"
        " many groups.",
        metavar="LINK",
    )
    engine: str | None = option(
        "Whose code is assumed: vllm, published (the Ladder Residual authors' benchmark), runtime or runtime-cpu"
        " (ladderize's own).",
        metavar="NAME",
        shown="vllm, or that of --hardware's file",
    )
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1,), shown="1")
    prompt_len: int = option(PROMPT_LEN, 1024)
    output_len: int = option(OUTPUT_LEN, 512)

    def __post_init__(self) -> None:
        check_options(self)
        for name, values in (("--tp-size", self.tp_sizes), ("--batch-size", self.batch_sizes)):
            if not values or any(type(value) is not int or not 1 <= value <= MOST_ROWS for value in values):
                raise UsageError(f"{name} must name integers from 1 to {MOST_ROWS:,}")


@dataclass(frozen=True)
class PlanGoal:
    """The goal of a choice: the costs of its layers, and the budget."""

    sensitivity: Path = option(
        "Choose the fastest layout, by the costs in this file of `ladderize sensitivity`.", None, metavar="FILE"
    )
    max_ppl_increase: str = option(
        "The budget of the choice: 2% of the dense perplexity, or 0.1 in perplexity.", None, metavar="X"
    )
    verify: int | None = option(
        "Measure at most N layouts: those near the choice, and the choice on held-out windows.", min=2
    )

    def __post_init__(self) -> None:
        if self.sensitivity is None or self.max_ppl_increase is None:
            raise UsageError(
                "a choice needs the costs of layers and a budget: give --sensitivity and --max-ppl-increase"
            )
        check_options(self)
        self.max_nats(0.0)

    def max_nats(self, dense_nll: float) -> float:
        """Return the budget in nats per token. Raises UsageError for a bad increase.

        dense_nll: of the dense model, in nats per token.
        """
        text, dense = str(self.max_ppl_increase).strip(), math.exp(dense_nll)
        try:
            value = float(text.removesuffix("%"))
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise UsageError(
                f"--max-ppl-increase {self.max_ppl_increase} is not an increase of the perplexity; write 2% (of the"
                " dense one) or a number above 0 such as 0.1 (in perplexity)"
            )
        return math.log1p((value / 100 * dense if text.endswith("%") else value) / dense)


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
    hardware: str | None = option("A known device or a file: its data sheet is kept.", metavar="DEVICE")
    device: str = option(DEVICE, default_device)
    threads: int | None = option(THREADS)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.tp_sizes or min(self.tp_sizes) < 1:
            raise UsageError(f"--tp-size {self.tp_sizes} must name positive integers")

    @property
    def compute_dtype(self) -> str:
        return "bfloat16" if self.dtype == "auto" else self.dtype
