"""The output of a benchmark: the document that is kept while it runs, and its tables."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ladderize.console import Console, human_bytes
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, write_json
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.runtime.bench.document import (
    PHASES,
    BenchDocument,
    BenchRow,
    PhaseCommunication,
    TimedDocument,
    few_rounds,
)
from ladderize.runtime.launch import run
from ladderize.runtime.schedule import Schedule

TABLES = {"prefill": "Prefill", "decode": "Decode, one step"}  # of inference, by phase
SomeDocument = TypeVar("SomeDocument", bound=TimedDocument)


def run_and_show(
    measure: Callable[..., SomeDocument],
    plan: Any,
    device: str,
    out: Path | None,
    console: Console,
    show: Callable[[SomeDocument, Console], None],
) -> SomeDocument:
    """Call ``measure(ranks, plan, console)`` on every rank and return its document.

    Each document that rank 0 reports is written to ``out`` at once. The last one is shown at the end, also after an
    error.
    """
    if out is not None:
        check_writable(out)
    newest: list[SomeDocument] = []

    def keep(document: SomeDocument) -> None:
        newest[:] = [document]
        if out is not None:
            write_json(out, document.to_dict())

    options = plan.options
    if options.tp_size > 1 and not already_started():
        console.note(f"starting {options.tp_size} ranks")
    try:
        document: SomeDocument = run(
            measure, plan, console, tp_size=options.tp_size, device=device, threads=options.threads, report=keep
        )
        if is_main_rank():
            keep(document)
    finally:  # also after Ctrl-C
        for shown in newest:
            console.document(shown.to_dict())
            show(shown, console)
            if out is not None:
                console.note(f"wrote {out}")
    return document


def check_sound(document: TimedDocument, promise: str) -> None:
    """Raise UserError if a model or schedule failed its check, or nothing overlapped in the trace of a pass.

    promise: the part of the run that should overlap.
    """
    if document.failed:
        first, *others = document.failed.values()
        raise UserError(f"{first}, so it was not timed" + (f", and neither were {len(others)} more" if others else ""))
    if disproved := document.disproved:
        raise UserError(
            f"nothing overlapped in the trace of {' and '.join(disproved)}, although {promise} overlaps: its row is not"
            " valid"
        )


# ---- tables ----


def table_line(
    document: TimedDocument,
    row: Any,
    label: str,
    milliseconds: float,
    speedup: tuple[float, list[float]] | None = None,
    communication: PhaseCommunication | None = None,
    *,
    overlaps: bool = False,
    variant: Mapping[str, str] | None = None,
    more: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return one line of a benchmark's table.

    variant: a further column that identifies the row.
    more: further columns of figures.
    """
    line = {"model": label, **(variant or {}), "batch": str(row.batch_size), "ms": short_ms(milliseconds)}
    line |= more or {}
    if speedup is not None:
        line["speed-up"] = f"{speedup[0]:.2f}x"
        line["95 % interval"] = "{:.2f}-{:.2f}".format(*speedup[1]) if document.has_interval(row) else ""
    sent = communication if communication is not None and communication.alone_ms else None
    line["waited ms"] = "" if sent is None else waited_text(sent)
    line["hidden ms"] = hidden_text(sent) if sent is not None and overlaps else ""
    line["comm. alone ms"] = "" if sent is None else short_ms(sent.alone_ms)
    return line


def show_tables(
    document: TimedDocument,
    console: Console,
    *,
    heading: str,
    tables: dict[str, list[dict[str, str]]],
    explanations: Iterable[str],
    speedups: Iterable[tuple[str, Sequence[float]]],
    communications: Sequence[tuple[str, PhaseCommunication]],
) -> None:
    """Print the result of a benchmark, and its doubts as warnings.

    tables: by title; columns without any entry are left out.
    speedups: intervals by the name of a row.
    communications: by the name of a pass.
    """
    rounds = document.options.repeat
    heading += f", medians of {rounds} interleaved rounds" if rounds > 1 else ", one round"
    console.prose(heading + ("" if document.complete else "; UNFINISHED, these are the rows measured so far"))
    for title, lines in tables.items():
        console.result(f"\n{title}{' (emulated)' if document.emulated else ''}")
        kept = [key for key in lines[0] if any(line[key] for line in lines)]
        right = [key for key in kept if key not in ("model", "class", "schedule")]
        console.table([{key: line[key] for key in kept} for line in lines], right=right)
    console.result("")
    for line in (*_explained_columns([one for _, one in communications]), *explanations):
        console.prose(line)
    if any(row.is_random for row in document.rows):
        console.prose("Weights are random: only the times are meaningful.")
    for warning in _warnings(document, speedups, communications):
        console.warn(warning)


