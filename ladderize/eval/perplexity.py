"""Perplexity over fixed windows: every token is scored but the first of each window."""

import math

import numpy as np

from ladderize.blocks import check_finite
from ladderize.eval.results import Perplexity


def perplexity_from_nlls(nlls: np.ndarray, windows: list[np.ndarray], seconds: float) -> Perplexity:
    """Perplexity and its standard error. Tokens of one window are not independent, windows are taken to be."""
    counts = np.array([len(window) - 1 for window in windows])
    mean = nlls.sum() / counts.sum()
    check_finite(mean, "the perplexity")
    stderr = None
    if len(windows) > 1:
        spread = nlls - mean * counts
        stderr = math.exp(mean) * math.sqrt(len(windows) / (len(windows) - 1) * (spread**2).sum()) / float(counts.sum())
    return Perplexity(
        perplexity=math.exp(mean),
        stderr=stderr,
        nll_per_token=float(mean),
        tokens=int(counts.sum()),
        windows=len(windows),
        seq_len=max(map(len, windows)),
        tokens_per_s=float(counts.sum() / seconds),
    )
