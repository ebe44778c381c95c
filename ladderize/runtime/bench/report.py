"""bench.json for a person: a table for each phase, and what to know when reading them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ladderize.console import Console, human_bytes
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.speed_row import PHASES, PhaseCommunication
from ladderize.runtime.bench.spread import LEAST_ROUNDS
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import Schedule


def show_bench(document: BenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench``, and warn of what makes it doubtful."""
    if not document.rows:
        return
    console.prose(_heading(document))
    labels = row_labels(document.rows)
    emulated = " (emulated)" if document.emulated else ""
    for phase, title in zip(PHASES, ("Prefill", "Decode, one step"), strict=True):
        lines = [_line(row, label, phase, document) for row, label in zip(document.rows, labels, strict=True)]
        console.result(f"\n{title}{emulated}")
        console.table(lines, right=[key for key in lines[0] if key != "model"])
    console.result("")
    for line in (*_explanations(document), *_verdict(document)):
        console.prose(line)
    for warning in _warnings(document, labels):
        console.warn(warning)


class OfModel(Protocol):
    """A row of a benchmark."""

    @property
    def model(self) -> str: ...


class Waited(Protocol):
    """What was waited for in milliseconds, and its 95 % interval."""

    @property
    def exposed_ms(self) -> float: ...
    @property
    def exposed_interval_ms(self) -> list[float]: ...


def row_labels(rows: Sequence[OfModel]) -> list[str]:
    """The last part of each model's name, or all of it where that would not tell models apart."""
    short = {row.model: Path(row.model).name for row in rows}
    unique = len(set(short.values())) == len(short)
    return [short[row.model] if unique else row.model for row in rows]


def group_text(document: BenchDocument) -> str:
    """How many ranks over what; says whether they are emulated."""
    ranks, link = document.rows[0].tp_size, document.link
    if link is not None:
        return f"EMULATED: rank 0 of {ranks}, {link.name}"
    return f"{ranks} rank{'s' * (ranks > 1)}, {document.backend}"


def schedule_text(schedule: Schedule) -> str:
    """``domino (2 chunks)``, ``domino (4 chunks, 2 columns)`` or ``sequential``."""
    if not schedule.is_domino:
        return schedule.name
    columns = f", {schedule.columns} columns" if schedule.columns > 1 else ""
    return f"{schedule.name} ({schedule.chunks} chunks{columns})"


def waited_text(communication: Waited) -> str:
    """ms waited for; a bound where the rounds do not tell it from nothing, ``?`` where they say less than nothing.

    The difference of two medians can come out negative, which no waiting time is.
    """
    low, high = communication.exposed_interval_ms
    if high <= 0:
        return "?"
    return f"<{short_ms(high)}" if low <= 0 else short_ms(communication.exposed_ms)


def hidden_text(communication: PhaseCommunication) -> str:
    """ms of the communication that ran under compute, to the same rule as ``waited_text``."""
    low, high = communication.exposed_interval_ms
    if low <= 0:
        least = communication.alone_ms - high
        return f">{short_ms(least)}" if 0 < least < communication.alone_ms else "?"
    if communication.hidden_ms <= 0:  # it waited longer than the collectives take alone
        return "none"
    return short_ms(communication.hidden_ms)


def short_ms(milliseconds: float) -> str:
    """Four digits: as many as a measurement has at best."""
    digits = 3 if milliseconds < 10 else 2 if milliseconds < 100 else 1 if milliseconds < 1000 else 0
    return f"{milliseconds:.{digits}f}"


def _heading(document: BenchDocument) -> str:
    options = document.options
    unfinished = "" if document.complete else "; UNFINISHED, these are the rows measured so far"
    schedule = f", prefill by {schedule_text(options.prefill_schedule)}" if options.schedule != "sequential" else ""
    return (
        f"{group_text(document)}; prompt {options.prompt_len}, output {options.output_len}{schedule},"
        f" {f'medians of {options.repeat} interleaved rounds' if options.repeat > 1 else 'one round'}{unfinished}"
    )


