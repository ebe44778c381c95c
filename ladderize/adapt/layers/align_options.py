"""The options of an alignment, and the layers that it solves. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ladderize.adapt.layers.options import MAX_MEMORY, WindowOptions, memory_limit
from ladderize.adapt.methods import CONVERTED, TRAINING_SEED, check_training
from ladderize.choices import check_at_least, option
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.layout import Layout, format_ranges, parse_ranges

RIDGES = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # tried for every projection on held-out windows, strongest first
LEAST_TOKENS, TOKENS_PER_INPUT = 1 << 17, 4  # the default, or so many per input of the widest projection
RANDOM_SHARE = 0.25  # windows of random tokens for each window of the data (docs/align.md)
MOST_RANDOM = 10
SHORT = 1 << 14  # instead of LEAST_TOKENS; eight times as many gain little (docs/results.md)


@dataclass(frozen=True)
class AlignSettings(Record):
    """The options that decide the result besides data and models. They are recorded, and identify the work of a killed
    run."""

    ridge: float | None = option(
        "align: how strongly weights are held where they are, as a share of the mean square of a projection's inputs.",
        shown="chosen for each projection on held-out windows, from 10 to 1e-5",
    )
    seed: int = option(TRAINING_SEED, 0)
    random_share: float = option(
        "align: windows of random tokens that are added, for each window of the data, so that text of other kinds gets"
        " no worse.",
        RANDOM_SHARE,
    )

    @property
    def ridges(self) -> tuple[float, ...]:
        return RIDGES if self.ridge is None else (self.ridge,)


@dataclass(frozen=True)
class AlignOptions(AlignSettings, WindowOptions):
    """The options of ``ladderize adapt --method align``; see its --help.

    layers: None: every layer from the first converted one on.
    Raises UsageError for values that contradict each other.
    """

    samples: int | None = option(
        "blocks, align: windows to train on.",
        min=1,
        shown="what the data give, up to 1024; align: up to 131,072 tokens",
    )
    tokens: int | None = None  # to align on where ``samples`` are not given; None: ``default_tokens``
    max_memory: int = option(
        "blocks, align: memory for the models' states, per process. What is beyond it goes to disk.",
        MAX_MEMORY,
        min=1,
        metavar="SIZE",
        parse=memory_limit,
        shown="8GB",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_training(self.dtype, None)
        check_at_least(self, 1, "tokens")
        if self.ridge == 0:
            raise UsageError(f"--ridge must be above 0, not {self.ridge:g}")
        if self.random_share > MOST_RANDOM:
            raise UsageError(f"--random-share must be between 0 and {MOST_RANDOM}, not {self.random_share:g}")

    def settings(self) -> AlignSettings:
        return AlignSettings(self.ridge, self.seed, self.random_share)


def layers_to_align(layout: Layout, ranges: str | None) -> tuple[int, ...]:
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
    chosen = tuple(parse_ranges(ranges, layout.num_layers, option="--train"))
    if rest := sorted(set(chosen) - set(able)):
        raise UserError(
            f"--train: {format_ranges(rest)} read what the dense model's read; only {format_ranges(able)} can be"
            " aligned"
        )
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
