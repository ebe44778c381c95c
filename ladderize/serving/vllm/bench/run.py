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
from ladderize.runtime.bench.report import row_labels
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.launch import check_group_size
from ladderize.serving.vllm.bench.document import VllmBenchDocument
from ladderize.serving.vllm.bench.options import VllmBenchOptions, check_vllm_usage
from ladderize.serving.vllm.bench.processes import run_ranks
from ladderize.serving.vllm.bench.report import show_vllm_bench, vllm_group_text
from ladderize.serving.vllm.bench.served import VllmPlan, served_models
from ladderize.serving.vllm.versions import installed_version, version_problem

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
