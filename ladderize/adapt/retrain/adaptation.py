"""adaptation.json: what a retraining did, in the checkpoint or the adapter that it wrote."""

from dataclasses import dataclass

from ladderize.adapt.data.stream import DataCounts
from ladderize.adapt.lora.config import AdapterBase, LoraOptions
from ladderize.adapt.retrain.losses import Objective
from ladderize.adapt.retrain.schedule import Budget, RateSchedule
from ladderize.adapt.teacher import share_won_back, target_text
from ladderize.console import human_seconds
from ladderize.files.records import Record
from ladderize.layout import format_ranges


@dataclass(frozen=True)
class FixedOptions(Record):
    """What decides the result, and must not change on the way."""

    method: str
    train: str
    packing: bool
    heldout: int | None
    seq_len: int
    batch_size: int
    weight_decay: float
    seed: int
    objective: Objective
    lora: LoraOptions | None


@dataclass(frozen=True)
class Settings(Record):
    """What decides the result, too, but may be changed when a run goes on: say, after the loss exploded, or for a
    longer training."""

    budget: Budget
    schedule: RateSchedule
    max_gradient: float
    skip_bad_rows: bool


@dataclass(frozen=True)
class DecidingOptions(Settings, FixedOptions):
    """Everything that decides the result."""

    @classmethod
    def of(cls, fixed: FixedOptions, settings: Settings) -> "DecidingOptions":
        return cls(**vars(fixed), **vars(settings))


@dataclass(frozen=True)
class LossRange(Record):
    """Of the first and the last step, in nats."""

    first: float
    last: float


@dataclass(frozen=True)
class HeldoutPerplexity(Record):
    """Of ``tokens`` scored tokens; after: with the weights as they are stored. dense: the teacher's, if there is one.

    won_back: of the loss (the logarithm) that the conversion cost, the share that training won back.
    """

    before: float
    after: float
    tokens: int
    dense: float | None = None
    won_back: float | None = None

    @classmethod
    def of(cls, before: float, after: float, tokens: int, dense: float | None) -> "HeldoutPerplexity":
        return cls(before, after, tokens, dense, share_won_back(before, after, dense) if dense is not None else None)

    @property
    def target(self) -> str:
        """The dense model's perplexity and the share won back, in words; empty without a dense model."""
        return target_text(self.before, self.after, self.dense) if self.dense is not None else ""


@dataclass(frozen=True)
class ModelFingerprints(Record):
    """Of the model that was retrained and, if there was one, its teacher."""

    model: str
    teacher: str | None


@dataclass(frozen=True)
class Adaptation(Record):
    """The document; docs/files.md says what the keys mean."""

    model: str
    out: str
    method: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    layers: list[int]
    distill_from: str | None
    data: list[str]
    steps: int
    tokens: int
    scored_tokens: int
    written_step: int
    training_seconds: float
    loss: LossRange
    heldout_perplexity: HeldoutPerplexity | None
    data_counts: DataCounts
    options: DecidingOptions
    dtype: str
    fingerprints: ModelFingerprints

    def card_note(self) -> str:
        """How the weights came about, for the model card."""
        objective, heldout = self.options.objective, self.heldout_perplexity
        weights = (("predictions", objective.distill_weight), ("sub-modules' outputs", objective.hidden_weight))
        taught = " and the ".join(f"{what} (weight {weight:g})" for what, weight in weights if weight)
        teacher = f" and the {taught} of `{self.distill_from}`" if taught else ""
        reached = f", held-out perplexity {heldout.before:.4f} before and {heldout.after:.4f} after" if heldout else ""
        if heldout and heldout.target:
            reached += f"; {heldout.target}"
        return (
            f"**Retraining.** Layers {format_ranges(self.layers)} were retrained (`{self.method}`) on"
            f" {' and '.join(f'`{name}`' for name in self.data)}{teacher}: {self.steps:,} steps,"
            f" {self.tokens:,} tokens, loss ({self.options.objective.label}) {self.loss.first:.4f} to"
            f" {self.loss.last:.4f}{reached}."
            " `adaptation.json` and `metrics.jsonl` say more."
        )

    def summary(self) -> str:
        """What was reached, for people."""
        lines = [
            f"{self.steps:,} steps, {self.tokens:,} tokens in {human_seconds(self.training_seconds)}; loss"
            f" ({self.options.objective.label}) {self.loss.first:.4f} to {self.loss.last:.4f}"
        ]
        if heldout := self.heldout_perplexity:
            lines.append(
                f"held-out perplexity {heldout.before:.4f} before, {heldout.after:.4f} after (step"
                f" {self.written_step}, as stored)"
            )
            if heldout.target:
                lines.append(heldout.target)
        return "\n".join(lines)


@dataclass(frozen=True)
class AdapterAdaptation(Adaptation):
    """The document of an adapter, which says what it belongs to."""

    base: AdapterBase
