"""Perplexity and predictions on the same windows of text. Imports no torch."""

import math

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.paired.comparable import ADVICE, check_same
from ladderize.eval.paired.document import CompareOptions, PerplexityComparison, PredictionComparison
from ladderize.eval.paired.entry import ComparedModel
from ladderize.eval.paired.statistics import Stratum, estimate_mean, generator, resampled_means, scaled_difference
from ladderize.eval.results import Perplexity

MAX_TOKENS = 2**40  # of a window
MAX_NATS = 700.0  # per token: a perplexity above exp(700) is none


def compare_perplexity(reference: ComparedModel, other: ComparedModel, options: CompareOptions) -> PerplexityComparison:
    """Perplexity of two models, window by window. Raises UserError where these are not the same windows."""
    ours, tokens = _windows(reference)
    theirs, same_tokens = _windows(other)
    for key, what in (("data_sha256", "file"), ("seq_len", "--seq-len"), ("ids_sha256", "token ids")):
        asked = (getattr(_measured(entry), key) for entry in (reference, other))
        check_same(f"{what} of --perplexity", reference, other, *asked)
    if not np.array_equal(tokens, same_tokens):
        raise UserError(
            f"not the same windows of --perplexity: {len(tokens):,} with {int(tokens.sum()):,} tokens in"
            f" {reference.where}, {len(same_tokens):,} with {int(same_tokens.sum()):,} in {other.where}; {ADVICE}"
        )
    found = scaled_difference(
        "perplexity", -ours, -theirs, tokens, options.resamples, generator(options.seed, "perplexity")
    )
    values = [math.exp(float(nll.sum() / tokens.sum())) for nll in (ours, theirs)]
    return PerplexityComparison(
        windows=len(tokens),
        tokens=int(tokens.sum()),
        reference_value=values[0],
        value=values[1],
        stderr=paired_stderr(ours, theirs, tokens),
        **vars(found),
    )


def paired_stderr(reference: "np.ndarray", other: "np.ndarray", tokens: "np.ndarray") -> float | None:
    """Standard error of the difference of two perplexities by the delta method: each window's contributions to both
    stay together. reference, other: nats of each window [W]; None for a single window."""
    count, total = len(tokens), tokens.sum()
    if count < 2:
        return None
    ours, theirs = (math.exp(nll.sum() / total) * (nll - nll.sum() / total * tokens) for nll in (reference, other))
    return math.sqrt(count / (count - 1) * float(((theirs - ours) ** 2).sum())) / float(total)


def compare_predictions(
    reference: ComparedModel, other: ComparedModel, options: CompareOptions
) -> PredictionComparison | None:
    """The mean KL divergence that ``eval`` measured, with an interval; None where it measured none against this
    reference."""
    measured = other.model.predictions if other.model is not None else None
    if measured is None or other.model is None or measured.reference != reference.name:
        return None
    _, tokens = _windows(other)
    sums = np.asarray(measured.window_kl, dtype=float)
    if len(sums) != len(tokens) or not (np.abs(sums) <= MAX_NATS * tokens).all():
        raise UserError(f"{other.where} has sums of KL that do not fit its windows; evaluate the model again")
    stratum = Stratum(sums, tokens)
    rng = generator(options.seed, "predictions")
    found = estimate_mean([stratum], [1.0], [resampled_means(stratum, options.resamples, rng)], rng)
    return PredictionComparison(
        windows=len(tokens),
        tokens=measured.tokens,
        mean_kl=measured.mean_kl,
        low=None if found.low is None else max(0.0, found.low),
        high=found.high,
        p99_kl=measured.p99_kl,
        same_top_share=measured.same_top_share,
    )


def _measured(entry: ComparedModel) -> Perplexity:
    assert entry.model is not None
    assert entry.model.perplexity is not None  # whoever calls has seen it
    return entry.model.perplexity


def _windows(entry: ComparedModel) -> tuple["np.ndarray", "np.ndarray"]:
    """Nats and scored tokens of each window."""
    measured = _measured(entry)
    if not measured.window_nll or not measured.window_tokens:
        raise UserError(
            f"{entry.where} keeps no windows of its perplexity, as files of earlier versions of ladderize; evaluate the"
            " model again"
        )
    fits = len(measured.window_nll) == len(measured.window_tokens) and all(
        0 < count <= MAX_TOKENS and 0 <= nats <= MAX_NATS * count
        for nats, count in zip(measured.window_nll, measured.window_tokens, strict=True)
    )
    if not fits:
        raise UserError(f"{entry.where} has windows of perplexity that do not fit together; evaluate the model again")
    return np.asarray(measured.window_nll, dtype=float), np.asarray(measured.window_tokens, dtype=float)
