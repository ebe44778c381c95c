"""bench.json for a person: tables, what to know when reading them, a picture. The first half serves all benchmarks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ladderize.console import Console, human_bytes
from ladderize.figure import PlotPanel, Spec, make_spec, nominal, picture_spec, quantitative, rule, save_pictures
from ladderize.runtime.bench.document import BenchDocument, BenchRow, RuntimeDocument, TimedDocument
from ladderize.runtime.bench.options import RoundsOptions
from ladderize.runtime.bench.rows import PHASES, PassCommunication, few_rounds, quartiles
from ladderize.runtime.schedule import Schedule

LEFT_COLUMNS = ("model", "class", "schedule")
TABLE_TITLES = {"prefill": "Prefill", "decode": "Decode, one step"}  # of the tables of inference, by phase
BAR_HEIGHT = 26  # pixels, with the space between bars


def show_document(
    document: TimedDocument,
    console: Console,
    *,
    heading: str,
    tables: Mapping[str, Sequence[Mapping[str, str]]],
    explanations: Iterable[str],
    warnings: Iterable[str],
) -> None:
    """Print the result of a benchmark, and warn of what makes it doubtful. tables: by title."""
    console.prose(heading)
    for title, lines in tables.items():
        console.result(f"\n{title}{' (emulated)' if document.emulated else ''}")
        console.table(lines, right=[key for key in lines[0] if key not in LEFT_COLUMNS])
    console.result("")
    for line in explanations:
        console.prose(line)
    if any(row.is_random for row in document.rows):
        console.prose("Weights are random: only the times are meaningful.")
    for warning in warnings:
        console.warn(warning)


def labelled(rows: Sequence[Any]) -> list[tuple[Any, str]]:
    """Each row with the last part of its model's name, or all of it where that would not tell models apart."""
    short = {row.model: Path(row.model).name for row in rows}
    unique = len(set(short.values())) == len(short)
    return [(row, short[row.model] if unique else row.model) for row in rows]


def rounds_text(options: RoundsOptions, *, complete: bool) -> str:
    """The end of a heading."""
    rounds = f"medians of {options.repeat} interleaved rounds" if options.repeat > 1 else "one round"
    return rounds + ("" if complete else "; UNFINISHED, these are the rows measured so far")


def schedule_text(schedule: Schedule) -> str:
    """``domino (2 chunks)``, ``domino (4 chunks, 2 columns)`` or ``sequential``."""
    if not schedule.is_domino:
        return schedule.name
    columns = f", {schedule.columns} columns" if schedule.columns > 1 else ""
    return f"{schedule.name} ({schedule.chunks} chunks{columns})"


def short_ms(milliseconds: float) -> str:
    """Four digits: as many as a measurement has at best."""
    digits = 3 if milliseconds < 10 else 2 if milliseconds < 100 else 1 if milliseconds < 1000 else 0
    return f"{milliseconds:.{digits}f}"


def bounds_text(interval: Sequence[float], *, digits: int = 2) -> str:
    low, high = interval
    return f"{low:.{digits}f}-{high:.{digits}f}"


def waited_text(communication: PassCommunication) -> str:
    """ms waited for; a bound where the rounds do not tell it from nothing, ``?`` where they say less than nothing.

    The difference of two medians can come out negative, which no waiting time is.
    """
    low, high = communication.exposed_interval_ms
    if high <= 0:
        return "?"
    return f"<{short_ms(high)}" if low <= 0 else short_ms(communication.exposed_ms)


def hidden_text(communication: PassCommunication) -> str:
    """ms of the communication that ran under compute, to the same rule as ``waited_text``."""
    low, high = communication.exposed_interval_ms
    if low <= 0:
        least = communication.alone_ms - high
        return f">{short_ms(least)}" if 0 < least < communication.alone_ms else "?"
    if communication.hidden_ms <= 0:  # it waited longer than the collectives take alone
        return "none"
    return short_ms(communication.hidden_ms)


def group_text(document: RuntimeDocument) -> str:
    """How many ranks over what; says whether they are emulated."""
    ranks, link = document.rows[0].tp_size, document.link
    if link is not None:
        return f"EMULATED: rank 0 of {ranks}, {link.name}"
    return f"{ranks} rank{'s' * (ranks > 1)}, {document.backend}"


