"""Speed-up against batch size, for each group of ranks and link; and where the time of a pass goes."""

from itertools import groupby
from typing import Any

from ladderize.figure import PlotPanel, Spec, intervals, level, lines, make_spec, marks, nominal, quantitative
from ladderize.tradeoff.report.join import ReportContent
from ladderize.tradeoff.report.plot import (
    MODEL_ROWS,
    PlotChoice,
    ReportPlot,
    family_colour,
    family_legend,
    kind_shape,
    row_height,
)
from ladderize.tradeoff.report.subjects import PHASE_WORDS, Setting, Spent, Subject, timed_in
from ladderize.tradeoff.report.words import ReportTable, interval_cell, named, number_cell, speedup_text

MOST_PANELS = {"speed": 8, "time": 6}  # the tables have all settings
MOST_LINES = 8  # models in a panel of lines; more could not be told apart
PARTS = {
    "compute": "compute",
    "hidden": "compute with communication beneath it",
    "waited": "waiting for communication",
}
PHASE_TITLES = {"prefill": "Prefill", "decode": "Decode, one token of each row"}
CHOSEN: Spec = {
    "params": [{"name": "phase", "value": "end_to_end"}],
    "transform": [{"filter": "datum.phase === phase"}],
}
SPEEDUP = quantitative(
    "x",
    "speed-up",
    scale={"zero": False},
    axis={"format": ".3~f", "labelExpr": "datum.label + '\u00d7'", "tickCount": 5},
)


def speed_plots(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    """One plot with a panel for each group of ranks; none without times."""
    groups = [list(same) for _, same in groupby(content.settings, key=lambda setting: setting.group)]
    if not groups:
        return []
    drawn = groups[: MOST_PANELS["speed"]]
    subjects = timed_in(content.subjects, content.settings)
    more = f" Drawn are {len(drawn)} of {len(groups)} groups; the table has all." if len(groups) > len(drawn) else ""
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
            panels=[_speed_panel(content, settings) for settings in drawn],
            table=_speed_table(content),
            legend=family_legend({s.family for s in subjects}, {setting.kind for setting in content.settings}),
            choices=[PlotChoice("phase", "Time of", list(PHASE_WORDS.items()))],
            commands=commands,
        )
    ]


def _speed_panel(content: ReportContent, settings: list[Setting]) -> PlotPanel:
    rows = _speed_rows(content, settings)
    place = settings[0].place + settings[0].weights_words
    if len(settings) > 1:
        return PlotPanel(_speed_lines(rows, place), place)
    title = f"{place}, batch {settings[0].batch_size}"
    encoding = {"x": SPEEDUP, "y": MODEL_ROWS, "color": family_colour(rows)}
    points = marks({**encoding, "shape": kind_shape(rows)}, 90)
    layers = [level("x", 1), intervals("x", encoding, width=3), points]
    return PlotPanel(make_spec(f"Speed-ups: {title}", row_height(rows), rows, layers, **CHOSEN), title)


def _speed_rows(content: ReportContent, settings: list[Setting]) -> list[dict[str, Any]]:
    return [
        {
            "name": subject.name,
            "family": subject.family,
            "kind": setting.kind,
            "phase": phase,
            "batch": setting.batch_size,
            "x": timing.speedup[phase].value,
            "x1": timing.speedup[phase].low,
            "x2": timing.speedup[phase].high,
            "words": f"{named(subject)}; {words} {speedup_text(timing.speedup[phase])}; {setting.words}",
        }
        for subject in content.subjects
        for setting in settings
        if (timing := subject.own_timing(setting)) is not None and subject.model != setting.reference
        for phase, words in PHASE_WORDS.items()
    ]


def _speed_lines(rows: list[dict[str, Any]], title: str) -> Spec:
    """Several batch sizes: a line for each model, with its name at the end."""
    names = list(dict.fromkeys(row["name"] for row in rows))[:MOST_LINES]
    rows = [row for row in rows if row["name"] in names]
    batches = sorted({row["batch"] for row in rows})
    scale = {"type": "log", "base": 2, "nice": False, "padding": 14}
    x = quantitative("batch", "batch size", scale=scale, axis={"values": batches, "format": "d"})
    place, name = {"x": x, "y": SPEEDUP}, nominal("name")
    encoding = {**place, "color": family_colour(rows)}
    layers: list[Spec] = [
        level("y", 1),
        lines({**encoding, "detail": name}, opacity=0.8),
        intervals("y", encoding),
        marks({**encoding, "shape": kind_shape(rows)}, 70),
        {
            "transform": [{"filter": f"datum.batch === {batches[-1]}"}],
            "mark": {"type": "text", "aria": False, "align": "right", "dx": -4, "dy": -9, "fontSize": 11, "limit": 130},
            "encoding": {**place, "text": name},
        },
    ]
    return make_spec(f"Speed-up against batch size: {title}", 260, rows, layers, **CHOSEN)


