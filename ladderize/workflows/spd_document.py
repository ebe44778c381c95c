"""spd.json: what each block got and why, with the figures of each step."""

from dataclasses import dataclass, field
from typing import ClassVar

from ladderize.adapt.align.reports import LayerReport
from ladderize.adapt.blockwise.block_trainer import BlockReport
from ladderize.adapt.blockwise.options import DistillSettings
from ladderize.adapt.blockwise.rewrite import WindowData, measured_note
from ladderize.convert.heads import GroupingReport
from ladderize.convert.selection import SelectedBlock, Selection
from ladderize.eval.results import Perplexity
from ladderize.files.records import Record


@dataclass(frozen=True)
class SpdBlock(SelectedBlock):
    """A block of the selection with what it got; None where it got none."""

    grouping: GroupingReport | None
    distillation: BlockReport | None
    alignment: LayerReport | None = None


@dataclass(frozen=True)
class SpdDocument(Record):
    """The document; docs/files.md says what the keys mean."""

    FORMER: ClassVar = {"selection": "spd_selection"}

    model: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    selection: Selection
    perplexity: dict[str, Perplexity]
    blocks: list[SpdBlock]
    data: WindowData
    options: DistillSettings
    dtype: str
    divergence: dict[str, float] = field(default_factory=dict)
    repair: str = "blocks"  # as SpdOptions has it; before there was a choice blocks were distilled

    def card_note(self) -> str:
        """What was measured, for the model card."""
        return measured_note(self.perplexity, self.data)


def spd_rows(document: SpdDocument) -> list[dict[str, str]]:
    """What each block got, for people; steps that no block got have no column."""
    grouped = any(row.grouping for row in document.blocks)
    aligned = any(row.alignment for row in document.blocks)
    distilled = any(row.distillation for row in document.blocks)
    rows = []
    for row in document.blocks:
        cells = {
            "block": str(row.block),
            "S": f"{row.sensitivity:+.4f}",
            "class": row.sensitivity_class,
            "attention sync": "dropped" if row.selected else "kept",
        }
        if grouped:
            cells["head grouping: error"] = (
                f"{row.grouping.error_before:.2e} to {row.grouping.error_after:.2e}" if row.grouping else ""
            )
        if aligned:
            cells["alignment: error of the MLP's writes"] = (
                "{error_before:.1%} to {error_after:.1%}".format(**vars(row.alignment.projections[-1]))
                if row.alignment
                else ""
            )
        if distilled:
            cells["distillation: block error"] = (
                f"{row.distillation.share_lost_before:.2%} to {row.distillation.share_lost_after:.2%}"
                if row.distillation
                else ""
            )
        rows.append(cells)
    return rows
