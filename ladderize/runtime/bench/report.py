"""The output of a benchmark: the document that is kept while it runs, and its tables."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ladderize.console import Console, human_bytes
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, write_json
from ladderize.ranks.device import default_device
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.runtime.bench.document import LEAST_ROUNDS, BenchDocument, BenchRow, PhaseCommunication, few_rounds
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.launch import run


def run_and_show(measure: Callable[..., BenchDocument], plan: Any, console: Console) -> BenchDocument:
    """Call ``measure(ranks, plan, console)`` on every rank and return its document. Each document that rank 0 reports
    is written to --out at once. The last one is shown at the end, also after an error. Raises UserError for a model or
    schedule that failed its check, and for an overlap that a trace disproves."""
    options: BenchOptions = plan.options
    out = options.out
    newest: list[BenchDocument] = []

    def keep(document: BenchDocument) -> None:
        newest[:] = [document]
        if out is not None:
            write_json(out, document.to_dict())

    if out is not None:
        check_writable(out, inputs=[options.random_weights, options.link])
    if options.tp_size > 1 and not already_started():
        console.note(f"starting {options.tp_size} ranks")
    try:
        document: BenchDocument = run(
            measure,
            plan,
            console,
            tp_size=options.tp_size,
            device=options.device or default_device(),
            threads=options.threads,
            report=keep,
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
    if document.disproved:
        names = " and ".join(document.disproved)
        raise UserError(f"nothing overlapped in the trace of {names}, although it should: its row is not valid")
    return document


EXPLANATIONS = {
    "of no-comm": "the share that the fastest step of this model without communication has of the step.",
    "speed-up": "over the first row of its batch size; its 95 % interval says how far the rounds disagree.",
    "waited ms": "longer than the same model without communication; <: at most (95 %), where the waiting is too short"
    " to be measured; ?: unknown.",
    "comm. alone ms": "with nothing beside it.",
    "in trace": "the share of the communication that ran under compute in the trace.",
}


def _entries(document: BenchDocument, row: BenchRow, label: str, phase: str) -> dict[str, str]:
    """Return a row of the table of a phase; a column without any text is left out."""
    sent, overlap = (row.communication or {}).get(phase), (row.overlap or {}).get(phase)
    waited, reduces, alone, share = "", "", "", ""
    if sent is not None and sent.alone_ms:
        waited, reduces, alone = waited_text(sent), str(sent.all_reduces), short_ms(sent.alone_ms)
    if overlap is not None and overlap.in_flight_ms:
        share = f"{overlap.share:.0%}"
    first = next(each for each in document.rows if each.batch_size == row.batch_size)
    interval = "{:.2f}-{:.2f}".format(*row.speedup_interval[phase])
    return {
        "model": label,
        "class": (row.architecture or "").removesuffix("ForCausalLM"),
        "batch": str(row.batch_size),
        "ms": short_ms(row.ms[phase]),
        "tokens/s": f"{row.tokens_per_s:.1f}" if phase in ("decode", "step") else "",
        "of no-comm": f"{row.bound_share:.2f}" if phase == "step" else "",
        "speed-up": f"{row.speedup[phase]:.2f}x",
        "95 % interval": interval if document.options.repeat >= LEAST_ROUNDS and row is not first else "",
        "all-reduces": reduces,
        "waited ms": waited,
        "comm. alone ms": alone,
        "in trace": share,
    }


PHASE_TITLES = {
    "prefill": "Prefill",
    "decode": "Decode, one step",
    "step": "Training step",
    "forward": "Forward pass",
    "backward": "Backward pass",
}


def short_ms(milliseconds: float) -> str:
    """Return the number with the four digits that a measurement has at best."""
    digits = sum(milliseconds < limit for limit in (1000, 100, 10))
    return f"{milliseconds:.{digits}f}"


def waited_text(communication: PhaseCommunication) -> str:
    """Return the ms waited for: a bound where the rounds do not tell it from 0, ``?`` where they say less. The
    difference of two medians can come out negative, which no waiting time is."""
    low, high = communication.exposed_interval_ms
    if high <= 0:
        return "?"
    return f"<{short_ms(high)}" if low <= 0 else short_ms(communication.exposed_ms)


def show_bench(document: BenchDocument, console: Console) -> None:
    """Print the tables of a benchmark, one for each phase, what they mean, and doubts as warnings."""
    if not document.rows:
        return
    console.prose(_heading(document))
    # the last part of a model's name, or all of it where labels would be equal
    labels = {row.model: Path(row.model).name for row in document.rows}
    if len(set(labels.values())) < len(labels):
        labels = {name: name for name in labels}
    explained: set[str] = set()
    for phase in ("step", "forward", "backward") if document.options.train else ("prefill", "decode"):
        console.result(f"\n{PHASE_TITLES[phase]}{' (emulated)' if document.link is not None else ''}")
        table = [_entries(document, row, labels[row.model], phase) for row in document.rows]
        empty = set(table[0])
        for entries in table:
            empty -= {title for title, text in entries.items() if text}
        for name in document.failed:
            table.append(dict.fromkeys(table[0], "") | {"model": Path(name).name, "ms": "failed"})
        for title in empty:
            for entries in table:
                del entries[title]
        explained |= table[0].keys()
        console.table(table, right=[title for title in table[0] if title not in ("model", "class")])
    console.result("")
    for title, explanation in EXPLANATIONS.items():
        if title in explained:
            console.prose(f"{title}: {explanation}")
    if any(row.is_random for row in document.rows):
        console.prose("Weights are random: only the times are meaningful.")
    for line in _checks(document, labels):
        console.prose(line)
    for warning in _warnings(document):
        console.warn(warning)


def _heading(document: BenchDocument) -> str:
    options, link = document.options, document.link
    ranks = f"{options.ranks} rank{'s' * (options.ranks > 1)}, {document.backend}"
    if options.emulate_tp is not None and link is not None:
        ranks = f"EMULATED: rank 0 of {options.ranks}, {link.name}"
    if document.engine == "vllm":
        ranks = f"vLLM {document.environment.vllm}, {ranks}"
        ranks += "" if document.messages is None else f", messages in flight by {document.messages}"
    sizes = f"prompt {options.prompt_len} tokens, output {options.output_len}"
    if options.train:
        sizes = f"rows of {options.prompt_len} tokens"
    schedule = "" if options.schedules[0] == "sequential" else f"; schedule {options.schedules[0]}"
    rounds = f"medians of {options.repeat} interleaved rounds" if options.repeat > 1 else "one round"
    doubt = "" if document.complete else "; UNFINISHED, these are the rows measured so far"
    return f"{ranks}; {sizes}{schedule}, {rounds}{doubt}"


def _checks(document: BenchDocument, labels: dict[str, str]) -> Iterator[str]:
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
    for model, check in document.checks.items():
        yield (
            f"Reference check of {labels.get(model, model)}: passed. Largest logit difference to transformers in"
            f" float32 {check['logit_difference']:.2g} (tolerance {check['tolerance']:.2g}), root mean square"
            f" {check['rms_difference']:.2g} ({check['rms_tolerance']:.2g});"
            f" {check['equal_greedy_tokens']:.0f} of {check['greedy_tokens']:.0f} tokens equal."
        )
    unchecked = {row.model for row in document.rows if row.is_model and not row.is_random} - document.checks.keys()
    if unchecked:
        yield f"Not checked against a reference: {', '.join(sorted(unchecked))}."


def _warnings(document: BenchDocument) -> Iterator[str]:
    """Yield the doubts about an emulated link's times and about the rounds."""
    link, sizes = document.link, document.extrapolated_bytes
    if link is not None and link.derived:
        yield f"{link.name} was not measured with {document.options.ranks} ranks: its times are {link.derived}"
    if link is not None and sizes:
        extrapolated = " to ".join(dict.fromkeys((human_bytes(sizes[0]), human_bytes(sizes[-1]))))
        yield f"extrapolated beyond the sizes that {link.name} was measured at: messages of {extrapolated}"
    if doubt := few_rounds(document.options.repeat):
        yield doubt
