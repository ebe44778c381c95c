"""Speed: against accuracy or perplexity, with the Pareto front; in each setting; and what a pass's time is spent on."""

import altair as alt

from ladderize.eval.table import margin_text
from ladderize.report import plot
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, Setting, Timing, WithInterval, pareto_front, speedup_text

SPEED_SCALE, SPEED_AXIS = alt.Scale(zero=False, nice=False, padding=16), alt.Axis(tickCount=6)
STAGES = {"as converted": 50, "aligned": 90, "trained": 150}  # the sizes of marks
TIMES = ["compute", "compute with communication beneath it", "waiting for communication"]
PHASE_TITLES = {"prefill": "Prefill", "decode": "Decode, one token of each row"}

# ---- the trade-off ----


def tradeoff_plots(content: ReportContent, first: Setting | None) -> list[plot.ReportPlot]:
    """Return a plot for each measure that was taken, with a panel for each setting; none without times of checkpoints.

    first: the setting that is shown first.
    """
    settings = sorted(content.real_settings, key=lambda setting: setting != first)
    caption = (
        "From end to end. Up and to the right is better. Bars are 95 % intervals of the speed-up and of the difference"
        " to dense. Filled marks are on the Pareto front: no other model is both faster and better, intervals aside."
        " Only these are named here; point at a mark for its name and numbers. Circles are measured; diamonds are"
        " emulated. Small marks are models as converted, larger ones are aligned, the largest trained."
    )
    margin = f" The dashed line is the margin, {margin_text(content.margin)}."
    of_accuracy = [_tradeoff_panel(content, plot.ACCURACY, setting) for setting in settings]
    of_perplexity = [_tradeoff_panel(content, plot.PERPLEXITY, setting) for setting in settings]
    plots = [
        plot.ReportPlot("tradeoff", "Speed-up against accuracy", caption + margin, of_accuracy),
        plot.ReportPlot("tradeoff-perplexity", "Speed-up against perplexity", caption, of_perplexity),
    ]
    return plot.filled(plots, 2)


def _tradeoff_panel(content: ReportContent, measure: plot.Measure, setting: Setting) -> plot.Panel:
    rows: list[plot.Row] = []
    for model in content.models:
        timing, score = model.timings.get(setting), getattr(model, measure.name)
        if timing is not None and score is not None:
            speed = timing.speedup()
            row: plot.Row = {"name": model.name, "family": model.family, "kind": setting.kind}
            row["stage"] = [*STAGES][bool(model.adaptation) + model.was_trained]
            row["description"] = f"{model.title}; end to end {speedup_text(speed)}, {setting.title}; {model.scores}"
            rows.append(row | speed.fields("x") | score.fields("y"))
    sign = 1 if measure.more_is_better else -1
    for row, is_front in zip(rows, pareto_front([(row["x"], sign * row["y"]) for row in rows]), strict=True):
        row["front"] = is_front
        row["description"] += "; on the Pareto front" * is_front
    x = alt.X("x:Q", title="speed-up over dense (\u00d7)", scale=SPEED_SCALE, axis=SPEED_AXIS)
    chart = alt.Chart().encode(x, measure.axis(alt.Y("y:Q")))
    coloured = chart.encode(plot.family_colour(rows))
    sizes = alt.Scale(type="ordinal", domain=[*STAGES], range=[*STAGES.values()])
    points = coloured.encode(
        alt.Shape("kind:N", scale=plot.KINDS, legend=None),
        alt.Size("stage:O", scale=sizes, legend=None),
        description="description:N",
    )
    front = chart.transform_filter("datum.front").mark_line(aria=False, color="gray", strokeDash=[2, 3])
    layers = [
        plot.level(alt.X, 1),
        plot.level(alt.Y, 0),
        *plot.margin_level(measure, content.margin),
        front.encode(order="x:Q"),
        plot.intervals(coloured, "x"),
        plot.intervals(coloured, "y"),
        points.transform_filter("!datum.front").mark_point(fill="white", opacity=1),
        points.transform_filter("datum.front").mark_point(filled=True, opacity=1),
        chart.mark_text(aria=False).encode(text=alt.condition("datum.front", "name:N", alt.value(""))),
    ]
    return plot.make_panel(setting.title, 300, rows, layers)


