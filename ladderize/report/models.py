"""The models of a report, with their scores and their speed in each setting. Imports neither torch nor Altair."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ladderize.adapt.options import ALIGN
from ladderize.eval.results import ComparisonDocument, MeanComparison, PerplexityComparison
from ladderize.layout import DELAYED, DROPPED, OVERLAPPED, Layout
from ladderize.runtime.bench.document import BenchRow
from ladderize.sweep_document import AS_CONVERTED


def number_text(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """Return a number with a true minus sign; with ``sign`` also with a plus, but for one that rounds to 0."""
    text = f"{value:+,.{digits}f}" if sign else f"{value:,.{digits}f}"
    is_zero = not float(text.replace(",", ""))
    return text.lstrip("+-") if is_zero else text.replace("-", "\u2212")


def listing(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


@dataclass(frozen=True)
class WithInterval:
    """A number and the ends of its 95 % interval; None: it has none."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, compared: MeanComparison | PerplexityComparison) -> "WithInterval":
        return cls(compared.difference, compared.low, compared.high)

    def mapped(self, function: Callable[[float], float]) -> "WithInterval":
        low, high = (None if end is None else function(end) for end in (self.low, self.high))
        return WithInterval(function(self.value), low, high)

    def fields(self, name: str) -> dict[str, float | None]:
        """Return the three numbers as fields of a plot's row, as ``plots.intervals`` reads them."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def text(self, digits: int = 2, *, sign: bool = False, unit: str = "") -> str:
        """Return the number, its unit and its interval: ``1.01x (0.98 to 1.04)``."""
        text = number_text(self.value, digits, sign=sign) + unit
        if self.low is None or self.high is None:
            return text
        return f"{text} ({number_text(self.low, digits, sign=sign)} to {number_text(self.high, digits, sign=sign)})"


def speedup_text(speedup: WithInterval) -> str:
    return speedup.text(2, unit="\u00d7")


def points_text(difference: WithInterval) -> str:
    return difference.text(1, sign=True)


@dataclass(frozen=True)
class Setting:
    """The setting in which a model was timed."""

    kind: Literal["measured", "emulated"]  # emulated: one real rank of a group that is not there
    tp_size: int
    batch_size: int
    source: int  # the number of the document
    is_random: bool
    title: str  # all of it in words, the kind first


@dataclass(frozen=True)
class Timing:
    """One model in one setting."""

    row: BenchRow
    is_first: bool  # speed-ups are over this row
    has_interval: bool  # there are enough rounds for the intervals of its speed-ups

    def speedup(self, phase: str = "end_to_end") -> WithInterval:
        return WithInterval(self.row.speedup[phase], *(self.row.speedup_interval[phase] if self.has_interval else ()))

    @property
    def is_faster(self) -> bool:
        """True where the interval shows a speed-up; without an interval nothing is shown."""
        low = self.speedup().low
        return low is not None and low > 1


@dataclass
class ReportModel:
    """A model, or a row that was only timed, with all that is known of it; differences are from dense, in pairs."""

    name: str
    model: str
    layout: Layout
    is_model: bool = True  # not a baseline, nor random weights, which have no accuracy
    is_baseline: bool = False
    adapted: str | None = None
    tokens: int | None = None
    failure: str | None = None
    not_promoted: str | None = None
    conversion: str = ""  # the folder of the sweep's stage that converted it
    sweep: str = ""  # the name of its sweep's folder; empty where it is of none
    tasks: list[str] = field(default_factory=list)
    accuracy: float | None = None  # the mean over tasks, 0 to 1
    difference: WithInterval | None = None  # of the accuracy, in points
    perplexity: float | None = None
    perplexity_change: WithInterval | None = None
    perplexity_growth: WithInterval | None = None  # the logarithm of its perplexity over dense's, in nats per token
    divergence: WithInterval | None = None  # the mean KL of predictions, in nats per token
    comparison: ComparisonDocument | None = None
    verdict: str = ""
    timings: dict[Setting, Timing] = field(default_factory=dict)
    timed_as: "ReportModel | None" = None  # the model whose times it has, where it was not timed itself

    @property
    def was_trained(self) -> bool:
        """True where its adaptation was more than an alignment."""
        return self.adapted not in (None, AS_CONVERTED, ALIGN)

    @property
    def origin(self) -> tuple[Layout, str]:
        """The conversion that it comes from: heads may lie otherwise in another one of the same layout."""
        return self.layout, self.conversion

    @property
    def is_faster(self) -> bool:
        return any(timing.is_faster for timing in self.timings.values())

    @property
    def family(self) -> str:
        """The kind of its layout, of ``plots.FAMILIES``."""
        if self.is_baseline:
            return "baseline"
        names = {DROPPED: "spd", OVERLAPPED: "ladder", DELAYED: "delayed"}
        kinds = [name for mode, name in names.items() if mode in self.layout.modes]
        return "ladder and delayed" if {"ladder", "delayed"} <= {*kinds} else " + ".join(kinds) or "dense"

    @property
    def adaptation(self) -> str:
        if self.adapted in (None, AS_CONVERTED):
            return ""
        return f"{self.adapted}, {self.tokens:,} tokens" if self.tokens else str(self.adapted)

    @property
    def title(self) -> str:
        """Name, layout and adaptation, as far as the name does not say them."""
        details = [text for text in (self.layout.words, self.adaptation) if text not in self.name]
        return f"{self.name} ({'; '.join(details)})" if details else self.name

    @property
    def scores(self) -> str:
        """Its distance from the reference in words: divergence, perplexity, points."""
        scores = [f"KL {self.divergence.text(4)} nats per token"] if self.divergence else []
        scores += [f"perplexity {number_text(self.perplexity, 3)}"] if self.perplexity is not None else []
        scores += [f"a change of {self.perplexity_change.text(3, sign=True)}"] if self.perplexity_change else []
        scores += [f"{points_text(self.difference)} points"] if self.difference else []
        return ", ".join(scores)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Return which (speed-up, score) are on the Pareto front: no other is as good in both, and better in one."""

    def is_beaten(point: tuple[float, float]) -> bool:
        return any(other != point and other[0] >= point[0] and other[1] >= point[1] for other in points)

    return [not is_beaten(point) for point in points]
