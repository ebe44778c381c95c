"""The output of a benchmark: the document that is kept while it runs, and its tables."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ladderize.console import Console, human_bytes
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, write_json
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.runtime.bench.document import (
    LEAST_ROUNDS,
    PASSES,
    PHASES,
    WHOLE_STEP,
    BenchDocument,
    BenchRow,
    PhaseCommunication,
    few_rounds,
)
from ladderize.runtime.launch import run

TITLES = {
    "prefill": "Prefill",
    "decode": "Decode, one step",
    "step": "Training step",
    "forward": "Forward pass",
    "backward": "Backward pass",
}
NO_NUMBERS = ("model", "class")  # the columns that are no numbers


def run_and_show(
    measure: Callable[..., BenchDocument], plan: Any, device: str, out: Path | None, console: Console
) -> BenchDocument:
    """Call ``measure(ranks, plan, console)`` on every rank and return its document.

    Each document that rank 0 reports is written to ``out`` at once. The last one is shown at the end, also after an
    error. Raises UserError for a model or schedule that failed its check, and for an overlap that a trace disproves.
    """
    if out is not None:
        check_writable(out)
    newest: list[BenchDocument] = []

    def keep(document: BenchDocument) -> None:
        newest[:] = [document]
        if out is not None:
            write_json(out, document.to_dict())

    options = plan.options
    if options.tp_size > 1 and not already_started():
        console.note(f"starting {options.tp_size} ranks")
    try:
        document: BenchDocument = run(
            measure, plan, console, tp_size=options.tp_size, device=device, threads=options.threads, report=keep
        )
        if is_main_rank():
            keep(document)
    finally:  # also after Ctrl-C
        for shown in newest:
            console.document(shown.to_dict())
            show_bench(shown, console)
            if out is not None:
                console.note(f"wrote {out}")
    if document.failed:
        first, *others = document.failed.values()
        raise UserError(f"{first}, so it was not timed" + (f", and neither were {len(others)} more" if others else ""))
    if disproved := document.disproved:
        names = " and ".join(disproved)
        raise UserError(f"nothing overlapped in the trace of {names}, although it should: its row is not valid")
    return document


# ---- tables ----


def show_bench(document: BenchDocument, console: Console) -> None:
    """Print the tables of a benchmark, one for each part, what they mean, and doubts as warnings."""
    if not document.rows:
        return
    rounds = document.options.repeat
    heading = f"{_heading(document)}, " + (f"medians of {rounds} interleaved rounds" if rounds > 1 else "one round")
    console.prose(heading + ("" if document.complete else "; UNFINISHED, these are the rows measured so far"))
    rows = labelled(document.rows)
    for part in (WHOLE_STEP, *PASSES) if document.options.train else PHASES:
        console.result(f"\n{TITLES[part]}{' (emulated)' if document.emulated else ''}")
        lines = [_line(document, row, label, part) for row, label in rows]
        lines += [dict.fromkeys(lines[0], "") | {"model": Path(name).name, "ms": "failed"} for name in document.failed]
        kept = [key for key in lines[0] if any(line[key] for line in lines)]
        console.table(
            [{key: line[key] for key in kept} for line in lines], right=[key for key in kept if key not in NO_NUMBERS]
        )
    console.result("")
    for line in (*_explained_columns(document), *_explained_checks(document)):
        console.prose(line)
    for warning in _warnings(document):
        console.warn(warning)


def _heading(document: BenchDocument) -> str:
    """Return words for the engine, the ranks and what connects or emulates them, the sizes, and the schedule."""
    options, link = document.options, document.link
    words = f"{options.ranks} rank{'s' * (options.ranks > 1)}, {document.backend}"
    if options.emulate_tp is not None and link is not None:
        words = f"EMULATED: rank 0 of {options.ranks}, {link.name}"
    if document.engine == "vllm":
        words = f"vLLM {document.environment.vllm}, {words}"
        words += "" if document.messages is None else f", messages in flight by {document.messages}"
    words += f"; {'rows of' if options.train else 'prompt'} {options.prompt_len} tokens"
    words += "" if options.train else f", output {options.output_len}"
    return words if options.schedules[0] == "sequential" else f"{words}; schedule {options.schedules[0]}"


def _line(document: BenchDocument, row: BenchRow, label: str, part: str) -> dict[str, str]:
    """Return a row's line in the table of a part. Columns without any entry are left out later."""
    sent = (row.communication or {}).get(part)
    sent = sent if sent is not None and sent.alone_ms else None
    traced = (row.overlap or {}).get(part)
    first = next(one for one in document.rows if one.batch_size == row.batch_size)
    has_interval = document.options.repeat >= LEAST_ROUNDS and row is not first
    return {
        "model": label,
        "class": (row.architecture or "").removesuffix("ForCausalLM"),
        "batch": str(row.batch_size),
        "ms": short_ms(row.ms[part]),
        "tokens/s": f"{row.tokens_per_s:.1f}" if part in ("decode", WHOLE_STEP) else "",
        "of no-comm": f"{row.bound_share:.2f}" if part == WHOLE_STEP else "",
        "speed-up": f"{row.speedup[part]:.2f}x",
        "95 % interval": "{:.2f}-{:.2f}".format(*row.speedup_interval[part]) if has_interval else "",
        "all-reduces": "" if sent is None else str(sent.all_reduces),
        "waited ms": "" if sent is None else waited_text(sent),
        "comm. alone ms": "" if sent is None else short_ms(sent.alone_ms),
        "in trace": f"{traced.share:.0%}" if traced is not None and traced.in_flight_ms else "",
    }


