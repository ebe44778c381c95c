"""The picture of a benchmark: compute and exposed communication, stacked, for each variant and batch size."""

from pathlib import Path
from typing import Any

from ladderize.figure import save_figure
from ladderize.runtime.bench.report import labels

COMPUTE, EXPOSED = "#4c72b0", "#dd8452"


def draw(document: dict[str, Any], stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if "communication" in row]
    names = dict(zip((row["model"] for row in rows), labels(rows), strict=True))
    batches = sorted({row["batch_size"] for row in rows})
    figure = Figure(figsize=(11, 1.6 + max(1.6, 0.42 * len(rows))), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, phase, title in zip(panels, ("prefill", "decode"), ("Prefill", "Decode, per token"), strict=True):
        tick_names, position = [], 0.0
        ticks: list[float] = []
        for batch in batches:
            for row in (row for row in rows if row["batch_size"] == batch):
                total = row["prefill_ms" if phase == "prefill" else "decode_ms_per_token"]
                compute = min(total, row["communication"][phase]["no_communication_ms"])
                exposed = max(0.0, total - compute)
                panel.barh(position, compute, color=COMPUTE, label="compute" if not ticks else None)
                panel.barh(
                    position,
                    exposed,
                    left=compute,
                    color=EXPOSED,
                    label="communication waited for" if not ticks else None,
                )
                panel.text(total, position, f" {total:.3g} ms", va="center", fontsize=8)
                ticks.append(position)
                tick_names.append(f"{names[row['model']]}, batch {batch}")
                position += 1
            position += 0.6
        panel.set_yticks(ticks, tick_names if phase == "prefill" else [""] * len(ticks))
        panel.invert_yaxis()
        panel.set_title(title)
        panel.set_xlabel("ms")
        panel.margins(x=0.18)
        panel.spines[["top", "right"]].set_visible(False)
    handles, entries = panels[0].get_legend_handles_labels()
    figure.legend(handles, entries, loc="outside lower center", ncols=2, frameon=False)
    ranks = rows[0]["tp_size"] if rows else 1
    how = (
        f"{ranks} emulated ranks, link {document['link']['name']}"
        if document["emulated"]
        else f"{ranks} ranks, {document['backend']}"
    )
    figure.suptitle(f"{how}; medians of {document['options']['repeat']} interleaved runs", fontsize=10)
    return save_figure(figure, stem)
