"""The rows of ``ladderize bench --engine vllm``, as folders that vLLM serves. Imports no vLLM."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.families.registry import known_family
from ladderize.layout import CONFIG_KEYS, Layout
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.plan import check_dense
from ladderize.runtime.spec import ModelSpec
from ladderize.vllm.environment import architecture, stock


@dataclass(frozen=True)
class Served:
    """A row: a folder that vLLM opens, and the model in it. Weights are random where the model has no folder.

    architecture: vLLM's model class, its own or the plugin's.
    is_baseline: True for the dense model in the plugin's class.
    """

    name: str
    spec: ModelSpec
    folder: Path
    architecture: str
    is_baseline: bool = False


@dataclass(frozen=True)
class VllmPlan:
    """The rows to time, and the options.

    starter: the process that started the ranks.
    """

    served: list[Served]
    options: BenchOptions
    starter: int


def served_models(specs: list[ModelSpec], options: BenchOptions, work: Path, *, emulated: bool = False) -> list[Served]:
    """Make a folder for each row under ``work``, and return the rows. Checkpoints' files are linked; only configs are
    written.

    emulated: a delay stands for each all-reduce. vLLM's own class has none, so dense models run in the plugin's, too.
    Raises UserError for the baseline of a model that is not dense.
    """
    rows = []
    for number, spec in enumerate(specs):
        is_plugin = emulated or not spec.layout.is_dense
        rows.append(_served(spec.name, spec, work / str(number), plugin=is_plugin))
    if "plugin" in options.baselines:
        check_dense("plugin", specs[0])
        baseline = _served("plugin's dense", specs[0], work / "plugin", plugin=True)
        rows.insert(1, replace(baseline, is_baseline=True))
    return rows


def _served(name: str, spec: ModelSpec, folder: Path, *, plugin: bool) -> Served:
    folder.mkdir()
    if spec.folder is not None:
        for path in spec.folder.resolve().iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path)
    config = vllm_config(spec.config, spec.layout, plugin=plugin)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return Served(name, spec, folder, config["architectures"][0])


def vllm_config(config: dict[str, Any], layout: Layout, *, plugin: bool) -> dict[str, Any]:
    """Return config.json for vLLM's own class, or for the plugin's, which runs dense layouts, too."""
    kept = {key: value for key, value in config.items() if key not in {*CONFIG_KEYS, "auto_map"}}
    family = known_family(config)
    kept["model_type"] = family.ladderized_type if plugin else family.model_type
    kept["architectures"] = [architecture(family) if plugin else stock(family)]
    return kept | (layout.to_config() if plugin else {})
