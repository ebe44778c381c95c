"""Speed-up against batch size, for each group of ranks and link."""

from itertools import groupby
from typing import Any

from ladderize.tradeoff.report.content.join import ReportContent
from ladderize.tradeoff.report.content.subjects import PHASE_WORDS, Setting, Subject
from ladderize.tradeoff.report.content.tables import ReportTable, TableCell, TableColumn
from ladderize.tradeoff.report.content.words import interval_text, named, speedup_text
from ladderize.tradeoff.report.plots.base import (
    PlotChoice,
    PlotPanel,
    ReportPlot,
    Spec,
    family_colour,
    family_legend,
    kind_shape,
    make_spec,
    row_height,
    rule,
)

MOST_PANELS = 8  # the table has all settings
MOST_LINES = 8  # models in a panel of lines; more could not be told apart


def speed_plots(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    """One plot with a panel for each group of ranks; none without times."""
    groups = _groups(content.settings)
    if not groups:
        return []
    drawn = groups[:MOST_PANELS]
    panels = [_panel(content, settings) for settings in drawn]
    subjects = _timed(content, content.settings)
    more = f" Drawn are {MOST_PANELS} of {len(groups)} groups; the table has all." if len(groups) > len(drawn) else ""
    is_random = any(setting.bare and setting.kind != "predicted" for setting in content.settings)
    random_words = " Random weights: only the times mean something." if is_random else ""
    if any(setting.kind == "predicted" for setting in content.settings):
        random_words += " Predicted: nothing ran; bars are how far the prediction may be off."
    return [
        ReportPlot(
            name="speed",
            title="Speed-up by batch size and link",
            caption="Speed-up over the first model of each benchmark; bars are 95 % intervals; the line at 1\u00d7 is"
            " no gain. Circles are measured; diamonds are emulated: one real rank of a group that is not"
            f" there; triangles are predicted.{random_words}{more}",
            summary=f"Speed-ups of {len(subjects)} models in {len(content.settings)} settings.",
            panels=panels,
            table=_table(content),
            legend=family_legend({s.family for s in subjects}, {setting.kind for setting in content.settings}),
            choices=[PlotChoice("phase", "Time of", list(PHASE_WORDS.items()))],
            commands=commands,
        )
    ]


def _groups(settings: list[Setting]) -> list[list[Setting]]:
    return [list(same) for _, same in groupby(settings, key=lambda setting: setting.group)]


def _timed(content: ReportContent, settings: list[Setting]) -> list[Subject]:
    """Subjects with times of their own; the models that share these are named in the remarks."""
    return [
        subject
        for subject in content.subjects
        if subject.timed_as is None and any(subject.timing(setting) for setting in settings)
    ]


def _panel(content: ReportContent, settings: list[Setting]) -> PlotPanel:
    place = settings[0].place + settings[0].weights_words
    if len(settings) == 1:
        title = f"{place}, batch {settings[0].batch_size}"
        return PlotPanel(_bars(_rows(content, settings), title), title)
    return PlotPanel(_lines(_rows(content, settings), place), place)


def _rows(content: ReportContent, settings: list[Setting]) -> list[dict[str, Any]]:
    rows = []
    for subject in _timed(content, settings):
        for setting in settings:
            timing = subject.timing(setting)
            if timing is None or subject.model == setting.reference:
                continue
            for phase, words in PHASE_WORDS.items():
                speedup = timing.speedup[phase]
                rows.append(
                    {
                        "name": subject.name,
                        "family": subject.family,
                        "kind": setting.kind,
                        "phase": phase,
                        "batch": setting.batch_size,
                        "x": speedup.value,
                        "x1": speedup.low,
                        "x2": speedup.high,
                        "words": f"{named(subject)}; {words} {speedup_text(speedup)}; {setting.words}",
                    }
                )
    return rows


CHOSEN: Spec = {
    "params": [{"name": "phase", "value": "end_to_end"}],
    "transform": [{"filter": "datum.phase === phase"}],
}
HAS_INTERVAL = [{"filter": "isValid(datum.x1) && isValid(datum.x2)"}]
AXIS: Spec = {"format": ".3~f", "labelExpr": "datum.label + '\u00d7'", "tickCount": 5}


def _bars(rows: list[dict[str, Any]], title: str) -> Spec:
    """One batch size: a row for each model."""
    x = {"field": "x", "type": "quantitative", "title": "speed-up", "scale": {"zero": False}, "axis": AXIS}
    y: Spec = {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170}}
    colour = family_colour(rows)
    ends = {"x": {**x, "field": "x1"}, "x2": {"field": "x2"}, "y": y, "color": colour}
    layers = [
        rule({"x": {"datum": 1}}, color="var(--muted)"),
        {**rule(ends, strokeWidth=3, opacity=0.8), "transform": HAS_INTERVAL},
        {
            "mark": {"type": "point", "filled": True, "size": 90, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": colour, "shape": kind_shape(rows), "description": {"field": "words"}},
        },
    ]
    return make_spec(
        f"Speed-ups: {title}", row_height(len({row["name"] for row in rows})), layers, data={"values": rows}, **CHOSEN
    )


def _lines(rows: list[dict[str, Any]], title: str) -> Spec:
    """Several batch sizes: a line for each model, with its name at the end."""
    names = list(dict.fromkeys(row["name"] for row in rows))[:MOST_LINES]
    rows = [row for row in rows if row["name"] in names]
    last = max(row["batch"] for row in rows)
    batches = sorted({row["batch"] for row in rows})
    x: Spec = {
        "field": "batch",
        "type": "quantitative",
        "title": "batch size",
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 14},
        "axis": {"values": batches, "format": "d"},
    }
    y: Spec = {"field": "x", "type": "quantitative", "title": "speed-up", "scale": {"zero": False}, "axis": AXIS}
    colour, detail = family_colour(rows), {"field": "name", "type": "nominal"}
    ends = {"x": x, "y": {**y, "field": "x1"}, "y2": {"field": "x2"}, "color": colour}
    layers: list[Spec] = [
        rule({"y": {"datum": 1}}, color="var(--muted)"),
        {
            "mark": {"type": "line", "aria": False, "strokeWidth": 1.5, "opacity": 0.8},
            "encoding": {"x": x, "y": y, "color": colour, "detail": detail},
        },
        {**rule(ends, strokeWidth=1.5, opacity=0.8), "transform": HAS_INTERVAL},
        {
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {"x": x, "y": y, "color": colour, "shape": kind_shape(rows), "description": {"field": "words"}},
        },
        {
            "transform": [{"filter": f"datum.batch === {last}"}],
            "mark": {"type": "text", "aria": False, "align": "right", "dx": -4, "dy": -9, "fontSize": 11, "limit": 130},
            "encoding": {"x": x, "y": y, "text": detail},
        },
    ]
    return make_spec(f"Speed-up against batch size: {title}", 260, layers, data={"values": rows}, **CHOSEN)


def _table(content: ReportContent) -> ReportTable:
    columns = [TableColumn("model"), TableColumn("setting")]
    columns += [TableColumn(words, True) for words in PHASE_WORDS.values()]
    columns += [TableColumn(f"{words}, 95 %", True) for words in PHASE_WORDS.values()]
    columns += [TableColumn(label, True) for label in ("prefill ms", "decode ms", "tokens/s")]
    table = ReportTable("Speed: the data", columns)
    for setting in content.settings:
        for subject in _timed(content, [setting]):
            timing = subject.timing(setting)
            assert timing is not None
            speedups = [timing.speedup[phase] for phase in PHASE_WORDS]
            table.add(
                subject.name,
                setting.words + setting.weights_words,
                *(TableCell(f"{speedup.value:.3f}", speedup.value) for speedup in speedups),
                *(TableCell(interval_text(speedup, 3), speedup.low) for speedup in speedups),
                TableCell(f"{timing.prefill_ms:.3f}", timing.prefill_ms),
                TableCell(f"{timing.decode_ms_per_token:.3f}", timing.decode_ms_per_token),
                TableCell(f"{timing.output_tokens_per_s:.1f}", timing.output_tokens_per_s),
            )
    return table
