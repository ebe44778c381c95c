"""The plots of speed-up against batch size, for each group of ranks and link, and of the parts of a pass's time."""

from dataclasses import replace
from itertools import groupby
from typing import Any

from ladderize.report.join import ReportContent
from ladderize.report.models import PHASE_WORDS, ReportModel, Setting, Timing, WithInterval, speedup_text
from ladderize.report.plot import (
    MODEL_ROWS,
    PlotChoice,
    PlotPanel,
    ReportPlot,
    Spec,
    dots,
    family_colour,
    family_legend,
    intervals,
    kind_shape,
    level,
    lines,
    make_spec,
    marks,
    nominal,
    quantitative,
    row_height,
)
from ladderize.runtime.bench.document import BenchRow

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


def _timings(content: ReportContent, settings: list[Setting]) -> list[tuple[ReportModel, Timing]]:
    """Return all times by setting, without times that a model shares with another."""
    return [
        (one, timing)
        for setting in settings
        for one in content.every
        if not one.timed_as and (timing := one.timing(setting)) is not None
    ]


def speed_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot with a panel for each group of ranks, of all batch sizes; none without times."""
    groups = [list(same) for _, same in groupby(content.settings, key=lambda one: replace(one, batch_size=0))]
    if not groups:
        return []
    timings = _timings(content, content.settings)
    words = " Random weights: only the times mean something." if any(one.note for one in content.settings) else ""
    return [
        ReportPlot(
            name="speed",
            title="Speed-up by batch size and link",
            caption="Speed-up over the first model of each benchmark; bars are 95 % intervals; the line at 1\u00d7 is"
            " no gain. Circles are measured; diamonds are emulated: one real rank of a group that is not"
            f" there.{words}",
            summary=f"Speed-ups of {len({id(one) for one, _ in timings})} models in {len(content.settings)} settings.",
            panels=[_speed_panel(content, settings) for settings in groups],
            legend=family_legend([{"family": one.family, "kind": timing.setting.kind} for one, timing in timings]),
            choices=[PlotChoice("phase", "Time of", list(PHASE_WORDS.items()))],
        )
    ]


def _speed_panel(content: ReportContent, settings: list[Setting]) -> PlotPanel:
    rows = [
        {
            "name": one.name,
            "family": one.family,
            "kind": timing.setting.kind,
            "phase": phase,
            "batch": timing.setting.batch_size,
            **timing.speedup(phase).fields("x"),
            "words": f"{one.title}; {words} {speedup_text(timing.speedup(phase))}; {timing.setting.words}"
            f"{_pass_words(timing.row, phase)}",
        }
        for one, timing in _timings(content, settings)
        if not timing.is_first
        for phase, words in PHASE_WORDS.items()
    ]
    if len(settings) > 1 and rows:
        return PlotPanel(_speed_lines(rows, settings[0].place), settings[0].place)
    title = settings[0].short
    return PlotPanel(dots(f"Speed-ups: {title}", rows, SPEEDUP, [level("x", 1)], **CHOSEN), title)


def _pass_words(row: BenchRow, phase: str) -> str:
    if phase == "decode":
        return f"; {row.ms['decode']:.3f} ms, {row.tokens_per_s:.1f} tokens/s"
    return f"; {row.ms['prefill']:.3f} ms" if phase == "prefill" else ""


def _speed_lines(rows: list[dict[str, Any]], title: str) -> Spec:
    """Draw several batch sizes: a line for each model, with its name at the end."""
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


# ---- the parts of a pass's time ----


def time_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot for each phase, with a panel for each setting; none where communication was not measured."""
    # one rank has nothing to wait for, so its waits are noise
    timings = [pair for pair in _timings(content, content.settings) if pair[1].setting.tp_size > 1]
    measured = {
        phase: [pair for pair in timings if phase in (pair[1].row.communication or {})] for phase in PHASE_TITLES
    }
    return [_time_plot(timings, phase, PHASE_TITLES[phase]) for phase, timings in measured.items() if timings]


def _time_parts(timing: Timing, phase: str) -> tuple[float, float | None, WithInterval]:
    """Return the milliseconds of a pass: without communication; of communication under compute, None for a layout that
    overlaps nothing; and waited."""
    part = (timing.row.communication or {})[phase]
    # a difference of two medians: it may come out below 0, or above all communication, which no time can be
    most = min(part.alone_ms, part.no_communication_ms)
    hidden = min(max(0.0, part.alone_ms - part.exposed_ms), most) if timing.row.overlaps(phase) else None
    return part.no_communication_ms, hidden, WithInterval(part.exposed_ms, *part.exposed_interval_ms)


def _time_plot(timings: list[tuple[ReportModel, Timing]], phase: str, title: str) -> ReportPlot:
    settings = list(dict.fromkeys(timing.setting for _, timing in timings))
    return ReportPlot(
        name=f"time-{phase}",
        title=title,
        caption="Compute is the time without communication. Waiting is what communication adds; where the rounds do"
        " not tell it from nothing, its interval in the data holds 0. Hidden is the communication alone minus the"
        " waiting, for layouts that overlap.",
        summary=f"Stacked bars of {title.lower()}: compute, hidden and waited milliseconds.",
        panels=[_time_panel([pair for pair in timings if pair[1].setting == setting], phase) for setting in settings],
        legend=[(words, part, "square") for part, words in PARTS.items()],
    )


def _time_panel(timings: list[tuple[ReportModel, Timing]], phase: str) -> PlotPanel:
    setting, rows = timings[0][1].setting, []
    for one, timing in timings:
        compute, hidden, waited = _time_parts(timing, phase)
        values = (compute - (hidden or 0.0), hidden or 0.0, max(0.0, waited.value))
        for order, (part, value) in enumerate(zip(PARTS, values, strict=True)):
            shown = waited.text(3) if part == "waited" else f"{value:.3f}"
            words = f"{one.title}: {PARTS[part]} {shown} ms; {setting.words}"
            if value > 0:
                rows.append({"name": one.name, "part": part, "order": order, "ms": value, "words": words})
    bars: Spec = {
        "mark": {"type": "bar", "height": {"band": 0.7}, "stroke": "var(--page)", "strokeWidth": 1},
        "encoding": {
            "y": MODEL_ROWS,
            "x": quantitative("ms", "ms", aggregate="sum", axis={"tickCount": 5}),
            "color": nominal("part", {part: part for part in PARTS}),
            "order": {"field": "order", "type": "quantitative"},
            "description": {"field": "words"},
        },
    }
    return PlotPanel(make_spec(f"{phase}: {setting.short}", row_height(rows), rows, [bars]), setting.short)
