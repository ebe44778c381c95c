"""The document for a person: a table for each phase, and what to know when reading them."""

from ladderize.console import Console
from ladderize.runtime.bench.report import row_labels, short_ms
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.bench.spread import LEAST_ROUNDS
from ladderize.serving.vllm.bench.document import VllmBenchDocument, VllmBenchRow


def show_vllm_bench(document: VllmBenchDocument, console: Console) -> None:
    """Print the result of ``ladderize bench --engine vllm``, and warn of what makes it doubtful."""
    if not document.rows:
        return
    console.prose(_heading(document))
    labels = row_labels(document.rows)
    emulated = " (emulated)" if document.emulated else ""
    for phase, title in zip(PHASES, ("Prefill", "Decode, one step"), strict=True):
        lines = [_line(row, label, phase, document) for row, label in zip(document.rows, labels, strict=True)]
        console.result(f"\n{title}{emulated}")
        console.table(lines, right=[key for key in lines[0] if key not in ("model", "class")])
    console.result("")
    console.prose("of first: time over the first model's in the same round, the median of the rounds; then quartiles.")
    for line in _overlaps(document, labels):
        console.prose(line)
    if any(row.weights == "random" for row in document.rows):
        console.prose("Weights are random: only the times are meaningful.")
    if document.options.repeat < LEAST_ROUNDS:
        console.warn(f"with fewer than {LEAST_ROUNDS} rounds their scatter is unknown; raise --repeat")


def vllm_group_text(document: VllmBenchDocument) -> str:
    """Which engine, on how many ranks, over what; says whether messages are emulated."""
    ranks = document.options.tp_size
    in_flight = "" if document.messages is None else f", messages in flight by {document.messages}"
    over = "" if ranks == 1 else f", {document.backend}{in_flight}"
    emulated = f", EMULATED messages: {document.messages}" if document.emulated else ""
    return f"vLLM {document.vllm}, {ranks} rank{'s' * (ranks > 1)}{over}{emulated}"


def _heading(document: VllmBenchDocument) -> str:
    options = document.options
    unfinished = "" if document.complete else "; UNFINISHED, these are the rows measured so far"
    rounds = f"medians of {options.repeat} interleaved rounds" if options.repeat > 1 else "one round"
    return (
        f"{vllm_group_text(document)}; prompt {options.prompt_len}, output {options.output_len}, {rounds}{unfinished}"
    )


def _line(row: VllmBenchRow, label: str, phase: str, document: VllmBenchDocument) -> dict[str, str]:
    low, high = row.ratio_quartiles(phase)
    line = {
        "model": label,
        "class": row.architecture.removesuffix("ForCausalLM"),
        "batch": str(row.batch_size),
        "ms": short_ms(row.total_ms(phase)),
    }
    if phase == "decode":
        line["tokens/s"] = f"{row.output_tokens_per_s:.1f}"
    first = row.model == document.rows[0].model
    spread = "" if first or document.options.repeat < LEAST_ROUNDS else f"{low:.3f}-{high:.3f}"
    return line | {"of first": f"{row.ratio(phase):.3f}x", "quartiles": spread}


def _overlaps(document: VllmBenchDocument, labels: list[str]) -> list[str]:
    shares = [
        f"{label} {phase} {overlap.share:.0%} (batch {row.batch_size})"
        for row, label in zip(document.rows, labels, strict=True)
        for phase, overlap in (row.overlap or {}).items()
        if overlap.in_flight_ms
    ]
    return [f"Of the messages' time in flight, under compute in the traces: {', '.join(shares)}."] if shares else []
