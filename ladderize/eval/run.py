"""The evaluation of several models with the same options: lm-eval's tasks and perplexity."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ladderize import data
from ladderize.checkpoint.opening import check_model
from ladderize.console import SILENT, Console
from ladderize.errors import UsageError, UserError
from ladderize.eval.answers import read_models
from ladderize.eval.compare import compare_models
from ladderize.eval.comparison import ComparisonDocument, Predictions
from ladderize.eval.model import EvalModel, HFModel, OpenModel
from ladderize.eval.options import CompareOptions, EvalOptions
from ladderize.eval.results import EvalResults, Perplexity, perplexity_from_nlls
from ladderize.eval.tasks import open_output, open_tasks, run_tasks
from ladderize.eval.text import KeptPredictions, ids_sha256, predictions_of, prepare_folder, read_about, write_about
from ladderize.files.regular import resolved
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.environment import already_started
from ladderize.ranks.group import Ranks, join_ranks

if TYPE_CHECKING:
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
    with contextlib.ExitStack() as stack:
        if out is None:
            out = stack.enter_context(temporary_folder("eval")) / "results.json"
        output = open_output(options, out, writes=ranks.is_main)
        baseline = stack.enter_context(open_baseline(len(names), keep_predictions, reference, ranks, console))
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
                manager = open_tasks(options)
        add_bos: bool | None = None
        for name, folder in zip(names, folders, strict=True):
            with console.stage(f"loading {name}"), console.contained():
                model = engine(name, folder, options) if engine else HFModel.open(name, folder, options, ranks)
            with contextlib.closing(model):
                if model.tokenizer is not None and add_bos is None:
                    add_bos = begins_with_bos(model.tokenizer)
                described = replace(model.described, add_bos_token=add_bos)
                if options.perplexity is not None:
                    perplexity, predictions = baseline.score_text(model, options)
                    described = replace(described, perplexity=perplexity, predictions=predictions)
                run_tasks(model, described, manager, output, console)
        results = output.finish([])
        if ranks.is_main and len(names) > 1:
            with console.stage(f"comparing with {names[0]}"):
                results = output.finish(compare_with_first(output.out, console))
        return results if ranks.size == 1 else ranks.broadcast(results)


def compare_with_first(out: Path, console: Console) -> list[ComparisonDocument]:
    """Return the comparisons of the models in results.json with the first. A model that cannot be compared gives a
    warning, so that no results are lost."""
    documents: list[ComparisonDocument] = []
    try:
        reference, *others = read_models(out)
    except UserError as error:
        console.warn(f"nothing was compared: {error}")
        return documents
    for other in others:
        try:
            documents.append(compare_models(reference, other, CompareOptions()))
        except UserError as error:
            console.warn(f"{other.model.model} was not compared with {reference.model.model}: {error}")
    return documents


def evaluation_ranks(options: EvalOptions) -> Ranks:
    """Return this process alone, or among those that a launcher has started.

    Raises UserError for a missing device, or a launcher that does not fit the backend.
    """
    device = options.device or default_device()
    check_device(device)
    if already_started() and options.backend == "vllm":
        raise UsageError("--backend vllm starts its own processes; run ladderize eval without a launcher")
    return join_ranks(device) if already_started() else Ranks(0, 1, torch.device(device))


def begins_with_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether this tokenizer by default puts BOS in front of a text."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


# ---- the text of --perplexity ----


def check_predictions(options: EvalOptions, keep: Path | None, reference: Path | None) -> None:
    """Raise UsageError where kept predictions have no effect."""
    for option, folder in (("--keep-predictions", keep), ("--reference", reference)):
        if folder is not None and options.perplexity is None:
            raise UsageError(f"{option} has no effect without --perplexity")
    if keep is not None and reference is not None:
        raise UsageError("--keep-predictions and --reference exclude each other: a reference is compared with nothing")


@dataclass
class Baseline:
    """The reference's predictions, with which those of other models are compared.

    folder: holds them; None: predictions are not compared.
    about: the description of what is kept there; None until the first model was scored.
    strict: the user named the folder, so a model that cannot be compared, or a reference that cannot be kept, is an
    error; otherwise a warning says what is left out.
    """

    folder: Path | None
    about: KeptPredictions | None
    strict: bool
    ranks: Ranks
    console: Console

    def score_text(self, model: EvalModel, options: EvalOptions) -> tuple[Perplexity, Predictions | None]:
        """Return the perplexity of ``options.perplexity``, and predictions where there is a reference.

        Raises UserError for a text that cannot be scored, and with ``strict`` for one that cannot be compared.
        """
        assert options.perplexity is not None
        windows = text_windows(model, options)
        about = KeptPredictions(
            model=model.name,
            ids_sha256=ids_sha256(windows),
            vocab_size=model.vocab_size,
        )
        kept, deed = self.about, "kept"
        reason = model.no_predictions if self.folder is not None else None
        if kept is not None:
            reason, deed = reason or kept.difference(about), f"compared with those of {kept.model}"
        if reason is not None:
            sentence = f"the predictions of {model.name} are not {deed}: {reason}"
            if self.strict:
                raise UserError(sentence)
            self.console.warn(sentence)
        folder = self.folder if reason is None else None
        start = time.perf_counter()
        with self.console.progress("perplexity", len(windows)) as advance:
            folders = {"keep": folder} if kept is None else {"reference": folder}
            scores = model.score(windows, batch_size=options.batch_size, advance=advance, **folders)
        nlls = np.array([score.nll for score in scores])
        perplexity = replace(
            perplexity_from_nlls(nlls, windows, time.perf_counter() - start),
            ids_sha256=about.ids_sha256,
            window_nll=nlls.tolist(),
            window_tokens=[len(window) - 1 for window in windows],
        )
        if kept is not None:
            return perplexity, None if folder is None else predictions_of(scores, kept.model)
        self.folder = folder
        if folder is not None:
            if self.ranks.is_main:
                write_about(folder, about)
            self.ranks.barrier()  # no rank goes on before it is written
            self.about = about
        return perplexity, None


@contextlib.contextmanager
def open_baseline(
    models: int, keep_predictions: Path | None, reference: Path | None, ranks: Ranks, console: Console
) -> Iterator[Baseline]:
    """Yield the baseline with a folder for predictions of the first of ``models`` models, or with those of an earlier
    run.

    Several models are compared with the first by default, through a temporary folder. All ranks write into one folder,
    which several machines must share: there, ``keep_predictions`` names one.
    Raises UserError for a folder that cannot be used.
    """
    if reference is not None:
        reference = resolved(reference, "--reference ")
        yield Baseline(reference, read_about(reference), True, ranks, console)
    elif keep_predictions is not None:
        folder = resolved(keep_predictions, "--keep-predictions ")
        with ranks.main_first():
            if ranks.is_main:
                prepare_folder(folder)
        yield Baseline(folder, None, True, ranks, console)
    elif models > 1:
        with temporary_folder("predictions") if ranks.is_main else contextlib.nullcontext() as temporary:
            yield Baseline(ranks.broadcast(temporary), None, False, ranks, console)
            ranks.barrier()  # no rank reads in the folder any more
    else:
        yield Baseline(None, None, False, ranks, console)


def text_windows(model: EvalModel, options: EvalOptions) -> list[np.ndarray]:
    """Return the windows of ``options.perplexity`` in this model's ids, ``options.seq_len`` long.

    Raises UserError for a text that cannot be read, or a length that the model does not support.
    """
    assert options.perplexity is not None
    documents = data.read_documents(options.perplexity, model.tokenizer, vocab_size=model.vocab_size)
    seq_len = options.seq_len or data.default_seq_len(documents, options.perplexity, model.positions)
    if not 2 <= seq_len <= model.positions:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {model.positions} positions of {model.name}")
    return data.windows(documents, seq_len)[: options.windows]