def _explained_columns(communications: Sequence[PhaseCommunication]) -> Iterator[str]:
    yield "speed-up: over the first row of its batch size; its 95 % interval says how far the rounds disagree."
    if any(one.alone_ms for one in communications):
        yield "waited ms: longer than the same model without communication."
        yield "hidden ms: comm. alone ms (the communication by itself) minus waited ms; for what overlaps."
    if any(one.exposed_interval_ms[0] <= 0 < one.alone_ms for one in communications):
        yield "<, >: at most, at least (95 %), where the waiting is too short to be measured; ?: unknown."


def _warnings(
    document: TimedDocument,
    speedups: Iterable[tuple[str, Sequence[float]]],
    communications: Iterable[tuple[str, PhaseCommunication]],
) -> Iterator[str]:
    """Yield the doubts about an emulated link's times and about the rounds."""
    link, outside = document.link, document.message_bytes_outside_link_range
    if link is not None and link.derived:
        yield f"{link.name} was not measured with {document.options.ranks} ranks: its times are {link.derived}"
    if link is not None and outside:
        sizes = " to ".join(human_bytes(size) for size in sorted({outside[0], outside[-1]}))
        yield f"extrapolated beyond the sizes that {link.name} was measured at: messages of {sizes}"
    if few := few_rounds(document.options.repeat):
        yield few
    elif doubtful := [name for name, (low, high) in speedups if low <= 1 <= high]:
        yield (
            "the rounds disagree by more than the rows differ, so these speed-ups may be noise:"
            f" {', '.join(doubtful)}; raise --repeat, or keep the machine idle"
        )
    if impossible := [name for name, one in communications if one.alone_ms > 0 and waited_text(one) == "?"]:
        yield (
            "without communication these were slower than with it, so the time waited is unknown:"
            f" {', '.join(impossible)}; perhaps other programs ran"
        )


def labelled(rows: Sequence[Any]) -> list[tuple[Any, str]]:
    """Return each row with a label: the last part of its model's name, or all of it where labels would be equal."""
    short = {row.model: Path(row.model).name for row in rows}
    unique = len(set(short.values())) == len(short)
    return [(row, short[row.model] if unique else row.model) for row in rows]


def group_text(document: TimedDocument) -> str:
    """Return words for the number of ranks and for what connects or emulates them."""
    ranks, link = document.options.ranks, document.link
    if document.options.emulate_tp is not None and link is not None:
        return f"EMULATED: rank 0 of {ranks}, {link.name}"
    return f"{ranks} rank{'s' * (ranks > 1)}, {document.backend}"


def schedule_text(schedule: Schedule) -> str:
    """Return ``domino (2 chunks)``, ``domino (4 chunks, 2 columns)`` or ``sequential``."""
    if not schedule.is_domino:
        return schedule.name
    columns = f", {schedule.columns} columns" if schedule.columns > 1 else ""
    return f"{schedule.name} ({schedule.chunks} chunks{columns})"


def short_ms(milliseconds: float) -> str:
    """Return the number with four digits, as many as a measurement has at best."""
    digits = 3 if milliseconds < 10 else 2 if milliseconds < 100 else 1 if milliseconds < 1000 else 0
    return f"{milliseconds:.{digits}f}"


def waited_text(communication: PhaseCommunication) -> str:
    """Return the ms waited for: a bound where the rounds do not tell it from 0, ``?`` where they say less.

    The difference of two medians can come out negative, which no waiting time is.
    """
    low, high = communication.exposed_interval_ms
    if high <= 0:
        return "?"
    return f"<{short_ms(high)}" if low <= 0 else short_ms(communication.exposed_ms)


def hidden_text(communication: PhaseCommunication) -> str:
    """Return the ms of the communication that ran under compute, by the rule of ``waited_text``."""
    low, high = communication.exposed_interval_ms
    if low <= 0:
        least = communication.alone_ms - high
        return f">{short_ms(least)}" if 0 < least < communication.alone_ms else "?"
    if communication.hidden_ms <= 0:  # it waited longer than the collectives take alone
        return "none"
    return short_ms(communication.hidden_ms)


