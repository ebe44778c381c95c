"""plan.json: described in docs/files.md. Imports no torch.

An accuracy cost is how much a layout raises the mean negative log-likelihood of a token over the dense model's, in
nats: its perplexity is exp(cost) times the dense one's.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ladderize.convert.sensitivity_file import AlignmentWindows
from ladderize.files.records import Record
from ladderize.layout import DROPPED, OVERLAPPED, Layout, format_ranges
from ladderize.planning.hardware import DeviceSpec, EngineFacts
from ladderize.planning.plans.options import ChoiceTarget, PlanModel, PlanOptions, TimedPhase
from ladderize.runtime.bench.document import PhaseCommunication, SpeedRow
from ladderize.runtime.collectives.links import Interconnect, Link

# predicted: from figures of other machines; calibrated: device and link were timed by `ladderize calibrate`
Basis = Literal["predicted", "calibrated"]
NO_WEIGHTS = "none"  # of a row: a layout of a shape, not a checkpoint


@dataclass(frozen=True)
class PlannedRow(SpeedRow):
    """A row of bench.json that nothing ran for. Its intervals are 95 % bands of the prediction.

    end_to_end_tokens_per_s: new tokens of the whole batch over prefill and all decode steps. parameters: of the model.
    memory_need_bytes: a rank's weights, KV cache and prefill; fits: whether its device has that much, None where that
    is unknown. peak_memory_bytes: None, it is measured or nothing. prefill_start_ms: what the host takes to start the
    all-reduces of a prefill, which no layout hides and no link shortens.
    """

    parameters: int
    basis: Basis
    end_to_end_tokens_per_s: float
    end_to_end_tokens_per_s_interval: list[float]
    prefill_ms_interval: list[float]
    decode_ms_per_token_interval: list[float]
    exposed_end_to_end_ms: float
    memory_need_bytes: int
    fits: bool | None
    communication: dict[str, PhaseCommunication]
    prefill_start_ms: float = 0.0


@dataclass(frozen=True)
class GroupLink(Record):
    """The link as it was taken for a group of ``ranks``. derived: how, where it was not timed with so many.

    bytes_outside_range: of messages, the smallest and the largest beyond the sizes that were timed.
    """

    ranks: int
    link: Link
    derived: str | None
    bytes_outside_range: list[int]


@dataclass(frozen=True)
class OtherAllReduce(Record):
    """What another all-reduce over the same wires would make of one group and batch size.

    vllm: whether vLLM takes this one. speedups: end to end, of each row, [value, low, high]; exact: of each exact
    stack. extrapolated: messages are of other sizes than were timed.
    """

    link: str
    ranks: int
    batch_size: int
    vllm: bool
    extrapolated: bool
    speedups: dict[str, list[float]]
    exact: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ExactStack(Record):
    """The dense model served in another way that changes no result, on the same ranks and at the same batch size.

    name: ``fused``: vLLM's all-reduces do the norm behind them, too, which gains what is assumed in exact.py.
    ``replicas``: two groups of half the ranks, each with half of the batch at the same time, fused where vLLM does so.
    prefill_ms, decode_ms_per_token: what a text of the batch waits; of replicas, those of the larger half.
    """

    name: Literal["fused", "replicas"]
    ranks: int
    batch_size: int
    prefill_ms: float
    decode_ms_per_token: float
    end_to_end_tokens_per_s: float
    end_to_end_tokens_per_s_interval: list[float]
    speedup_end_to_end: float
    speedup_end_to_end_interval: list[float]
    memory_need_bytes: int
    fits: bool | None


def speedup_band(row: PlannedRow | ExactStack) -> list[float]:
    """[value, low, high] end to end."""
    return [row.speedup_end_to_end, *row.speedup_end_to_end_interval]


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

    @property
    def changes(self) -> tuple[str, str, str]:
        """Its layout."""
        return self.attention_overlapped, self.attention_dropped, self.mlp_overlapped


@dataclass(frozen=True)
class MeasuredCheck(Record):
    """Which layouts were measured, in order. limit: the most measurements that were allowed; made: those that were.

    notes: what happened, a sentence each, such as a choice that was over budget on held-out windows. borderline: the
    choice is within it there by less than a standard error.
    """

    verified: bool
    limit: int
    made: int
    layouts: list[PlannedLayout]
    notes: list[str]
    borderline: bool = False


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
    costs: Literal["sensitivity", "sweep"]
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
            return "measured by the sweep"
        if self.verification is None or not self.verification.verified:
            return "not verified"
        return f"{'borderline' if self.verification.borderline else 'verified'} on held-out windows"


@dataclass(frozen=True)
class PlanResult(Record):
    """All of plan.json but the schema in front. model: what was asked for.

    link, links: None and empty where only one rank was asked for. choice: the layout that was chosen, if one was to be.
    others: other all-reduces than that of ``link``. remark: where the model is of another family. exact: rivals of the
    layouts that change no result; no_replicas: by ranks, why two replicas of half of them could not be predicted.
    """

    LEFT_OUT: ClassVar = ("choice", "remark")

    model: PlanModel
    options: PlanOptions
    device: DeviceSpec
    link: Interconnect | None
    links: list[GroupLink]
    engine: EngineFacts
    rows: list[PlannedRow]
    choice: PlanChoice | None = None
    others: list[OtherAllReduce] = field(default_factory=list)
    remark: str | None = None
    exact: list[ExactStack] = field(default_factory=list)
    no_replicas: dict[int, str] = field(default_factory=dict)

    def exact_of(self, ranks: int, batch: int) -> list[ExactStack]:
        return [one for one in self.exact if (one.ranks, one.batch_size) == (ranks, batch)]

    def rows_of(self, ranks: int, batch: int) -> list[PlannedRow]:
        """Of one group at one batch size, the dense model first."""
        return [row for row in self.rows if (row.tp_size, row.batch_size) == (ranks, batch)]