def runtime_warnings(
    document: RuntimeDocument,
    variants: str,
    speedups: Iterable[tuple[str, Sequence[float]]],
    passes: Iterable[tuple[str, PassCommunication]],
) -> Iterator[str]:
    """How far an emulated link's times are known, and what the rounds leave open.

    variants: the word for what is compared. speedups: intervals by name. passes: by name.
    """
    link, outside = document.link, document.message_bytes_outside_link_range
    if link is not None and link.derived:
        yield f"{link.name} was not measured with {document.options.ranks} ranks: its times are {link.derived}"
    if link is not None and outside:
        sizes = " to ".join(human_bytes(size) for size in sorted({outside[0], outside[-1]}))
        yield f"extrapolated beyond the sizes that {link.name} was measured at: messages of {sizes}"
    if few := few_rounds(document.options.repeat):
        yield few
    if doubtful := [name for name, (low, high) in speedups if low <= 1 <= high]:
        yield (
            f"the rounds disagree by more than the {variants} differ, so these speed-ups may be noise:"
            f" {', '.join(doubtful)}; raise --repeat, or keep the machine idle"
        )
    if impossible := [name for name, one in passes if one.alone_ms > 0 and waited_text(one) == "?"]:
        yield (
            "without communication these were slower than with it, so the time waited is unknown:"
            f" {', '.join(impossible)}; perhaps other programs ran"
        )


