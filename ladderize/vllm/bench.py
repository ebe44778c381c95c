"""The command ``ladderize bench --engine vllm``: from its options to its document. Only the ranks import vLLM.

Each row is a folder that vLLM serves.
"""

import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.families.registry import known_family
from ladderize.files.temporaries import temporary_folder
from ladderize.layout import CONFIG_KEYS, Layout
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import BenchDocument
from ladderize.runtime.bench.options import PLUGIN, BenchOptions, ModelChoice, check_bench_usage
from ladderize.runtime.bench.plan import check_dense, check_positions, chosen_models, make_profile_folder
from ladderize.runtime.bench.report import run_and_show
from ladderize.runtime.collectives.shm import remove_segments
from ladderize.runtime.launch import check_group_size
from ladderize.runtime.shards import Shape
from ladderize.runtime.spec import ModelSpec
from ladderize.vllm.environment import architecture, check_vllm, configuration_refusal, stock

# variables of a rank: the engine runs in the rank itself, which reports errors
VARIABLES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
PLUGIN_ROW = "plugin's dense"


@dataclass(frozen=True)
class Served:
    """A row: a folder that vLLM opens, and the model in it. Weights are random where the model has no folder.

    architecture: vLLM's model class, its own or the plugin's.
    is_baseline: True for the dense model in the plugin's class.
    """

    spec: ModelSpec
    folder: Path
    architecture: str
    is_baseline: bool = False

    @property
    def name(self) -> str:
        """The row's name."""
        return PLUGIN_ROW if self.is_baseline else self.spec.name

    def shape(self, tp_size: int) -> Shape:
        """Return the sizes of one of ``tp_size`` ranks' part of the model."""
        return Shape.from_config(self.spec.config, tp_size=tp_size, rank=0)


@dataclass(frozen=True)
class VllmPlan:
    """The rows to time, and the options.

    starter: the process that started the ranks.
    """

    served: list[Served]
    options: BenchOptions
    starter: int


def bench_vllm(
    choice: ModelChoice, options: BenchOptions, *, out: Path | None = None, console: Console = SILENT
) -> BenchDocument:
    """Time the chosen models in vLLM against each other, and return the result; a console that speaks shows it.

    A dense model runs in vLLM's own class, others in ladderize's. Raises UsageError or UserError for what cannot be
    measured.

    out: a JSON file, written after each batch size.
    """
    check_bench_usage(choice, options, None, baselines=(PLUGIN,))
    check_vllm()
    options = replace(options, device=default_device())
    check_group_size(options.tp_size, options.device)
    specs = chosen_models(choice, options)
    for spec in specs:
        check_positions(spec, options)
        if spec.config["vocab_size"] != specs[0].config["vocab_size"]:
            raise UserError(f"{spec.name} has another vocabulary than {specs[0].name}; compare them apart")
    make_profile_folder(options.profile)
    with temporary_folder("vllm") as work:
        plan = VllmPlan(served_models(specs, options, work), options, os.getpid())
        try:
            return run_and_show(measure_vllm, plan, options.device, out, console)
        finally:
            remove_segments(os.getpid())  # vLLM's, whose names bench_engine.py gives


def measure_vllm(ranks: Ranks, plan: VllmPlan, console: Console) -> BenchDocument:
    """Start the engines of all rows and time them. All ranks call it. Raises UserError for what vLLM refuses."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")  # of vLLM and its imports
    try:
        from ladderize.vllm.bench_engine import VllmRun

        return VllmRun(ranks, plan, console).measure()
    except Exception as error:
        if refusal := configuration_refusal(error):
            raise UserError(refusal) from None
        raise


# ---- what is served ----


def served_models(specs: list[ModelSpec], options: BenchOptions, work: Path) -> list[Served]:
    """Make a folder for each row under ``work``, and return the rows. Checkpoints' files are linked; only configs are
    written.

    Raises UserError for the baseline of a model that is not dense.
    """
    rows = [_served(spec, work / str(number), plugin=not spec.layout.is_dense) for number, spec in enumerate(specs)]
    if PLUGIN in options.baselines:
        check_dense(PLUGIN, specs[0])
        rows.insert(1, replace(_served(specs[0], work / PLUGIN, plugin=True), is_baseline=True))
    return rows


def _served(spec: ModelSpec, folder: Path, *, plugin: bool) -> Served:
    folder.mkdir()
    if spec.folder is not None:
        for path in spec.folder.resolve().iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path)
    config = vllm_config(spec.config, spec.layout, plugin=plugin)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return Served(spec, folder, config["architectures"][0])


def vllm_config(config: dict[str, Any], layout: Layout, *, plugin: bool) -> dict[str, Any]:
    """Return config.json for vLLM's own class, or for the plugin's, which runs dense layouts, too."""
    kept = {key: value for key, value in config.items() if key not in {*CONFIG_KEYS, "auto_map"}}
    family = known_family(config)
    kept["model_type"] = family.ladderized_type if plugin else family.model_type
    kept["architectures"] = [architecture(family) if plugin else stock(family)]
    return kept | (layout.to_config() if plugin else {})
