"""distillation.json: what became of each block, and what it cost and won."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillSettings, WindowOptions
from ladderize.adapt.blockwise.windows import Windows
from ladderize.adapt.data.sources import source_sha256
from ladderize.adapt.teacher import target_text
from ladderize.eval.perplexity import Perplexity
from ladderize.files.records import Record
from ladderize.layout import format_ranges

BLOCK_ERROR = "block error: error of the block's output on held-out windows, as % of what the dense block adds"


@dataclass(frozen=True)
class BlockReport(Record):
    """A block's training. loss: held-out mean squared difference to the dense block's output; share_lost: of what the
    dense block adds to the stream. after: of the weights as they are stored. curve: [step, held-out loss]."""

    block: int
    loss_before: float
    loss_after: float
    share_lost_before: float
    share_lost_after: float
    steps: int
    best_step: int
    stopped_early: bool
    seconds: float
    curve: list[tuple[int, float]]


@dataclass(frozen=True)
class WindowData(Record):
    """The data and its windows. samples: to learn from. seq_len: tokens of each."""

    file: str
    sha256: str
    samples: int
    heldout: int
    seq_len: int

    @classmethod
    def of(cls, windows: Windows, options: WindowOptions) -> "WindowData":
        """Reads all data once."""
        sizes = len(windows.train), len(windows.heldout), windows.train.shape[1]
        return cls(options.data, source_sha256(options.source), *sizes)


@dataclass(frozen=True)
class TrainingRecord(Record):
    """What training depends on besides the models: for ladderize.yaml, and for a killed run to know itself. dtype: what
    is computed in."""

    data: WindowData
    options: DistillSettings
    dtype: str

    @classmethod
    def of(cls, windows: Windows, options: BlockwiseOptions, dtype: torch.dtype) -> "TrainingRecord":
        """Reads all data once."""
        return cls(WindowData.of(windows, options), options.distill.settings(), str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class BlockwiseRun(Record):
    """What a run was about; the models by their fingerprints."""

    method: str
    model: str
    teacher: str


@dataclass(frozen=True)
class HeldoutMeasures:
    """Of held-out windows, by name of the step: perplexities, of the dense model too, and mean divergences KL(dense ||
    model) in nats per token."""

    perplexity: dict[str, Perplexity]
    divergence: dict[str, float]


@dataclass(frozen=True)
class RewrittenLayers(Record, ABC):
    """What documents of methods that rewrite layers one by one have in common. RESULT: the method's step among the
    held-out measures. MEANING: of the errors in ``rows``."""

    RESULT: ClassVar[str]
    MEANING: ClassVar[str]

    model: str
    teacher: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    fingerprints: BlockwiseRun
    data: WindowData
    dtype: str
    heldout_perplexity: dict[str, Perplexity]
    heldout_divergence: dict[str, float] = field(default_factory=dict, kw_only=True)

    @abstractmethod
    def rows(self) -> list[dict[str, str]]:
        """A table of layers for people."""

    @abstractmethod
    def done(self) -> str:
        """What was done, as a paragraph of the model card."""

    @property
    def card_note(self) -> str:
        """What was done and measured, for the model card."""
        return f"{self.done()}\n\n{measured_note(self.heldout_perplexity, self.data)}"

    @property
    def target(self) -> str:
        """The dense model's perplexity and the share of the loss recovered, in words."""
        values = [self.heldout_perplexity[name].perplexity for name in ("before", self.RESULT, "dense")]
        return target_text(*values)


@dataclass(frozen=True)
class Distillation(RewrittenLayers):
    """The document; docs/files.md says what the keys mean."""

    RESULT = "distilled"
    MEANING = BLOCK_ERROR
    options: DistillSettings
    blocks: list[BlockReport]

    def rows(self) -> list[dict[str, str]]:
        return [
            {
                "block": str(report.block),
                "loss (MSE) before": f"{report.loss_before:.3e}",
                "after": f"{report.loss_after:.3e}",
                "block error before": f"{report.share_lost_before:.2%}",
                "after distillation": f"{report.share_lost_after:.2%}",
                "steps": str(report.steps) + (" (stopped early)" if report.stopped_early else ""),
            }
            for report in self.blocks
        ]

    def done(self) -> str:
        layers = format_ranges([block.block for block in self.blocks])
        return f"**Retraining.** Layers {layers} were distilled block by block from `{self.teacher}` (`blocks`)."


def measured_note(perplexities: Mapping[str, Perplexity], data: WindowData) -> str:
    """The held-out perplexities of each step as a paragraph of a model card."""
    steps = ", ".join(f"{value.perplexity:.4f} ({name.removeprefix('+ ')})" for name, value in perplexities.items())
    return (
        f"**Measured.** Perplexity on {data.heldout} held-out windows of {data.seq_len} tokens of `{data.file}`:"
        f" {steps}."
    )


def perplexity_rows(perplexities: Mapping[str, Perplexity], divergences: Mapping[str, float]) -> list[dict[str, str]]:
    """Held-out perplexities beside the first, the dense model's, and divergences from it, for people."""
    dense = next(iter(perplexities.values())).perplexity
    return [
        {
            "held out": name,
            "perplexity": f"{value.perplexity:.4f}",
            "stderr": "" if value.stderr is None else f"{value.stderr:.4f}",
            "difference": "" if number == 0 else f"{value.perplexity - dense:+.4f}",
            "KL to dense": f"{divergences[name]:.4f}" if name in divergences else "",
        }
        for number, (name, value) in enumerate(perplexities.items())
    ]