# ---- speed-ups in each setting ----


def _timings(content: ReportContent, setting: Setting) -> list[tuple[ReportModel, Timing]]:
    """Return all times in a setting, without those that a model shares with another."""
    models = [model for model in content.every if setting in model.timings and model.timed_as is None]
    return [(model, model.timings[setting]) for model in models]


def speed_plots(content: ReportContent) -> list[plot.ReportPlot]:
    """Return one plot with a panel for each setting; none without times."""
    caption = (
        "Speed-up from end to end over the first model of each benchmark; bars are 95 % intervals; the line at 1\u00d7"
        " is no gain. Circles are measured; diamonds are emulated: one real rank of a group that is not there."
    )
    if any(setting.is_random for setting in content.settings):
        caption += " Random weights: only the times mean something."
    panels = [_speed_panel(setting, _timings(content, setting)) for setting in content.settings]
    return plot.filled([plot.ReportPlot("speed", "Speed-up in each setting", caption, panels)])


def _speed_panel(setting: Setting, timings: list[tuple[ReportModel, Timing]]) -> plot.Panel:
    rows: list[plot.Row] = []
    for model, timing in timings:
        if not timing.is_first:
            ms = timing.row.ms
            description = (
                f"{model.title}; {setting.title}; end to end {speedup_text(timing.speedup())};"
                f" prefill {speedup_text(timing.speedup('prefill'))}, {ms['prefill']:.3f} ms;"
                f" decode {speedup_text(timing.speedup('decode'))}, {ms['decode']:.3f} ms,"
                f" {timing.row.tokens_per_s:.1f} tokens/s"
            )
            row = {"name": model.name, "family": model.family, "kind": setting.kind, "description": description}
            rows.append(row | timing.speedup().fields("x"))
    x = alt.X("x:Q", title="speed-up (\u00d7)", scale=SPEED_SCALE, axis=SPEED_AXIS)
    return plot.dots(setting.title, rows, x, [plot.level(alt.X, 1)])


# ---- what a pass's time is spent on ----


def time_plots(content: ReportContent) -> list[plot.ReportPlot]:
    """Return one plot for each phase, with a panel for each setting; none where communication was not measured."""
    caption = (
        "Compute is the time without communication. Waiting is what communication adds; where the rounds do not tell it"
        " from nothing, its interval in the data holds 0. Hidden is the communication alone minus the waiting, for"
        " layouts that overlap."
    )
    # one rank has nothing to wait for, so its waits are noise
    settings = [setting for setting in content.settings if setting.tp_size > 1]
    plots = []
    for phase, title in PHASE_TITLES.items():
        panels = [_time_panel(phase, setting, _timings(content, setting)) for setting in settings]
        plots.append(plot.ReportPlot(f"time-{phase}", title, caption, panels))
    return plot.filled(plots)


def _time_panel(phase: str, setting: Setting, timings: list[tuple[ReportModel, Timing]]) -> plot.Panel:
    rows: list[plot.Row] = []
    for model, timing in timings:
        if (sent := (timing.row.communication or {}).get(phase)) is None:
            continue
        # a difference of two medians: it may come out below 0, or above all communication, which no time can be
        computed = min(sent.no_communication_ms, timing.row.ms[phase])
        most = min(sent.alone_ms, computed)
        hidden = min(max(0.0, sent.alone_ms - sent.exposed_ms), most) if timing.row.overlaps(phase) else 0.0
        waited = WithInterval(sent.exposed_ms, *sent.exposed_interval_ms)
        times = WithInterval(computed - hidden), WithInterval(hidden), waited
        for order, time in enumerate(times):
            if time.value > 0:
                description = f"{model.title}: {TIMES[order]} {time.text(3)} ms; {setting.title}"
                row = {"name": model.name, "time": TIMES[order], "order": order, "ms": time.value}
                rows.append({**row, "description": description})
    bars = alt.Chart().encode(
        alt.X("ms:Q", title="ms"),
        alt.Y("name:N", title=None, sort=None),
        alt.Color("time:N", scale=alt.Scale(domain=TIMES), legend=alt.Legend(columns=2)),
        order="order:Q",
        description="description:N",
    )
    return plot.make_panel(setting.title, alt.Step(22), rows, [bars.mark_bar(height={"band": 0.7})])
