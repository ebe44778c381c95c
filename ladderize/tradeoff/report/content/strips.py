"""The layers of each layout, as two rows of sync points. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, format_ranges
from ladderize.tradeoff.report.content.join import ReportContent

LETTERS = {BLOCKING: "B", OVERLAPPED: "O", DROPPED: "D"}


@dataclass(frozen=True)
class StripRun:
    """Sync points in a row that have one mode. layers: such as 4:8."""

    mode: str
    letter: str
    length: int
    layers: str


@dataclass(frozen=True)
class StripRow:
    """summary: all of it in words."""

    name: str
    runs: list[StripRun]
    summary: str


@dataclass(frozen=True)
class LayoutStrip:
    """One layout. models: that have it."""

    layout: str
    models: list[str]
    rows: list[StripRow]


def layout_strips(content: ReportContent) -> list[LayoutStrip]:
    """One for each layout of the models, in their order; a model whose layout is not known has none."""
    strips: dict[tuple[object, ...], LayoutStrip] = {}
    for subject in content.models:
        if not subject.attention_sync:
            continue
        key = (tuple(subject.attention_sync), tuple(subject.mlp_sync), subject.sync_tp_size)
        if key not in strips:
            rows = [_row("attention", subject.attention_sync), _row("MLP", subject.mlp_sync)]
            strips[key] = LayoutStrip(subject.layout_words, [], rows)
        strips[key].models.append(subject.name)
    return list(strips.values())


def _row(name: str, modes: Sequence[str]) -> StripRow:
    runs, layer = [], 0
    for mode, same in groupby(modes):
        length = len(list(same))
        runs.append(StripRun(mode, LETTERS.get(mode, "?"), length, format_ranges(range(layer, layer + length))))
        layer += length
    words = [f"{mode} {format_ranges([i for i, m in enumerate(modes) if m == mode])}" for mode in dict.fromkeys(modes)]
    return StripRow(name, runs, f"{name}: {'; '.join(words)}")
