"""The folders that vLLM serves, one for each row of the benchmark."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.families.registry import known_family
from ladderize.layout import CONFIG_KEYS, Layout
from ladderize.runtime.bench.document import BenchRow, inference_figures
from ladderize.runtime.bench.options import PLUGIN, REPLICAS, UNFUSED, BenchOptions
from ladderize.runtime.bench.plan import check_dense
from ladderize.runtime.bench.rounds import TimedVariant
from ladderize.runtime.shards import Shape, check_runnable
from ladderize.runtime.spec import ModelSpec
from ladderize.vllm.environment import MessageBackend, architecture, stock

PLUGIN_ROW = "plugin's dense"
BASELINE_ROWS = {PLUGIN: PLUGIN_ROW, UNFUSED: "dense, norms not fused", REPLICAS: "dense, 2 replicas"}


@dataclass(frozen=True)
class Served:
    """A row: a folder that vLLM opens, and the model in it. Weights are random where the model has no folder.

    architecture: vLLM's model class, its own or the plugin's.
    baseline: one of --baselines, which runs the first model's weights.
    """

    spec: ModelSpec
    folder: Path
    architecture: str
    baseline: str | None = None

    @property
    def name(self) -> str:
        return self.spec.name if self.baseline is None else BASELINE_ROWS[self.baseline]

    @property
    def replicas(self) -> int:
        """The number of groups of ranks, each of which serves its part of a batch."""
        return 2 if self.baseline == REPLICAS else 1

    def part(self, batch: int) -> int:
        """Return the largest number of texts of a batch that one group serves."""
        return -(-batch // self.replicas)

    def shape(self, tp_size: int) -> Shape:
        """Return the sizes of one of ``tp_size`` ranks' part of the model."""
        return Shape.from_config(self.spec.config, tp_size=tp_size // self.replicas, rank=0)


@dataclass(frozen=True)
class VllmPlan:
    """The rows to time, and the options.

    starter: the process that started the ranks.
    """

    served: list[Served]
    options: BenchOptions
    starter: int


def served_models(specs: list[ModelSpec], options: BenchOptions, work: Path) -> list[Served]:
    """Make a folder for each row under ``work``, and return the rows. Checkpoints' files are linked; only configs are
    written.

    Raises UserError for a baseline of a model that is not dense, LayoutError for a model that half of the ranks cannot
    run.
    """
    rows = [_served(spec, work / str(number), plugin=not spec.layout.is_dense) for number, spec in enumerate(specs)]
    for name in reversed(options.baselines):
        check_dense(name, specs[0])
        if name == REPLICAS:
            check_runnable(specs[0].config, specs[0].layout, options.tp_size // 2, name="half of --tp-size,")
        rows.insert(1, _served(specs[0], work / name, plugin=name == PLUGIN, baseline=name))
    return rows


def _served(spec: ModelSpec, folder: Path, *, plugin: bool, baseline: str | None = None) -> Served:
    folder.mkdir()
    if spec.folder is not None:
        for path in spec.folder.resolve().iterdir():
            if path.name != "config.json":
                (folder / path.name).symlink_to(path)
    config = vllm_config(spec.config, spec.layout, plugin=plugin)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return Served(spec, folder, config["architectures"][0], baseline)


def vllm_config(config: dict[str, Any], layout: Layout, *, plugin: bool) -> dict[str, Any]:
    """Return config.json for vLLM's own class, or for the plugin's, which runs dense layouts, too."""
    kept = {key: value for key, value in config.items() if key not in {*CONFIG_KEYS, "auto_map"}}
    family = known_family(config)
    kept["model_type"] = family.ladderized_type if plugin else family.model_type
    kept["architectures"] = [architecture(family) if plugin else stock(family)]
    return kept | (layout.to_config() if plugin else {})


def vllm_rows(variants: Sequence[TimedVariant], options: BenchOptions, batch: int) -> list[BenchRow]:
    """Return the rows of one batch size. Speed-ups are over the first."""
    emulated = MessageBackend.from_environment(os.environ).link is not None
    first = variants[0].timed.seconds
    return [
        BenchRow(
            **variant.row_figures(options.tp_size // variant.timed.engine.served.replicas, batch),
            **inference_figures(variant.timed.seconds, first, options.decode_steps, batch),
            kind=variant.kind,
            checked=False,
            emulated=emulated,
        )
        for variant in variants
    ]
