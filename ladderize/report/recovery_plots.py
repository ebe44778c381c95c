"""The accuracy that adaptation wins back: of each model by the tokens that it read, and of retrainings while they
ran."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ladderize.report.documents import RetrainingRun
from ladderize.report.join import ReportContent
from ladderize.report.plot import (
    BY_ACCURACY,
    BY_PERPLEXITY,
    TOKENS_AXIS,
    Measure,
    ReportPlot,
    family_colour,
    family_legend,
    is_wide,
)
from ladderize.report.subjects import Subject
from ladderize.report.tables import TableCell, make_table, number_cell
from ladderize.report.vega import (
    SIGNED_LABEL,
    PlotPanel,
    Spec,
    intervals,
    level,
    lines,
    looks,
    make_spec,
    marks,
    nominal,
    quantitative,
)
from ladderize.sweep_document import AS_CONVERTED, THEN

RUN_COLOURS = ("ladder", "spd", "both", "baseline", "dense")
RUN_SHAPES = ("circle", "square", "diamond", "triangle-up")  # with the colours, different for the first twenty runs


def recovery_plots(content: ReportContent) -> list[ReportPlot]:
    """Return the plots of adapted models by tokens and of retrainings; none where no model was adapted."""
    return [*_models_plot(content), *_retraining_plot(content.found.retrainings)]


# ---- models ----


def _models_plot(content: ReportContent) -> list[ReportPlot]:
    adapted = [one for one in content.models if one.adapted is not None]
    trained = {one.modes for one in adapted if one.tokens}
    same = sorted((one for one in adapted if one.modes in trained), key=lambda one: one.tokens or 0)
    measure = BY_ACCURACY if any(one.difference is not None for one in same) else BY_PERPLEXITY
    known = [(one, value) for one in same if (value := measure.value(one, content.reference)) is not None]
    if len(known) < 2:
        return []
    rows = [
        {
            "line": f"{one.layout_words}, {end}",
            "name": one.name,
            "family": one.family,
            "tokens": one.tokens or 0,
            **value.fields("y"),
            "words": f"{one.description}; {measure.words(value)}",
        }
        for one, value in known
        for end in _ends([other for other, _ in known if other.modes == one.modes])
        if _begins(str(one.adapted), end)
    ]
    cells: Iterator[dict[str, str | TableCell]] = (
        {
            "model": one.name,
            "layout": one.layout_words,
            "method": str(one.adapted),
            "tokens": number_cell(one.tokens or 0, "{:,.0f}"),
            measure.title: TableCell(measure.text(value), value.value),
        }
        for one, value in known
    )
    return [
        ReportPlot(
            name="recovery",
            title="Recovery against tokens",
            caption=f"Each line is one layout and way of adapting it: {measure.title} against the tokens that it read;"
            " 0 tokens is the converted model as it is. A line goes through the models that its stages made. Bars are"
            " 95 % intervals.",
            summary=f"{measure.title.capitalize()} of {len(known)} models against the tokens that they read.",
            panels=[PlotPanel(_models_spec(rows, measure, content.margin))],
            table=make_table("Recovery: the data", cells),
            legend=family_legend(rows),
        )
    ]


def _begins(method: str, other: str) -> bool:
    """Return True if one way of adapting is the other, or becomes it by further stages."""
    return method == AS_CONVERTED or f"{other}{THEN}".startswith(f"{method}{THEN}")


def _ends(subjects: Sequence[Subject]) -> list[str]:
    """Return the ways of adapting that no other way continues."""
    methods = {str(one.adapted) for one in subjects}
    return sorted(one for one in methods if not any(_begins(one, other) for other in methods - {one}))


def _models_spec(rows: list[dict[str, Any]], measure: Measure, margin: float) -> Spec:
    constant = max(1.0, max(row["tokens"] for row in rows) / 100)
    x = quantitative("tokens", "tokens read", scale={"type": "symlog", "constant": constant}, axis=TOKENS_AXIS)
    y = quantitative("y", measure.title, scale={"zero": False})
    levels = []
    if measure.is_more_better:
        y["axis"] = {"labelExpr": SIGNED_LABEL, "tickCount": 6}
        levels = [level("y", 0), level("y", -margin, dashed=True)]
    encoding = {"x": x, "y": y, "color": family_colour(rows)}
    by_line = lines({**encoding, "detail": nominal("line")}, opacity=0.8)
    layers = [*levels, by_line, intervals("y", encoding), marks(encoding, 80)]
    return make_spec(f"{measure.title} against tokens read", 300, rows, layers)


# ---- retrainings: the KL to the dense model on held-out text, or the perplexity, while they ran ----


def _retraining_plot(found: Sequence[RetrainingRun]) -> list[ReportPlot]:
    """Return one plot of all runs that held text out: of the KL where all runs measured it, else of the perplexity."""
    runs = [run for run in found if run.validations]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=f"{run.folder.parent.name}/{run.folder.name}") for run in runs]
    validations = [(run.name, line) for run in runs for line in run.validations]
    has_teacher = all(line.heldout_divergence is not None for _, line in validations)
    key, what = ("heldout_divergence", "KL to dense") if has_teacher else ("heldout_perplexity", "perplexity")
    rows: list[dict[str, Any]] = [
        {"name": name, "step": line.step, "tokens": line.tokens, "y": value}
        for name, line in validations
        if (value := line.value(key)) is not None
    ]
    if not rows:
        return []
    for row in rows:
        row["words"] = f"{row['name']}: {row['tokens']:,} tokens, {what} {row['y']:.4g}"
    dense = {line.value("dense_heldout_perplexity") for _, line in validations}
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
    scale: Spec = {"type": "log", "nice": False} if is_wide([row["y"] for row in rows]) else {"zero": False}
    y_title = f"held-out {what}{', nats' * has_teacher}"
    y = quantitative("y", y_title, scale=scale, axis={"format": "~g", "tickCount": 6})
    encoding, look = {"x": quantitative("tokens", "tokens read", axis=TOKENS_AXIS), "y": y}, looks("name", table)
    drawn = [lines({**encoding, "color": look["color"]}), marks({**encoding, **look}, 55)]
    layers = [*(level("y", value, dashed=True) for value in levels), *drawn]
    return [
        ReportPlot(
            name="heldout",
            title=title,
            caption=f"Of text that was held out, by the tokens that were read.{dashed}",
            summary=f"Held-out {what} of {len(runs)} trainings, by tokens read.",
            panels=[
                PlotPanel(make_spec(f"Held-out {what} by tokens", 280, rows, layers), picture_title=f"{title}.{dashed}")
            ],
            table=make_table(f"Held-out {what}: the data", cells),
            legend=[(name, *look) for name, look in table.items()],
        )
    ]
