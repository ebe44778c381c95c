"""The picture of a benchmark: compute, hidden and waited communication of each variant and batch size, with error
bars."""

from pathlib import Path
from typing import Any

from ladderize.figure import save_figure
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.report import group_text, row_labels
from ladderize.runtime.bench.spread import quartiles

COMPUTE, HIDDEN, WAITED, INK = "#4c72b0", "#9fb8dc", "#dd8452", "#222222"
HEIGHT = 0.74  # of a bar


def plot_bench(document: BenchDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    from matplotlib.figure import Figure

    rows = _rows(document)
    figure = Figure(figsize=(11, 2.1 + max(1.6, 0.5 * len(rows))), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, phase, title in zip(panels, ("prefill", "decode"), ("Prefill", "Decode, per step"), strict=True):
        _draw_phase(panel, document, phase)
        panel.set_title(title)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(f"{group_text(document)}; medians of {document.options.repeat} interleaved rounds", fontsize=10)
    return save_figure(figure, stem)


def _rows(document: BenchDocument) -> list[BenchRow]:
    """Those that communicate: the no-comm baseline is the compute of the first."""
    return [row for row in document.rows if row.communication is not None]


def _draw_phase(panel: Any, document: BenchDocument, phase: str) -> None:
    """One bar for each row, grouped by batch size."""
    rows = _rows(document)
    labels = dict(zip((row.model for row in rows), row_labels(rows), strict=True))
    tick_names: list[str] = []
    ticks: list[float] = []
    stops: list[float] = []
    position = 0.0
    for batch in sorted({row.batch_size for row in rows}):
        for row in (row for row in rows if row.batch_size == batch):
            stops.append(_draw_bar(panel, row, phase, position))
            ticks.append(position)
            tick_names.append(f"{labels[row.model]}, batch {batch}")
            position += 1
        position += 0.6
    panel.set_yticks(ticks, tick_names if phase == "prefill" else [""] * len(ticks))
    panel.invert_yaxis()
    panel.set_xlabel("ms")
    panel.set_xlim(0, 1.18 * max(stops, default=1.0))  # room for the figure behind the longest bar
    panel.spines[["top", "right"]].set_visible(False)


def _draw_bar(panel: Any, row: BenchRow, phase: str, position: float) -> float:
    """Compute, of which communication hides under the last part, then what is waited for, each with its spread.

    Returns where the bar ends.
    """
    assert row.communication is not None
    assert row.no_communication_samples_ms is not None
    total, communication = row.total_ms(phase), row.communication[phase]
    compute = communication.no_communication_ms
    panel.barh(position, compute, color=COMPUTE, height=HEIGHT)
    # where noise makes the whole shorter than its compute, no more than all communication is hidden
    hidden = min(communication.hidden_ms, communication.alone_ms) if row.overlaps(phase) else 0.0
    if hidden > 0:
        place = {"left": compute - hidden, "height": HEIGHT}
        panel.barh(position, hidden, color=HIDDEN, hatch="////", edgecolor=COMPUTE, lw=0, **place)
    if total > compute:
        panel.barh(position, total - compute, left=compute, color=WAITED, height=HEIGHT)
    _draw_spread(panel, compute, row.no_communication_samples_ms[phase], position + HEIGHT / 3)
    high = _draw_spread(panel, total, row.samples_ms[phase], position)
    stop = max(high, compute)
    panel.text(stop, position, f"  {total:.3g} ms", va="center", fontsize=8)
    return stop


def _draw_spread(panel: Any, median: float, samples: list[float], position: float) -> float:
    """Mark a median and its quartiles; returns where the mark ends."""
    low, high = quartiles(samples)
    reach = [[max(0.0, median - low)], [max(0.0, high - median)]]
    panel.errorbar(median, position, xerr=reach, fmt="|", color=INK, capsize=2.5, markersize=8, lw=1.1)
    return max(median, high)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(color=COMPUTE, label="compute"),
        Patch(facecolor=HIDDEN, edgecolor=COMPUTE, hatch="////", lw=0, label="communication hidden under compute"),
        Patch(color=WAITED, label="communication waited for"),
        Line2D([], [], color=INK, marker="|", markersize=9, label="median and quartiles (below: of compute)"),
    ]