def bar_panel(title: str, bars: Sequence[dict[str, Any]], colours: dict[str, str]) -> PlotPanel:
    """Stacked bars with error bars. Each has ``row``, its name; ``parts``: (part, start, stop); ``spread``, and maybe
    ``lower``, which is drawn below it: (median, low, high); ``text`` behind its end. colours: of the parts."""
    y: Spec = {"field": "row", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 300}}
    stop = max((end for bar in bars for end in (*bar["spread"], bar["parts"][-1][2])), default=1.0)
    x = quantitative("ms", "ms", scale={"domain": [0, 1.25 * stop], "nice": False})  # with room for the text
    parts = [
        {"row": bar["row"], "part": part, "ms": start, "stop": end}
        for bar in bars
        for part, start, end in bar["parts"]
        if end > start
    ]
    layers: list[Spec] = [
        {
            "data": {"values": parts},
            "mark": {"type": "bar", "height": {"band": 0.74}},
            "encoding": {"y": y, "x": x, "x2": {"field": "stop"}, "color": nominal("part", colours, colours=True)},
        }
    ]
    for key, offset in (("lower", 6), ("spread", 0)):
        spreads = [
            {"row": bar["row"], "ms": median, "low": low, "high": high, "text": bar["text"], "end": max(median, high)}
            for bar in bars
            if key in bar
            for median, low, high in [bar[key]]
        ]
        place: Spec = {"data": {"values": spreads}}
        error = rule({"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}, color="var(--ink)", yOffset=offset)
        tick = {"type": "tick", "color": "var(--ink)", "thickness": 1.5, "height": 8, "yOffset": offset}
        layers += [{**place, **error}, {**place, "mark": tick, "encoding": {"y": y, "x": x}}]
    text = {"y": y, "x": {**x, "field": "end"}, "text": {"field": "text"}}
    layers.append({**place, "mark": {"type": "text", "align": "left", "dx": 6}, "encoding": text})
    return PlotPanel(make_spec(title, BAR_HEIGHT * max(1, len(bars)), [], layers), picture_title=title)


# ---- inference ----

PART_COLOURS = {
    "compute": "compute",
    "communication hidden under compute": "hidden",
    "communication waited for": "waited",
}


def show_bench(document: BenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench``."""
    if not document.rows:
        return
    options, rows = document.options, labelled(document.rows)
    schedule = f", prefill by {schedule_text(options.prefill_schedule)}" if options.schedule != "sequential" else ""
    cases = [(row, f"{label} (batch {row.batch_size}, {phase})", phase) for row, label in rows for phase in PHASES]
    show_document(
        document,
        console,
        heading=f"{group_text(document)}; prompt {options.prompt_len}, output {options.output_len}{schedule},"
        f" {rounds_text(options, complete=document.complete)}",
        tables={
            title: _with_failed([_line(row, label, phase, document) for row, label in rows], document)
            for phase, title in TABLE_TITLES.items()
        },
        explanations=(*_explanations(document), *_verdict(document)),
        warnings=runtime_warnings(
            document,
            "models",
            [(name, row.speedup_interval(phase)) for row, name, phase in cases if document.has_interval(row)],
            [(name, row.communication[phase]) for row, name, phase in cases if row.communication is not None],
        ),
    )


def _line(row: BenchRow, label: str, phase: str, document: BenchDocument) -> dict[str, str]:
    line = {"model": label, "batch": str(row.batch_size), "ms": short_ms(row.total_ms(phase))}
    if phase == "decode":
        line["tokens/s"] = f"{row.output_tokens_per_s:.1f}"
    line |= {
        "speed-up": f"{row.speedup(phase):.2f}x",
        "95 % interval": bounds_text(row.speedup_interval(phase)) if document.has_interval(row) else "",
        "waited ms": "",
        "hidden ms": "",
        "comm. alone ms": "",
    }
    if row.communication is not None and (communication := row.communication[phase]).alone_ms:
        line["waited ms"] = waited_text(communication)
        line["comm. alone ms"] = short_ms(communication.alone_ms)
        if row.overlaps(phase):
            line["hidden ms"] = hidden_text(communication)
    return line


def _with_failed(lines: list[dict[str, str]], document: BenchDocument) -> list[dict[str, str]]:
    """The same, and a line for each model that failed the reference check."""
    blank = dict.fromkeys(lines[0], "")
    return lines + [{**blank, "model": Path(model).name, "ms": "failed"} for model in document.failed]


def _explanations(document: BenchDocument) -> Iterator[str]:
    communications = [one for row in document.rows for one in (row.communication or {}).values()]
    yield "speed-up: over the first model; its 95 % interval says how far the rounds disagree."
    yield "waited ms: longer than the same model without communication."
    yield "hidden ms: comm. alone ms (the communication by itself) minus waited ms; for what overlaps."
    if any(one.exposed_interval_ms[0] <= 0 < one.alone_ms for one in communications):
        yield "<, >: at most, at least (95 %), where the waiting is too short to be measured; ?: unknown."
    counts, shares = {}, []
    for row, label in labelled(document.rows):
        if row.communication is not None:
            counts[label] = str(row.communication["decode"].all_reduces)
        if row.overlap is not None:
            shares.append(f"{label} {row.overlap.share:.0%} (batch {row.batch_size})")
    counted = ", ".join(f"{label} {count}" for label, count in counts.items())
    yield f"All-reduces of the layers in one pass: {counted}."
    if shares:
        yield f"Of the communication, under compute in the traces: {', '.join(shares)}."


def _verdict(document: BenchDocument) -> Iterator[str]:
    """What the reference check found, and which models it did not see."""
    labels = {row.model: label for row, label in labelled(document.rows)}
    for model, check in document.checks.items():
        equal = "all" if check.equal_greedy_tokens == check.greedy_tokens else f"{check.equal_greedy_tokens} of"
        as_good = "" if equal == "all" else ", the others within the tolerance"
        rms = ""
        if check.rms_difference is not None and check.rms_tolerance is not None:
            rms = f", root mean square {check.rms_difference:.2g} ({check.rms_tolerance:.2g})"
        yield (
            f"Reference check of {labels.get(model, model)}: passed. Largest logit difference to transformers in"
            f" float32 {check.logit_difference:.2g} (tolerance {check.tolerance:.2g}){rms}; {equal}"
            f" {check.greedy_tokens} tokens equal{as_good}."
        )
    for failure in document.failed.values():
        yield f"Reference check FAILED, so not timed: {failure}."
    if unchecked := sorted({row.model for row in document.rows if row.is_model and not (row.is_random or row.checked)}):
        yield f"Not checked against a reference: {', '.join(unchecked)}."


def plot_bench(document: BenchDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    rows = [row for row in document.rows if row.communication is not None]  # no-comm is the compute of the first
    ordered = sorted(labelled(rows), key=lambda one: one[0].batch_size)
    panels = []
    for phase, title in zip(PHASES, ("Prefill", "Decode, per step"), strict=True):
        bars = [_bar(row, phase, label) for row, label in ordered]
        panels.append(bar_panel(f"{title}; lines: medians and quartiles (below: of compute)", bars, PART_COLOURS))
    about = f"{group_text(document)}; medians of {document.options.repeat} interleaved rounds"
    return save_pictures(picture_spec(panels, title=about, columns=2, width=420), stem)


def _bar(row: BenchRow, phase: str, label: str) -> dict[str, Any]:
    """Compute, of which communication hides under the last part, then what is waited for, each with its spread."""
    assert row.communication is not None
    assert row.no_communication_samples_ms is not None
    total, communication = row.total_ms(phase), row.communication[phase]
    compute = communication.no_communication_ms
    # where noise makes the whole shorter than its compute, no more than all communication is hidden
    hidden = max(0.0, min(communication.hidden_ms, communication.alone_ms)) if row.overlaps(phase) else 0.0
    ends = (0.0, compute - hidden, compute, max(total, compute))
    return {
        "row": f"{label}, batch {row.batch_size}",
        "parts": list(zip(PART_COLOURS, ends, ends[1:], strict=False)),
        "spread": (total, *quartiles(row.samples_ms[phase])),
        "lower": (compute, *quartiles(row.no_communication_samples_ms[phase])),
        "text": f"{total:.3g} ms",
    }
