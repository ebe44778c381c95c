"""spd.json: what each block got and why, with the figures of each step."""

from dataclasses import dataclass

from ladderize.adapt.blockwise.documents import BlockReport, WindowData
from ladderize.adapt.blockwise.options import DistillSettings
from ladderize.convert.heads import GroupingReport
from ladderize.convert.selection import SelectedBlock, Selection
from ladderize.eval.results import Perplexity
from ladderize.files.records import Record


@dataclass(frozen=True)
class SpdBlock(SelectedBlock):
    """A block of the selection with what it got; grouping, distillation: None where it got none."""

    grouping: GroupingReport | None
    distillation: BlockReport | None


@dataclass(frozen=True)
class SpdDocument(Record):
    """The document; docs/files.md says what the keys mean."""

    model: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    spd_selection: Selection
    perplexity: dict[str, Perplexity]
    blocks: list[SpdBlock]
    data: WindowData
    options: DistillSettings
    dtype: str


def spd_rows(document: SpdDocument) -> list[dict[str, str]]:
    """What each block got, for people."""
    rows = []
    for row in document.blocks:
        grouping, distillation = row.grouping, row.distillation
        rows.append(
            {
                "block": str(row.block),
                "S": f"{row.sensitivity:+.4f}",
                "class": row.sensitivity_class,
                "attention sync": "dropped" if row.dropped else "kept",
                "heads grouped: error": (
                    f"{grouping.error_before:.2e} to {grouping.error_after:.2e}" if grouping else ""
                ),
                "distilled: share lost": (
                    f"{distillation.share_lost_before:.2%} to {distillation.share_lost_after:.2%}"
                    if distillation
                    else ""
                ),
            }
        )
    return rows
