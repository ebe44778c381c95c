"""The stages of a sweep, each with everything that decides its output, and the files that it reads."""

import importlib.metadata
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.data_files import HUB, data_files, split_weight
from ladderize.checkpoint.opening import open_sound_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.tasks import open_tasks, tasks_digest
from ladderize.families.registry import family_of
from ladderize.files.regular import names_a_file, split_name
from ladderize.files.unfinished import run_digest
from ladderize.layout import Layout
from ladderize.ranks.device import cores, processor
from ladderize.sweep.stages import (
    BENCH_JSON,
    MODEL_FOLDER,
    PREDICTIONS,
    RESULTS,
    SHARDS,
    Given,
    Stage,
    Words,
    adapt_words,
    make_stage,
    parsed_options,
    words_of,
)
from ladderize.sweep.sweep_file import LINK_KEYS, AdaptStage, BenchChoice, LayoutChoice, SweepSpec

MODEL_SUFFIXES = (".json", ".model", ".jinja", ".txt")  # of a checkpoint's files besides the weights
# accuracies of two versions cannot be compared in pairs
EVAL_PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval")


@dataclass
class Inputs:
    """The files that a sweep reads and did not make, identified by their content. When one changes, its stages run
    anew.

    seen: size, time and place of each file when it was read.
    hashes: of the files that were read as a whole.
    questions: of lm-eval's tasks, by the options of eval: the hash of their settings, functions and rows.
    """

    seen: dict[Path, list[int] | None] = field(default_factory=dict)
    hashes: dict[Path, str] = field(default_factory=dict)
    questions: dict[EvalOptions, str] = field(default_factory=dict)

    def model(self, name: str) -> str:
        """Return the hash of a checkpoint: its weights, config and tokenizer. Raises UserError unless it is sound."""
        checkpoint = open_sound_checkpoint(name)
        family_of(checkpoint.config)  # raises for one that cannot be converted
        folder = checkpoint.folder
        self.seen |= {folder / weights: _signature(folder / weights) for weights in checkpoint.weight_files}
        files = self._files(folder, (path for path in folder.iterdir() if path.suffix in MODEL_SUFFIXES))
        return run_digest({"weights": fingerprint(checkpoint), "files": files})

    def _files(self, folder: Path, paths: Iterable[Path]) -> str:
        """Return the hash of the content of files, and of their places in a folder."""
        return run_digest({str(path.relative_to(folder)): self.file(path) for path in paths if path.is_file()})

    def data(self, name: str) -> tuple[str, str | None]:
        """Return the hash of a file of ids or text, and the array in it that is meant. Raises UserError if it is not
        there."""
        path, array = split_name(name)
        if not path.exists():
            raise UserError(f"{path} does not exist")
        if path.is_dir():
            return self._files(path, (entry for entry in path.rglob("*") if entry.suffix != ".pyc")), None
        return self.file(path), array

    def sources(self, names: str | list[str]) -> list[Any]:
        """Return what identifies sources of training data: their weights, and the content of files or the name on the
        hub."""
        sources = [split_weight(name) for name in (names if isinstance(names, list) else [names])]
        return [
            (weight, name if name.startswith(HUB) else [self.data(file) for file in data_files(name)])
            for name, weight in sources
        ]

    def file(self, path: Path) -> str:
        """Return the sha256 of a file's content, which is read again only where size or time have changed."""
        path = path.resolve()
        if path not in self.hashes or self.seen[path] != _signature(path):
            self.seen[path] = _signature(path)
            self.hashes[path] = file_sha256(str(path))
        return self.hashes[path]

    def tasks(self, options: EvalOptions) -> str:
        """Return the hash of what lm-eval's tasks ask, which is read once. Raises UserError where they cannot be
        read."""
        if options not in self.questions:
            with SILENT.contained():
                self.questions[options] = tasks_digest(open_tasks(options), self.file)
        return self.questions[options]

    def check_unchanged(self, *, asked: bool) -> None:
        """Raise UserError for a file that has changed since it was read.

        asked: lm-eval has read its tasks, so they are read again: only that shows what their files hold.
        """
        changed = [
            str(path)
            for path, before in self.seen.items()
            if _signature(path) != before and self.hashes.get(path) != (path.is_file() and file_sha256(str(path)))
        ]
        if asked and not changed:
            again = Inputs()
            changed = [
                ", ".join(options.tasks) for options, digest in self.questions.items() if again.tasks(options) != digest
            ]
        if changed:
            raise UserError(
                f"{changed[0]} changed while the sweep ran, so what was measured meanwhile may be of either; run the"
                " same command again: it keeps the stages that were complete before, and that do not depend on it"
            )


def _signature(path: Path) -> list[int] | None:
    """Return size, time and place of a file; None where it is not there."""
    if not path.exists():
        return None
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev]


