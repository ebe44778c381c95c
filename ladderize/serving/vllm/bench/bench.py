"""``ladderize bench --engine vllm`` from its options to its document."""

import functools
from pathlib import Path
from typing import Any

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.harness import KeptDocument
from ladderize.runtime.bench.options import GroupOptions, ModelChoice
from ladderize.runtime.bench.plan import check_positions, chosen_models, make_profile_folder
from ladderize.runtime.launch import check_group_size
from ladderize.serving.vllm.bench.document import VllmBenchDocument, plot_vllm_bench, show_vllm_bench
from ladderize.serving.vllm.bench.options import VllmBenchOptions, check_vllm_usage
from ladderize.serving.vllm.bench.processes import run_ranks
from ladderize.serving.vllm.bench.served import VllmPlan, served_models
from ladderize.serving.vllm.environment import check_vllm


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
    check_vllm()
    device = default_device()
    check_group_size(options.tp_size, device)
    kept = KeptDocument(out, plot, console, show_vllm_bench, plot_vllm_bench)
    specs = chosen_models(choice, GroupOptions(tp_size=options.tp_size, device=device))
    for spec in specs:
        check_positions(spec, options.prompt_len, options.output_len)
        if spec.config["vocab_size"] != specs[0].config["vocab_size"]:
            raise UserError(f"{spec.name} has another vocabulary than {specs[0].name}; compare them apart")
    make_profile_folder(options.profile)
    with temporary_folder("vllm") as work:
        plan = VllmPlan(served_models(specs, options, work), options)
        start = functools.partial(run_ranks, work=work)
        return kept.measured(_measure, plan, device=device, start=start, of_engine=" of vLLM")


def _measure(ranks: Ranks, plan: VllmPlan, console: Console) -> tuple[VllmBenchDocument, Any]:
    """In a rank's own process: vLLM is imported there, and nowhere else. Returns what has to live as long, too."""
    from ladderize.serving.vllm.bench.engine import VllmBench

    bench = VllmBench(ranks, plan, console)
    return bench.measure(), bench
