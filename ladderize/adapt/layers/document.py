"""The document of a checkpoint whose layers were rewritten: alignment.json or distillation.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ladderize.adapt.layers.align import LayerReport, align
from ladderize.adapt.layers.distill import BlockReport, distill
from ladderize.adapt.methods import ALIGN, BLOCKS
from ladderize.adapt.teacher import target_text
from ladderize.console import code_span
from ladderize.convert.inspection import ALIGNMENT, DISTILLATION
from ladderize.eval.results import Perplexity
from ladderize.files.records import Record
from ladderize.layout import format_ranges


@dataclass(frozen=True)
class LayerMethod:
    """A method that rewrites layers: its name in the history of a checkpoint, the file of its document, the function
    that does a job with the method's options, the reports of its layers, and sentences on their errors, on what was
    done, and on what else to try."""

    noun: str
    file: str
    run: Callable[..., None]
    report: type[LayerReport] | type[BlockReport]
    errors: str
    done: str
    advice: str


METHODS = {
    ALIGN: LayerMethod(
        "alignment",
        ALIGNMENT,
        align,
        LayerReport,
        "errors: squared, on held-out tokens, in % of the squared values aimed at; reads: q, k, v; gate, up. writes: o;"
        " down; they aim at the dense model's stream",
        "**Alignment.** The projections of layers {} were solved anew by least squares, towards {} (`align`).",
        "align on more data, or on data like those that the model is for",
    ),
    BLOCKS: LayerMethod(
        "distillation",
        DISTILLATION,
        distill,
        BlockReport,
        "block error: error of the block's output on held-out windows, as % of what the dense block adds",
        "**Retraining.** Layers {} were distilled block by block from {} (`blocks`).",
        "train with a lower --lr or on other data",
    ),
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
    """The content of alignment.json and distillation.json; docs/files.md explains the keys."""

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
            f"{METHODS[self.method].done.format(layers, code_span(self.teacher))}\n\n"
            f"**Measured.** Perplexity on {self.data.heldout} held-out windows of {self.data.seq_len} tokens of"
            f" {code_span(self.data.file)}: {steps}."
        )
