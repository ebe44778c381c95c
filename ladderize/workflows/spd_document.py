"""spd.json: what each block got and why, with the figures of each step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from ladderize.adapt.align.options import LayerReport
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
    columns: dict[str, Callable[[SpdBlock], str]] = {
        "block": lambda row: str(row.block),
        "S": lambda row: f"{row.sensitivity:+.4f}",
        "class": lambda row: row.sensitivity_class,
        "attention sync": lambda row: "dropped" if row.selected else "kept",
        "head grouping: error": lambda row: (
            f"{row.grouping.error_before:.2e} to {row.grouping.error_after:.2e}" if row.grouping else ""
        ),
        "alignment: error of the MLP's writes": lambda row: (
            "{error_before:.1%} to {error_after:.1%}".format(**vars(row.alignment.projections[-1]))
            if row.alignment
            else ""
        ),
        "distillation: block error": lambda row: (
            f"{row.distillation.share_lost_before:.2%} to {row.distillation.share_lost_after:.2%}"
            if row.distillation
            else ""
        ),
    }
    cells = {name: [text(row) for row in document.blocks] for name, text in columns.items()}
    shown = {name: texts for name, texts in cells.items() if any(texts)}
    return [{name: texts[number] for name, texts in shown.items()} for number in range(len(document.blocks))]
