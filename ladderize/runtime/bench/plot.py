"""The picture of a benchmark: compute and exposed communication, stacked, for each variant and batch size."""

from pathlib import Path
from typing import Any

from ladderize.figure import save_figure
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.report import row_labels

COMPUTE, EXPOSED = "#4c72b0", "#dd8452"


def plot_bench(document: BenchDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    from matplotlib.figure import Figure

    rows = [row for row in document.rows if row.communication is not None]
    figure = Figure(figsize=(11, 1.6 + max(1.6, 0.42 * len(rows))), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, phase, title in zip(panels, ("prefill", "decode"), ("Prefill", "Decode, per token"), strict=True):
        _draw_phase(panel, document, phase)
        panel.set_title(title)
    handles, entries = panels[0].get_legend_handles_labels()
    figure.legend(handles, entries, loc="outside lower center", ncols=2, frameon=False)
    ranks = rows[0].tp_size if rows else 1
    group = (
        f"{ranks} emulated ranks, link {document.link.name}"
        if document.link is not None
        else f"{ranks} ranks, {document.backend}"
    )
    figure.suptitle(f"{group}; medians of {document.options.repeat} interleaved runs", fontsize=10)
    return save_figure(figure, stem)


def _draw_phase(panel: Any, document: BenchDocument, phase: str) -> None:
    """One bar for each row that has communication, grouped by batch size."""
    rows = [row for row in document.rows if row.communication is not None]
    labels = dict(zip((row.model for row in rows), row_labels(rows), strict=True))
    tick_names: list[str] = []
    ticks: list[float] = []
    position = 0.0
    for batch in sorted({row.batch_size for row in rows}):
        for row in (row for row in rows if row.batch_size == batch):
            assert row.communication is not None
            total = row.total_ms(phase)
            compute = min(total, row.communication[phase].no_communication_ms)
            first = not ticks  # the legend has one entry for each colour
            panel.barh(position, compute, color=COMPUTE, label="compute" if first else None)
            panel.barh(
                position,
                max(0.0, total - compute),
                left=compute,
                color=EXPOSED,
                label="communication waited for" if first else None,
            )
            panel.text(total, position, f" {total:.3g} ms", va="center", fontsize=8)
            ticks.append(position)
            tick_names.append(f"{labels[row.model]}, batch {batch}")
            position += 1
        position += 0.6
    panel.set_yticks(ticks, tick_names if phase == "prefill" else [""] * len(ticks))
    panel.invert_yaxis()
    panel.set_xlabel("ms")
    panel.margins(x=0.18)
    panel.spines[["top", "right"]].set_visible(False)
