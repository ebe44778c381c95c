"""Perplexity over fixed windows: every token is scored but the first of each window."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from ladderize.blocks import check_finite
from ladderize.eval.results import Perplexity
from ladderize.memory import check_room

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_scoring_room(model: "PreTrainedModel", windows: list[np.ndarray], batch_size: int) -> None:
    """Raise UserError where the logits of a batch do not fit into memory."""
    longest, at_once = max(map(len, windows)), min(batch_size, len(windows))
    embedding = next(model.get_input_embeddings().parameters())
    check_room(
        longest * model.config.vocab_size * (at_once * embedding.dtype.itemsize + 4),
        embedding.device,
        f"scoring {at_once:,} windows of {longest:,} tokens at a time",
        "lower --batch-size or --seq-len",
    )


def score_windows(
    model: "PreTrainedModel",
    windows: list[np.ndarray],
    *,
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda n: None,
) -> np.ndarray:
    """Summed negative log-likelihood of each window, in nats: float64 [len(windows)].

    Windows of equal length are scored in batches; of their logits one window at a time is held in fp32.
    """
    device = next(model.get_input_embeddings().parameters()).device
    sums = np.zeros(len(windows))
    start = 0
    while start < len(windows):
        stop = start + 1
        while stop < len(windows) and stop - start < batch_size and len(windows[stop]) == len(windows[start]):
            stop += 1
        ids = torch.from_numpy(np.stack(windows[start:stop])).to(device)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits
            for row, (scores, target) in enumerate(zip(logits, ids.to(logits.device), strict=True), start=start):
                sums[row] = cross_entropy(scores[:-1].float(), target[1:], reduction="none").double().sum().item()
        advance(stop - start)
        start = stop
    return sums


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


def model_perplexity(
    model: "PreTrainedModel",
    windows: list[np.ndarray],
    *,
    batch_size: int = 8,
    advance: Callable[[int], None] = lambda n: None,
) -> Perplexity:
    """Score ``windows`` with ``model`` and time it. Raises UserError where a batch's logits do not fit into memory."""
    check_scoring_room(model, windows, batch_size)
    start = time.perf_counter()
    nlls = score_windows(model, windows, batch_size=batch_size, advance=advance)
    return perplexity_from_nlls(nlls, windows, time.perf_counter() - start)
