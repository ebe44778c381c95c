"""The scores of a text: perplexity, and how far the predictions on it are from the reference's."""

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ladderize import data
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.eval.backends.base import EvalModel
from ladderize.eval.evaluation.baseline import Baseline, predictions_of
from ladderize.eval.options import EvalOptions
from ladderize.eval.perplexity import perplexity_from_nlls
from ladderize.eval.results import EvaluatedModel


def score_text(
    model: EvalModel,
    described: EvaluatedModel,
    checkpoint: Path,
    options: EvalOptions,
    baseline: Baseline,
    console: Console,
) -> EvaluatedModel:
    """``described`` with the perplexity of ``options.perplexity``, and with predictions where there is a reference.

    checkpoint: the model's folder.
    """
    assert options.perplexity is not None
    windows = text_windows(model, options)
    data_sha, ids_sha = data.file_sha256(options.perplexity), ids_sha256(windows)
    reference = baseline.folder_to_compare(model, data_sha, ids_sha)
    keep = baseline.folder_to_fill(model, described.dtype, windows)
    start = time.perf_counter()
    with console.progress("perplexity", len(windows)) as advance:
        scores = model.score(windows, batch_size=options.batch_size, keep=keep, reference=reference, advance=advance)
    measured = replace(
        perplexity_from_nlls(scores.nll, windows, time.perf_counter() - start),
        data_sha256=data_sha,
        ids_sha256=ids_sha,
        window_nll=scores.nll.tolist(),
        window_tokens=[len(window) - 1 for window in windows],
    )
    predictions = None
    if reference is not None and baseline.about is not None:
        predictions = predictions_of(scores, baseline.about.model)
    if keep is not None:
        baseline.filled(keep, model, checkpoint, measured)
    return replace(described, perplexity=measured, predictions=predictions)


def text_windows(model: EvalModel, options: EvalOptions) -> list[np.ndarray]:
    """The windows of ``options.perplexity`` in this model's ids, ``options.seq_len`` long."""
    assert options.perplexity is not None
    documents = data.read_documents(options.perplexity, model.tokenizer, vocab_size=model.vocab_size)
    seq_len = options.seq_len or data.default_seq_len(documents, options.perplexity, model.positions)
    if not 2 <= seq_len <= model.positions:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {model.positions} positions of {model.name}")
    return data.windows(documents, seq_len)[: options.windows]


def ids_sha256(windows: list[np.ndarray]) -> str:
    """A hash of the ids of windows and of where each ends."""
    digest = hashlib.sha256(json.dumps([len(window) for window in windows]).encode())
    for window in windows:
        digest.update(np.ascontiguousarray(window, dtype="<i8").tobytes())
    return digest.hexdigest()