def _speed_table(content: ReportContent) -> ReportTable:
    columns = ["model", "setting", *PHASE_WORDS.values(), *(f"{words}, 95 %" for words in PHASE_WORDS.values())]
    table = ReportTable("Speed: the data", [*columns, "prefill ms", "decode ms", "tokens/s"])
    for setting in content.settings:
        for subject in content.subjects:
            if (timing := subject.own_timing(setting)) is None:
                continue
            speedups = [timing.speedup[phase] for phase in PHASE_WORDS]
            table.add(
                subject.name,
                setting.words + setting.weights_words,
                *(number_cell(speedup.value, "{:.3f}") for speedup in speedups),
                *(interval_cell(speedup, 3) for speedup in speedups),
                number_cell(timing.prefill_ms, "{:.3f}"),
                number_cell(timing.decode_ms_per_token, "{:.3f}"),
                number_cell(timing.output_tokens_per_s, "{:.1f}"),
            )
    return table


# ---- where the time goes ----


def time_plots(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    """One plot for each phase, with a panel for each setting; none where communication was not measured."""
    plots = []
    for phase, title in PHASE_TITLES.items():
        # one rank has nothing to wait for: what is measured there is noise
        settings = [s for s in content.settings if s.tp_size > 1 and _spent(content, s, phase)]
        if settings:
            plots.append(_time_plot(content, settings, phase, title, commands))
    return plots


def _spent(content: ReportContent, setting: Setting, phase: str) -> list[tuple[Subject, Spent]]:
    return [
        (subject, timing.spent[phase])
        for subject in content.subjects
        if (timing := subject.own_timing(setting)) is not None and phase in timing.spent
    ]


def _time_plot(
    content: ReportContent, settings: list[Setting], phase: str, title: str, commands: list[str]
) -> ReportPlot:
    drawn = settings[: MOST_PANELS["time"]]
    more = f" Drawn are {len(drawn)} of {len(settings)} settings; the table has all." if drawn != settings else ""
    columns = ["model", "setting", "compute ms", "hidden ms", "waited ms", "waited, 95 %"]
    table = ReportTable(f"{title}: the data", columns)
    for setting in settings:
        for subject, spent in _spent(content, setting, phase):
            times = (number_cell(ms, "{:.3f}") for ms in (spent.compute, spent.hidden, spent.waited.value))
            table.add(subject.name, setting.words, *times, interval_cell(spent.waited, 3))
    return ReportPlot(
        name=f"time-{phase}",
        title=title,
        caption="Compute is the time without communication. Waiting is what communication adds; where the rounds do"
        " not tell it from nothing, its interval in the table holds 0. Hidden is the communication alone minus the"
        f" waiting, for layouts that overlap.{more}",
        summary=f"Stacked bars of {title.lower()} in {len(drawn)} settings: compute, hidden and waited milliseconds.",
        panels=[_time_panel(content, setting, phase) for setting in drawn],
        table=table,
        legend=[(words, part, "square") for part, words in PARTS.items()],
        commands=commands,
    )


def _time_panel(content: ReportContent, setting: Setting, phase: str) -> PlotPanel:
    rows: list[dict[str, Any]] = []
    for subject, spent in _spent(content, setting, phase):
        hidden, waited = spent.hidden or 0.0, max(0.0, spent.waited.value)
        for order, (part, value) in enumerate(zip(PARTS, (spent.compute - hidden, hidden, waited), strict=True)):
            words = f"{named(subject)}: {PARTS[part]} {value:.3f} ms; {setting.words}"
            if value > 0:
                rows.append({"name": subject.name, "part": part, "order": order, "ms": value, "words": words})
    bars: Spec = {
        "mark": {"type": "bar", "height": {"band": 0.7}, "stroke": "var(--page)", "strokeWidth": 1},
        "encoding": {
            "y": MODEL_ROWS,
            "x": quantitative("ms", "ms", aggregate="sum", axis={"tickCount": 5}),
            "color": nominal("part", {part: part for part in PARTS}, colours=True),
            "order": {"field": "order", "type": "quantitative"},
            "description": {"field": "words"},
        },
    }
    title = setting.short + setting.weights_words
    return PlotPanel(make_spec(f"{phase}: {title}", row_height(rows), rows, [bars]), title)
