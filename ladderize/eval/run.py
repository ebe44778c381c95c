"""The evaluation of several models with the same options: lm-eval's tasks and perplexity."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ladderize.checkpoint.opening import open_sound_checkpoint
from ladderize.console import SILENT, Console
from ladderize.data.files import data_files
from ladderize.data.windows import cut_windows, default_seq_len, read_documents
from ladderize.errors import UsageError, UserError
from ladderize.eval.answers import read_models
from ladderize.eval.compare import compare_models
from ladderize.eval.comparison import ComparisonDocument, Predictions
from ladderize.eval.model import EvalModel, HFModel, OpenModel
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults, ModelResult, Perplexity, perplexity_from_nlls
from ladderize.eval.tasks import Output, open_tasks, run_tasks
from ladderize.eval.text import ABOUT_NAME, KeptPredictions, ids_sha256, predictions_of, prepare_folder, read_about
from ladderize.files.documents import write_json
from ladderize.files.regular import resolved
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.environment import already_started
from ladderize.ranks.group import Ranks, join_ranks


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
    """Evaluate each model with the same options and seeds. The first is the reference of the others.

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
    names = [str(name) for name in models]
    options.check(names)
    if options.backend == "vllm" and engine is None:  # nothing in here imports vLLM
        raise UsageError("the backend vllm needs engine=open_vllm, of ladderize.vllm.eval_model")
    check_predictions(options, keep_predictions, reference)
    ranks = evaluation_ranks(options)
    with contextlib.ExitStack() as stack:
        if out is None:
            out = stack.enter_context(temporary_folder("eval")) / "results.json"
        output = Output(options, out, names, writes=ranks.is_main)
        is_kept = len(names) > 1 and options.perplexity is not None and options.backend == "hf"
        baseline = stack.enter_context(open_baseline(is_kept, keep_predictions, reference, ranks))
        # errors that are certain are found before any model is loaded
        if options.perplexity is not None:
            data_files(options.perplexity, "--perplexity")
        folders = [open_sound_checkpoint(name, options.revision).folder for name in names]
        if resume:
            output.models = ranks.broadcast(output.earlier())  # all ranks leave out the tasks that are done
        asked = None
        if options.tasks:
            # rank 0 downloads first, and the others use its cache
            with console.stage("reading the tasks of lm-eval"), console.contained(), ranks.main_first():
                asked = open_tasks(options)
        begins: list[bool] = []  # with BOS
        for name, folder in zip(names, folders, strict=True):
            with console.stage(f"loading {name}"), console.contained():
                model = engine(name, folder, options) if engine else HFModel(name, folder, options, ranks)
            with contextlib.closing(model):
                begins.append(model.begins_with_bos)
                if options.tasks and begins[-1] != begins[0]:
                    both = f"{names[0]} and {name}"
                    console.warn(f"of the tokenizers of {both} only one begins texts with BOS, which changes answers")
                described = model.described
                if options.perplexity is not None:
                    perplexity, predictions = baseline.score_text(model, options, console)
                    described = replace(described, perplexity=perplexity, predictions=predictions)
                known = output.models.get(name)
                output.models[name] = replace(known, model=described) if known else ModelResult(described)
                output.save()
                if asked is not None:
                    run_tasks(model, asked, output, ranks, console)
        results = output.save()
        if ranks.is_main and len(names) > 1:
            with console.stage(f"comparing with {names[0]}"):
                results = output.save(compare_with_first(output, console))
        return results if ranks.size == 1 else ranks.broadcast(results)


def compare_with_first(output: Output, console: Console) -> list[ComparisonDocument]:
    """Return the comparisons of all models with the first. A model that cannot be compared gives a warning, so that no
    results are lost."""
    documents: list[ComparisonDocument] = []
    try:
        reference, *others = read_models(output.out)
    except UserError as error:
        console.warn(f"nothing was compared: {error}")
        return documents
    for other in others:
        try:
            documents.append(compare_models(reference, other))
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


# ---- the text of --perplexity ----


