"""The picture of a benchmark of vLLM: a bar for each row, with its quartiles."""

from pathlib import Path
from typing import Any

from ladderize.figure import save_figure
from ladderize.runtime.bench.plot import COMPUTE, INK, WAITED
from ladderize.runtime.bench.report import row_labels
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.serving.vllm.bench.document import VllmBenchDocument
from ladderize.serving.vllm.bench.report import vllm_group_text


def plot_vllm_bench(document: VllmBenchDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    from matplotlib.figure import Figure

    batches = sorted({row.batch_size for row in document.rows})
    # batch sizes differ too much in time to share an axis
    figure = Figure(
        figsize=(11, 1.2 + len(batches) * (0.5 + 0.34 * len(document.rows) / len(batches))), layout="constrained"
    )
    panels = figure.subplots(len(batches), 2, squeeze=False)
    for line, batch in zip(panels, batches, strict=True):
        for panel, phase in zip(line, PHASES, strict=True):
            _draw_panel(panel, document, phase, batch)
    figure.suptitle(
        f"{vllm_group_text(document)}; medians of {document.options.repeat} interleaved rounds", fontsize=10
    )
    return save_figure(figure, stem)


def _draw_panel(panel: Any, document: VllmBenchDocument, phase: str, batch: int) -> None:
    labels = row_labels(document.rows)
    rows = [(row, label) for row, label in zip(document.rows, labels, strict=True) if row.batch_size == batch]
    for place, (row, _) in enumerate(rows):
        median, (low, high) = row.total_ms(phase), row.quartiles_ms[phase]
        panel.barh(place, median, color=COMPUTE if place else WAITED, height=0.74)
        panel.errorbar(
            median, place, xerr=[[max(0.0, median - low)], [max(0.0, high - median)]], color=INK, capsize=2.5
        )
        ratio = f", {row.ratio(phase):.2f}x" if place else ""
        panel.text(max(median, high), place, f"  {median:.3g} ms{ratio}", va="center", fontsize=8)
    panel.set_yticks(range(len(rows)), [label for _, label in rows] if phase == PHASES[0] else [""] * len(rows))
    panel.invert_yaxis()
    panel.set_xlim(0, 1.3 * max(max(row.total_ms(phase), row.quartiles_ms[phase][1]) for row, _ in rows))
    what = "prefill" if phase == "prefill" else "decode, per step"
    panel.set_title(f"{what}, batch {batch}", fontsize=9)
    panel.set_xlabel("ms")
    panel.spines[["top", "right"]].set_visible(False)
