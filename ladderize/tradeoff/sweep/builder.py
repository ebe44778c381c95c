"""The stages of a sweep, each with everything that decides its output."""

import importlib.metadata
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.data.sources import parse_specs
from ladderize.adapt.retrain.options import RetrainOptions
from ladderize.checkpoint.llama import check_model
from ladderize.convert.recipe import Recipe
from ladderize.ranks.threads import cores
from ladderize.tradeoff.sweep import by_hand
from ladderize.tradeoff.sweep.inputs import Inputs
from ladderize.tradeoff.sweep.settings import adapt_settings, texts
from ladderize.tradeoff.sweep.spec import AdaptStage, BenchChoice, SweepSpec
from ladderize.tradeoff.sweep.stages import MODEL_FOLDER, PREDICTIONS, Stage

# what computes the accuracies: numbers of two versions are no pairs
EVAL_PACKAGES = ("torch", "transformers", "lm-eval")
PLACEHOLDER = "OUTPUT"  # in a command, until the stage's key is known


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
        identity: dict[str, Any] = {
            "model": self.digest,
            "mode": mode,
            "sync_tp_size": sync_tp_size,
            "options": {**given, "data": self.inputs.data(given["data"])},
        }
        job = {"model": self.model, "mode": mode, "sync_tp_size": sync_tp_size, "options": given}
        command = by_hand.sensitivity_by_hand(self.model, PLACEHOLDER, given, mode, sync_tp_size)
        return _with_command(Stage("sensitivity", f"sensitivity to {of}", identity, job, command))

    def conversion(self, recipe: Recipe, text: str) -> Stage:
        given = recipe.to_dict()
        identity: dict[str, Any] = {"model": self.digest, "recipe": given}
        if recipe.head_map is not None:
            identity["recipe"] = {**given, "head_map": self.inputs.data(recipe.head_map)}
        job = {
            "model": self.spec.model,
            "revision": self.spec.revision,
            "recipe": given,
            "verify": self.spec.verify,
        }
        command = by_hand.convert_by_hand(self.spec.model, PLACEHOLDER, given, self.spec.revision, self.spec.verify)
        return _with_command(Stage("convert", f"convert: {text}", identity, job, command))

    def adaptation(self, asked: AdaptStage, before: Stage | None, name: str) -> Stage:
        """before: the stage that writes the model to adapt; None: it is the dense one."""
        given, model = dict(asked.given), f"{before.output}/{MODEL_FOLDER}" if before is not None else self.model
        sources = {
            key: [self.inputs.source(spec) for spec in parse_specs(texts(given, key, asked.where))]
            for key in ("data", "eval_data")
            if key in given
        }
        identity: dict[str, Any] = {
            "model": before.key if before is not None else self.digest,
            "teacher": self.digest,
            "method": asked.method,
            "options": {**given, **sources},
        }
        job = {
            "model": model,
            "method": asked.method,
            "teacher": self.model,
            "options": given,
            "verify": self.spec.verify,
        }
        options = adapt_settings(asked.method, given, self.model, asked.where)
        teacher = options.distill_from if isinstance(options, RetrainOptions) else self.model
        command = by_hand.adapt_by_hand(model, PLACEHOLDER, asked.method, teacher, given, self.spec.verify)
        needs = (before.key,) if before is not None else ()
        stage = Stage("adapt", f"adapt: {name}", identity, job, command, needs, self.tokens(asked))
        return _with_command(stage)

    def evaluation(self, model: str, name: str, made_by: Stage | None, reference: Stage | None) -> Stage:
        """made_by: the stage that writes the model, None for the dense one. reference: the dense model's evaluation."""
        given = dict(self.spec.eval_given or {})
        content: dict[str, Any] = dict(given)
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
            "options": content,
            "versions": {package: importlib.metadata.version(package) for package in packages},
        }
        if made_by is None:
            identity["name"] = model  # results.json holds it, and everything is joined by it
        if reference is not None:
            identity["reference"] = self.digest
        needs = tuple(stage.key for stage in (made_by, reference) if stage is not None)
        job = {
            "model": model,
            "options": given,
            "keep_predictions": compared and made_by is None,
            "reference": f"{reference.output}/{PREDICTIONS}" if reference is not None else None,
        }
        own = {"reference": job["reference"], "keep_predictions": None}
        if job["keep_predictions"]:
            own["keep_predictions"] = f"{PLACEHOLDER}/{PREDICTIONS}"
        command = by_hand.eval_by_hand([model], PLACEHOLDER, {**given, **own})
        return _with_command(Stage("eval", f"eval: {name}", identity, job, command, needs))

    def benchmark(self, setting: BenchChoice, converted: Sequence[Stage]) -> Stage:
        """All models of one setting, interleaved in one group of processes."""
        given = dict(setting.given)
        models = [self.model, *(f"{stage.output}/{MODEL_FOLDER}" for stage in converted)]
        identity = {
            "model": self.digest,
            "name": self.model,
            "models": [stage.key for stage in converted],
            "options": setting.options.to_dict(),
            "link": setting.link,
            "dtype": given.get("dtype", "auto"),
            "machine": machine(),
            "torch": importlib.metadata.version("torch"),
        }
        job = {"models": models, "options": given}
        command = by_hand.bench_by_hand(models, PLACEHOLDER, given)
        needs = tuple(stage.key for stage in converted)
        return _with_command(Stage("bench", f"bench: {bench_title(setting)}", identity, job, command, needs))

    def tokens(self, asked: AdaptStage) -> int | None:
        """That a stage reads, where the file says it."""
        options = adapt_settings(asked.method, asked.given, self.model, asked.where)
        if isinstance(options, RetrainOptions):
            return options.budget.tokens
        if options.samples is None or options.seq_len is None:
            return None
        return options.samples * options.seq_len


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


def bench_title(setting: BenchChoice) -> str:
    """A benchmark in words: the keys that it was given."""
    parts = [
        f"{key} {','.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in setting.given.items()
        if value is not True
    ]
    return ", ".join(parts) if parts else "one process"


def _with_command(stage: Stage) -> Stage:
    """The same with its own folder in its command, which does not decide its key."""
    return replace(stage, command=stage.command.replace(PLACEHOLDER, stage.output))
