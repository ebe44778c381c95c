"""What retraining wins back while it runs: the KL to the dense model on held-out text, or the perplexity, by tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import METRICS
from ladderize.errors import UserError
from ladderize.figure import PlotPanel, Spec, level, lines, looks, make_spec, marks, quantitative
from ladderize.files.parsing import parse_json
from ladderize.files.records import Record
from ladderize.files.regular import read_lines
from ladderize.tradeoff.report.plot import TOKENS_AXIS, ReportPlot, is_wide
from ladderize.tradeoff.report.words import make_table, number_cell

RUN_COLOURS = ("ladder", "spd", "both", "baseline", "dense")
RUN_SHAPES = ("circle", "square", "diamond", "triangle-up")  # with the colours, different for the first twenty runs


@dataclass(frozen=True)
class MetricsLine(Record):
    """A line of metrics.jsonl: of a step, or of a validation. What is NaN or infinite is null there."""

    step: int
    tokens: int | None = None  # read so far
    heldout_perplexity: float | None = None
    heldout_divergence: float | None = None
    dense_heldout_perplexity: float | None = None

    def value(self, key: str) -> float | None:
        """What was measured; None where that is no number, as of a training that broke down."""
        found = getattr(self, key)
        return found if found is not None and math.isfinite(found) else None


@dataclass(frozen=True)
class RetrainingRun:
    """One run. name: of the point of a sweep, else of its folder."""

    folder: Path
    name: str
    validations: list[MetricsLine]  # with the tokens that were read by then


def read_retraining(folder: Path, name: str | None) -> RetrainingRun:
    """The validations of a finished retraining; raises UserError for a file that is damaged."""
    path = folder / METRICS
    read, validations = 0, []
    for number, text in enumerate(read_lines(path), 1):
        try:
            line = MetricsLine.from_dict(parse_json(text, constants=True), f"{path}, line {number}")
        except ValueError:
            raise UserError(f"{path}, line {number} is not JSON; the file may be damaged") from None
        read = read if line.tokens is None else line.tokens  # a validation follows its step
        if line.heldout_perplexity is not None:
            validations.append(replace(line, tokens=read))
    return RetrainingRun(folder, name or folder.name, validations)


def retraining_plots(found: Sequence[RetrainingRun]) -> list[ReportPlot]:
    """One plot of all runs that held text out; none where there are none. The KL, where all runs measured it."""
    runs = [run for run in found if run.validations]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=f"{run.folder.parent.name}/{run.folder.name}") for run in runs]
    has_teacher = all(line.heldout_divergence is not None for run in runs for line in run.validations)
    key, what = ("heldout_divergence", "KL to dense") if has_teacher else ("heldout_perplexity", "perplexity")
    rows: list[dict[str, Any]] = [
        {"name": run.name, "step": line.step, "tokens": line.tokens, "y": value}
        for run in runs
        for line in run.validations
        if (value := line.value(key)) is not None
    ]
    if not rows:
        return []
    for row in rows:
        row["words"] = f"{row['name']}: {row['tokens']:,} tokens, {what} {row['y']:.4g}"
    dense = {line.value("dense_heldout_perplexity") for run in runs for line in run.validations}
    levels = [] if has_teacher else sorted({round(value, 6) for value in dense if value is not None})
    dashed = f" Dashed: the dense model, {', '.join(f'{value:.4g}' for value in levels)}." if levels else ""
    title = f"Held-out {what} while retraining"
    names = dict.fromkeys(run.name for run in runs)
    table = {name: (RUN_COLOURS[i % len(RUN_COLOURS)], RUN_SHAPES[i % len(RUN_SHAPES)]) for i, name in enumerate(names)}
    cells = (
        {
            "training": row["name"],
            "step": number_cell(row["step"], "{:.0f}"),
            "tokens": number_cell(row["tokens"], "{:,.0f}"),
            f"held-out {what}": number_cell(row["y"], "{:.4f}"),
        }
        for row in rows
    )
    return [
        ReportPlot(
            name="heldout",
            title=title,
            caption=f"Of text that was held out, by the tokens that were read.{dashed}",
            summary=f"Held-out {what} of {len(runs)} trainings, by tokens read.",
            panels=[PlotPanel(_spec(what, rows, levels, looks("name", table)), picture_title=f"{title}.{dashed}")],
            table=make_table(f"Held-out {what}: the data", cells),
            legend=[(name, *look) for name, look in table.items()],
        )
    ]


def _spec(what: str, rows: list[dict[str, Any]], levels: list[float], look: Spec) -> Spec:
    scale: Spec = {"type": "log", "nice": False} if is_wide([row["y"] for row in rows]) else {"zero": False}
    x = quantitative("tokens", "tokens read", axis=TOKENS_AXIS)
    title = f"held-out {what}{', nats' * (what != 'perplexity')}"
    y = quantitative("y", title, scale=scale, axis={"format": "~g", "tickCount": 6})
    encoding = {"x": x, "y": y}
    drawn = [lines({**encoding, "color": look["color"]}), marks({**encoding, **look}, 55)]
    return make_spec(f"Held-out {what} by tokens", 280, rows, [*(level("y", v, dashed=True) for v in levels), *drawn])
