"""alignment.json: what was solved from what, and what it won."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ladderize.adapt.align.options import AlignOptions, AlignSettings
from ladderize.adapt.align.reports import GROUPS, LayerReport
from ladderize.adapt.blockwise.documents import RewrittenLayers, WindowData, measured_note
from ladderize.adapt.blockwise.windows import Windows
from ladderize.adapt.improvement import target_text
from ladderize.files.records import Record
from ladderize.layout import format_ranges

ERROR = (
    "errors: squared, on held-out tokens, in % of the squared values aimed at; reads: q, k, v; gate, up. writes: o;"
    " down; they aim at the dense model's stream"
)


@dataclass(frozen=True)
class AlignRecord(Record):
    """What an alignment depends on besides the models. dtype: what is computed in."""

    data: WindowData
    options: AlignSettings
    dtype: str

    @classmethod
    def of(cls, windows: Windows, options: AlignOptions, dtype: torch.dtype) -> "AlignRecord":
        """Reads all data once."""
        return cls(WindowData.of(windows, options), options.settings(), str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Alignment(RewrittenLayers):
    """The document; docs/files.md says what the keys mean."""

    options: AlignSettings
    layers: list[LayerReport]

    def card_note(self) -> str:
        """What was done and measured, for the model card."""
        layers = format_ranges([report.layer for report in self.layers])
        return (
            f"**Alignment.** The projections of layers {layers} were solved anew by least squares, towards"
            f" `{self.teacher}` (`align`).\n\n" + measured_note(self.heldout_perplexity, self.data)
        )

    @property
    def target(self) -> str:
        """The dense model's perplexity and the share of the loss recovered, in words."""
        values = [self.heldout_perplexity[name].perplexity for name in ("before", "aligned", "dense")]
        return target_text(*values)


def alignment_rows(reports: Sequence[LayerReport]) -> list[dict[str, str]]:
    """A table of layers for people: the error of each sub-module's reads and writes, before and after."""
    return [{"layer": str(report.layer), **{name: _errors(report, name) for name in GROUPS}} for report in reports]


def _errors(report: LayerReport, name: str) -> str:
    errors = report.errors(name)
    if errors is None:
        return ""
    before, after = errors
    kept = all(entry.ridge is None for entry in report.of_group(name))
    return f"{before:.1%}, kept" if kept else f"{before:.1%} to {after:.1%}"
