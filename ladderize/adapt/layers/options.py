"""The options of methods that work layer by layer, and the defaults that depend on the model. Imports no torch and no
numpy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from ladderize import choices
from ladderize.adapt.options import ALIGN, BLOCKS, COMPUTE_DTYPE, CONVERTED, SAMPLES, TrainingDtype, Write, check_lr
from ladderize.choices import (
    DATA,
    LAYOUT,
    MEASUREMENT,
    MEMORY,
    METHOD,
    OUTPUT,
    DeviceName,
    Dtype,
    argument,
    check_options,
    distinct_names,
    option,
)
from ladderize.convert.sensitivity_file import Mode
from ladderize.errors import UsageError, UserError
from ladderize.layout import Layout, format_ranges, parse_ranges
from ladderize.ranks.device import default_device

# The paper's learning rate at LLaMA2-7B's width; a step of Adam moves a sum over twice the width twice as far.
PAPERS_LR, PAPERS_WIDTH = 5e-5, 4096
TOKENS_PER_STEP = 2048  # the paper's: one sequence
DEFAULT_SAMPLES, DEFAULT_HELDOUT = 1024, 64  # windows at most
HEADS, NEURONS = "heads", "neurons"  # of --assign
# The size of an alignment by default: tokens, or so many per input of the widest projection; tokens where it is
# repeated, or as long as a short training; and the windows held out.
LEAST_TOKENS, TOKENS_PER_INPUT, SHORT, LEAST_WINDOWS_HELDOUT = 1 << 17, 4, 1 << 14, 8


@dataclass(frozen=True)
class WindowOptions:
    """The windows of data that layers are rewritten from, the layers, and where it is computed."""

    method: ClassVar[str]

    data: str
    samples: int | None = None
    heldout: int | None = None
    seq_len: int | None = None
    layers: str | None = None  # ``converted``, ranges, or None: the method's default
    dtype: TrainingDtype = "auto"
    device: str = field(default_factory=default_device)
    write: Write = "best"  # nothing where the held-out KL did not fall; last: always
    seed: int = 0
    # rows that are not read, since a retraining with this seed holds them out; None: as many as it does by default
    spare: int | None = 0

    def __post_init__(self) -> None:
        check_options(self)

    def recorded(self) -> dict[str, Any]:
        """Return the options that decide the result besides data, layers and dtype."""
        return {"seed": self.seed}

    def least_tokens(self, config: Mapping[str, Any]) -> int | None:
        """Return how many tokens are read, of a model with this config; None: all that the data have."""
        return None


@dataclass(frozen=True)
class AlignOptions(WindowOptions):
    """The options of alignment: of every layer from the first converted one on."""

    method = ALIGN

    tokens: int | None = None  # to align on where ``samples`` are not given; None: ``default_tokens``

    def least_tokens(self, config: Mapping[str, Any]) -> int | None:
        return self.tokens or default_tokens(config)


@dataclass(frozen=True)
class BlockwiseOptions(WindowOptions):
    """The options of block distillation: of every layer that differs from the dense model's."""

    method = BLOCKS

    epochs: int = 10  # at most
    lr: float | None = None  # at the peak; None: the paper's, scaled to the width

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lr(self.lr)

    def recorded(self) -> dict[str, Any]:
        return {"seed": self.seed, "epochs": self.epochs, "lr": self.lr}


def default_tokens(config: Mapping[str, Any], *, short: bool = False) -> int:
    """Return the number of tokens to align on by default, or where alignment is repeated often (``short``)."""
    return max(SHORT if short else LEAST_TOKENS, TOKENS_PER_INPUT * widest_input(config))


def start_tokens(config: Mapping[str, Any], budget: int | None) -> int:
    """Return the number of tokens to align on before a training on ``budget`` tokens: as many, between the defaults
    (docs/results.md: what more tokens win stays after the training)."""
    return min(default_tokens(config), max(default_tokens(config, short=True), budget or 0))


def widest_input(config: Mapping[str, Any]) -> int:
    return max(int(config["hidden_size"]), int(config["intermediate_size"]))


def layers_to_rewrite(options: WindowOptions, layout: Layout) -> tuple[int, ...]:
    """Return the layers of ``options.layers``, or the method's default. Raises UserError for one that reads, and is,
    what the dense model's is."""
    converted = tuple(layout.converted_layers)
    usable = layers_to_align(layout) if options.method == ALIGN else converted
    if options.layers == CONVERTED:
        return converted
    if options.layers is None or options.layers == "all":
        return usable
    chosen = tuple(parse_ranges(options.layers, layout.num_layers, option="--train"))
    if unchanged := sorted({*chosen} - {*usable}):
        raise UserError(
            f"--train: {format_ranges(unchanged)} are the same as in the dense model; only {format_ranges(usable)} can"
            " be rewritten"
        )
    return chosen


def layers_to_align(layout: Layout) -> tuple[int, ...]:
    """Return every layer from the first converted one on: those behind it read a changed stream too, and repairing them
    helped on every layout that was measured (ladder 1:3 of stories260K: KL 0.289 in place of 0.300)."""
    return tuple(range(layout.converted_layers[0], layout.num_layers))


