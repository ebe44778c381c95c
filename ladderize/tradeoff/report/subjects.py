"""What a report is about: models, what they score, and how fast they are in which setting. Imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

from ladderize.adapt.methods import ALIGN
from ladderize.eval.paired.document import ComparisonDocument, Verdict
from ladderize.layout import DROPPED, OVERLAPPED
from ladderize.runtime.bench.rows import SpeedRow
from ladderize.workflows.sweep_document import AS_CONVERTED

# measured: real ranks; emulated: one real rank of a group that is not there; predicted: nothing ran
TimingKind = Literal["measured", "emulated", "predicted"]
KIND_ORDER: tuple[TimingKind, ...] = ("measured", "emulated", "predicted")
PHASE_WORDS = {"end_to_end": "end to end", "prefill": "prefill", "decode": "decode"}
FAMILIES = ("dense", "ladder", "spd", "spd + ladder", "baseline")
MODEL_SUBJECT, BARE_SUBJECT, BASELINE_SUBJECT = "model", "no checkpoint", "baseline, for timing only"


@dataclass(frozen=True)
class WithInterval:
    """A number and the ends of its 95 % interval; None where it has none."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def around(cls, value: float, spread: float | None) -> "WithInterval":
        """spread: half the width of the interval; None: there is none."""
        return cls(value) if spread is None else cls(value, value - spread, value + spread)

    def scaled(self, factor: float) -> "WithInterval":
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return WithInterval(self.value * factor, low, high)

    def fields(self, name: str) -> dict[str, float | None]:
        """As a row of a plot has it: see ``figure.intervals``."""
        return {name: self.value, f"{name}1": self.low, f"{name}2": self.high}


@dataclass(frozen=True)
class Setting:
    """Where a model was timed, or its times predicted."""

    kind: TimingKind
    tp_size: int
    medium: str  # how ranks communicate, or the emulated or assumed link
    batch_size: int
    prompt_len: int
    output_len: int
    device: str
    reference: str  # the model that speed-ups are over
    bare: bool  # a shape was timed, not a checkpoint
    source: int  # which bench.json or plan.json

    @property
    def place(self) -> str:
        """All but the batch size, in words; begins with the kind."""
        ranks = f"{self.tp_size} rank{'s' * (self.tp_size > 1)}"
        over = f" over {self.medium}" if self.tp_size > 1 else ""
        return f"{self.kind}: {ranks}{over} ({self.device})"

    @property
    def weights_words(self) -> str:
        """What stands behind it where it is no checkpoint that was timed."""
        if not self.bare:
            return ""
        return "; a shape without weights" if self.kind == "predicted" else "; random weights"

    @property
    def short(self) -> str:
        """Without the lengths of prompt and output."""
        return f"{self.place}, batch {self.batch_size}"

    @property
    def words(self) -> str:
        return f"{self.short}, {self.prompt_len} + {self.output_len} tokens"


@dataclass(frozen=True)
class Spent:
    """Milliseconds of one pass."""

    compute: float  # without communication
    waited: WithInterval  # what communication adds
    hidden: float | None  # what of it ran under compute; None for a layout that overlaps nothing


@dataclass(frozen=True)
class Timing:
    """One model in one setting. row: of bench.json or plan.json."""

    setting: Setting
    row: SpeedRow
    speedup: dict[str, WithInterval]  # by phase
    spent: dict[str, Spent]  # by phase, without ``end_to_end``

    @property
    def whole(self) -> WithInterval:
        """The speed-up from end to end."""
        return self.speedup["end_to_end"]


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task."""

    task: str
    metric: str
    value: float
    stderr: float | None
    difference: WithInterval | None = None  # to the reference, in the metric's unit
    paired: bool = False  # whether its interval comes from the same questions; else from two standard errors
    main: bool = True  # whether it stands for its task
    points: bool = True  # whether the metric is between 0 and 1
    flips: tuple[int | None, int | None] = (None, None)  # right to wrong, wrong to right


@dataclass(frozen=True)
class Accuracy:
    """The mean over tasks."""

    value: float
    difference: WithInterval | None = None  # to the reference, in points
    paired: bool = False
    verdict: Verdict | None = None
    needed: int | None = None  # samples to show the margin


@dataclass
class Subject:
    """A model, or a baseline, with all that is known of it."""

    name: str
    model: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    kind: str = MODEL_SUBJECT
    adapted: str | None = None
    tokens: int | None = None
    failure: str | None = None
    not_promoted: str | None = None
    control: str | None = None  # the dense model after the same training
    over_control: WithInterval | None = None  # points of accuracy from that, paired
    accuracy: Accuracy | None = None
    scores: list[TaskScore] = field(default_factory=list)
    perplexity: WithInterval | None = None  # interval: paired where a comparison is there
    comparison: ComparisonDocument | None = None
    timings: list[Timing] = field(default_factory=list)
    # models of its layout and size that were timed, if it was not: the times are the first one's
    timed_as: "list[Subject]" = field(default_factory=list)
    parameters: int | None = None

    @property
    def is_dense(self) -> bool:
        return self.family == "dense"

    @property
    def was_trained(self) -> bool:
        """Whether its adaptation was more than an alignment."""
        return self.adapted not in (None, AS_CONVERTED, ALIGN)

    @property
    def is_control(self) -> bool:
        """Whether it is the dense model, trained like the others."""
        return self.is_dense and bool(self.adaptation)

    @property
    def difference(self) -> WithInterval | None:
        """Points of mean accuracy from the reference."""
        return self.accuracy.difference if self.accuracy is not None else None

    @property
    def divergence(self) -> WithInterval | None:
        """The mean KL of its predictions from the reference's, in nats per token."""
        measured = self.comparison.predictions if self.comparison is not None else None
        return None if measured is None else WithInterval(measured.mean_kl, measured.low, measured.high)

    @property
    def modes(self) -> tuple[tuple[str, ...], tuple[str, ...], int | None]:
        """What its layout is."""
        return tuple(self.attention_sync), tuple(self.mlp_sync), self.sync_tp_size

    @property
    def family(self) -> str:
        """One of FAMILIES."""
        if self.kind == BASELINE_SUBJECT:
            return "baseline"
        modes = {*self.attention_sync, *self.mlp_sync}
        if DROPPED in modes:
            return "spd + ladder" if OVERLAPPED in modes else "spd"
        return "ladder" if OVERLAPPED in modes else "dense"

    @property
    def layout_words(self) -> str:
        """The layout without the number of layers, which all share."""
        return self.layout.partition(": ")[2] or self.layout

    @property
    def adaptation(self) -> str:
        """How it was adapted, in words; empty where it was not, or it is unknown."""
        if self.adapted in (None, AS_CONVERTED):
            return ""
        return f"{self.adapted}, {self.tokens:,} tokens" if self.tokens else str(self.adapted)

    def timing(self, setting: Setting) -> Timing | None:
        return next((timing for timing in self.timings if timing.setting == setting), None)
