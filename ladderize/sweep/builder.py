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
from ladderize.sweep.stages import (
    MODEL_FOLDER,
    PREDICTIONS,
    SHARDS,
    Given,
    Stage,
    StageLaunch,
    adapt_words,
    bench_words,
    computing,
    convert_words,
    eval_words,
    make_stage,
    sensitivity_words,
)
from ladderize.sweep.sweep_file import AdaptStage, BenchChoice, SweepSpec

CACHE = "inputs.json"  # in the sweep's folder: the hashes of files that have not changed since
MODEL_SUFFIXES = (".json", ".safetensors", ".model", ".jinja", ".txt")
EVAL_PACKAGES = ("torch", "transformers", "lm-eval")  # accuracies of two versions cannot be compared in pairs


@dataclass
class Inputs:
    """The files that a sweep reads and did not make, identified by their content. When one changes, its stages run
    anew.

    cache: a file that keeps the hashes, each with its file's size, time and inode. A file with the same ones is not
    read again.
    seen: the hashes that this run has asked for.
    """

    cache: Path
    seen: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.remembered = read_own(self.cache).get("files", {})

    def model(self, name: str, revision: str | None = None) -> str:
        """Return the hash of a checkpoint: its weights, config and tokenizer. Raises UserError unless it is sound."""
        folder = check_model(name, revision)
        files = sorted(path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES and path.is_file())
        return _digest({path.name: self.file(path) for path in files})

    def data(self, spec: str) -> str:
        """Return the hash of a file of ``--perplexity`` or ``sensitivity --data``. Raises UserError if it is not
        there."""
        path, array = split_name(spec)
        if not path.exists():
            raise UserError(f"{path} does not exist")
        return _digest({"file": self.file(path), "array": array})

    def source(self, spec: SourceSpec) -> str:
        """Return the hash of one source of training data. A dataset on the hub is identified by its name alone."""
        if spec.is_streamed:
            return _digest({"hub": spec.text, "weight": spec.weight})
        return _digest({"weight": spec.weight, "files": [self.data(name) for name in spec.files()]})

    def folder(self, path: Path) -> str:
        """Return the hash of all files in a folder of tasks. Raises UserError if it is no folder."""
        if not path.is_dir():
            raise UserError(f"{path} is not a folder")
        files = sorted(entry for entry in path.rglob("*") if entry.is_file() and "__pycache__" not in entry.parts)
        return _digest({str(entry.relative_to(path)): self.file(entry) for entry in files})

    def file(self, path: Path) -> str:
        """Return the sha256 of a file's content. Raises UserError if the file changes meanwhile."""
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
        """Keep the hashes for the next run."""
        write_json(self.cache, {"files": self.seen})

    def check_unchanged(self) -> None:
        """Raise UserError for a file that has changed since this run began."""
        for name, before in self.seen.items():
            path = Path(name)
            is_same = path.exists() and (
                _signature(path) == before["signature"] or file_sha256(name) == before["sha256"]
            )
            if not is_same:
                raise UserError(
                    f"{name} changed while the sweep ran, so what was measured meanwhile may be of either; run the same"
                    " command again: it keeps the stages that were complete before, and that do not depend on it"
                )


def _signature(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]


def _digest(value: Any) -> str:
    return run_digest({"value": value})


