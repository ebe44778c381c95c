"""The evaluation of several models with the same options. Beside results.json lie a model's answers to each task's
questions, in the layout of lm-eval's ``--log_samples``, which lm-eval's tools and ``datasets`` read."""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladderize.checkpoint.opening import open_checkpoint
from ladderize.choices import flag, identity
from ladderize.console import SILENT, Console, strict_json
from ladderize.data.files import data_files
from ladderize.errors import UsageError, UserError
from ladderize.eval.compare import compare_models, read_models
from ladderize.eval.model import EvalModel, HFModel, OpenModel
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import ComparisonDocument, EvalResults, EvaluatedModel, ModelResult, perplexity_from_nlls
from ladderize.eval.tasks import open_tasks, run_tasks
from ladderize.eval.text import KeptPredictions, PredictedText, ids_sha256, open_baseline, predictions_of, text_windows
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.output import replacement, temporary_folder
from ladderize.files.regular import inside, resolved
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.environment import already_started
from ladderize.ranks.group import Ranks, join_ranks

MOST_NAME = 80  # characters of a model's or a task's name in a file's name


def evaluate(options: EvalOptions, *, open_model: OpenModel | None = None, console: Console = SILENT) -> EvalResults:
    """Evaluate each model with the same options and seeds. The first is the reference of the others.

    Models may also be evaluated one at a time: with ``keep_predictions`` for the first, then ``reference``. Under
    ``accelerate launch`` or ``torchrun`` every process has each model, and they share windows and questions; rank 0
    writes, and all return the same. ``out`` is written after every task, so a later failure loses nothing.

    open_model: opens a model with the engine vllm: ``open_vllm`` of ``ladderize.vllm.eval_model``.
    """
    if options.engine == "vllm" and open_model is None:  # nothing in here imports vLLM
        raise UsageError("the engine vllm needs open_model=open_vllm, of ladderize.vllm.eval_model")
    device = options.device or default_device()
    check_device(device)
    if already_started() and options.engine == "vllm":
        raise UsageError("--engine vllm starts its own processes; run ladderize eval without a launcher")
    ranks = join_ranks(device) if already_started() else Ranks(0, 1, torch.device(device))
    names = [str(name) for name in options.models]
    with contextlib.ExitStack() as stack:
        out = options.out or stack.enter_context(temporary_folder("eval")) / "results.json"
        output = Output(options, out, writes=ranks.is_main)
        baseline = stack.enter_context(open_baseline(options, ranks))
        # errors that are certain are found before any model is loaded
        if options.perplexity is not None:
            data_files(options.perplexity, "--perplexity")
        folders = [open_checkpoint(name, sound="any").folder for name in names]
        if options.resume:
            output.models = ranks.broadcast(output.earlier())  # all ranks leave out the tasks that are done
        asked = None
        if options.tasks:
            # rank 0 downloads first, and the others use its cache
            with console.stage("reading the tasks of lm-eval"), console.contained(), ranks.main_first():
                asked = open_tasks(options)
        begins: list[bool] = []  # with BOS
        for name, folder in zip(names, folders, strict=True):
            with console.stage(f"loading {name}"), console.contained():
                model = open_model(name, folder, options) if open_model else HFModel(name, folder, options, ranks)
            with contextlib.closing(model):
                tokenizer = model.tokenizer
                begins.append(tokenizer is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id])
                if options.tasks and begins[-1] != begins[0]:
                    pair = f"{names[0]} and {name}"
                    console.warn(f"of the tokenizers of {pair} only one begins texts with BOS, which changes answers")
                described = model.described
                if options.perplexity is not None:
                    described = score_text(model, baseline, options, ranks, console)
                output.models[name] = replace(output.models.get(name, ModelResult(described)), model=described)
                output.save()
                if asked is not None:
                    done = output.models[name].reported.results
                    for result in run_tasks(model, asked, done, options, ranks, console):
                        output.add_task(name, result)
        results = output.save()
        if ranks.is_main and len(names) > 1:
            with console.stage(f"comparing with {names[0]}"):
                results = output.save(compare_with_first(output.out, console))
        return results if ranks.size == 1 else ranks.broadcast(results)


