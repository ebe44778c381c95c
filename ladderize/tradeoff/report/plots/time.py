"""Where the time of a pass goes: compute, communication that runs under it, and communication that is waited for."""

from typing import Any

from ladderize.tradeoff.report.content.join import ReportContent
from ladderize.tradeoff.report.content.subjects import Setting, Spent, Subject
from ladderize.tradeoff.report.content.tables import ReportTable, TableCell, TableColumn
from ladderize.tradeoff.report.content.words import interval_text, named
from ladderize.tradeoff.report.plots.base import PlotPanel, ReportPlot, Spec, make_spec, row_height

PARTS = ("compute", "hidden", "waited")
PART_WORDS = {
    "compute": "compute",
    "hidden": "compute with communication beneath it",
    "waited": "waiting for communication",
}
PHASE_TITLES = {"prefill": "Prefill", "decode": "Decode, one token of each row"}
MOST_PANELS_OF_TIME = 6


def time_plots(content: ReportContent, commands: list[str]) -> list[ReportPlot]:
    """One plot for each phase, with a panel for each setting; none where communication was not measured."""
    plots = []
    for phase, title in PHASE_TITLES.items():
        # one rank has nothing to wait for: what is measured there is noise
        settings = [s for s in content.settings if s.tp_size > 1 and _spent(content, s, phase)]
        if settings:
            plots.append(_plot(content, settings, phase, title, commands))
    return plots


def _spent(content: ReportContent, setting: Setting, phase: str) -> list[tuple[Subject, Spent]]:
    found = []
    for subject in content.subjects:
        timing = subject.timing(setting)
        if timing is not None and subject.timed_as is None and phase in timing.spent:
            found.append((subject, timing.spent[phase]))
    return found


def _plot(content: ReportContent, settings: list[Setting], phase: str, title: str, commands: list[str]) -> ReportPlot:
    drawn = settings[:MOST_PANELS_OF_TIME]
    more = f" Drawn are {len(drawn)} of {len(settings)} settings; the table has all." if drawn != settings else ""
    return ReportPlot(
        name=f"time-{phase}",
        title=title,
        caption="Compute is the time without communication. Waiting is what communication adds; where the rounds do"
        " not tell it from nothing, its interval in the table holds 0. Hidden is the communication alone minus the"
        f" waiting, for layouts that overlap.{more}",
        summary=f"Stacked bars of {title.lower()} in {len(drawn)} settings: compute, hidden and waited milliseconds.",
        panels=[_panel(content, setting, phase) for setting in drawn],
        table=_table(content, settings, phase, title),
        legend=[(PART_WORDS[part], part, "square") for part in PARTS],
        commands=commands,
    )


def _panel(content: ReportContent, setting: Setting, phase: str) -> PlotPanel:
    rows: list[dict[str, Any]] = []
    for subject, spent in _spent(content, setting, phase):
        hidden, waited = spent.hidden or 0.0, max(0.0, spent.waited.value)
        for order, (part, value) in enumerate(zip(PARTS, (spent.compute - hidden, hidden, waited), strict=True)):
            words = f"{named(subject)}: {PART_WORDS[part]} {value:.3f} ms; {setting.words}"
            if value > 0:
                rows.append({"name": subject.name, "part": part, "order": order, "ms": value, "words": words})
    title = setting.short + setting.weights_words
    colours = {"domain": list(PARTS), "range": [f"var(--{part})" for part in PARTS]}
    layers: list[Spec] = [
        {
            "mark": {"type": "bar", "height": {"band": 0.7}, "stroke": "var(--page)", "strokeWidth": 1},
            "encoding": {
                "y": {"field": "name", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 170}},
                "x": {
                    "field": "ms",
                    "type": "quantitative",
                    "aggregate": "sum",
                    "title": "ms",
                    "axis": {"tickCount": 5},
                },
                "color": {"field": "part", "type": "nominal", "scale": colours},
                "order": {"field": "order", "type": "quantitative"},
                "description": {"field": "words"},
            },
        }
    ]
    return PlotPanel(
        make_spec(f"{phase}: {title}", row_height(len({row["name"] for row in rows})), layers, data={"values": rows}),
        title,
    )


def _table(content: ReportContent, settings: list[Setting], phase: str, title: str) -> ReportTable:
    columns = [TableColumn("model"), TableColumn("setting")]
    columns += [TableColumn(label, True) for label in ("compute ms", "hidden ms", "waited ms", "waited, 95 %")]
    table = ReportTable(f"{title}: the data", columns)
    for setting in settings:
        for subject, spent in _spent(content, setting, phase):
            table.add(
                subject.name,
                setting.words,
                TableCell(f"{spent.compute:.3f}", spent.compute),
                TableCell("" if spent.hidden is None else f"{spent.hidden:.3f}", spent.hidden),
                TableCell(f"{spent.waited.value:.3f}", spent.waited.value),
                TableCell(interval_text(spent.waited, 3), spent.waited.low),
            )
    return table
