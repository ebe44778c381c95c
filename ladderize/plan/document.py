"""The document plan.json, described in docs/files.md. Imports no torch.

An accuracy cost is the increase of the mean negative log-likelihood of a token over the dense model's, in nats. The
perplexity is exp(cost) times the dense one's.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ladderize.convert.sensitivity_file import AlignmentWindows
from ladderize.files.records import Record
from ladderize.layout import Layout
from ladderize.plan.hardware import DeviceSpec, EngineFacts
from ladderize.plan.options import ChoiceTarget, PlanModel, PlanOptions, TimedPhase
from ladderize.runtime.bench.document import PhaseCommunication, SpeedRow
from ladderize.runtime.collectives.links import Interconnect, Link

# predicted: from figures of other machines; calibrated: device and link were timed by `ladderize calibrate`
Basis = Literal["predicted", "calibrated"]
NO_WEIGHTS = "none"  # of a row: a layout of a shape, not a checkpoint


@dataclass(frozen=True)
class PlannedRow(SpeedRow):
    """A predicted row. Its intervals are 95 % bands of the prediction.

    end_to_end_tokens_per_s: new tokens of the whole batch over prefill and all decode steps.
    parameters: of the model.
    memory_need_bytes: a rank's weights, KV cache and prefill.
    fits: True if the rank's device has so much memory; None where that is unknown.
    peak_memory_bytes: None, since nothing ran.
    prefill_start_ms: the host's time to start the all-reduces of a prefill, which no layout hides and no link shortens.
    speedup_over_vllm: end to end over vLLM's all-reduce instead of the link's, [value, low, high]; None where that is
    unknown over these wires, or is the link's.
    """

    parameters: int
    basis: Basis
    end_to_end_tokens_per_s: float
    end_to_end_tokens_per_s_interval: list[float]
    exposed_end_to_end_ms: float
    memory_need_bytes: int
    fits: bool | None
    communication: dict[str, PhaseCommunication]
    prefill_start_ms: float = 0.0
    speedup_over_vllm: list[float] | None = None

    @property
    def speedup_band(self) -> list[float]:
        """[value, low, high] end to end: over vLLM's all-reduce where it is known, else over the link."""
        return self.speedup_over_vllm or [self.speedup_end_to_end, *self.speedup_end_to_end_interval]


@dataclass(frozen=True)
class GroupLink(Record):
    """The link of a group of ``ranks``.

    derived: the way in which it was derived, where it was not timed with so many ranks.
    bytes_outside_range: the smallest and the largest message beyond the sizes that were timed.
    """

    ranks: int
    link: Link
    derived: str | None
    bytes_outside_range: list[int]


@dataclass(frozen=True)
class ExactStack(Record):
    """The dense model served in another way that changes no result, on the same ranks and at the same batch size.

    name: ``fused``: vLLM's all-reduces do the norm behind them, too. ``N replicas``: N groups, each with its part of
    the batch at the same time, fused where vLLM does so.
    prefill_ms, decode_ms_per_token: the time of a text of the batch; of replicas, in the one with the largest part.
    speedup_over_vllm: as of a ``PlannedRow``.
    """

    name: str
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
    speedup_over_vllm: list[float] | None = None

    @property
    def speedup_band(self) -> list[float]:
        """[value, low, high] end to end: over vLLM's all-reduce where it is known, else over the link."""
        return self.speedup_over_vllm or [self.speedup_end_to_end, *self.speedup_end_to_end_interval]


@dataclass(frozen=True)
class LayoutNll(Record):
    """The measured cost of a layout on so many windows, in nats per token.

    nll, stderr: its negative log-likelihood, and the standard error; a single window has none.
    increase, increase_stderr: its difference to the dense model's on the same windows, and the standard error, paired
    by window.
    """

    nll: float
    stderr: float | None
    increase: float
    increase_stderr: float | None
    windows: int


@dataclass(frozen=True)
class PlannedLayout(Record):
    """A layout with its time and its costs.

    ms: the time of the part that is to be fast: prefill and all decode steps, the prefill, or one decode step.
    speedup: over the dense layout.
    estimated_nats: the sum of the costs of its layers.
    measured: on the windows that it was chosen on.
    held_out: on other windows.
    """

    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    ms: float
    speedup: float
    estimated_nats: float
    measured: LayoutNll | None = None
    held_out: LayoutNll | None = None

    @property
    def as_layout(self) -> Layout:
        return Layout(tuple(self.attention_sync), tuple(self.mlp_sync), self.sync_tp_size)


@dataclass(frozen=True)
class MeasuredCheck(Record):
    """The layouts that were measured, in order.

    verified: True if the choice is within the budget on held-out windows, too.
    limit: the most measurements that were allowed.
    made: the number of measurements.
    notes: a sentence each, such as of a choice that was over budget on held-out windows.
    borderline: True if the choice is within the budget there by less than a standard error.
    """

    verified: bool
    limit: int
    made: int
    layouts: list[PlannedLayout]
    notes: list[str]
    borderline: bool = False


@dataclass(frozen=True)
class PlanChoice(Record):
    """The layout that meets the target best.

    costs_file: the sensitivity that it was chosen by.
    notes: for people, a sentence each.
    aligned: the windows that layouts were aligned on before they were measured.
    """

    LEFT_OUT: ClassVar = ("aligned",)

    target: ChoiceTarget
    phase: TimedPhase
    costs_file: str
    dense_ms: float
    dense_perplexity: float
    chosen: PlannedLayout
    notes: list[str]
    verification: MeasuredCheck | None = None
    aligned: AlignmentWindows | None = None

    @property
    def statement(self) -> str:
        """The certainty of the choice's costs, in a few words."""
        if self.verification is None or not self.verification.verified:
            return "not verified"
        return f"{'borderline' if self.verification.borderline else 'verified'} on held-out windows"


@dataclass(frozen=True)
class PlanResult(Record):
    """The content of plan.json without its schema.

    model: the model that was asked for.
    link, links: None and empty where only one rank was asked for.
    vllm_links: the names of vLLM's all-reduce over the link's wires, by ranks.
    exact: rivals of the layouts that change no result.
    no_replicas: the reason why some replicas are not there, by ranks.
    choice: the chosen layout, if one was asked for.
    """

    LEFT_OUT: ClassVar = ("choice",)

    model: PlanModel
    options: PlanOptions
    device: DeviceSpec
    link: Interconnect | None
    links: list[GroupLink]
    engine: EngineFacts
    rows: list[PlannedRow]
    exact: list[ExactStack] = field(default_factory=list)
    vllm_links: dict[int, str] = field(default_factory=dict)
    no_replicas: dict[int, str] = field(default_factory=dict)
    choice: PlanChoice | None = None

    def exact_of(self, ranks: int, batch: int) -> list[ExactStack]:
        """Return the rivals of one group at one batch size."""
        return [one for one in self.exact if (one.ranks, one.batch_size) == (ranks, batch)]

    def rows_of(self, ranks: int, batch: int) -> list[PlannedRow]:
        """Return the rows of one group at one batch size, the dense model first."""
        return [row for row in self.rows if (row.tp_size, row.batch_size) == (ranks, batch)]