def score_text(
    model: EvalModel, baseline: KeptPredictions | None, options: EvalOptions, ranks: Ranks, console: Console
) -> EvaluatedModel:
    """Return the model's description with the perplexity of the text, and predictions where there is a reference."""
    name = model.described.model
    windows = text_windows(options, model.tokenizer, vocab_size=model.vocab_size, positions=model.positions)
    text = PredictedText(name, ids_sha256(windows), model.vocab_size)
    before = baseline.text if baseline is not None else None
    keep, reference = (baseline, None) if before is None else (None, baseline)
    if before is not None and (before.vocab_size, before.ids_sha256) != (text.vocab_size, text.ids_sha256):
        reason = "their windows are others (--perplexity, --seq-len, --windows, or the tokenizer differs)"
        if before.vocab_size != text.vocab_size:
            reason = f"their vocabulary has {before.vocab_size} tokens, and this one {text.vocab_size}"
        message = f"the predictions of {name} are not compared with those of {before.model}: {reason}"
        if options.reference is not None:
            raise UserError(message)
        console.warn(message)
        reference = None
    with console.progress("perplexity", len(windows)) as advance:
        scores = model.score(windows, advance, keep, reference)
    nlls = np.array([score.nll for score in scores])
    perplexity = replace(
        perplexity_from_nlls(nlls, windows),
        ids_sha256=text.ids_sha256,
        window_nll=nlls.tolist(),
        window_tokens=[len(window) - 1 for window in windows],
    )
    if keep is not None:
        keep.finish(text, ranks)
    predictions = predictions_of(scores, before.model) if before is not None and reference is not None else None
    return replace(model.described, perplexity=perplexity, predictions=predictions)


def compare_with_first(out: Path, console: Console) -> list[ComparisonDocument]:
    """Return the comparisons of all models with the first. What cannot be compared is a warning: no results are
    lost."""
    documents: list[ComparisonDocument] = []
    try:
        reference, *others = read_models(out)
    except UserError as error:
        console.warn(f"nothing was compared: {error}")
        return documents
    for other in others:
        try:
            documents.append(compare_models(reference, other))
        except UserError as error:
            console.warn(f"{other.model.model} was not compared with {reference.model.model}: {error}")
    return documents


class Output:
    """The results so far by model, and their files: ``out``, and the samples beside it; ``writes``: by this process."""

    def __init__(self, options: EvalOptions, out: Path, *, writes: bool) -> None:
        self.options: dict[str, Any] = strict_json(identity(options))
        self.names, self.writes = [str(name) for name in options.models], writes
        self.models: dict[str, ModelResult] = {}
        self.out = resolved(out, "--out ")
        check_writable(self.out, inputs=[options.perplexity])
        self.folder = self.out.with_name(f"{self.out.stem}.samples")
        if self.out == self.folder or self.folder.is_file():
            raise UserError(
                f"--out {self.out}: its samples belong into {self.folder}; name a file whose samples can lie beside it"
            )

    def earlier(self) -> dict[str, ModelResult]:
        """Return the entries that an earlier run with the same options left in ``out``, with all their samples. Refused
        are models that are not named now: their results would be lost."""
        try:
            results = EvalResults.from_dict(read_own(self.out), self.out)
        except UserError:
            return {}
        changed = [flag(name) for name, value in self.options.items() if results.options.get(name) != value]
        if changed:
            raise UserError(f"{self.out} is of an eval with another {' and '.join(changed)}; name another --out")
        models = {}
        for entry in results.models:
            if entry.model.model not in self.names:
                raise UserError(f"{self.out} also has {entry.model.model}; name all its models, or another --out")
            paths = [inside(self.out.parent, file) for file in entry.samples.values()]
            if all(path is not None and path.is_file() for path in paths):
                models[entry.model.model] = entry
        return models

    def add_task(self, name: str, result: dict[str, Any]) -> None:
        """Add the results of a task. Its samples are on disk, in whole files, before results.json names them."""
        samples, written = result.pop("samples"), dict[str, str]()
        if self.writes:
            folder = self.folder / _as_name(name, Path(name).name)
            folder.mkdir(parents=True, exist_ok=True)
            for task, answers in samples.items():
                path = folder / f"{_as_name(task, task)}.jsonl"
                with replacement(path) as file:
                    for sample in answers:
                        file.write(json.dumps(_as_logged(sample), ensure_ascii=False, allow_nan=False) + "\n")
                written[task] = path.relative_to(self.out.parent).as_posix()
            self.models[name] = self.models[name].with_task(result, written)
            self.save()

    def save(self, comparisons: Sequence[ComparisonDocument] = ()) -> EvalResults:
        """Write and return the results so far."""
        models = [self.models[name] for name in self.names if name in self.models]
        results = EvalResults(self.options, models, [*comparisons])
        if self.writes:
            write_json(self.out, results.to_dict())
        return results


def _as_logged(sample: Mapping[str, Any]) -> Any:
    """Return a sample as lm-eval's ``--log_samples`` writes it; NaN and infinity, which JSON lacks, become null."""
    from lm_eval.utils import sanitize_list

    arguments = {}
    for number, texts in enumerate(sample["arguments"]):
        arguments[f"gen_args_{number}"] = {f"arg_{position}": text for position, text in enumerate(texts)}
    answers = {key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")}
    return strict_json({**sample, "arguments": arguments, **answers, "target": str(sample["target"])})


def _as_name(text: str, shown: str) -> str:
    """Return a file's name: ``shown``, with a hash of ``text`` where it is not the whole text."""
    name = re.sub(r"[^\w.-]", "_", shown)[:MOST_NAME].lstrip(".")
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