@dataclass(frozen=True)
class StageBuilder:
    """A builder of stages.

    model: the dense model as stages name it.
    digest: the hash of its content.
    gpus: the number of GPUs.
    """

    spec: SweepSpec
    inputs: Inputs
    model: str
    digest: str
    gpus: int

    @classmethod
    def of(cls, spec: SweepSpec, inputs: Inputs) -> "StageBuilder":
        """Return a builder for the dense model. Raises UserError unless the model is sound."""
        folder = check_model(spec.model, spec.revision)
        model = spec.model if spec.revision is None else str(folder)
        return cls(spec, inputs, model, inputs.model(spec.model, spec.revision), len(visible_gpus()))

    def sensitivity(self, mode: str, sync_tp_size: int | None) -> Stage:
        options = {key: value for key, value in (self.spec.sensitivity or {}).items() if key != "mode"}
        title = f"sensitivity to {f'spd, sync_tp_size {sync_tp_size}' if sync_tp_size is not None else 'ladder'}"
        identity = {
            "model": self.digest,
            "mode": mode,
            "sync_tp_size": sync_tp_size,
            "options": {**computing("sensitivity", options), "data": self.inputs.data(options["data"])},
        }
        return make_stage(
            "sensitivity",
            title,
            identity,
            lambda output: (sensitivity_words(self.model, output, options, mode, sync_tp_size),),
            launch=StageLaunch.of(options, "sensitivity", self.gpus),
        )

    def conversion(self, recipe: Recipe, text: str) -> Stage:
        options, spec = recipe.to_dict(), self.spec
        content = {"head_map": self.inputs.data(recipe.head_map)} if recipe.head_map is not None else {}
        return make_stage(
            "convert",
            f"convert: {text}",
            {"model": self.digest, "recipe": {**options, **content}},
            lambda output: (convert_words(spec.model, output, options, spec.revision, spec.verify),),
        )

    def adaptation(self, asked: AdaptStage, before: Stage | None, name: str) -> Stage:
        """Return the stage of one step of adaptation.

        before: the stage that writes the model to adapt; None: the dense model.
        name: the title's words.
        """
        model = f"{before.output}/{MODEL_FOLDER}" if before is not None else self.model
        content = {
            key: [self.inputs.source(spec) for spec in parse_specs(texts if isinstance(texts, list) else [texts])]
            for key, texts in asked.options.items()
            if key in ("data", "eval_data")
        }
        identity: dict[str, Any] = {
            "model": before.key if before is not None else self.digest,
            "teacher": self.digest,
            "method": asked.method,
            "options": {**computing("adapt", asked.options), **content},
        }
        launch = StageLaunch.of(asked.options, asked.method, self.gpus)
        sharing = launch.processes // int(asked.options.get("tp_size", 1))
        if sharing > 1 and asked.method in SHARDS and "batch_size" not in asked.options:
            identity["processes"] = sharing  # the default batch then depends on it
        return make_stage(
            "adapt",
            f"adapt: {name}",
            identity,
            lambda output: adapt_words(model, output, asked.method, self.model, asked.options, self.spec.verify),
            (before.key,) if before is not None else (),
            launch,
        )

    def evaluation(self, model: str, name: str, made_by: Stage | None, reference: Stage | None) -> Stage:
        """Return the stage that evaluates a model.

        made_by: the stage that writes the model; None: the dense model.
        reference: the dense model's evaluation.
        """
        options = self.spec.evaluation or {}
        content: dict[str, Any] = {}
        has_text = "perplexity" in options  # predictions are those of its text
        if has_text:
            content["perplexity"] = self.inputs.data(options["perplexity"])
        if "include_path" in options:
            content["include_path"] = self.inputs.folder(Path(options["include_path"]))
        packages = EVAL_PACKAGES if "tasks" in options else EVAL_PACKAGES[:2]
        identity: dict[str, Any] = {
            "model": made_by.key if made_by is not None else self.digest,
            "options": {**computing("eval", options), **content},
            "versions": {package: importlib.metadata.version(package) for package in packages},
        }
        if made_by is None:
            identity["name"] = model  # results.json holds it, and the report joins by it
        own: Given = {}
        if has_text and made_by is not None and reference is not None:
            identity["reference"] = self.digest
            own = {"reference": f"{reference.output}/{PREDICTIONS}"}
        needs = [stage.key for stage in (made_by, reference if own else None) if stage is not None]

        def commands(output: str) -> tuple[tuple[str, ...], ...]:
            keep = {"keep_predictions": f"{output}/{PREDICTIONS}"} if has_text and made_by is None else {}
            return (eval_words(model, output, options, {**keep, **own}),)

        launch = StageLaunch.of(options, "eval", self.gpus)
        return make_stage("eval", f"eval: {name}", identity, commands, tuple(needs), launch)

    def benchmark(self, setting: BenchChoice, converted: Sequence[Stage]) -> Stage:
        """Return the stage that times all models of one setting, interleaved in one group of processes."""
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
        return make_stage(
            "bench",
            f"bench: {title or 'one process'}",
            identity,
            lambda output: (bench_words(models, output, setting.given),),
            tuple(stage.key for stage in converted),
        )


def machine() -> dict[str, Any]:
    """Return the facts of the machine that times depend on."""
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"processor": processor(), "cores": len(cores()), "gpus": gpus}
