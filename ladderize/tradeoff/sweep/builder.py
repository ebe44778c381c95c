"""The stages of a sweep, each with everything that decides its output, and the files that it reads."""

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.adapt.data_specs import SourceSpec, parse_specs
from ladderize.checkpoint.opening import check_model
from ladderize.convert.recipe import Recipe
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.regular import split_name
from ladderize.files.work import run_digest
from ladderize.ranks.device import visible_gpus
from ladderize.ranks.threads import cores, processor
from ladderize.tradeoff.sweep.launch import SHARDS, Given, StageLaunch, Words
from ladderize.tradeoff.sweep.stages import (
    MODEL_FOLDER,
    PREDICTIONS,
    Stage,
    adapt_words,
    bench_words,
    computing,
    convert_words,
    eval_words,
    sensitivity_words,
)
from ladderize.tradeoff.sweep.sweep_file import AdaptStage, BenchChoice, SweepSpec

CACHE = "inputs.json"  # in the sweep's folder: the hashes of files that have not changed since
OF_A_MODEL = (".json", ".safetensors", ".model", ".jinja", ".txt")
# what computes the accuracies: numbers of two versions are no pairs
EVAL_PACKAGES = ("torch", "transformers", "lm-eval")


@dataclass
class Inputs:
    """What a sweep reads and did not make: the dense model, data, tasks. Known by their whole content, so that a stage
    runs anew when one of them is another, and noticed when one changes while the sweep runs.

    cache: keeps the digests of files, with what the file system says of each (``signature``); one that says the same is
    not read again. seen: those of this run.
    """

    cache: Path
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.remembered = read_own(self.cache).get("files", {})

    def model(self, name: str, revision: str | None = None) -> str:
        """Of a checkpoint: all of its weights, its config and its tokenizer. Raises UserError unless it is sound."""
        folder = check_model(name, revision)
        files = sorted(path for path in folder.iterdir() if path.suffix in OF_A_MODEL and path.is_file())
        return _digest({path.name: self.file(path) for path in files})

    def data(self, spec: str) -> str:
        """Of one file as ``--perplexity`` or ``sensitivity --data`` takes it."""
        path, array = split_name(spec)
        if not path.exists():
            raise UserError(f"{path} does not exist")
        return _digest({"file": self.file(path), "array": array})

    def source(self, spec: SourceSpec) -> str:
        """Of one source of training data; a dataset on the hub is known by its name alone."""
        if spec.is_streamed:
            return _digest({"hub": spec.text, "weight": spec.weight})
        return _digest({"weight": spec.weight, "files": [self.data(name) for name in spec.files()]})

    def folder(self, path: Path) -> str:
        """Of all files in a folder, such as one of tasks."""
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        files = sorted(entry for entry in path.rglob("*") if entry.is_file() and "__pycache__" not in entry.parts)
        return _digest({str(entry.relative_to(path)): self.file(entry) for entry in files})

    def file(self, path: Path) -> str:
        """The sha256 of a file's content."""
        path = path.resolve()
        signature = _signature(path)
        known = self.remembered.get(str(path))
        if not isinstance(known, dict) or known.get("signature") != signature or "sha256" not in known:
            known = {"signature": signature, "sha256": file_sha256(str(path))}
            if _signature(path) != signature:
                raise UserError(f"{path} changes while it is read; wait until whatever writes it is done")
        self.remembered[str(path)] = self.seen[str(path)] = known
        return str(known["sha256"])

    def save(self) -> None:
        """Keep what was learnt of the files of this sweep, for the next run."""
        write_json(self.cache, {"files": self.seen})

    def check_unchanged(self) -> None:
        """Raise UserError for a file that is not what it was when this run began."""
        for name, before in self.seen.items():
            path = Path(name)
            try:
                signature = _signature(path)
                same = signature == before["signature"] or file_sha256(str(path)) == before["sha256"]
            except OSError:
                same = False
            if not same:
                raise UserError(
                    f"{name} changed while the sweep ran, so what was measured meanwhile may be of either; run the same"
                    " command again: it keeps the stages that were complete before, and that do not depend on it"
                )
            self.seen[name] = {**before, "signature": signature}


def _signature(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]


def _digest(value: Any) -> str:
    return run_digest({"value": value})


@dataclass(frozen=True)
class StageBuilder:
    """model: the dense one as stages name it. digest: of its content. gpus: of each of so many hosts."""

    spec: SweepSpec
    inputs: Inputs
    model: str
    digest: str
    gpus: int
    hosts: int = 1

    @classmethod
    def of(cls, spec: SweepSpec, inputs: Inputs, hosts: int = 1) -> "StageBuilder":
        """Reads everything that the sweep reads, once. Raises UserError for what is not there."""
        folder = check_model(spec.model, spec.revision)
        model = spec.model if spec.revision is None else str(folder)
        return cls(spec, inputs, model, inputs.model(spec.model, spec.revision), len(visible_gpus()), hosts)

    def _launch(self, given: Given, method: str) -> StageLaunch:
        return StageLaunch.of(given, method, self.gpus, self.hosts)

    def sensitivity(self, mode: str, sync_tp_size: int | None) -> Stage:
        given = {key: value for key, value in (self.spec.sensitivity or {}).items() if key != "mode"}
        of = f"spd, sync_tp_size {sync_tp_size}" if sync_tp_size is not None else "ladder"
        identity = {
            "model": self.digest,
            "mode": mode,
            "sync_tp_size": sync_tp_size,
            "options": {**computing("sensitivity", given), "data": self.inputs.data(given["data"])},
        }

        def commands(output: str) -> tuple[Words, ...]:
            return (sensitivity_words(self.model, output, given, mode, sync_tp_size),)

        launch = self._launch(given, "sensitivity")
        return Stage.of("sensitivity", f"sensitivity to {of}", identity, commands, launch=launch)

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
        identity: dict[str, Any] = {
            "model": before.key if before is not None else self.digest,
            "teacher": self.digest,
            "method": asked.method,
            "options": {**computing("adapt", asked.given), **content},
        }
        launch = self._launch(asked.given, asked.method)
        sharing = launch.processes // int(asked.given.get("tp_size", 1))
        if sharing > 1 and asked.method in SHARDS and "batch_size" not in asked.given:
            identity["processes"] = sharing  # by which the batch is then made divisible

        def commands(output: str) -> tuple[Words, ...]:
            return adapt_words(model, output, asked.method, self.model, asked.given, self.spec.verify)

        needs = (before.key,) if before is not None else ()
        return Stage.of("adapt", f"adapt: {name}", identity, commands, needs, asked.tokens, launch)

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
            "options": {**computing("eval", given), **content},
            "versions": {package: importlib.metadata.version(package) for package in packages},
        }
        if made_by is None:
            identity["name"] = model  # results.json holds it, and everything is joined by it
        if reference is not None:
            identity["reference"] = self.digest

        def commands(output: str) -> tuple[Words, ...]:
            kept = f"{output}/{PREDICTIONS}" if compared and made_by is None else None
            compared_with = f"{reference.output}/{PREDICTIONS}" if reference is not None else None
            return (eval_words(model, output, given, {"keep_predictions": kept, "reference": compared_with}),)

        needs = tuple(stage.key for stage in (made_by, reference) if stage is not None)
        return Stage.of("eval", f"eval: {name}", identity, commands, needs, launch=self._launch(given, "eval"))

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


def machine() -> dict[str, Any]:
    """What times depend on and is known without measuring."""
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"processor": processor(), "cores": len(cores()), "gpus": gpus}