# ---- assignment ----


def assign_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated text; () for none."""
    return () if text == "none" else distinct_names(text)


def check_assign(names: tuple[str, ...]) -> None:
    """Raise UsageError for anything but heads and neurons."""
    if unknown := [name for name in names if name not in (HEADS, NEURONS)]:
        raise UsageError(f"--assign {unknown[0]} is not one of {HEADS}, {NEURONS}, none")


@dataclass(frozen=True)
class AssignOptions:
    """The names, data and device of an assignment."""

    assign: tuple[str, ...]
    data: str | None
    device: DeviceName | None = None

    def __post_init__(self) -> None:
        check_assign(self.assign)


# ---- commands ----


@dataclass(frozen=True)
class SensitivityOptions:
    model: str = argument("MODEL", "A dense checkpoint: folder or hub id.")
    data: str = option(
        "Text (.txt, .jsonl) or token ids (.npy, .npz, file.npz:array).", ..., panel=DATA, metavar="FILE"
    )
    out: Path = option("The JSON file to write.", ..., panel=OUTPUT, metavar="FILE")
    samples: int = option("Windows to score, drawn from the data; all if there are fewer.", 128, panel=DATA, min=2)
    seq_len: int | None = option(choices.SEQ_LEN)
    seed: int = option("Seed of the windows that are drawn.", 0, panel=DATA, min=0, max=choices.MAX_SEED)
    overwrite: bool = option("Replace what --out names.", False, panel=OUTPUT, decides=False)
    sync_tp_size: int | None = option(
        "TP size to delay and drop sync points for (virtual ranks). Without it only ladder is measured.",
        panel=MEASUREMENT,
        min=1,
    )
    mode: Mode = option(
        "layers: change each layer alone: to ladder and, with --sync-tp-size, to delayed, spd, and spd and ladder."
        " sweep: drop one more attention sync point at a time, from the last layer backwards (the SPD paper's).",
        "layers",
        panel=MEASUREMENT,
    )
    align: bool = option(
        "Solve the projections of each changed layer before, as `adapt --method align` does, on further windows of the"
        " data.",
        False,
        panel=MEASUREMENT,
    )
    align_samples: int | None = None  # windows; None: 16,384 tokens, or four for each input of an MLP
    dtype: Dtype = option(choices.DTYPE, "auto")
    device: DeviceName | None = option(choices.DEVICE)

    def __post_init__(self) -> None:
        check_options(self)
        if self.mode == "sweep" and self.sync_tp_size is None:
            raise UsageError("--mode sweep needs --sync-tp-size N")


@dataclass(frozen=True)
class SpdOptions:
    model: str = argument("MODEL", "A dense checkpoint: folder or hub id. It is never changed.")
    out: str = argument("OUT", "The folder to write. It appears whole or not at all.")
    sync_tp_size: int = option(
        "TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide it.",
        ...,
        panel=LAYOUT,
        min=2,
    )
    data: str = option(
        "json, jsonl, parquet, txt, npy, npz:array, or a folder or glob of one kind.", ..., panel=DATA, metavar="FILE"
    )
    spd_fraction: float = option("Fraction of all blocks to drop, least sensitive first.", 0.7, panel=LAYOUT)
    samples: int | None = option(SAMPLES, panel=DATA)
    heldout: int | None = option(
        "Windows to hold out for early stopping and for the table.", panel=DATA, min=1, shown="a tenth, up to 64"
    )
    seq_len: int | None = option(choices.SEQ_LEN)
    seed: int = 0  # of which data are used, and their order
    repair: Literal["align", "blocks"] = option(
        "align: solve the projections from the first dropped block on by least squares. blocks: distil each dropped"
        " block, as in the paper.",
        "align",
        panel=METHOD,
    )
    assign: tuple[str, ...] = option(
        "Assign KV groups, MLP neurons or both of dropped blocks to the ranks where they lose least: heads, neurons;"
        " none: they stay.",
        (HEADS, NEURONS),
        panel=METHOD,
        metavar="A,B",
        parse=assign_names,
        shown="heads,neurons",
    )
    lr: float | None = None  # peak learning rate of blocks; None: 5e-5 * 4096 / hidden size
    epochs: int = 10
    dtype: TrainingDtype = option(COMPUTE_DTYPE, "auto", panel=MEMORY)
    device: DeviceName | None = option(choices.DEVICE)
    overwrite: bool = option(choices.OVERWRITE, False)
    verify: bool = option(choices.NO_VERIFY, True)

    def __post_init__(self) -> None:
        check_options(self)
        check_lr(self.lr)
        check_assign(self.assign)
        if not 0 < self.spd_fraction <= 1:
            raise UsageError(f"--spd-fraction must be above 0 and at most 1, not {self.spd_fraction:g}")
        if self.lr is not None and self.repair == ALIGN:
            raise UsageError("lr has no effect with repair align, which trains nothing")
