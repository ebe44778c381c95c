"""The models of a report, with their scores and their speed in each setting. Imports no torch."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ladderize.adapt.methods import ALIGN
from ladderize.eval.results import ComparisonDocument, EvaluatedModel, PooledComparison
from ladderize.layout import DELAYED, DROPPED, OVERLAPPED
from ladderize.runtime.bench.document import BenchRow
from ladderize.sweep_document import AS_CONVERTED, SweepPoint


def number_text(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """Return a number with a true minus sign.

    sign: write a plus as well, but for a number that rounds to 0.
    """
    text = f"{abs(value):,.{digits}f}"
    if not float(text.replace(",", "")):
        return text
    return ("\u2212" if value < 0 else "+" if sign else "") + text


def listing(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


@dataclass(frozen=True)
class WithInterval:
    """A number and the ends of its 95 % interval; None: it has none."""

    value: float
    low: float | None = None
    high: float | None = None

    def mapped(self, function: Callable[[float], float]) -> "WithInterval":
        low, high = (None if end is None else function(end) for end in (self.low, self.high))
        return WithInterval(function(self.value), low, high)

    def fields(self, name: str) -> dict[str, float | None]:
        """Return the three numbers as fields of a plot's row, named as in ``plot.intervals``."""
        return {name: self.value, f"{name}1": self.low, f"{name}2": self.high}

    def text(self, digits: int = 2, *, sign: bool = False, unit: str = "") -> str:
        """Return the number, its unit and its interval: ``1.01x (0.98 to 1.04)``."""
        value, low, high = (
            "" if one is None else number_text(one, digits, sign=sign) for one in (self.value, self.low, self.high)
        )
        return value + unit + (f" ({low} to {high})" if low and high else "")


def speedup_text(speedup: WithInterval) -> str:
    return speedup.text(2, unit="\u00d7")


def points_text(difference: WithInterval) -> str:
    return difference.text(1, sign=True)


def change_text(change: WithInterval) -> str:
    return change.text(3, sign=True)


@dataclass(frozen=True)
class Setting:
    """The setting in which a model was timed.

    kind: measured: real ranks; emulated: one real rank of a group that is not there.
    medium: the backend of the ranks, or the emulated link.
    source: the number of the document.
    note: a remark at the end of the words, such as on random weights.
    """

    kind: Literal["measured", "emulated"]
    tp_size: int
    medium: str
    batch_size: int
    prompt_len: int
    output_len: int
    device: str
    source: int
    note: str = ""

    @property
    def words(self) -> str:
        """Words that begin with the kind."""
        ranks = f"{self.tp_size} rank{'s' * (self.tp_size > 1)}"
        over = f" over {self.medium}" if self.tp_size > 1 else ""
        lengths = f"{self.prompt_len} + {self.output_len} tokens"
        return f"{self.kind}: {ranks}{over} ({self.device}){self.note}, batch {self.batch_size}, {lengths}"


@dataclass(frozen=True)
class Timing:
    """One model in one setting.

    is_first: True if speed-ups are over this row.
    has_interval: True if there are enough rounds for the intervals of its speed-ups.
    """

    setting: Setting
    row: BenchRow
    is_first: bool
    has_interval: bool

    def speedup(self, phase: str) -> WithInterval:
        """Return the speed-up of a phase: ``end_to_end``, ``prefill`` or ``decode``."""
        return WithInterval(self.row.speedup[phase], *(self.row.speedup_interval[phase] if self.has_interval else ()))

    @property
    def whole(self) -> WithInterval:
        """The speed-up from end to end."""
        return self.speedup("end_to_end")

    @property
    def is_faster(self) -> bool:
        """True where the interval shows a speed-up; without an interval nothing is shown."""
        return self.whole.low is not None and self.whole.low > 1