def _line(row: BenchRow, label: str, phase: str, document: BenchDocument) -> dict[str, str]:
    low, high = row.speedup_interval(phase)
    line = {"model": label, "batch": str(row.batch_size), "ms": short_ms(row.total_ms(phase))}
    if phase == "decode":
        line["tokens/s"] = f"{row.output_tokens_per_s:.1f}"
    line |= {
        "speed-up": f"{row.speedup(phase):.2f}x",
        "95 % interval": f"{low:.2f}-{high:.2f}" if _has_interval(row, document) else "",
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


def _has_interval(row: BenchRow, document: BenchDocument) -> bool:
    return document.options.repeat >= LEAST_ROUNDS and row.model != document.rows[0].model


def _explanations(document: BenchDocument) -> list[str]:
    lines = [
        "speed-up: over the first model; its 95 % interval says how far the rounds disagree.",
        "waited ms: longer than the same model without communication.",
        "hidden ms: comm. alone ms (the communication by itself) minus waited ms; for what overlaps.",
        *_per_model(document),
    ]
    if any(c.exposed_interval_ms[0] <= 0 < c.alone_ms for row in document.rows for c in _communications(row)):
        lines.insert(3, "<, >: at most, at least (95 %), where the waiting is too short to be measured; ?: unknown.")
    if any(row.is_random for row in document.rows):
        lines.append("Weights are random: only the times are meaningful.")
    return lines


def _communications(row: BenchRow) -> list[PhaseCommunication]:
    return list((row.communication or {}).values())


def _per_model(document: BenchDocument) -> list[str]:
    """What has one figure for each model: the number of all-reduces, and what traces show."""
    counts, shares = {}, []
    for row, label in zip(document.rows, row_labels(document.rows), strict=True):
        if row.communication is not None:
            counts[label] = str(row.communication["decode"].all_reduces)
        if row.overlap is not None:
            shares.append(f"{label} {row.overlap.share:.0%} (batch {row.batch_size})")
    counted = ", ".join(f"{label} {count}" for label, count in counts.items())
    lines = [f"All-reduces of the layers in one pass: {counted}."]
    if shares:
        lines.append(f"Of the communication, under compute in the traces: {', '.join(shares)}.")
    return lines


def _verdict(document: BenchDocument) -> list[str]:
    """What the reference check found, and which models it did not see."""
    lines = []
    checked = {row.model: label for row, label in zip(document.rows, row_labels(document.rows), strict=True)}
    for model, check in document.checks.items():
        equal = "all" if check.equal_greedy_tokens == check.greedy_tokens else f"{check.equal_greedy_tokens} of"
        as_good = "" if equal == "all" else ", the others within the tolerance"
        lines.append(
            f"Reference check of {checked.get(model, model)}: passed. Largest logit difference to transformers in"
            f" float32 {check.logit_difference:.2g} (tolerance {check.tolerance:.2g}); {equal} {check.greedy_tokens}"
            f" tokens equal{as_good}."
        )
    unchecked = sorted({row.model for row in document.rows if row.is_model and not (row.is_random or row.checked)})
    if unchecked:
        lines.append(f"Not checked against a reference: {', '.join(unchecked)}.")
    return lines


def link_warnings(link: Link | None, ranks: int, outside: Sequence[int]) -> Iterator[str]:
    """How far an emulated link's times are known. outside: bytes of messages that it was not measured at, ascending."""
    if link is None:
        return
    if link.derived:
        yield f"{link.name} was not measured with {ranks} ranks: its times are {link.derived}"
    if outside:
        yield f"extrapolated beyond the sizes that {link.name} was measured at: messages of {_range(outside)}"


def _warnings(document: BenchDocument, labels: Sequence[str]) -> list[str]:
    found = list(link_warnings(document.link, document.options.ranks, document.message_bytes_outside_link_range))
    if document.options.repeat < LEAST_ROUNDS:
        found.append(f"with fewer than {LEAST_ROUNDS} rounds their scatter is unknown: no intervals; raise --repeat")
    doubtful, impossible = [], []
    for row, label in zip(document.rows, labels, strict=True):
        for phase in PHASES:
            what = f"{label} (batch {row.batch_size}, {phase})"
            low, high = row.speedup_interval(phase)
            if low <= 1 <= high and _has_interval(row, document):
                doubtful.append(what)
            if row.communication is not None and _is_impossible(row.communication[phase]):
                impossible.append(what)
    if doubtful:
        found.append(
            "the rounds disagree by more than the models differ, so these speed-ups may be noise:"
            f" {', '.join(doubtful)}; raise --repeat, or keep the machine idle"
        )
    if impossible:
        found.append(
            "without communication these were slower than with it, so the time waited is unknown:"
            f" {', '.join(impossible)}; perhaps other programs ran"
        )
    return found


def _is_impossible(communication: PhaseCommunication) -> bool:
    return communication.alone_ms > 0 and waited_text(communication) == "?"


def _range(sizes: Sequence[int]) -> str:
    return human_bytes(sizes[0]) if len(sizes) == 1 else f"{human_bytes(sizes[0])} to {human_bytes(sizes[-1])}"
