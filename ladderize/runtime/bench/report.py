"""bench.json for a person: a table for each phase, and what to know when reading them."""

from collections.abc import Sequence
from pathlib import Path

from ladderize.console import Console, human_bytes
from ladderize.runtime.bench.document import BenchDocument, BenchRow, PhaseCommunication
from ladderize.runtime.bench.instrument import PHASES


def show_bench(document: BenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench``, and warn of what makes it doubtful."""
    if not document.rows:
        return
    console.result(_heading(document))
    labels = row_labels(document.rows)
    for phase, title in zip(PHASES, ("Prefill", "Decode, per step (one token of each row)"), strict=True):
        lines = [_line(row, label, phase, document) for row, label in zip(document.rows, labels, strict=True)]
        console.result(f"\n{title}")
        console.table(lines, right=[key for key in lines[0] if key != "model"])
    console.result("")
    for line in (*_explanations(document), *_verdict(document)):
        console.result(line)
    for warning in _warnings(document, labels):
        console.warn(warning)


def row_labels(rows: Sequence[BenchRow]) -> list[str]:
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


def waited_text(communication: PhaseCommunication, digits: int) -> str:
    """What was waited for; a bound where the rounds do not tell it from nothing, ``?`` where they say less than none.

    The difference of two medians can come out negative, which no waiting time is.
    """
    low, high = communication.exposed_interval_ms
    if high <= 0 < communication.alone_ms:
        return "?"
    if low <= 0:
        return f"<{high:.{digits}f}" if high > 0 else f"{0:.{digits}f}"
    return f"{communication.exposed_ms:.{digits}f}"


def hidden_text(communication: PhaseCommunication, digits: int) -> str:
    """What of the communication ran under compute, to the same rule as ``waited_text``."""
    low, high = communication.exposed_interval_ms
    if high <= 0:
        return "?"
    if communication.hidden_ms <= 0:  # it waited longer than the collectives take alone
        return "none"
    if low <= 0:
        least = communication.alone_ms - high
        return f">{least:.{digits}f}" if least > 0 else "?"
    return f"{communication.hidden_ms:.{digits}f}"


def _heading(document: BenchDocument) -> str:
    options = document.options
    unfinished = "" if document.complete else "; UNFINISHED, these are the rows measured so far"
    return (
        f"{group_text(document)}; prompt {options.prompt_len}, output {options.output_len}, medians of"
        f" {options.repeat} interleaved rounds{unfinished}"
    )


def _line(row: BenchRow, label: str, phase: str, document: BenchDocument) -> dict[str, str]:
    digits = 2 if phase == "prefill" else 3
    is_first = row.model == document.rows[0].model
    low, high = row.speedup_interval(phase)
    line = {
        "model": label + (" (emulated)" if row.emulated else ""),
        "batch": str(row.batch_size),
        "ms": f"{row.total_ms(phase):.{digits}f}",
    }
    if phase == "decode":
        line["tokens/s"] = f"{row.output_tokens_per_s:.1f}"
    line |= {
        "speed-up": f"{row.speedup(phase):.3f}x",
        "95 % interval": "" if is_first else f"{low:.3f}-{high:.3f}",
        "waited ms": "",
        "hidden ms": "",
        "comm. alone ms": "",
    }
    if phase == "decode":
        line["all- reduces"] = ""
    if row.communication is not None:
        communication = row.communication[phase]
        line["waited ms"] = waited_text(communication, digits)
        line["comm. alone ms"] = f"{communication.alone_ms:.{digits}f}" if communication.alone_ms else ""
        if row.overlaps and communication.alone_ms:
            line["hidden ms"] = hidden_text(communication, digits)
        if phase == "decode":
            line["all- reduces"] = str(communication.all_reduces)
    if phase == "decode" and any(other.overlap is not None for other in document.rows):
        line["under compute"] = "" if row.overlap is None else f"{row.overlap.share:.0%}"
    return line


def _explanations(document: BenchDocument) -> list[str]:
    lines = [
        "speed-up: over the first model; its 95 % interval says how far the rounds disagree.",
        "waited ms: longer than the same model without communication.",
        "hidden ms: of the communication's own time (comm. alone ms), what did not show. Layouts that overlap only.",
    ]
    if any("<" in waited_text(c, 3) for row in document.rows for c in (row.communication or {}).values()):
        lines.append("<: at most this (95 %); the rounds do not tell it from 0. >: at least this.")
    if any(row.is_random for row in document.rows):
        lines.append("Weights are random: these are times only.")
    return lines


def _verdict(document: BenchDocument) -> list[str]:
    """What the reference check found, and which models it did not see."""
    lines = []
    checked = {row.model: label for row, label in zip(document.rows, row_labels(document.rows), strict=True)}
    for model, check in document.checks.items():
        lines.append(
            f"Reference check of {checked.get(model, model)}: passed. The largest logit difference to transformers in"
            f" float32 is {check.logit_difference:.2g} (tolerance {check.tolerance:.2g});"
            f" {check.equal_greedy_tokens} of {check.greedy_tokens} tokens are equal, the others as good."
            if check.equal_greedy_tokens < check.greedy_tokens
            else f"Reference check of {checked.get(model, model)}: passed. The largest logit difference to transformers"
            f" in float32 is {check.logit_difference:.2g} (tolerance {check.tolerance:.2g}); all"
            f" {check.greedy_tokens} tokens are equal."
        )
    unchecked = sorted({row.model for row in document.rows if row.is_model and not (row.is_random or row.checked)})
    if unchecked:
        lines.append(f"Not checked against a reference: {', '.join(unchecked)}.")
    return lines


def _warnings(document: BenchDocument, labels: Sequence[str]) -> list[str]:
    link, found = document.link, []
    if link is not None and (outside := document.message_bytes_outside_link_range):
        found.append(
            f"beyond the sizes that {link.name} was measured at, so taken from its fit: messages of {_range(outside)}"
        )
    doubtful, impossible = [], []
    for row, label in zip(document.rows, labels, strict=True):
        for phase in PHASES:
            what = f"{label} (batch {row.batch_size}, {phase})"
            low, high = row.speedup_interval(phase)
            if low <= 1 <= high and row.model != document.rows[0].model:
                doubtful.append(what)
            if row.communication is not None and waited_text(row.communication[phase], 3) == "?":
                impossible.append(what)
    if doubtful:
        found.append(
            "the rounds disagree by more than the models differ, so that these speed-ups may be noise:"
            f" {', '.join(doubtful)}; raise --repeat, or keep the machine idle"
        )
    if impossible:
        found.append(
            "without communication these were slower than with it, so that what they waited cannot be told:"
            f" {', '.join(impossible)}; other programs ran, perhaps"
        )
    return found


def _range(sizes: list[int]) -> str:
    return human_bytes(sizes[0]) if len(sizes) == 1 else f"{human_bytes(sizes[0])} to {human_bytes(sizes[-1])}"
