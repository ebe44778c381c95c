"""What was chosen, among what, and how far it was measured: a part of plan.json. Imports no torch.

An accuracy cost is how much a layout raises the mean negative log-likelihood of a token over the dense model's, in
nats: its perplexity is exp(cost) times the dense one's.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from ladderize.convert.sensitivity_file import AlignmentWindows
from ladderize.files.records import Record
from ladderize.layout import DROPPED, OVERLAPPED, Layout, format_ranges

TimedPhase = Literal["end_to_end", "prefill", "decode"]  # what of a workload is to be fast
CostSource = Literal["sensitivity", "sweep"]
EXP_LIMIT = 700.0  # of which exp is a float still
LEAST_MEASUREMENTS = 2  # of --verify: one to choose by, one to confirm
VERIFIED, NOT_VERIFIED = "verified on held-out windows", "not verified"
BY_SWEEP = "measured by the sweep"


@dataclass(frozen=True)
class LayoutNll(Record):
    """What a layout really costs on so many windows, in nats per token: nll with its standard error, and its difference
    to the dense model's on the same windows with the standard error of that (paired by window). Of a single
    window there is no standard error."""

    nll: float
    stderr: float | None
    increase: float
    increase_stderr: float | None
    windows: int


@dataclass(frozen=True)
class PlannedLayout(Record):
    """A layout with its time and its costs.

    ms: of what is to be fast: prefill and all decode steps, the prefill, or one decode step. speedup: over the dense
    layout. estimated_nats: from costs of single changes; None of a sweep's layout. measured: on the windows that it was
    chosen on, or by the sweep, as it was retrained. held_out: on others.
    """

    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    ms: float
    speedup: float
    estimated_nats: float | None
    measured: LayoutNll | None = None
    held_out: LayoutNll | None = None

    @property
    def as_layout(self) -> Layout:
        return Layout(tuple(self.attention_sync), tuple(self.mlp_sync), self.sync_tp_size)

    @property
    def nats(self) -> float | None:
        """The cost that is known best: on held-out windows, measured, or estimated."""
        known = self.held_out or self.measured
        return known.increase if known is not None else self.estimated_nats

    @property
    def ppl_ratio(self) -> float | None:
        """Its perplexity over the dense one."""
        return math.exp(min(self.nats, EXP_LIMIT)) if self.nats is not None else None


@dataclass(frozen=True)
class FrontPoint(Record):
    """A layout that no other is faster and at most as costly as.

    nats: estimated, or of a sweep measured. Ranges of layers, ``none`` for none: those whose attention sync point is
    overlapped or dropped, and those whose MLP sync point is overlapped.
    """

    ms: float
    speedup: float
    nats: float
    attention_overlapped: str
    attention_dropped: str
    mlp_overlapped: str

    @classmethod
    def of(cls, layout: Layout, *, ms: float, speedup: float, nats: float) -> "FrontPoint":
        def ranges(modes: tuple[str, ...], mode: str) -> str:
            return format_ranges(layer for layer, one in enumerate(modes) if one == mode)

        return cls(
            ms=ms,
            speedup=speedup,
            nats=nats,
            attention_overlapped=ranges(layout.attention_sync, OVERLAPPED),
            attention_dropped=ranges(layout.attention_sync, DROPPED),
            mlp_overlapped=ranges(layout.mlp_sync, OVERLAPPED),
        )


@dataclass(frozen=True)
class ChoiceTarget(Record):
    """What a layout has to meet: one of the two.

    max_ppl_increase: as it was said (``2%`` of the dense perplexity, or ``0.1`` in perplexity), and in nats.
    """

    LEFT_OUT: ClassVar = ("max_ppl_increase", "max_nats", "min_speedup")

    max_ppl_increase: str | None = None
    max_nats: float | None = None
    min_speedup: float | None = None


@dataclass(frozen=True)
class MeasuredCheck(Record):
    """Which layouts were measured, in order. limit: the most measurements that were allowed; made: those that were.

    notes: what happened, a sentence each, such as a choice that was over budget on held-out windows.
    """

    verified: bool
    limit: int
    made: int
    layouts: list[PlannedLayout]
    notes: list[str]


@dataclass(frozen=True)
class PlanChoice(Record):
    """The layout that meets the target best, and the whole front that it is chosen from.

    costs: where they come from, and the file. model: the retrained checkpoint of a sweep's layout. beyond: what a
    sensitivity file suggests although no sweep has retrained it. notes: for people, a sentence each. aligned: the
    windows that layouts were aligned on before it was measured what they cost.
    """

    LEFT_OUT: ClassVar = ("aligned",)

    target: ChoiceTarget
    phase: TimedPhase
    costs: CostSource
    costs_file: str
    dense_ms: float
    dense_perplexity: float
    chosen: PlannedLayout
    front: list[FrontPoint]
    notes: list[str]
    model: str | None = None
    beyond: PlannedLayout | None = None
    verification: MeasuredCheck | None = None
    aligned: AlignmentWindows | None = None

    @property
    def statement(self) -> str:
        """Whether the costs of what is chosen were measured on windows that nothing was chosen by."""
        if self.costs == "sweep":
            return BY_SWEEP
        return VERIFIED if self.verification is not None and self.verification.verified else NOT_VERIFIED
