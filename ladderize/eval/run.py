"""The evaluation of several models with the same options: lm-eval's tasks and perplexity."""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ladderize import data
from ladderize.chat_template import chat_template_of
from ladderize.checkpoint.opening import check_model
from ladderize.console import SILENT, Console, to_json
from ladderize.errors import UsageError, UserError
from ladderize.eval.answers import AnsweredModel, Answers, collect_answers, read_answers
from ladderize.eval.compare import compare_models
from ladderize.eval.comparison import CompareOptions, ComparisonDocument
from ladderize.eval.hf import HFModel
from ladderize.eval.model import EvalModel, OpenModel
from ladderize.eval.options import EvalOptions
from ladderize.eval.output import Output, open_output
from ladderize.eval.results import EvalResults, EvaluatedModel
from ladderize.eval.tasks import open_tasks, run_task
from ladderize.eval.text import open_baseline
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.environment import already_started
from ladderize.ranks.group import Ranks, join_ranks

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase


def evaluate(
    models: Iterable[str | Path],
    options: EvalOptions,
    *,
    out: Path | None = None,
    keep_predictions: Path | None = None,
    reference: Path | None = None,
    resume: bool = False,
    engine: OpenModel | None = None,
    console: Console = SILENT,
) -> EvalResults:
    """Evaluate each model with the same options, seeds and BOS handling. The first is the reference of the others.

    On the text of ``options.perplexity`` the predictions of each later model are compared with the first one's. Models
    may also be evaluated one at a time: with ``keep_predictions`` for the first, then ``reference``. Under ``accelerate
    launch`` or ``torchrun`` every process has each model, and they share windows and questions; rank 0 writes, and all
    return the same.

    models: folders or hub ids.
    out: a JSON file that is written after every task, so a later failure loses nothing; the samples of tasks lie beside
    it, in ``STEM.samples``.
    keep_predictions: a folder to write the first model's predictions into.
    reference: such a folder of an earlier run, whose model is then the reference of all.
    resume: tasks that ``out`` has from an earlier run with the same options are not run again. The caller knows that
    models and data are unchanged.
    engine: opens a model with the backend vllm: ``open_vllm`` of ``ladderize.vllm.eval_model``.
    Raises UserError.
    """
    options.check()
    if options.backend == "vllm" and engine is None:  # nothing in here imports vLLM
        raise UsageError("the backend vllm needs engine=open_vllm, of ladderize.vllm.eval_model")
    check_predictions(options, keep_predictions, reference)
    ranks = evaluation_ranks(options)
    names = [str(Path(name).expanduser()) if str(name).startswith("~") else str(name) for name in models]
    output = open_output(options, out, writes=ranks.is_main)
    answered: list[AnsweredModel] = []
    with open_baseline(len(names), keep_predictions, reference, ranks, console) as baseline:
        # errors that are certain are found before any model is loaded
        if options.perplexity is not None:
            data.check_data_file(options.perplexity)
        folders = [check_model(name, options.revision) for name in names]
        if resume:
            output.resume()
            output.earlier = ranks.broadcast(output.earlier)  # all ranks leave out the tasks that are done
        manager = None
        if options.tasks:
            # rank 0 downloads first, and the others use its cache
            with console.stage("reading the tasks of lm-eval"), console.contained(), ranks.main_first():
                manager = open_tasks(options, ranks.size)
        add_bos: bool | None = None
        for name, folder in zip(names, folders, strict=True):
            with console.stage(f"loading {name}"), console.contained():
                model = engine(name, folder, options) if engine else HFModel.open(name, folder, options, ranks)
            with model:
                if model.tokenizer is not None and add_bos is None:
                    add_bos = begins_with_bos(model.tokenizer)
                described = replace(model.described, add_bos_token=add_bos)
                if options.perplexity is not None:
                    perplexity, predictions = baseline.score_text(model, options)
                    described = replace(described, perplexity=perplexity, predictions=predictions)
                answered.append(run_tasks(model, described, manager, output, console))
    comparisons = compare_with_first(answered, console) if ranks.is_main else []
    return shared_results(output.finish(comparisons), ranks)