class StageBuilder:
    """A builder of stages. Raises UserError unless the dense model is sound.

    digest: the hash of that model's content.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self.spec, self.inputs, self.gpus = spec, Inputs(), torch.cuda.device_count()
        self.digest = self.inputs.model(spec.model)

    def processes(self, options: Given, is_shared: bool = False) -> int:
        """Return the number of processes of a command: as many as there are GPUs and divide the batch. One group of
        tensor parallel ranks is started by the command itself.

        is_shared: the processes share a batch.
        """
        copy = int(options.get("tp_size", 1))  # processes for each copy of the model
        batch = options.get("batch_size") if is_shared else None
        gpus = 1 if options.get("device") == "cpu" else self.gpus
        fit = [n for n in range(2 * copy, gpus + 1, copy) if batch is None or int(batch) % (n // copy) == 0]
        return max(fit, default=1)

    def conversion(self, choice: LayoutChoice, layout: Layout, words: str) -> Stage:
        """Return the stage that makes a layout.

        words: the layout in words.
        """
        assignment, spec = choice.recipe.assignment, self.spec
        identity: dict[str, Any] = {
            "model": self.digest,
            "layout": layout.to_config(),
            "dtype": choice.recipe.dtype,
            "assignment": None if assignment is None else self.inputs.data(assignment),
        }
        if "recipe" in choice.options:  # decides what is here; it must not change before it is read again
            self.inputs.file(Path(choice.options["recipe"]))
        if choice.assign:
            identity |= {"assign": choice.assign, "data": self.inputs.sources(choice.options["data"])}

        def commands(output: str) -> tuple[Words, ...]:
            own = {"no_verify": not spec.verify}
            return (words_of("convert", [spec.model, f"{output}/{MODEL_FOLDER}"], own, choice.options),)

        return make_stage("convert", f"convert: {words}", identity, commands)

    def adaptation(self, stage: AdaptStage, before: Stage, name: str) -> Stage:
        """Return the stage of one step of adaptation.

        before: the stage that writes the model to adapt.
        name: the title's words.
        """
        options, is_sharded = stage.options, stage.method in SHARDS
        processes = self.processes(options, is_sharded)
        content = {key: self.inputs.sources(options[key]) for key in ("data", "eval_data") if key in options}
        is_cached = "teacher_cache" in options
        cached = {"teacher_cache": True} if is_cached else {}  # wherever it lies
        identity: dict[str, Any] = {
            "model": before.key,
            "teacher": self.digest,
            "method": stage.method,
            "options": {**options, **content, **cached},
        }
        if is_sharded and "batch_size" not in options:  # the default depends on how many share it
            identity["processes"] = processes
        return make_stage(
            "adapt",
            f"adapt: {name}",
            identity,
            lambda output: adapt_words(before.model, output, stage.method, self.spec.model, options, self.spec.verify),
            (before,),
            processes,
            fsdp=is_sharded and processes > 1 and int(options.get("tp_size", 1)) == 1 and not is_cached,
        )

    def evaluation(self, name: str, made_by: Stage | None, reference: Stage | None) -> Stage:
        """Return the stage that evaluates a model.

        made_by: the stage that writes the model; None: the dense model.
        reference: the dense model's evaluation.
        """
        assert self.spec.evaluation is not None
        options, has_text = self.spec.evaluation, "perplexity" in self.spec.evaluation
        model = made_by.model if made_by is not None else self.spec.model
        content = {key: self.inputs.data(options[key]) for key in ("perplexity", "include_path") if key in options}
        evaluated = parsed_options(words_of("eval", ["MODEL"], {}, options)).fill(EvalOptions)
        packages = EVAL_PACKAGES if "tasks" in options else EVAL_PACKAGES[:3]
        identity = {
            "model": made_by.key if made_by is not None else [self.digest, model],  # the report joins by its name
            "reference": [self.digest, self.spec.model if has_text else None],  # kept predictions have its name
            "options": {**options, **content},
            "questions": self.inputs.tasks(evaluated) if evaluated.tasks else None,
            "versions": {package: importlib.metadata.version(package) for package in packages},
        }
        needs = (made_by,) if made_by is not None else ()
        if has_text and reference is not None:  # predictions are those of its text
            needs = (*needs, reference)

        def commands(output: str) -> tuple[Words, ...]:
            # --resume is safe: the stage's key identifies the model and the data
            own: dict[str, Any] = {"out": f"{output}/{RESULTS}", "resume": True}
            if has_text and reference is not None:
                own |= {"reference": f"{reference.output}/{PREDICTIONS}"}
            elif has_text and made_by is None:
                own |= {"keep_predictions": f"{output}/{PREDICTIONS}"}
            return (words_of("eval", [model], own, options),)

        return make_stage("eval", f"eval: {name}", identity, commands, needs, self.processes(options))

    def benchmark(self, setting: BenchChoice, converted: Sequence[Stage]) -> Stage:
        """Return the stage that times all models of one setting, interleaved in one group of processes."""
        models = [self.spec.model, *(stage.model for stage in converted)]
        links = {key: str(setting.given.get(key, "")) for key in LINK_KEYS}
        content = {key: self.inputs.data(link) for key, link in links.items() if names_a_file(link)}
        identity = {
            "model": [self.digest, self.spec.model],
            "models": [stage.key for stage in converted],
            "options": {**setting.given, **content},
            "machine": machine(),
            "torch": importlib.metadata.version("torch"),
        }
        title = ", ".join(f"{key} {str(value).strip('[]')}" for key, value in setting.given.items())
        return make_stage(
            "bench",
            f"bench: {title or 'one process'}",
            identity,
            lambda output: (words_of("bench", models, {"out": f"{output}/{BENCH_JSON}"}, setting.given),),
            tuple(converted),
        )


def machine() -> dict[str, Any]:
    """Return the facts of the machine that times depend on."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"processor": processor(), "cores": len(cores()), "gpus": gpus}
