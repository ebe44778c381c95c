"""The options of ``ladderize plan`` and ``calibrate``, and the checks that need nothing else. Imports no torch."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ladderize.choices import (
    BACKEND,
    LAYOUT,
    MEASUREMENT,
    MEMORY,
    MODELS,
    OUTPUT,
    SHAPE_NAMES,
    DeviceName,
    Dtype,
    SendingBackend,
    argument,
    check_options,
    option,
)
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.runtime.bench.options import BATCH_SIZES, LAYOUT_NAMES, OUTPUT_LEN, PROMPT_LEN, parse_counts

MOST_ROWS = 1 << 20  # of a batch
BOUND_NAMES = ("parallel", "no-comm")  # rows for comparison, which are no layouts
CHOICE = "Choose a layout"  # a title of the help
COUNTS = partial(parse_counts, option="--tp-size")
DTYPES = "float32, bfloat16, float16, or auto: "


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Record):
    """The options of ``ladderize plan``; a layout is chosen where ``sensitivity`` is given."""

    model: str | None = argument("[MODEL]", "A checkpoint: folder or hub id. Its own layout is a row too.", None)
    shape: str | None = option(f"A shape instead of a checkpoint: {SHAPE_NAMES}.", panel=MODELS, metavar="CONFIG")
    dtype: Dtype = option(f"{DTYPES}as stored, bfloat16 for a shape.", "auto", panel=MODELS, metavar="DTYPE")
    hardware: str = option(
        "The device of one rank: h100-sxm, rtx-4090, l40s or another known one (docs/planning.md), or a file of"
        " calibrate or of your own.", ..., panel=MEMORY, metavar="DEVICE",
    )  # fmt: skip
    link: str | None = option(
        "What joins the ranks: a known link, such as nccl_pcie4, ALPHA_US,BETA_GB_S (see bench), or a file.",
        panel=MEMORY, metavar="LINK", shown="the fastest of --speeds on such devices, or that of --hardware's file",
    )  # fmt: skip
    outer_link: str | None = option(
        "What joins machines, such as nccl_two_nodes_ib_ndr: --link is within one then. With --sync-tp-size it joins as"
        " many groups.", panel=MEMORY, metavar="LINK",
    )  # fmt: skip
    tp_sizes: tuple[int, ...] = option(
        "Tensor-parallel ranks: one number or several.", ..., panel=MEMORY, metavar="A,B", flags="--tp-size",
        parse=COUNTS,
    )  # fmt: skip
    speeds: str | None = option(
        "Whose code is assumed: vllm, published (the Ladder Residual authors' benchmark), runtime or runtime-cpu"
        " (ladderize's own).", panel=MEMORY, metavar="NAME", shown="vllm, or that of --hardware's file",
    )  # fmt: skip
    layout: str | None = option(
        f"Rows of the table: {', '.join(LAYOUT_NAMES)}, such a name with a range of layers, ladder=16:32, or"
        f" {' and '.join(BOUND_NAMES)}, which are for comparison. dense is always there.", panel=LAYOUT,
        metavar="A,B", shown="ladder and delayed on the upper half, spd on 70 %, and all layers",
    )  # fmt: skip
    sync_tp_size: int | None = option(
        "Virtual ranks of delayed and spd in --layout.", panel=LAYOUT, min=1, shown="as many as ranks"
    )
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1,), panel=MEASUREMENT, shown="1")
    prompt_len: int = option(PROMPT_LEN, 1024, panel=MEASUREMENT)
    output_len: int = option(OUTPUT_LEN, 512, panel=MEASUREMENT)
    sensitivity: Path | None = option(
        "Choose the fastest layout, by the costs in this file of `ladderize sensitivity`.", panel=CHOICE, metavar="FILE"
    )
    max_ppl_increase: str | None = option(
        "The budget of the choice: 2% of the dense perplexity, or 0.1 in perplexity.", panel=CHOICE, metavar="X"
    )
    verify: int | None = option(
        "Measure at most N layouts: those near the choice, and the choice on held-out windows.", panel=CHOICE, min=2
    )
    recipe_out: Path | None = option(
        "Write the chosen layout as a recipe for convert.", panel=OUTPUT, metavar="FILE", decides=False
    )
    out: Path | None = option("Write everything as JSON.", panel=OUTPUT, metavar="FILE", decides=False)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.model is None) == (self.shape is None):
            raise UsageError("name a checkpoint, or a shape with --shape, and not both")
        for name, sizes in (("--tp-size", self.tp_sizes), ("--batch-size", self.batch_sizes)):
            if not sizes or any(type(size) is not int or not 1 <= size <= MOST_ROWS for size in sizes):
                raise UsageError(f"{name} must name integers from 1 to {MOST_ROWS:,}")
        asked = {self.sensitivity, self.max_ppl_increase, self.verify, self.recipe_out} - {None}
        if asked and (self.sensitivity is None or self.max_ppl_increase is None):
            raise UsageError(
                "a choice needs the costs of layers and a budget: give --sensitivity and --max-ppl-increase"
            )
        if not asked:
            return
        self.max_nats(0.0)  # raises for no increase
        if len(self.tp_sizes) > 1 or len(self.batch_sizes) > 1 or self.tp_sizes[0] == 1:
            raise UsageError(
                "a layout is chosen for one group and one workload: give one --tp-size above 1, and one --batch-size"
            )

    @property
    def name(self) -> str:
        return str(self.model or self.shape)

    def max_nats(self, dense_nll: float) -> float:
        """Return the budget in nats per token, where the dense model has so many. Raises UsageError."""
        text, dense = str(self.max_ppl_increase).strip(), math.exp(dense_nll)
        try:
            increase = float(text.removesuffix("%"))
        except ValueError:
            increase = math.nan
        if not 0 < increase < math.inf:
            raise UsageError(
                f"--max-ppl-increase {text} is not an increase of the perplexity; write 2% (of the dense one) or a"
                " number above 0 such as 0.1 (in perplexity)"
            )
        return math.log1p(increase / 100 if text.endswith("%") else increase / dense)


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Record):
    """The options of ``ladderize calibrate``."""

    out: Path = option(
        "The JSON file to write; --hardware and --link take it.", ..., panel=OUTPUT, metavar="FILE", decides=False
    )
    tp_sizes: tuple[int, ...] = option(
        "Numbers of ranks to time, one after the other. Under torchrun: as many as it started.", (1,), panel=MEMORY,
        metavar="A,B", flags="--tp-size", shown="1", parse=COUNTS,
    )  # fmt: skip
    backend: SendingBackend = option(BACKEND, "auto")
    dtype: Dtype = option(f"{DTYPES}bfloat16.", "auto", panel=MEMORY, metavar="DTYPE")
    device: DeviceName | None = None  # a GPU where there is one
    hardware: str | None = option("A known device or a file: its data sheet is kept.", panel=MEMORY, metavar="DEVICE")

    def __post_init__(self) -> None:
        check_options(self)
        if not self.tp_sizes or min(self.tp_sizes) < 1:
            raise UsageError(f"--tp-size {self.tp_sizes} must name positive integers")

    @property
    def compute_dtype(self) -> str:
        return "bfloat16" if self.dtype == "auto" else self.dtype