def check_predictions(options: EvalOptions, keep: Path | None, reference: Path | None) -> None:
    """Raise UsageError where kept predictions have no effect."""
    option = "--keep-predictions" if keep is not None else "--reference" if reference is not None else None
    if option and (options.perplexity is None or options.backend == "vllm"):
        raise UsageError(
            f"{option} has no effect without --perplexity, and needs --backend hf: vLLM does not tell the probabilities"
            " of the whole vocabulary"
        )
    if keep is not None and reference is not None:
        raise UsageError("--keep-predictions and --reference exclude each other: a reference is compared with nothing")


class Baseline:
    """The reference's predictions, with which those of other models are compared.

    folder: holds them; None: predictions are not compared.
    about: the description of what is kept there; None until the first model was scored.
    """

    def __init__(self, folder: Path | None, about: KeptPredictions | None, ranks: Ranks) -> None:
        self.folder, self.about, self.ranks, self.is_named = folder, about, ranks, about is not None

    def score_text(
        self, model: EvalModel, options: EvalOptions, console: Console
    ) -> tuple[Perplexity, Predictions | None]:
        """Return the perplexity of ``options.perplexity``, and predictions where there is a reference.

        Raises UserError for a text that cannot be scored, or that cannot be compared with an earlier run's.
        """
        windows = text_windows(model, options)
        about = KeptPredictions(model.name, ids_sha256(windows), model.vocab_size)
        folder, kept = self.folder, self.about
        if kept is not None and (reason := kept.difference(about)):
            sentence = f"the predictions of {model.name} are not compared with those of {kept.model}: {reason}"
            if self.is_named:
                raise UserError(sentence)
            console.warn(sentence)
            folder = None
        with console.progress("perplexity", len(windows)) as advance:
            place = {"keep": folder} if kept is None else {"reference": folder}
            scores = model.score(windows, batch_size=options.batch_size, advance=advance, **place)
        nlls = np.array([score.nll for score in scores])
        perplexity = replace(
            perplexity_from_nlls(nlls, windows),
            ids_sha256=about.ids_sha256,
            window_nll=nlls.tolist(),
            window_tokens=[len(window) - 1 for window in windows],
        )
        if folder is None:
            return perplexity, None
        if kept is not None:
            return perplexity, predictions_of(scores, kept.model)
        if self.ranks.is_main:
            write_json(folder / ABOUT_NAME, about.to_dict())
        self.ranks.barrier()  # no rank goes on before it is written
        self.about = about
        return perplexity, None


@contextlib.contextmanager
def open_baseline(
    is_kept: bool, keep_predictions: Path | None, reference: Path | None, ranks: Ranks
) -> Iterator[Baseline]:
    """Yield the baseline with a folder for predictions of the first model, or with those of an earlier run.

    All ranks write into one folder, which several machines must share: there, ``keep_predictions`` names one.
    Raises UserError for a folder that cannot be used.

    is_kept: without a named folder, a temporary one is made.
    """
    if reference is not None:
        reference = resolved(reference, "--reference ")
        yield Baseline(reference, read_about(reference), ranks)
    elif keep_predictions is not None:
        folder = resolved(keep_predictions, "--keep-predictions ")
        with ranks.main_first():
            if ranks.is_main:
                prepare_folder(folder)
        yield Baseline(folder, None, ranks)
    elif is_kept:
        with temporary_folder("predictions") if ranks.is_main else contextlib.nullcontext() as temporary:
            yield Baseline(ranks.broadcast(temporary), None, ranks)
            ranks.barrier()  # no rank reads in the folder any more
    else:
        yield Baseline(None, None, ranks)


def text_windows(model: EvalModel, options: EvalOptions) -> list[np.ndarray]:
    """Return the windows of ``options.perplexity`` in this model's ids, ``options.seq_len`` long.

    Raises UserError for a text that cannot be read, or a length that the model does not support.
    """
    assert options.perplexity is not None
    documents = read_documents(options.perplexity, model.tokenizer, vocab_size=model.vocab_size)
    seq_len = options.seq_len or default_seq_len([options.perplexity], model.positions)
    if not 2 <= seq_len <= model.positions:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {model.positions} positions of {model.name}")
    return cut_windows(documents, seq_len)[: options.windows]