@dataclass
class ReportModel:
    """A model, or a row that was only timed, with all that is known of it.

    row: that of the first document with it, which has its layout.
    accuracy: the mean over tasks, 0 to 1.
    perplexity_change: from the reference, in pairs.
    difference: points of mean accuracy from the reference.
    divergence: the mean KL of its predictions from the reference's, in nats per token.
    comparison: with the reference, in pairs, on the report's margin.
    timed_as: the model whose times it has, where it was not timed itself.
    sweep: the name of its sweep's folder; empty where it is of none.
    tasks: those that it was evaluated on.
    """

    name: str
    model: str
    row: SweepPoint | EvaluatedModel | BenchRow
    adapted: str | None = None
    tokens: int | None = None
    failure: str | None = None
    not_promoted: str | None = None
    accuracy: float | None = None
    perplexity: float | None = None
    perplexity_change: WithInterval | None = None
    difference: WithInterval | None = None
    divergence: WithInterval | None = None
    comparison: ComparisonDocument | None = None
    timings: list[Timing] = field(default_factory=list)
    timed_as: "ReportModel | None" = None
    sweep: str = ""
    tasks: list[str] = field(default_factory=list)

    @property
    def is_model(self) -> bool:
        """False for a baseline and for random weights."""
        return not isinstance(self.row, BenchRow) or (self.row.is_model and not self.row.is_random)

    @property
    def was_trained(self) -> bool:
        """True where its adaptation was more than an alignment."""
        return self.adapted not in (None, AS_CONVERTED, ALIGN)

    @property
    def modes(self) -> tuple[tuple[str, ...], tuple[str, ...], int | None]:
        """The layout as a value to compare."""
        return tuple(self.row.attention_sync), tuple(self.row.mlp_sync), self.row.sync_tp_size

    @property
    def family(self) -> str:
        """The kind of its layout, such as dense, ladder or spd + delayed; or baseline."""
        if isinstance(self.row, BenchRow) and not self.row.is_model:
            return "baseline"
        modes = {*self.row.attention_sync, *self.row.mlp_sync}
        kinds = (DROPPED, "spd"), (OVERLAPPED, "ladder"), (DELAYED, "delayed")
        names = [name for mode, name in kinds if mode in modes]
        return "ladder and delayed" if {"ladder", "delayed"} <= {*names} else " + ".join(names) or "dense"

    @property
    def layout_words(self) -> str:
        """The layout without the number of layers, which all share."""
        return self.row.layout.partition(": ")[2] or self.row.layout

    @property
    def title(self) -> str:
        """Name, layout and adaptation, as far as the name does not say them."""
        details = [text for text in (self.layout_words, self.adaptation) if text not in self.name]
        return f"{self.name} ({'; '.join(details)})" if details else self.name

    @property
    def adaptation(self) -> str:
        """The words for its adaptation; empty where there was none, or it is unknown."""
        if self.adapted in (None, AS_CONVERTED):
            return ""
        return f"{self.adapted}, {self.tokens:,} tokens" if self.tokens else str(self.adapted)

    @property
    def perplexity_growth(self) -> WithInterval | None:
        """The logarithm of its perplexity over the reference's, in nats per token."""
        if self.perplexity is None or self.perplexity_change is None:
            return None
        reference = max(self.perplexity - self.perplexity_change.value, 1.0)  # no perplexity is below 1
        return self.perplexity_change.mapped(lambda change: math.log(max(reference + change, 1.0) / reference))

    @property
    def scores(self) -> str:
        """The words for its distance from the reference: divergence, perplexity, points."""
        scores = [f"KL {self.divergence.text(4)} nats per token"] if self.divergence is not None else []
        scores += [f"perplexity {number_text(self.perplexity, 3)}"] if self.perplexity is not None else []
        scores += [f"a change of {change_text(self.perplexity_change)}"] if self.perplexity_change is not None else []
        scores += [f"{points_text(self.difference)} points"] if self.difference is not None else []
        return ", ".join(scores)

    @property
    def overall(self) -> PooledComparison | None:
        """All tasks as one number; None where none were compared."""
        return None if self.comparison is None else self.comparison.overall

    @property
    def verdict(self) -> str:
        """The verdict of ``compare`` on the report's margin; empty where no tasks were compared."""
        return (self.overall and self.overall.verdict) or ""

    def timing(self, setting: Setting) -> Timing | None:
        return next((timing for timing in self.timings if timing.setting == setting), None)


def model_key(model: str) -> str:
    """Return a model's path as one name: ``./a/`` and ``a`` are the same."""
    return os.path.normpath(model)