def run_tasks(
    model: EvalModel, described: EvaluatedModel, manager: "TaskManager | None", output: Output, console: Console
) -> AnsweredModel:
    """Run the tasks of one opened model, each saved as soon as it is done; returns the model with its answers."""
    options, entry = output.options, output.begin(described)
    answers: dict[str, Answers] = {}
    if output.out is not None:
        answers = {task: read_answers(output.out.parent / path) for task, path in entry.samples.items()}
    if described.perplexity is not None:
        output.save(entry)
    todo = [(number, task) for number, task in enumerate(options.tasks, start=1) if task not in entry.tasks]
    if manager is not None and todo:
        harness = model.harness(options, described.add_bos_token)
        if options.apply_chat_template:
            chat_template_of(harness.tokenizer, model.name)
        for number, task in todo:
            console.note(f"{model.name}: {task} ({number} of {len(options.tasks)})")
            with console.contained(bars=True):
                result = run_task(harness, task, manager, options)
            if result is None:  # on other ranks than 0
                continue
            samples = result.pop("samples")
            entry = output.with_task(entry, result, samples)
            for name, logged in samples.items():
                named = ((f"{model.name}: {name}, sample {number}", one) for number, one in enumerate(logged))
                answers[name] = collect_answers(named, f"{model.name}: {name}")
    output.finished.append(entry)
    return AnsweredModel(described.model, described.model, entry.harness, described, answers)


def compare_with_first(answered: list[AnsweredModel], console: Console) -> list[dict[str, Any]]:
    """Return the comparisons for results.json. A model that cannot be compared gives a warning, so that no results are
    lost."""
    if len(answered) < 2:
        return []
    with console.stage(f"comparing with {answered[0].name}"):
        documents = [_compare(answered[0], other, console) for other in answered[1:]]
    return [document.to_dict() for document in documents if document is not None]


def _compare(reference: AnsweredModel, other: AnsweredModel, console: Console) -> ComparisonDocument | None:
    try:
        return compare_models(reference, other, CompareOptions())
    except UserError as error:
        console.warn(f"{other.name} was not compared with {reference.name}: {error}")
    if reference.answers and other.answers:
        with contextlib.suppress(UserError):  # the text alone may differ: another tokenizer has other windows
            return compare_models(_without_text(reference), _without_text(other), CompareOptions())
    return None


def _without_text(entry: AnsweredModel) -> AnsweredModel:
    assert entry.model is not None
    return replace(entry, model=replace(entry.model, perplexity=None, predictions=None))


def evaluation_ranks(options: EvalOptions) -> Ranks:
    """Return this process alone, or among those that a launcher has started.

    Raises UserError for a missing device, or a launcher that does not fit the backend.
    """
    device = options.device or default_device()
    check_device(device)
    if already_started() and options.backend == "vllm":
        raise UsageError("--backend vllm starts its own processes; run ladderize eval without a launcher")
    return join_ranks(device) if already_started() else Ranks(0, 1, torch.device(device))


def shared_results(results: EvalResults, ranks: Ranks) -> EvalResults:
    """Return rank 0's results on every rank."""
    if ranks.size == 1:
        return results
    text = ranks.broadcast(to_json(results.to_dict()) if ranks.is_main else None)
    return results if ranks.is_main else EvalResults.from_dict(json.loads(text), "results of rank 0")


def check_predictions(options: EvalOptions, keep: Path | None, reference: Path | None) -> None:
    """Raise UsageError where kept predictions have no effect."""
    for option, folder in (("--keep-predictions", keep), ("--reference", reference)):
        if folder is not None and options.backend == "vllm":
            raise UsageError(
                f"{option} needs --backend hf: vLLM tells the log-probabilities of single tokens, not of the whole"
                " vocabulary"
            )
        if folder is not None and options.perplexity is None:
            raise UsageError(f"{option} has no effect without --perplexity")
    if keep is not None and reference is not None:
        raise UsageError("--keep-predictions and --reference exclude each other: a reference is compared with nothing")


def begins_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether this tokenizer by default puts BOS in front of a text."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
