"""The commands that measure models or run them: ``eval``, ``compare``, ``bench``, ``report`` and ``generate``."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import ladderize
from ladderize.choices import MEASUREMENT, OUTPUT, argument, check_options, option
from ladderize.commands.shared import loading, runtime_device, start_server
from ladderize.console import Console
from ladderize.eval.options import MARGIN, EvalOptions, check_margin, check_task_names
from ladderize.files.documents import check_writable
from ladderize.files.records import Record
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.links import read_interconnect
from ladderize.runtime.sampling import GenerateOptions


def evaluate(options: EvalOptions, console: Console) -> None:
    """Evaluate models with lm-eval tasks and by perplexity, all in the same way, and compare them with the first."""
    check_task_names(options)  # before anything is imported
    with loading(options, console):
        from ladderize.eval.run import evaluate as evaluate_models
        from ladderize.eval.table import prediction_words, result_rows, show_comparison

        if options.engine == "vllm":
            from ladderize.vllm.environment import check_vllm
            from ladderize.vllm.eval_model import open_vllm

            check_vllm()
    opened_by = open_vllm if options.engine == "vllm" else None
    results = evaluate_models(options, open_model=opened_by, console=console)
    console.document(results.to_dict())
    console.table(result_rows(results), right=["value", "stderr"])
    for entry in results.models:
        predictions = entry.model.predictions
        if options.reference is not None and predictions is not None:
            console.result("")
            console.prose(f"{entry.model.model} against {predictions.reference}. {prediction_words(predictions)}")
    for comparison in results.comparisons:
        console.result("")
        show_comparison(comparison, console)
    if options.out is not None:
        console.note(f"wrote {options.out}")


@dataclass(frozen=True)
class CompareOptions:
    files: tuple[Path, ...] = argument(
        "RESULTS...", "Files that eval wrote (results.json). The first model is the reference."
    )
    margin: float = option("Points that may be lost: 1 is 0.01 of acc.", MARGIN, panel=MEASUREMENT)

    def __post_init__(self) -> None:
        check_options(self)
        check_margin(self.margin)


def compare(options: CompareOptions, console: Console) -> None:
    """Compare evaluated models question by question: differences with intervals, flips, and what a margin shows.

    Works on stored files alone. Models that were not asked the same are refused.
    """
    from ladderize.eval.compare import compare as compare_files
    from ladderize.eval.table import show_comparison

    comparisons = compare_files(options.files, options.margin)
    console.document(comparisons.to_dict())
    for number, document in enumerate(comparisons.comparisons):
        if number:
            console.result("")
        show_comparison(document, console)


def bench(options: BenchOptions, console: Console) -> None:
    """Time layouts and schedules against each other on ladderize's tensor-parallel runtime, and show what they wait
    for."""
    options.check_named()
    if options.out is not None:
        check_writable(options.out, inputs=[options.random_weights, options.link])
    if options.link is not None:
        read_interconnect(options.link)
    if options.engine == "vllm":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM binds memory, and torch logs that for each engine
    with loading(options, console, "loading torch"):  # what argv alone decides was said before these seconds
        start_server(options.tp_size)
        if options.engine == "vllm":
            from ladderize.vllm.bench import bench_vllm as timed
        else:
            timed = ladderize.bench
            device = runtime_device(options.device, options.backend, options.threads, options.ranks)
            options = replace(options, device=device)
    timed(options, console=console)


@dataclass(frozen=True)
class ReportOptions:
    sources: tuple[Path, ...] = argument(
        "DIR_OR_JSON...",
        "A sweep's folder; or results.json, bench.json, sensitivity.json, or folders with these or with a retraining's"
        " metrics.jsonl.",
    )
    out: Path = option("Write the page to FILE.html.", Path("report.html"), panel=OUTPUT, metavar="FILE")
    markdown: Path | None = option(
        "Also write FILE.md, for a README or a model card, and its pictures to FILE-pictures/.",
        panel=OUTPUT,
        metavar="FILE",
    )
    margin: float | None = option(
        "How much accuracy may be lost, in points.", panel=MEASUREMENT, metavar="POINTS", shown="the sweep's, else 1"
    )

    def __post_init__(self) -> None:
        check_options(self)


def report(options: ReportOptions, console: Console) -> None:
    """Show accuracy against speed on one page: an HTML file that needs no network."""
    from ladderize.report.page import write_report

    summary = write_report(
        options.sources, options.out, margin=options.margin, markdown=options.markdown, console=console
    )
    console.document(summary.to_dict())
    console.prose(summary.headline)
    console.result(f"wrote {summary.out}")


def generate(options: GenerateOptions, console: Console) -> None:
    """Generate text, or training data: answers to instructions, or texts of the model's own."""
    with loading(options, console):
        start_server(options.tp_size)
        from ladderize.runtime.generate import generate as generate_texts
        from ladderize.runtime.generate_file import generate_file
    document: Record | None
    if options.out is None:
        document = generate_texts(options, console=console)
    else:
        document = generate_file(options, console=console)
    if document is not None:  # None on other ranks than 0
        console.document(document.to_dict())
