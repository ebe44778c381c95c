"""The options of ``ladderize spd``. Imports no torch and no numpy."""

from dataclasses import dataclass
from typing import Any, Literal

from ladderize.adapt.layers.options import BlockwiseOptions
from ladderize.choices import LOWER_TAU, MOST_INCREASE, REVISION, UPPER_TAU, check_options, option, ppl_increase
from ladderize.errors import UsageError
from ladderize.eval.options import check_taus

DEFAULT_FRACTION = 0.7


@dataclass(frozen=True)
class SpdOptions:
    """The options of ``ladderize spd``; see its --help.

    training: the data, its windows, and the distillation. Alignment solves every layer from the first dropped one on.
    Raises UsageError for values that contradict each other.
    """

    sync_tp_size: int = option(
        "TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide it.", ..., min=2
    )
    training: BlockwiseOptions  # type: ignore[misc]  # what goes before has no default either
    spd_fraction: float | None = option(
        "Fraction of all blocks to drop, least sensitive first.", shown=str(DEFAULT_FRACTION)
    )
    max_ppl_increase: str | float | None = option(MOST_INCREASE)
    calibration_samples: int = option(  # the paper's
        "Windows for sensitivity and head grouping, out of --samples.", 128, min=1
    )
    tau1: float | None = option(LOWER_TAU)
    tau2: float = option(UPPER_TAU, 10.0)
    distill: Literal["all", "sensitive"] = option(
        "Dropped blocks to repair. sensitive: not the insensitive ones, as in the paper.", "all"
    )
    repair: Literal["align", "blocks", "align+blocks"] = option(
        "align: solve the projections from the first dropped block on by least squares. blocks: distil each dropped"
        " block, as in the paper. align+blocks: the one, then the other.",
        "align",
    )
    head_grouping: Literal["error", "paper", "none"] = option(
        "Regroup attention heads over ranks. error: of every distilled block, to minimise its output error. paper: of"
        " extremely sensitive blocks, by the paper's criterion.",
        "error",
    )
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_options(self)
        check_taus(self.tau1, self.tau2)
        if self.max_ppl_increase is not None:
            ppl_increase(self.max_ppl_increase, 1.0)
        if self.spd_fraction is not None and self.max_ppl_increase is not None:
            raise UsageError("--spd-fraction and --max-ppl-increase both say how much to drop; give one of them")

    @property
    def aligns(self) -> bool:
        return self.repair != "blocks"

    @property
    def distils(self) -> bool:
        return self.repair != "align"

    @property
    def fraction(self) -> float | None:
        """The fraction of all blocks to drop; None where max_ppl_increase decides."""
        return DEFAULT_FRACTION if self.spd_fraction is None and self.max_ppl_increase is None else self.spd_fraction

    def choices(self) -> dict[str, Any]:
        """Return the options that decide the result besides the data and the training."""
        names = ("spd_fraction", "max_ppl_increase", "tau1", "tau2", "distill", "repair", "head_grouping")
        return {name: getattr(self, name) for name in names}
