"""The options of methods that rewrite a model layer by layer, and the defaults that depend on it. Imports no torch and
no numpy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ladderize.adapt.methods import COMPUTE_DTYPE, CONVERTED, TRAINING_SEED, TrainingDtype, Write, check_lr
from ladderize.choices import DEVICE, REVISION, SEQ_LEN, DeviceName, Option, check_options, distinct_names, option
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
SAMPLES = Option("Windows to align on, or to train blocks on.", min=1, shown="131,072 tokens; blocks: up to 1024")


@dataclass(frozen=True)
class WindowOptions:
    """The windows of data that layers are rewritten from, the layers, and the place of the computation.

    write: best: nothing where the held-out KL did not fall; last: always.
    spare: rows that are not read, since a retraining with this seed holds them out; None: as many as it does by
        default.
    Raises UsageError for options that contradict each other.
    """

    data: str = option(
        "json, jsonl, parquet, txt, npy, npz:array, or a folder or glob of one kind.", ..., metavar="FILE"
    )
    samples: int | None = option(SAMPLES)
    heldout: int | None = option(
        "Windows to hold out for early stopping and for the table.", min=1, shown="a tenth, up to 64; align: an eighth"
    )
    seq_len: int | None = option(SEQ_LEN)
    layers: str | None = None  # ranges; None: the method's default
    dtype: TrainingDtype = option(COMPUTE_DTYPE, "auto")
    device: str = option(DEVICE, default_device)
    write: Write = "best"
    seed: int = option(TRAINING_SEED, 0)
    spare: int | None = 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class AlignOptions(WindowOptions):
    """The options of ``ladderize adapt --method align``; see its --help.

    layers: ``converted``, ranges, or None: every layer from the first converted one on.
    tokens: to align on where ``samples`` are not given; None: ``default_tokens``.
    """

    tokens: int | None = None


def default_tokens(config: Mapping[str, Any], *, short: bool = False) -> int:
    """Return the number of tokens to align on by default, or where alignment is repeated often (``short``)."""
    return max(SHORT if short else LEAST_TOKENS, TOKENS_PER_INPUT * widest_input(config))


def start_tokens(config: Mapping[str, Any], budget: int | None) -> int:
    """Return the number of tokens to align on before a training on ``budget`` tokens: as many, from the short
    to the long default (docs/results.md: what more tokens win stays after the training)."""
    return min(default_tokens(config), max(default_tokens(config, short=True), budget or 0))


def assign_tokens(config: Mapping[str, Any]) -> int:
    """Return the number of tokens to assign heads and neurons by."""
    return max(SHORT, int(config["intermediate_size"]))


def widest_input(config: Mapping[str, Any]) -> int:
    return max(int(config["hidden_size"]), int(config["intermediate_size"]))


def assign_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated text; () for none."""
    return () if text == "none" else distinct_names(text)


def check_assign(names: tuple[str, ...]) -> None:
    """Raise UsageError for anything but heads and neurons."""
    if unknown := [name for name in names if name not in (HEADS, NEURONS)]:
        raise UsageError(f"--assign {unknown[0]} is not one of {HEADS}, {NEURONS}, none")


@dataclass(frozen=True)
class AssignOptions:
    """The options of ``ladderize convert`` that compute an assignment; see its --help.

    Raises UsageError for others than heads and neurons.
    """

    assign: tuple[str, ...] = option(
        "Assign KV groups, MLP neurons or both to the ranks where they lose least: heads, neurons.",
        (),
        metavar="A,B",
        parse=assign_names,
        shown="none",
        needs="data",
    )
    data: str | None = option("The text or ids to assign by.", metavar="FILE", needs="assign")
    device: DeviceName | None = option(DEVICE, needs="assign")

    def __post_init__(self) -> None:
        check_options(self)
        check_assign(self.assign)


@dataclass(frozen=True)
class BlockwiseOptions(WindowOptions):
    """The options of ``ladderize adapt --method blocks``; see its --help.

    layers: ``converted``, ranges, or None: every layer that differs from the dense model's.
    """

    epochs: int = option("Most epochs per block.", 10, min=1)
    lr: float | None = option("Peak learning rate.", shown="5e-5 * 4096 / hidden size")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lr(self.lr)


@dataclass(frozen=True, kw_only=True)
class SpdOptions(BlockwiseOptions):
    """The options of ``ladderize spd``; see its --help.

    Raises UsageError for values that contradict each other.
    """

    sync_tp_size: int = option(
        "TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide it.", ..., min=2
    )
    spd_fraction: float = option("Fraction of all blocks to drop, least sensitive first.", 0.7)
    repair: Literal["align", "blocks"] = option(
        "align: solve the projections from the first dropped block on by least squares. blocks: distil each dropped"
        " block, as in the paper.",
        "align",
    )
    assign: tuple[str, ...] = option(
        "Assign KV groups, MLP neurons or both of dropped blocks to the ranks where they lose least: heads, neurons;"
        " none: they stay.",
        (HEADS, NEURONS),
        metavar="A,B",
        parse=assign_names,
        shown="heads,neurons",
    )
    revision: str | None = option(REVISION)
    write: Write = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_assign(self.assign)
        if not 0 < self.spd_fraction <= 1:
            raise UsageError(f"--spd-fraction must be above 0 and at most 1, not {self.spd_fraction:g}")


def layers_to_rewrite(options: WindowOptions, layout: Layout) -> tuple[int, ...]:
    """Return the layers of ``options.layers``, or the method's default. Raises UserError for one that reads, and is,
    what the dense model's is."""
    converted = tuple(layout.converted_layers)
    able = layers_to_align(layout) if isinstance(options, AlignOptions) else converted
    if options.layers == CONVERTED:
        return converted
    if options.layers is None or options.layers == "all":
        return able
    chosen = tuple(parse_ranges(options.layers, layout.num_layers, option="--train"))
    if rest := sorted({*chosen} - {*able}):
        raise UserError(
            f"--train: {format_ranges(rest)} are the same as in the dense model; only {format_ranges(able)} can be"
            " rewritten"
        )
    return chosen


def layers_to_align(layout: Layout) -> tuple[int, ...]:
    """Return every layer from the first converted one on: those behind it read a changed stream too, and repairing them
    helped on every layout that was measured (ladder 1:3 of stories260K: KL 0.289 in place of 0.300)."""
    return tuple(range(layout.converted_layers[0], layout.num_layers))