# ---- inference ----


def show_bench(document: BenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench``, on either engine."""
    if not document.rows:
        return
    options, rows = document.options, labelled(document.rows)
    schedule = f", prefill by {schedule_text(options.prefill_schedule)}" if options.schedule != "sequential" else ""
    names = [(row, f"{label} (batch {row.batch_size}, {phase})", phase) for row, label in rows for phase in PHASES]
    show_tables(
        document,
        console,
        heading=f"{_engine_text(document)}; prompt {options.prompt_len}, output {options.output_len}{schedule}",
        tables={title: _lines(document, rows, phase) for phase, title in TABLES.items()},
        explanations=(*_sent(document), *_verdict(document), *_of_vllm(document)),
        speedups=[(name, row.speedup_interval(phase)) for row, name, phase in names if document.has_interval(row)],
        communications=[(name, row.communication[phase]) for row, name, phase in names if row.communication],
    )


def _engine_text(document: BenchDocument) -> str:
    if document.engine is None:
        return group_text(document)
    messages = "" if document.messages is None else f", messages in flight by {document.messages}"
    return f"vLLM {document.environment.vllm}, {group_text(document)}{messages}"


def _lines(document: BenchDocument, rows: Sequence[tuple[BenchRow, str]], phase: str) -> list[dict[str, str]]:
    lines = []
    for row, label in rows:
        variant = {"class": (row.architecture or "").removesuffix("ForCausalLM")}
        more = {"tokens/s": f"{row.output_tokens_per_s:.1f}"} if phase == "decode" else {}
        communication = row.communication[phase] if row.communication is not None else None
        speedup, overlaps = (row.speedup(phase), row.speedup_interval(phase)), row.overlaps(phase)
        figures = (row.total_ms(phase), speedup, communication)
        lines.append(table_line(document, row, label, *figures, overlaps=overlaps, variant=variant, more=more))
    blank = dict.fromkeys(lines[0], "")
    return lines + [{**blank, "model": Path(model).name, "ms": "failed"} for model in document.failed]


def _sent(document: BenchDocument) -> Iterator[str]:
    rows = labelled(document.rows)
    counts = {label: row.communication["decode"].all_reduces for row, label in rows if row.communication is not None}
    if counts:
        counted = ", ".join(f"{label} {count}" for label, count in counts.items())
        yield f"All-reduces of the layers in one pass: {counted}."
    shares = [
        f"{label} {phase} {overlap.share:.0%} (batch {row.batch_size})"
        for row, label in rows
        for phase, overlap in (row.overlap or {}).items()
        if overlap.in_flight_ms
    ]
    if shares:
        yield f"Of the communication, under compute in the traces: {', '.join(shares)}."


def _verdict(document: BenchDocument) -> Iterator[str]:
    """Yield the outcome of the reference check, and the models that it did not see."""
    labels = {row.model: label for row, label in labelled(document.rows)}
    for model, check in document.checks.items():
        equal = "all" if check.equal_greedy_tokens == check.greedy_tokens else f"{check.equal_greedy_tokens} of"
        as_good = "" if equal == "all" else ", the others within the tolerance"
        yield (
            f"Reference check of {labels.get(model, model)}: passed. Largest logit difference to transformers in"
            f" float32 {check.logit_difference:.2g} (tolerance {check.tolerance:.2g}), root mean square"
            f" {check.rms_difference:.2g} ({check.rms_tolerance:.2g}); {equal} {check.greedy_tokens} tokens"
            f" equal{as_good}."
        )
    for failure in document.failed.values():
        yield f"Reference check FAILED, so not timed: {failure}."
    if unchecked := sorted({row.model for row in document.rows if row.is_model and not (row.is_random or row.checked)}):
        yield f"Not checked against a reference: {', '.join(unchecked)}."


def _of_vllm(document: BenchDocument) -> Iterator[str]:
    if document.engine is None:
        return
    rows = labelled(document.rows)
    fused = dict.fromkeys(label for row, label in rows if row.fused_norm)
    if document.options.tp_size > 1:
        yield (
            f"Norms are fused into the all-reduces before them in: {', '.join(fused) or 'no row'}."
            " An overlapped sum is not fused."
        )
    if any(row.tp_size < document.options.tp_size for row, _ in rows):
        yield "2 replicas: on half of the ranks each, at the same time, each with half of the batch."
