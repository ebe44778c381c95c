"""alignment.json: what was solved from what, and what it won."""

from dataclasses import dataclass

import torch

from ladderize.adapt.align.options import AlignOptions, AlignSettings
from ladderize.adapt.align.reports import GROUPS, LayerReport
from ladderize.adapt.blockwise.documents import RewrittenLayers, WindowData
from ladderize.adapt.blockwise.windows import Windows
from ladderize.files.records import Record
from ladderize.layout import format_ranges


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

    RESULT = "aligned"
    MEANING = (
        "errors: squared, on held-out tokens, in % of the squared values aimed at; reads: q, k, v; gate, up. writes:"
        " o; down; they aim at the dense model's stream"
    )
    options: AlignSettings
    layers: list[LayerReport]

    def rows(self) -> list[dict[str, str]]:
        """The error of each sub-module's reads and writes, before and after."""
        return [{"layer": str(one.layer), **{name: _errors(one, name) for name in GROUPS}} for one in self.layers]

    def done(self) -> str:
        layers = format_ranges([report.layer for report in self.layers])
        return (
            f"**Alignment.** The projections of layers {layers} were solved anew by least squares, towards"
            f" `{self.teacher}` (`align`)."
        )


def _errors(report: LayerReport, name: str) -> str:
    errors = report.errors(name)
    if errors is None:
        return ""
    before, after = errors
    kept = all(entry.ridge is None for entry in report.of_group(name))
    return f"{before:.1%}, kept" if kept else f"{before:.1%} to {after:.1%}"