def labelled(rows: Sequence[BenchRow]) -> list[tuple[BenchRow, str]]:
    """Return each row with a label: the last part of its model's name, or all of it where labels would be equal."""
    short = {row.model: Path(row.model).name for row in rows}
    unique = len(set(short.values())) == len(short)
    return [(row, short[row.model] if unique else row.model) for row in rows]


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


# ---- what the tables mean ----


def _explained_columns(document: BenchDocument) -> Iterator[str]:
    sent = [one for row in document.rows for one in (row.communication or {}).values() if one.alone_ms]
    yield "speed-up: over the first row of its batch size; its 95 % interval says how far the rounds disagree."
    if sent:
        yield "waited ms: longer than the same model without communication; comm. alone ms: with nothing beside it."
    if any(one.exposed_interval_ms[0] <= 0 for one in sent):
        yield "<: at most (95 %), where the waiting is too short to be measured; ?: unknown."
    if any(row.overlap for row in document.rows):
        yield "in trace: the share of the communication that ran under compute in the trace."
    if document.options.train:
        yield "of no-comm: the share that the fastest step of this model without communication has of the step."
    if any(row.is_random for row in document.rows):
        yield "Weights are random: only the times are meaningful."


def _explained_checks(document: BenchDocument) -> Iterator[str]:
    """Yield the outcome of the checks before timing, and what they did not see."""
    for failure in document.failed.values():
        yield f"Check FAILED, so not timed: {failure}."
    if document.options.train:
        if not document.options.check:
            yield "Not checked: whether the schedules give the same gradients."
        elif document.checks:
            worst = max(check["gradient_difference"] / check["tolerance"] for check in document.checks.values())
            yield (
                "Checked before timing: every schedule gives the loss and the gradients of the sequential one whose"
                f" sums block; the largest difference is {worst:.0%} of the tolerance."
            )
        return
    rows = labelled(document.rows)
    labels = {row.model: label for row, label in rows}
    for model, check in document.checks.items():
        yield (
            f"Reference check of {labels.get(model, model)}: passed. Largest logit difference to transformers in"
            f" float32 {check['logit_difference']:.2g} (tolerance {check['tolerance']:.2g}), root mean square"
            f" {check['rms_difference']:.2g} ({check['rms_tolerance']:.2g});"
            f" {check['equal_greedy_tokens']:.0f} of {check['greedy_tokens']:.0f} tokens equal."
        )
    unchecked = {row.model for row, _ in rows if row.is_model and not row.is_random} - set(document.checks)
    if unchecked:
        yield f"Not checked against a reference: {', '.join(sorted(unchecked))}."


def _warnings(document: BenchDocument) -> Iterator[str]:
    """Yield the doubts about an emulated link's times and about the rounds."""
    if (link := document.link) is not None:
        if link.derived:
            yield f"{link.name} was not measured with {document.options.ranks} ranks: its times are {link.derived}"
        sizes = sorted({int(name.split()[-2]) for name in document.alone_ms})
        if outside := [human_bytes(size) for size in sizes if not link.in_range(size)]:
            extrapolated = " to ".join(dict.fromkeys((outside[0], outside[-1])))
            yield f"extrapolated beyond the sizes that {link.name} was measured at: messages of {extrapolated}"
    if few := few_rounds(document.options.repeat):
        yield few
