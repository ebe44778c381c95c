"""The plots of speed-ups in each setting, and of the parts of a pass's time."""

from typing import Any

from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, Setting, Timing, WithInterval, speedup_text
from ladderize.report.plot import (
    MODEL_ROWS,
    ReportPlot,
    Spec,
    dots,
    level,
    make_spec,
    nominal,
    quantitative,
    row_height,
)

PARTS = {
    "compute": "compute",
    "hidden": "compute with communication beneath it",
    "waited": "waiting for communication",
}
PHASE_TITLES = {"prefill": "Prefill", "decode": "Decode, one token of each row"}


def _timings(content: ReportContent) -> dict[Setting, list[tuple[ReportModel, Timing]]]:
    """Return all times by setting, without times that a model shares with another."""
    models = [one for one in content.every if one.timed_as is None]
    return {
        setting: [(one, timing) for one in models if (timing := one.timing(setting)) is not None]
        for setting in content.settings
    }


def speed_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot with a panel for each setting; none without times."""
    if not content.settings:
        return []
    caption = (
        "Speed-up from end to end over the first model of each benchmark; bars are 95 % intervals; the line at 1\u00d7"
        " is no gain. Circles are measured; diamonds are emulated: one real rank of a group that is not there."
    )
    if any(setting.note for setting in content.settings):
        caption += " Random weights: only the times mean something."
    compared = {setting: pairs for setting, pairs in _timings(content).items() if not all(t.is_first for _, t in pairs)}
    panels = [_speed_panel(setting, timings) for setting, timings in compared.items()]
    return [ReportPlot("speed", "Speed-up in each setting", caption, panels)] if panels else []


def _speed_panel(setting: Setting, timings: list[tuple[ReportModel, Timing]]) -> Spec:
    rows = [
        {
            "name": one.name,
            "family": one.family,
            "kind": setting.kind,
            **timing.whole.fields("x"),
            "words": f"{one.title}; {setting.words}; end to end {speedup_text(timing.whole)};"
            f" prefill {speedup_text(timing.speedup('prefill'))}, {timing.row.ms['prefill']:.3f} ms;"
            f" decode {speedup_text(timing.speedup('decode'))}, {timing.row.ms['decode']:.3f} ms,"
            f" {timing.row.tokens_per_s:.1f} tokens/s",
        }
        for one, timing in timings
        if not timing.is_first
    ]
    axis = {"format": ".3~f", "labelExpr": "datum.label + '\u00d7'", "tickCount": 5}
    x = quantitative("x", "speed-up", scale={"zero": False}, axis=axis)
    return dots(setting.words, rows, x, [level("x", 1)])


# ---- the parts of a pass's time ----


def time_plots(content: ReportContent) -> list[ReportPlot]:
    """Return one plot for each phase, with a panel for each setting; none where communication was not measured."""
    caption = (
        "Compute is the time without communication. Waiting is what communication adds; where the rounds do not tell it"
        " from nothing, its interval in the data holds 0. Hidden is the communication alone minus the waiting, for"
        " layouts that overlap."
    )
    # one rank has nothing to wait for, so its waits are noise
    timings = {setting: pairs for setting, pairs in _timings(content).items() if setting.tp_size > 1}
    panels = {phase: [_time_panel(phase, *known) for known in timings.items()] for phase in PHASE_TITLES}
    measured = {phase: [panel for panel in drawn if panel["data"]["values"]] for phase, drawn in panels.items()}
    return [
        ReportPlot(f"time-{phase}", PHASE_TITLES[phase], caption, drawn) for phase, drawn in measured.items() if drawn
    ]


def _time_panel(phase: str, setting: Setting, timings: list[tuple[ReportModel, Timing]]) -> Spec:
    rows: list[dict[str, Any]] = []
    for one, timing in timings:
        if (sent := (timing.row.communication or {}).get(phase)) is None:
            continue
        # a difference of two medians: it may come out below 0, or above all communication, which no time can be
        computed = min(sent.no_communication_ms, timing.row.ms[phase])
        most = min(sent.alone_ms, computed)
        hidden = min(max(0.0, sent.alone_ms - sent.exposed_ms), most) if timing.row.overlaps(phase) else 0.0
        waited = WithInterval(sent.exposed_ms, *sent.exposed_interval_ms)
        values = (computed - hidden, hidden, max(0.0, waited.value))
        for order, (part, value) in enumerate(zip(PARTS.values(), values, strict=True)):
            shown = waited.text(3) if order == 2 else f"{value:.3f}"
            words = f"{one.title}: {part} {shown} ms; {setting.words}"
            if value > 0:
                rows.append({"name": one.name, "part": part, "order": order, "ms": value, "words": words})
    bars: Spec = {
        "mark": {"type": "bar", "height": {"band": 0.7}, "stroke": "var(--page)", "strokeWidth": 1},
        "encoding": {
            "y": MODEL_ROWS,
            "x": quantitative("ms", "ms", aggregate="sum", axis={"tickCount": 5}),
            "color": {**nominal("part", {words: part for part, words in PARTS.items()}), "legend": {"columns": 2}},
            "order": {"field": "order", "type": "quantitative"},
            "description": {"field": "words"},
        },
    }
    return make_spec(setting.words, row_height(rows), rows, [bars])
