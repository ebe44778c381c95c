"""Evaluate several models alike: lm-eval's tasks and perplexity, in one invocation."""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ladderize import data
from ladderize.checkpoint.model_check import check_model
from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.eval.backends.base import EvalModel
from ladderize.eval.backends.choose import open_model
from ladderize.eval.evaluation.output import Output, open_output
from ladderize.eval.evaluation.tasks import load_tasks, run_task
from ladderize.eval.options import EvalOptions
from ladderize.eval.perplexity import perplexity_from_nlls
from ladderize.eval.results import EvalResults, ModelResult, Perplexity
from ladderize.ranks.device import check_device

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerBase


def evaluate(
    models: Iterable[str | Path],
    options: EvalOptions,
    *,
    out: Path | None = None,
    console: Console = SILENT,
) -> EvalResults:
    """Evaluate each model with the same options, seeds and BOS handling. The first is the reference of the others.

    models: folders or hub ids. out: a JSON file that is written after every task, so that nothing is lost when a later
    one fails; the samples of the tasks lie beside it, in ``STEM.samples``. Raises UserError.
    """
    options.check()
    if options.device is not None:
        check_device(options.device)
    names = [str(Path(name).expanduser()) if str(name).startswith("~") else str(name) for name in models]
    with open_output(options, out, writes=True) as output:
        folders = check_before_work(names, options)
        manager = None
        if options.tasks:
            with console.stage("reading the tasks of lm-eval"), console.contained():
                manager = load_tasks(options)
        add_bos: bool | None = None
        for name, folder in zip(names, folders, strict=True):
            with console.stage(f"loading {name}"), console.contained():
                model = open_model(name, folder, options)
            with model:
                if model.tokenizer is not None and add_bos is None:
                    add_bos = begins_with_bos(model.tokenizer)
                output.finished.append(evaluate_model(model, add_bos, manager, output, console))
        return output.save()


def evaluate_model(
    model: EvalModel, add_bos: bool | None, manager: "TaskManager | None", output: Output, console: Console
) -> ModelResult:
    """Everything that the options ask for of one opened model; each part is saved as soon as it is there."""
    options = output.options
    entry = ModelResult(model.describe(add_bos))
    if options.perplexity is not None:
        perplexity = measure_perplexity(model, options, console)
        entry = replace(entry, model=replace(entry.model, perplexity=perplexity))
        output.save(entry)
    if manager is not None:
        harness = model.harness(options, add_bos)
        for number, task in enumerate(options.tasks, start=1):
            console.note(f"{model.name}: {task} ({number} of {len(options.tasks)})")
            with console.contained(bars=True):
                result = run_task(harness, task, manager, options)
            samples = result.pop("samples")
            entry = output.with_task(entry, result, samples)
    return entry


def check_before_work(names: list[str], options: EvalOptions) -> list[Path]:
    """The folders of the models, all of which were checked: what is certain to fail is found before any is loaded."""
    if options.perplexity is not None:
        data.check_data_file(options.perplexity)
    return [check_model(name, options.revision) for name in names]


def begins_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether this tokenizer by itself puts BOS in front of a text."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def measure_perplexity(model: EvalModel, options: EvalOptions, console: Console) -> Perplexity:
    """Perplexity of ``options.perplexity`` in windows of ``options.seq_len``."""
    assert options.perplexity is not None
    documents = data.read_documents(options.perplexity, model.tokenizer, vocab_size=model.vocab_size)
    seq_len = options.seq_len or data.default_seq_len(documents, options.perplexity, model.positions)
    if not 2 <= seq_len <= model.positions:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {model.positions} positions of {model.name}")
    windows = data.windows(documents, seq_len)[: options.windows]
    start = time.perf_counter()
    with console.progress("perplexity", len(windows)) as advance:
        scores = model.score(windows, batch_size=options.batch_size, advance=advance)
    return replace(
        perplexity_from_nlls(scores.nll, windows, time.perf_counter() - start),
        data_sha256=data.file_sha256(options.perplexity),
        ids_sha256=ids_sha256(windows),
        window_nll=scores.nll.tolist(),
        window_tokens=[len(window) - 1 for window in windows],
    )


def ids_sha256(windows: list[np.ndarray]) -> str:
    """A hash of the ids of windows and of where each ends."""
    digest = hashlib.sha256(json.dumps([len(window) for window in windows]).encode())
    for window in windows:
        digest.update(np.ascontiguousarray(window, dtype="<i8").tobytes())
    return digest.hexdigest()
