"""The document of a checkpoint whose layers were rewritten: alignment.json or distillation.json."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ladderize.adapt.layers.align import ERRORS, LayerReport
from ladderize.adapt.layers.distill import BLOCK_ERROR, BlockReport
from ladderize.adapt.methods import ALIGN, BLOCKS
from ladderize.adapt.teacher import target_text
from ladderize.console import code_span
from ladderize.convert.inspection import ALIGNMENT, DISTILLATION
from ladderize.eval.results import Perplexity
from ladderize.files.records import Record
from ladderize.layout import format_ranges

FILES = {ALIGN: ALIGNMENT, BLOCKS: DISTILLATION}  # of the documents
MEANINGS = {ALIGN: ERRORS, BLOCKS: BLOCK_ERROR}  # of the errors in reports of layers
DONE = {
    ALIGN: "**Alignment.** The projections of layers {} were solved anew by least squares, towards {} (`align`).",
    BLOCKS: "**Retraining.** Layers {} were distilled block by block from {} (`blocks`).",
}


@dataclass(frozen=True)
class WindowData(Record):
    """The data, and the numbers of windows to learn from and held out."""

    file: str
    sha256: str
    samples: int
    heldout: int
    seq_len: int


@dataclass(frozen=True)
class SpdBlock(Record):
    """A block as ``ladderize spd`` measured it, and if it was dropped."""

    block: int
    sensitivity: float
    dropped: bool


@dataclass(frozen=True)
class LayersDocument(Record):
    """The content of alignment.json and distillation.json; docs/files.md explains the keys.

    heldout_perplexity: dense, before and after.
    heldout_divergence: before and after, nats per token.
    spd: all blocks, where ``ladderize spd`` made the layout.
    """

    LEFT_OUT: ClassVar = ("spd",)

    method: str
    model: str
    teacher: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    fingerprints: dict[str, str]
    data: WindowData
    options: dict[str, Any]
    dtype: str
    heldout_perplexity: dict[str, Perplexity]
    heldout_divergence: dict[str, float]
    layers: list[LayerReport] | list[BlockReport]
    spd: list[SpdBlock] | None = None

    def measured_rows(self) -> list[dict[str, str]]:
        return [
            {
                "held out": name,
                "perplexity": f"{value.perplexity:.4f}",
                "stderr": "" if value.stderr is None else f"{value.stderr:.4f}",
                "KL to dense": f"{self.heldout_divergence[name]:.4f}" if name in self.heldout_divergence else "",
            }
            for name, value in self.heldout_perplexity.items()
        ]

    @property
    def target(self) -> str:
        """The dense model's perplexity and the recovered share of the loss, in words."""
        return target_text(*(self.heldout_perplexity[name].perplexity for name in ("before", "after", "dense")))

    def note(self) -> str:
        """Return paragraphs for the model card that say what was done, and the held-out perplexities."""
        layers = format_ranges([report.layer for report in self.layers])
        steps = ", ".join(f"{value.perplexity:.4f} ({name})" for name, value in self.heldout_perplexity.items())
        return (
            f"{DONE[self.method].format(layers, code_span(self.teacher))}\n\n"
            f"**Measured.** Perplexity on {self.data.heldout} held-out windows of {self.data.seq_len} tokens of"
            f" {code_span(self.data.file)}: {steps}."
        )
