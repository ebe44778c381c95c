"""The stages of a sweep, each with everything that decides its output."""

import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.adapt.data.sources import parse_specs
from ladderize.checkpoint.llama import check_model
from ladderize.convert.recipe import Recipe
from ladderize.ranks.threads import cores
from ladderize.tradeoff.sweep.inputs import Inputs
from ladderize.tradeoff.sweep.stage_commands import (
    MODEL_FOLDER,
    PREDICTIONS,
    Words,
    adapt_words,
    bench_words,
    convert_words,
    eval_words,
    sensitivity_words,
)
from ladderize.tradeoff.sweep.stages import Stage
from ladderize.tradeoff.sweep.sweep_file import AdaptStage, BenchChoice, SweepSpec

# what computes the accuracies: numbers of two versions are no pairs
EVAL_PACKAGES = ("torch", "transformers", "lm-eval")


@dataclass(frozen=True)
class StageBuilder:
    """model: the dense one as stages name it. digest: of its content. data: digests of files, by what names them."""

    spec: SweepSpec
    inputs: Inputs
    model: str
    digest: str

    @classmethod
    def of(cls, spec: SweepSpec, inputs: Inputs) -> "StageBuilder":
        """Reads everything that the sweep reads, once. Raises UserError for what is not there."""
        folder = check_model(spec.model, spec.revision)
        model = spec.model if spec.revision is None else str(folder)
        return cls(spec, inputs, model, inputs.model(spec.model, spec.revision))

    def sensitivity(self, mode: str, sync_tp_size: int | None) -> Stage:
        given = {key: value for key, value in (self.spec.sensitivity or {}).items() if key != "mode"}
        of = f"spd, sync_tp_size {sync_tp_size}" if sync_tp_size is not None else "ladder"
        identity = {
            "model": self.digest,
            "mode": mode,
            "sync_tp_size": sync_tp_size,
            "options": {**given, "data": self.inputs.data(given["data"])},
        }

        def commands(output: str) -> tuple[Words, ...]:
            return (sensitivity_words(self.model, output, given, mode, sync_tp_size),)

        return Stage.of("sensitivity", f"sensitivity to {of}", identity, commands)

    def conversion(self, recipe: Recipe, text: str) -> Stage:
        given, spec = recipe.to_dict(), self.spec
        content = {"head_map": self.inputs.data(recipe.head_map)} if recipe.head_map is not None else {}
        identity = {"model": self.digest, "recipe": {**given, **content}}

        def commands(output: str) -> tuple[Words, ...]:
            return (convert_words(spec.model, output, given, spec.revision, spec.verify),)

        return Stage.of("convert", f"convert: {text}", identity, commands)

    def adaptation(self, asked: AdaptStage, before: Stage | None, name: str) -> Stage:
        """before: the stage that writes the model to adapt; None: it is the dense one."""
        model = f"{before.output}/{MODEL_FOLDER}" if before is not None else self.model
        content = {
            key: [self.inputs.source(spec) for spec in parse_specs(texts if isinstance(texts, list) else [texts])]
            for key, texts in asked.given.items()
            if key in ("data", "eval_data")
        }
        identity = {
            "model": before.key if before is not None else self.digest,
            "teacher": self.digest,
            "method": asked.method,
            "options": {**asked.given, **content},
        }

        def commands(output: str) -> tuple[Words, ...]:
            return adapt_words(model, output, asked.method, self.model, asked.given, self.spec.verify)

        needs = (before.key,) if before is not None else ()
        return Stage.of("adapt", f"adapt: {name}", identity, commands, needs, asked.tokens)

    def evaluation(self, model: str, name: str, made_by: Stage | None, reference: Stage | None) -> Stage:
        """made_by: the stage that writes the model, None for the dense one. reference: the dense model's evaluation."""
        given = self.spec.eval_given or {}
        content: dict[str, Any] = {}
        compared = "perplexity" in given  # predictions are those of its text
        if compared:
            content["perplexity"] = self.inputs.data(given["perplexity"])
        else:
            reference = None
        if "include_path" in given:
            content["include_path"] = self.inputs.folder(Path(given["include_path"]))
        packages = EVAL_PACKAGES if "tasks" in given else EVAL_PACKAGES[:2]
        identity: dict[str, Any] = {
            "model": made_by.key if made_by is not None else self.digest,
            "options": {**given, **content},
            "versions": {package: importlib.metadata.version(package) for package in packages},
        }
        if made_by is None:
            identity["name"] = model  # results.json holds it, and everything is joined by it
        if reference is not None:
            identity["reference"] = self.digest

        def commands(output: str) -> tuple[Words, ...]:
            kept = f"{output}/{PREDICTIONS}" if compared and made_by is None else None
            compared_with = f"{reference.output}/{PREDICTIONS}" if reference is not None else None
            return (eval_words(model, output, {**given, "keep_predictions": kept, "reference": compared_with}),)

        needs = tuple(stage.key for stage in (made_by, reference) if stage is not None)
        return Stage.of("eval", f"eval: {name}", identity, commands, needs)

    def benchmark(self, setting: BenchChoice, converted: Sequence[Stage]) -> Stage:
        """All models of one setting, interleaved in one group of processes."""
        models = [self.model, *(f"{stage.output}/{MODEL_FOLDER}" for stage in converted)]
        identity = {
            "model": self.digest,
            "name": self.model,
            "models": [stage.key for stage in converted],
            "options": setting.options.to_dict(),
            "link": setting.link,
            "dtype": setting.given.get("dtype", "auto"),
            "machine": machine(),
            "torch": importlib.metadata.version("torch"),
        }
        title = ", ".join(
            f"{key} {','.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in setting.given.items()
            if value is not True
        )
        needs = tuple(stage.key for stage in converted)
        return Stage.of(
            "bench",
            f"bench: {title or 'one process'}",
            identity,
            lambda output: (bench_words(models, output, setting.given),),
            needs,
        )


def summed(amounts: Iterable[int | None]) -> int | None:
    """None where one is not known, and of none."""
    known = list(amounts)
    return sum(amount for amount in known if amount is not None) if known and None not in known else None


def machine() -> dict[str, Any]:
    """What times depend on and is known without measuring."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"processor": model or platform.machine(), "cores": len(cores()), "gpus": gpus}
