"""The picture of a benchmark: compute, hidden and waited communication of each variant and batch size, with error
bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladderize.figure import PlotPanel, Spec, make_spec, nominal, picture_spec, quantitative, rule, save_pictures
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.report import group_text, labelled
from ladderize.runtime.bench.rows import PHASES, quartiles

PART_COLOURS = {
    "compute": "compute",
    "communication hidden under compute": "hidden",
    "communication waited for": "waited",
}
BAR_HEIGHT = 26  # pixels, with the space between bars


def plot_bench(document: BenchDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    rows = [row for row in document.rows if row.communication is not None]  # no-comm is the compute of the first
    ordered = sorted(labelled(rows), key=lambda one: one[0].batch_size)
    panels = []
    for phase, title in zip(PHASES, ("Prefill", "Decode, per step"), strict=True):
        bars = [_bar(row, phase, label) for row, label in ordered]
        panels.append(bar_panel(f"{title}; lines: medians and quartiles (below: of compute)", bars, PART_COLOURS))
    about = f"{group_text(document)}; medians of {document.options.repeat} interleaved rounds"
    return save_pictures(picture_spec(panels, title=about, columns=2, width=420), stem)


def _bar(row: BenchRow, phase: str, label: str) -> dict[str, Any]:
    """Compute, of which communication hides under the last part, then what is waited for, each with its spread."""
    assert row.communication is not None
    assert row.no_communication_samples_ms is not None
    total, communication = row.total_ms(phase), row.communication[phase]
    compute = communication.no_communication_ms
    # where noise makes the whole shorter than its compute, no more than all communication is hidden
    hidden = max(0.0, min(communication.hidden_ms, communication.alone_ms)) if row.overlaps(phase) else 0.0
    ends = (0.0, compute - hidden, compute, max(total, compute))
    return {
        "row": f"{label}, batch {row.batch_size}",
        "parts": list(zip(PART_COLOURS, ends, ends[1:], strict=False)),
        "spread": (total, *quartiles(row.samples_ms[phase])),
        "lower": (compute, *quartiles(row.no_communication_samples_ms[phase])),
        "text": f"{total:.3g} ms",
    }


def bar_panel(title: str, bars: Sequence[dict[str, Any]], colours: dict[str, str]) -> PlotPanel:
    """Stacked bars with error bars. Each has ``row``, its name; ``parts``: (part, start, stop); ``spread``, and maybe
    ``lower``, which is drawn below it: (median, low, high); ``text`` behind its end. colours: of the parts."""
    y: Spec = {"field": "row", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 300}}
    stop = max((end for bar in bars for end in (*bar["spread"], bar["parts"][-1][2])), default=1.0)
    x = quantitative("ms", "ms", scale={"domain": [0, 1.25 * stop], "nice": False})  # with room for the text
    parts = [
        {"row": bar["row"], "part": part, "ms": start, "stop": end}
        for bar in bars
        for part, start, end in bar["parts"]
        if end > start
    ]
    layers: list[Spec] = [
        {
            "data": {"values": parts},
            "mark": {"type": "bar", "height": {"band": 0.74}},
            "encoding": {"y": y, "x": x, "x2": {"field": "stop"}, "color": nominal("part", colours, colours=True)},
        }
    ]
    for key, offset in (("lower", 6), ("spread", 0)):
        spreads = [
            {"row": bar["row"], "ms": median, "low": low, "high": high, "text": bar["text"], "end": max(median, high)}
            for bar in bars
            if key in bar
            for median, low, high in [bar[key]]
        ]
        place: Spec = {"data": {"values": spreads}}
        error = rule({"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}, color="var(--ink)", yOffset=offset)
        tick = {"type": "tick", "color": "var(--ink)", "thickness": 1.5, "height": 8, "yOffset": offset}
        layers += [{**place, **error}, {**place, "mark": tick, "encoding": {"y": y, "x": x}}]
    text = {"y": y, "x": {**x, "field": "end"}, "text": {"field": "text"}}
    layers.append({**place, "mark": {"type": "text", "align": "left", "dx": 6}, "encoding": text})
    return PlotPanel(make_spec(title, BAR_HEIGHT * max(1, len(bars)), [], layers), picture_title=title)
