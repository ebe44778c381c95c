"""``ladderize bench --train`` from its options to its document: plan, measure, keep, show."""

from pathlib import Path

from ladderize.console import SILENT, Console, human_bytes
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, write_json
from ladderize.ranks.device import check_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import already_started
from ladderize.runtime.bench.options import ModelChoice
from ladderize.runtime.bench.report import link_warnings, row_labels, schedule_text, short_ms, waited_text
from ladderize.runtime.bench.spread import LEAST_ROUNDS
from ladderize.runtime.bench.training.document import PassCommunication, TrainingBenchDocument, TrainingBenchRow
from ladderize.runtime.bench.training.measure import measure_training
from ladderize.runtime.bench.training.options import TrainingBenchOptions
from ladderize.runtime.bench.training.plan import plan_training_bench
from ladderize.runtime.bench.training.steps import STEP_PASSES
from ladderize.runtime.launch import run


def show_training_bench(document: TrainingBenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench --train``, and warn of what makes it doubtful."""
    if not document.rows:
        return
    console.prose(_heading(document))
    labels = _labels(document)
    emulated = " (emulated)" if document.emulated else ""
    for title, line in ((f"Training step{emulated}", _step_line), (f"Its two passes{emulated}", _passes_line)):
        lines = [line(row, label, document) for row, label in zip(document.rows, labels, strict=True)]
        console.result(f"\n{title}")
        console.table(lines, right=[key for key in lines[0] if key not in ("model", "schedule")])
    console.result("")
    for text in _explanations(document, labels):
        console.prose(text)
    for warning in _warnings(document, labels):
        console.warn(warning)


def _heading(document: TrainingBenchDocument) -> str:
    options, row, link = document.options, document.rows[0], document.link
    unfinished = "" if document.complete else "; UNFINISHED, these are the rows measured so far"
    group = f"{row.tp_size} rank{'s' * (row.tp_size > 1)}, {document.backend}"
    if link is not None:
        group = f"EMULATED: rank 0 of {row.tp_size}, {link.name}"
    schedules = [schedule_text(schedule) for schedule in options.timed_schedules if schedule.is_domino]
    return (
        f"{group}; {row.seq_len} tokens in each row; {''.join(f'{text}; ' for text in schedules)}"
        f"{f'medians of {options.repeat} interleaved rounds' if options.repeat > 1 else 'one round'}{unfinished}"
    )


def _labels(document: TrainingBenchDocument) -> list[str]:
    return row_labels(document.rows)


def _step_line(row: TrainingBenchRow, label: str, document: TrainingBenchDocument) -> dict[str, str]:
    low, high = row.speedup_interval
    return {
        **_who(row, label),
        "ms": short_ms(row.step_ms),
        "tokens/s": f"{row.tokens_per_s:.0f}",
        "speed-up": f"{row.speedup:.2f}x",
        "95 % interval": f"{low:.2f}-{high:.2f}" if _has_interval(row, document) else "",
        "of no-comm": f"{row.bound_share:.2f}",
        "peak memory": "" if row.peak_memory_bytes is None else human_bytes(row.peak_memory_bytes),
    }


def _passes_line(row: TrainingBenchRow, label: str, document: TrainingBenchDocument) -> dict[str, str]:
    line = _who(row, label)
    for name, milliseconds in zip(STEP_PASSES, (row.forward_ms, row.backward_ms), strict=True):
        communication = row.communication[name]
        line[f"{name} ms"] = short_ms(milliseconds)
        line[f"{name} waited"] = _waited(communication)
        line[f"{name} alone"] = short_ms(communication.alone_ms) if communication.alone_ms else ""
        if any(one.overlap is not None for one in document.rows):
            line[f"{name} hidden"] = "" if row.overlap is None else f"{row.overlap[name].share:.0%}"
    return line


def _who(row: TrainingBenchRow, label: str) -> dict[str, str]:
    return {"model": label, "schedule": row.schedule.name, "rows": str(row.batch_size)}


def _waited(communication: PassCommunication) -> str:
    return waited_text(communication) if communication.alone_ms else ""


def _has_interval(row: TrainingBenchRow, document: TrainingBenchDocument) -> bool:
    first = next(one for one in document.rows if one.batch_size == row.batch_size)
    return document.options.repeat >= LEAST_ROUNDS and row is not first


def _explanations(document: TrainingBenchDocument, labels: list[str]) -> list[str]:
    lines = [
        "A step is a forward and a backward pass, without the optimizer. speed-up: over the first row of this size; its"
        " 95 % interval says how far the rounds disagree.",
        "of no-comm: the share that the fastest step of this model without communication has of the step.",
        "waited: ms longer than the same without communication. alone: ms of all its communication by itself.",
    ]
    messages = {
        label: " + ".join(str(row.communication[name].all_reduces) for name in STEP_PASSES)
        for row, label in zip(document.rows, labels, strict=True)
        if not row.schedule.is_domino
    }
    if messages:
        counted = ", ".join(f"{label} {count}" for label, count in messages.items())
        lines.append(f"All-reduces of a sequential step, forward + backward: {counted}.")
    if any(row.overlap is not None for row in document.rows):
        lines.append("hidden: the share of the communication that ran under compute in the trace.")
    if document.checks:
        worst = max(check.gradient_difference / check.tolerance for check in document.checks)
        lines.append(
            "Checked before timing: every schedule gives the loss and the gradients of the sequential one whose sums"
            f" block; the largest difference is {worst:.0%} of the tolerance."
        )
    if not document.checked:
        lines.append("Not checked: whether the schedules give the same gradients.")
    if any(row.is_random for row in document.rows):
        lines.append("Weights are random: only the times are meaningful.")
    return lines


def _warnings(document: TrainingBenchDocument, labels: list[str]) -> list[str]:
    found = list(link_warnings(document.link, document.options.ranks, document.message_bytes_outside_link_range))
    if document.options.repeat < LEAST_ROUNDS:
        found.append(f"with fewer than {LEAST_ROUNDS} rounds their scatter is unknown: no intervals; raise --repeat")
    rows = list(zip(document.rows, labels, strict=True))
    doubtful = [
        f"{label}, {row.schedule.name} ({row.batch_size} rows)"
        for row, label in rows
        if _has_interval(row, document) and row.speedup_interval[0] <= 1 <= row.speedup_interval[1]
    ]
    if doubtful:
        found.append(
            "the rounds disagree by more than the variants differ, so these speed-ups may be noise:"
            f" {', '.join(doubtful)}; raise --repeat, or keep the machine idle"
        )
    impossible = [
        f"{label}, {row.schedule.name} ({name})"
        for row, label in rows
        for name in STEP_PASSES
        if _waited(row.communication[name]) == "?"
    ]
    if impossible:
        found.append(
            "without communication these were slower than with it, so the time waited is unknown:"
            f" {', '.join(impossible)}; perhaps other programs ran"
        )
    return found


def bench_training(
    choice: ModelChoice,
    options: TrainingBenchOptions,
    link: str | None = None,
    *,
    out: Path | None = None,
    console: Console = SILENT,
) -> TrainingBenchDocument:
    """Check and time training steps of the chosen models by the chosen schedules; returns the result, and shows it
    where the console speaks.

    link: of the ranks that ``options.emulate_tp`` emulates, as ``--link`` takes it. out: a JSON file, which is written
    after each batch size, and before traces are made. Raises UsageError or UserError for what cannot be measured, where
    a schedule gives other gradients than the sequential one, and where a trace disproves an overlap; what was measured
    until then is kept in ``out`` and shown.
    """
    check_device(options.device)
    if out is not None:
        check_writable(out)
    plan = plan_training_bench(choice, options, link)
    newest: list[TrainingBenchDocument] = []

    def keep(document: TrainingBenchDocument) -> None:
        newest[:] = [document]
        if out is not None:
            write_json(out, document.to_dict())

    def show() -> None:
        for document in newest:
            console.document(document.to_dict())
            show_training_bench(document, console)
            if out is not None:
                console.note(f"wrote {out}")

    if options.tp_size > 1 and not already_started():
        console.note(f"starting {options.tp_size} ranks")
    try:
        measured: TrainingBenchDocument = run(
            measure_training,
            plan,
            console,
            tp_size=options.tp_size,
            device=options.device,
            threads=options.threads,
            report=keep,
        )
    except BaseException:  # also Ctrl-C
        show()
        raise
    if is_main_rank():
        keep(measured)
    show()
    if measured.disproved:
        raise UserError(
            f"nothing overlapped in the trace of {' and '.join(measured.disproved)}, although the schedule overlaps:"
            " its row is not valid"
        )
    return measured
