"""The making of stages: the options of each, and the hash of everything that decides its output."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.options import FULL, LORA, AdaptOptions
from ladderize.choices import OPTION, described, identity
from ladderize.commands.convert import convert
from ladderize.commands.measure import bench, evaluate
from ladderize.commands.recover import MergeOptions, adapt, merge
from ladderize.files.regular import names_a_file
from ladderize.files.unfinished import run_digest
from ladderize.layout import Layout
from ladderize.ranks.device import cores, processor
from ladderize.sweep.inputs import Inputs
from ladderize.sweep.stages import (
    ADAPTER,
    BENCH_JSON,
    KEY_DIGITS,
    MODEL_FOLDER,
    PREDICTIONS,
    RESULTS,
    Stage,
    Step,
    output_folder,
)
from ladderize.sweep.sweep_file import AdaptEntry, BenchEntry, LayoutEntry, SweepSpec

# Of the code behind a kind of stage: raise it when the output changes for the same input.
VERSIONS = {"convert": 2, "adapt": 6, "eval": 2, "bench": 2}
# accuracies of two versions cannot be compared in pairs
EVAL_PACKAGES = ("torch", "transformers", "tokenizers", "lm-eval")
SHARDS = (FULL, LORA)  # methods with models that FSDP2 shards, and a batch that processes share
# those of accelerate launch for FSDP2; without the policy the whole model is gathered at once
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


class StageBuilder:
    """A builder of stages. Raises UserError unless the dense model is sound.

    digest: the hash of that model's content.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self.spec, self.inputs, self.gpus = spec, Inputs(), torch.cuda.device_count()
        self.digest = self.inputs.model(spec.model)

    def conversion(self, entry: LayoutEntry, layout: Layout, title: str) -> Stage:
        """Return the stage that makes a layout."""
        options = entry.options
        content: dict[str, Any] = {"layout": layout.to_config(), "dtype": entry.recipe.dtype}
        if entry.recipe.assignment is not None:
            content["assignment"] = self.inputs.data(entry.recipe.assignment)
        if options.recipe is not None:  # decides the layout; it must not change before it is read again
            self.inputs.file(options.recipe)
        if options.assign and options.data is not None:
            content |= {"assign": options.assign, "data": self.inputs.sources((options.data,))}
        key = self._key("convert", content)
        out = f"{output_folder('convert', key)}/{MODEL_FOLDER}"
        made = replace(options, src=self.spec.model, out=out, verify=self.spec.verify)
        return Stage("convert", f"convert: {title}", key, (Step("convert", convert, made),))

    def adaptation(self, entry: AdaptEntry, before: Stage, title: str, work: str) -> Stage:
        """Return the stage of one step of adaptation. An adapter is merged right away.

        before: the stage that writes the model to adapt.
        """
        options = entry.options
        is_sharded = options.method in SHARDS
        processes = self._processes(options, is_sharded)
        content = self._content(options)
        if options.teacher_cache is not None:
            content["teacher_cache"] = True  # wherever it lies
        if is_sharded and options.batch_size is None:  # the default depends on how many share it
            content["processes"] = processes
        key = self._key("adapt", content, before)
        output = output_folder("adapt", key)
        is_taught = not is_sharded or options.distill_weight != 0
        out = f"{output}/{trained_folder(options)}"
        made = replace(
            options,
            model=before.model,
            out=out,
            distill_from=self.spec.model if is_taught else None,
            distill_weight=options.distill_weight if is_taught else None,
            verify=self.spec.verify or options.method == LORA,
        )
        has_fsdp = is_sharded and processes > 1 and options.tp_size == 1 and options.teacher_cache is None
        steps = [Step("adapt", adapt, made, processes, FSDP2 if has_fsdp else {})]
        if options.method == LORA:
            merging = MergeOptions(out, f"{output}/{MODEL_FOLDER}", verify=self.spec.verify)
            steps.append(Step("merge", merge, merging))
        return Stage("adapt", f"adapt: {title}", key, tuple(steps), (before,), work)

    def evaluation(self, name: str, made_by: Stage | None, reference: Stage | None) -> Stage:
        """Return the stage that evaluates a model.

        made_by: the stage that writes the model; None: the dense model.
        reference: the dense model's evaluation.
        """
        options = self.spec.evaluation
        assert options is not None
        has_text = options.perplexity is not None
        packages = EVAL_PACKAGES if options.tasks else EVAL_PACKAGES[:3]
        content = self._content(options) | {
            "dense": self.spec.model if has_text or made_by is None else None,  # kept predictions have its name
            "questions": self.inputs.tasks(options) if options.tasks else None,
            "versions": {package: importlib.metadata.version(package) for package in packages},
        }
        needs = [made_by] if made_by is not None else []
        if has_text and reference is not None:  # predictions are those of its text
            needs.append(reference)
        key = self._key("eval", content, *needs)
        output = output_folder("eval", key)
        made = replace(
            options,
            models=(made_by.model if made_by is not None else self.spec.model,),
            out=Path(output, RESULTS),
            resume=True,  # safe: the stage's key identifies the model and the data
            reference=Path(reference.output, PREDICTIONS) if has_text and reference is not None else None,
            keep_predictions=Path(output, PREDICTIONS) if has_text and made_by is None else None,
        )
        step = Step("eval", evaluate, made, self._processes(options))
        return Stage("eval", f"eval: {name}", key, (step,), tuple(needs))

    def benchmark(self, entry: BenchEntry, converted: Sequence[Stage]) -> Stage:
        """Return the stage that times all models of one setting, interleaved in one group of processes."""
        content = self._content(entry.options) | {
            "dense": self.spec.model,
            "machine": machine(),
            "torch": importlib.metadata.version("torch"),
        }
        key = self._key("bench", content, *converted)
        models = (self.spec.model, *(stage.model for stage in converted))
        made = replace(entry.options, models=models, out=Path(output_folder("bench", key), BENCH_JSON))
        title = ", ".join(f"{key} {str(value).strip('[]')}" for key, value in entry.typed.items())
        return Stage(
            "bench", f"bench: {title or 'one process'}", key, (Step("bench", bench, made),), tuple(converted), title
        )

    def _content(self, options: Any) -> dict[str, Any]:
        """Return what the options say that decides the output: of files and folders their content, of arguments
        nothing."""
        arguments = {field.name for field in described(options) if field.metadata[OPTION].positional}
        content = {name: value for name, value in identity(options).items() if name not in arguments}
        for name in ("data", "eval_data"):
            if content.get(name):
                content[name] = self.inputs.sources(content[name])
        for name in ("perplexity", "include_path", "link", "outer_link"):
            if content.get(name) is not None and (name not in ("link", "outer_link") or names_a_file(content[name])):
                content[name] = self.inputs.data(content[name])
        return content

    def _key(self, kind: str, content: dict[str, Any], *needs: Stage) -> str:
        """Return the hash of all that decides a stage's output."""
        keys = [stage.key for stage in needs]
        deciding = {"stage": kind, "version": VERSIONS[kind], "model": self.digest, "content": content, "needs": keys}
        return run_digest(deciding)[:KEY_DIGITS]

    def _processes(self, options: Any, is_shared: bool = False) -> int:
        """Return the number of processes of a command: as many as there are GPUs and divide the batch. One group of
        tensor parallel ranks is started by the command itself.

        is_shared: the processes share a batch.
        """
        copy = options.tp_size  # processes for each copy of the model
        batch = options.batch_size if is_shared else None
        gpus = 1 if options.device == "cpu" else self.gpus
        fit = [n for n in range(2 * copy, gpus + 1, copy) if batch is None or batch % (n // copy) == 0]
        return max(fit, default=1)


def trained_folder(options: AdaptOptions) -> str:
    """Return the folder that a method writes, in a stage's folder."""
    return ADAPTER if options.method == LORA else MODEL_FOLDER


def machine() -> dict[str, Any]:
    """Return the facts of the machine that times depend on."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"processor": processor(), "cores": len(cores()), "gpus": gpus}
