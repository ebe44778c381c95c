"""``ladderize bench --engine vllm`` from its options to its document: plan, measure, keep, show."""

from pathlib import Path
from typing import Any

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.figure import PlotPanel, check_plot, picture_spec, save_pictures
from ladderize.files.documents import check_writable
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.device import default_device
from ladderize.ranks.environment import is_main_rank
from ladderize.ranks.group import Ranks, already_started
from ladderize.runtime.bench.kept import KeptDocument
from ladderize.runtime.bench.options import GroupOptions, ModelChoice
from ladderize.runtime.bench.plan import check_positions, chosen_models, make_profile_folder
from ladderize.runtime.bench.plot import bar_panel
from ladderize.runtime.bench.report import row_labels, short_ms
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.bench.spread import LEAST_ROUNDS
from ladderize.runtime.launch import check_group_size
from ladderize.serving.vllm.bench.document import VllmBenchDocument, VllmBenchRow
from ladderize.serving.vllm.bench.options import VllmBenchOptions, check_vllm_usage
from ladderize.serving.vllm.bench.processes import run_ranks
from ladderize.serving.vllm.bench.served import VllmPlan, served_models
from ladderize.serving.vllm.versions import installed_version, version_problem


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


BAR_COLOURS = {"reference": "waited", "others": "compute"}


def plot_vllm_bench(document: VllmBenchDocument, stem: Path) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg; returns their paths."""
    batches = sorted({row.batch_size for row in document.rows})
    # batch sizes differ too much in time to share an axis
    panels = [_panel(document, phase, batch) for batch in batches for phase in PHASES]
    about = f"{vllm_group_text(document)}; medians of {document.options.repeat} interleaved rounds"
    return save_pictures(picture_spec(panels, title=about, columns=2, width=420), stem)


def _panel(document: VllmBenchDocument, phase: str, batch: int) -> PlotPanel:
    labels = row_labels(document.rows)
    rows = [(row, label) for row, label in zip(document.rows, labels, strict=True) if row.batch_size == batch]
    bars = []
    for place, (row, label) in enumerate(rows):
        median = row.total_ms(phase)
        ratio = f", {row.ratio(phase):.2f}x" if place else ""
        part = "others" if place else "reference"
        spread = (median, *row.quartiles_ms[phase])
        bars.append({"row": label, "parts": [(part, 0.0, median)], "spread": spread, "text": f"{median:.3g} ms{ratio}"})
    what = "prefill" if phase == "prefill" else "decode, per step"
    return bar_panel(f"{what}, batch {batch}", bars, BAR_COLOURS)


def bench_vllm(
    choice: ModelChoice,
    options: VllmBenchOptions,
    *,
    out: Path | None = None,
    plot: Path | None = None,
    console: Console = SILENT,
) -> VllmBenchDocument:
    """Time the chosen models in vLLM against each other; returns the result, and shows it where the console speaks.

    A dense model runs in vLLM's own class, others in ladderize's. out: a JSON file, which is written after each batch
    size. plot: draws ``plot``.png and ``plot``.svg. Raises UsageError or UserError for what cannot be measured.
    """
    check_vllm_usage(choice, options)
    problem = version_problem(installed_version())
    if problem is not None:
        raise UserError(problem)
    device = default_device()
    check_group_size(options.tp_size, device)
    if out is not None:
        check_writable(out)
    if plot is not None:
        check_plot(plot)
    specs = chosen_models(choice, GroupOptions(tp_size=options.tp_size, device=device))
    for spec in specs:
        check_positions(spec, options.prompt_len, options.output_len)
        if spec.config["vocab_size"] != specs[0].config["vocab_size"]:
            raise UserError(f"{spec.name} has another vocabulary than {specs[0].name}; compare them apart")
    make_profile_folder(options.profile)
    kept = KeptDocument(out, plot, console, show_vllm_bench, plot_vllm_bench)
    with temporary_folder("vllm") as work:
        plan = VllmPlan(served_models(specs, options, work), dict(specs[0].config), options)
        if not already_started():
            console.note(f"starting {options.tp_size} rank{'s' * (options.tp_size > 1)} of vLLM")
        try:
            document = run_ranks(
                _measure,
                plan,
                console,
                tp_size=options.tp_size,
                device=device,
                threads=options.threads,
                work=work,
                report=kept.write,
            )
        except BaseException:  # also Ctrl-C
            kept.show()
            raise
    if is_main_rank():
        kept.write(document)
    kept.show()
    return document


def _measure(ranks: Ranks, plan: VllmPlan, console: Console) -> tuple[VllmBenchDocument, Any]:
    """In a rank's own process: vLLM is imported there, and nowhere else."""
    from ladderize.serving.vllm.bench.measure import measure_vllm

    return measure_vllm(ranks, plan, console)
