"""The options of methods that rewrite a model layer by layer, and the defaults that depend on it. Imports no torch and
no numpy."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from ladderize.adapt.methods import COMPUTE_DTYPE, CONVERTED, TRAINING_SEED, Write, check_training
from ladderize.choices import (
    DEVICE,
    REVISION,
    SEQ_LEN,
    Dtype,
    check_at_least,
    check_options,
    option,
)
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.layout import Layout, format_ranges, parse_ranges
from ladderize.ranks.device import default_device

# The paper's learning rate at LLaMA2-7B's width; a step of Adam moves a sum over twice the width twice as far.
PAPERS_LR, PAPERS_WIDTH = 5e-5, 4096
TOKENS_PER_STEP = 2048  # the paper's: one sequence
DEFAULT_SAMPLES, DEFAULT_HELDOUT = 1024, 64  # windows at most
RIDGES = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # tried for every projection on held-out windows, strongest first
LEAST_TOKENS, TOKENS_PER_INPUT = 1 << 17, 4  # to align on, or so many per input of the widest projection
SHORT = 1 << 14  # instead of LEAST_TOKENS; eight times as many gain little (docs/results.md)
RANDOM_SHARE = 0.25  # windows of random tokens for each window of the data (docs/align.md)
MOST_RANDOM = 10


@dataclass(frozen=True)
class WindowOptions:
    """The windows of data that layers are rewritten from, the layers, and the place of the computation.

    write: best: nothing where the held-out KL did not fall; last: always.
    Raises UsageError for options that contradict each other.
    """

    data: str = option(
        "json, jsonl, parquet, txt, npy, npz:array, or a folder or glob of one kind.", ..., metavar="FILE"
    )
    samples: int | None = option(
        "Windows to train on.", min=1, shown="what the data give, up to 1024; align: up to 131,072 tokens"
    )
    heldout: int | None = option(
        "Windows to hold out for early stopping and for the table.", min=1, shown="a tenth, up to 64"
    )
    seq_len: int | None = option(SEQ_LEN)
    layers: str | None = None  # ranges; None: the method's default
    dtype: Dtype = option(COMPUTE_DTYPE, "auto")
    device: str = option(DEVICE, default_device)
    write: Write = "best"
    seed: int = option(TRAINING_SEED, 0)

    def __post_init__(self) -> None:
        check_options(self)
        check_training(self.dtype, None)

    def tokens_wanted(self, config: Mapping[str, Any]) -> int | None:
        """Return the number of tokens to learn from where ``samples`` is None; None: as many as the data give."""
        return None

    def chosen_layers(self, layout: Layout) -> tuple[int, ...]:
        """Return the layers to rewrite; raises UserError for one that cannot be."""
        raise NotImplementedError

    def settings(self) -> Record:
        """Return the options that decide the result besides data, models and layers."""
        raise NotImplementedError


@dataclass(frozen=True)
class AlignSettings(Record):
    """The options of alignment that decide its result."""

    ridge: float | None = None  # a share of the mean square of a projection's inputs; None: chosen from RIDGES
    seed: int = 0
    random_share: float = RANDOM_SHARE

    @property
    def ridges(self) -> tuple[float, ...]:
        return RIDGES if self.ridge is None else (self.ridge,)


@dataclass(frozen=True)
class AlignOptions(WindowOptions):
    """The options of ``ladderize adapt --method align``; see its --help.

    layers: ``converted``, ranges, or None: every layer from the first converted one on.
    ridge: how strongly weights are held where they are; None: chosen for each projection on held-out windows.
    random_share: windows of random tokens for each window of the data, so that text of other kinds gets no worse.
    tokens: to align on where ``samples`` are not given; None: ``default_tokens``.
    Raises UsageError for values that contradict each other.
    """

    ridge: float | None = None
    random_share: float = RANDOM_SHARE
    tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "tokens")
        if self.ridge is not None and not self.ridge > 0:
            raise UsageError(f"--ridge must be above 0, not {self.ridge:g}")
        if not 0 <= self.random_share <= MOST_RANDOM:
            raise UsageError(f"--random-share must be between 0 and {MOST_RANDOM}, not {self.random_share:g}")

    def tokens_wanted(self, config: Mapping[str, Any]) -> int:
        return self.tokens or default_tokens(config)

    def chosen_layers(self, layout: Layout) -> tuple[int, ...]:
        return layers_to_align(layout, self.layers)

    def settings(self) -> AlignSettings:
        return AlignSettings(self.ridge, self.seed, self.random_share)


def layers_to_align(layout: Layout, ranges: str | None = None) -> tuple[int, ...]:
    """Return the layers to solve.

    Layers behind the first converted one read a changed stream too, and repairing them helped on every layout that was
    measured (docs/results.md).

    ranges: ``converted``, ranges, or None: every layer from the first converted one on.
    Raises UserError for layers whose input is the dense model's.
    """
    converted = tuple(layout.converted_layers)
    if ranges == CONVERTED:
        return converted
    able = tuple(range(converted[0], layout.num_layers))
    if ranges is None or ranges == "all":
        return able
    return _among(able, ranges, layout, "read what the dense model's read; only {} can be aligned")


def _among(able: tuple[int, ...], ranges: str, layout: Layout, why: str) -> tuple[int, ...]:
    """Return the layers of ``ranges``; raises UserError, which ends with ``why``, for one that is not ``able``."""
    chosen = tuple(parse_ranges(ranges, layout.num_layers, option="--train"))
    if rest := sorted({*chosen} - {*able}):
        raise UserError(f"--train: {format_ranges(rest)} {why.format(format_ranges(able))}")
    return chosen


def default_tokens(config: Mapping[str, Any]) -> int:
    """Return the number of tokens to align on by default."""
    return max(LEAST_TOKENS, TOKENS_PER_INPUT * widest_input(config))


def short_tokens(config: Mapping[str, Any]) -> int:
    """Return the number of tokens to align on where alignment is only a step, or is repeated often."""
    return max(SHORT, TOKENS_PER_INPUT * widest_input(config))


def widest_input(config: Mapping[str, Any]) -> int:
    """Return the number of inputs of the widest projection."""
    return max(int(config["hidden_size"]), int(config["intermediate_size"]))


@dataclass(frozen=True)
class DistillSettings(Record):
    """The options of block distillation that decide its result."""

    epochs: int = 10
    patience: int = 2
    lr: float | None = None
    batch_size: int | None = None
    seed: int = 0

    def resolve(self, hidden: int, seq_len: int) -> "DistillSettings":
        """Return the settings with every default worked out."""
        return replace(
            self,
            lr=self.lr if self.lr is not None else PAPERS_LR * PAPERS_WIDTH / hidden,
            batch_size=self.batch_size or max(1, TOKENS_PER_STEP // seq_len),
        )


@dataclass(frozen=True)
class BlockwiseOptions(WindowOptions):
    """The options of ``ladderize adapt --method blocks``; see its --help.

    layers: ranges, or None: every layer that differs from the dense model's.
    Raises UsageError for values that contradict each other.
    """

    epochs: int = option("Most epochs per block.", DistillSettings.epochs, min=1)
    patience: int = option(
        "Stop a block after this many epochs without a better held-out loss.", DistillSettings.patience, min=1
    )
    lr: float | None = option("Peak learning rate.", shown="5e-5 * 4096 / hidden size")
    batch_size: int | None = option("Windows per step.", min=1, shown="2048 tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_training(self.dtype, self.lr)

    def chosen_layers(self, layout: Layout) -> tuple[int, ...]:
        able = tuple(layout.converted_layers)
        if self.layers is None or self.layers == CONVERTED:
            return able
        return _among(able, self.layers, layout, "are the same as in the dense model; only {} differ from it")

    def settings(self) -> DistillSettings:
        return DistillSettings(**{each.name: getattr(self, each.name) for each in fields(DistillSettings)})


@dataclass(frozen=True, kw_only=True)
class SpdOptions(BlockwiseOptions):
    """The options of ``ladderize spd``; see its --help.

    Alignment solves every layer from the first dropped one on.
    Raises UsageError for values that contradict each other.
    """

    sync_tp_size: int = option(
        "TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide it.", ..., min=2
    )
    spd_fraction: float = option("Fraction of all blocks to drop, least sensitive first.", 0.7)
    calibration_samples: int = option(  # the paper's
        "Windows for sensitivity and head grouping, out of --samples.", 128, min=1
    )
    repair: Literal["align", "blocks"] = option(
        "align: solve the projections from the first dropped block on by least squares. blocks: distil each dropped"
        " block, as in the paper.",
        "align",
    )
    head_grouping: Literal["error", "paper", "none"] = option(
        "Regroup the attention heads of dropped blocks over ranks. error: minimise the block's output error. paper: by"
        " the paper's criterion.",
        "error",
    )
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.spd_fraction <= 1:
            raise UsageError(f"--spd-fraction must be above 0 and at most 1, not {self.spd_fraction:g}")
