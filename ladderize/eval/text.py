"""The text of ``--perplexity``: its windows, their scores, and how far predictions are from the reference's."""

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ladderize import data
from ladderize.blocks import check_finite
from ladderize.errors import UserError
from ladderize.eval.compare import bootstrapped
from ladderize.eval.options import EvalOptions
from ladderize.eval.predictions import HEAD, WINDOW, KeptPredictions
from ladderize.eval.results import Predictions
from ladderize.families.registry import decoder_of, find_family

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOGITS_AT_A_TIME = 1 << 24  # about six arrays of this size exist while models are compared


def text_windows(
    options: EvalOptions, tokenizer: "PreTrainedTokenizerBase | None", *, vocab_size: int, positions: int
) -> list[np.ndarray]:
    """Return the windows of ``options.perplexity`` in a model's ids, ``options.seq_len`` long.

    Raises UserError for a text that cannot be read, or a length beyond the model's positions.
    """
    assert options.perplexity is not None
    documents = data.read_documents(options.perplexity, tokenizer, vocab_size=vocab_size)
    seq_len = options.seq_len or data.default_seq_len(documents, options.perplexity, positions)
    if not 2 <= seq_len <= positions:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {positions} positions of the model")
    return data.windows(documents, seq_len)[: options.windows]


def ids_sha256(windows: list[np.ndarray]) -> str:
    """Return a hash of the ids of windows and of their lengths."""
    digest = hashlib.sha256(json.dumps([len(window) for window in windows]).encode())
    for window in windows:
        digest.update(np.ascontiguousarray(window, dtype="<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class WindowScore:
    """The score of a window of n ids, of which all but the first are scored.

    nll: the summed negative log-likelihood in nats.
    kl: KL(reference || this model) at each scored token in nats, float32 [n - 1]; empty without a reference.
    same_top: True where both models hold the same token most likely, bool [n - 1]; empty without a reference.
    """

    nll: float
    kl: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    same_top: np.ndarray = field(default_factory=lambda: np.empty(0, bool))


def score_windows(
    model: "PreTrainedModel",
    windows: list[np.ndarray],
    *,
    batch_size: int = 8,
    chosen: range | None = None,
    keep: KeptPredictions | None = None,
    reference: KeptPredictions | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> list[WindowScore]:
    """Score the ``chosen`` windows (None: all), int64 [n] each; consecutive windows of equal length are batched.

    The model's body runs on batches, its output layer on so few tokens at a time that memory stays bounded for any
    vocabulary.

    keep: takes this model's states and output layer.
    reference: what ``keep`` of another model took of the same windows.
    advance: is called with the number of windows scored.
    Raises UserError for an architecture that ladderize does not know, which may cap its logits, say; and where a folder
    cannot be written or read.
    """
    layer, config = model.get_output_embeddings(), model.config.to_dict()
    if not isinstance(layer, torch.nn.Linear) or find_family(config) is None:
        raise UserError(
            f"--perplexity is for the families of models that ladderize converts, not for a {config.get('model_type')}"
        )
    scale = decoder_of(config).logits_scale
    device = next(model.get_input_embeddings().parameters()).device
    chosen = range(len(windows)) if chosen is None else chosen
    if keep is not None and 0 in chosen:  # one of several ranks
        keep.save(HEAD, {"weight": layer.weight, "bias": layer.bias})
    head = None if reference is None else reference.load(HEAD, device)
    groups = [[*alike] for _, alike in itertools.groupby(chosen, key=lambda index: len(windows[index]))]
    batches = [group[first : first + batch_size] for group in groups for first in range(0, len(group), batch_size)]
    scores = []
    with torch.inference_mode():
        for batch in batches:
            ids = torch.from_numpy(np.stack([windows[index] for index in batch])).to(device)
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state * scale
            for row, index in enumerate(batch):
                if keep is not None:
                    keep.save(WINDOW.format(index), {"states": states[row, :-1]})
                theirs = None if reference is None else reference.load(WINDOW.format(index), device)["states"]
                targets = ids[row, 1:].to(states.device)
                scores.append(score_window(layer, states[row, :-1], targets, head, theirs))
            advance(len(batch))
    return scores


def score_window(
    layer: torch.nn.Linear, states: Tensor, targets: Tensor, head: dict[str, Tensor] | None, theirs: Tensor | None
) -> WindowScore:
    """Score one window.

    layer: states [n, hidden] -> logits [n, vocabulary].
    targets: the tokens that follow the states [n].
    head, theirs: the reference's output layer, and its states [n, hidden].
    """
    total, kl, same = 0.0, [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
    at_once = max(1, LOGITS_AT_A_TIME // layer.out_features)
    for first in range(0, len(targets), at_once):
        tokens = slice(first, first + at_once)
        logits = layer(states[tokens]).float()
        log_q = logits.log_softmax(-1)
        total -= float(log_q.gather(-1, targets[tokens, None]).double().sum())
        if head is not None and theirs is not None:
            other = torch.nn.functional.linear(theirs[tokens], head["weight"], head.get("bias")).float()
            log_p = other.log_softmax(-1)
            kl.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).cpu())
            same.append((other.argmax(-1) == logits.argmax(-1)).cpu())
    return WindowScore(total, torch.cat(kl).numpy(), torch.cat(same).numpy())


def predictions_of(scores: list[WindowScore], reference: str) -> Predictions:
    """Return the figures of a model whose windows were compared with the reference's.

    Raises UserError where they are NaN or infinite.
    """
    tokens = np.concatenate([score.kl for score in scores]).astype(np.float64)
    check_finite(tokens.sum(), "the divergence from the reference's predictions")
    sums = np.array([score.kl.sum(dtype=np.float64) for score in scores])
    counts = np.array([len(score.kl) for score in scores], dtype=float)
    low, high, _ = bootstrapped(lambda kl, count, axis=-1: kl.sum(axis) / count.sum(axis), sums, counts)
    return Predictions(
        reference=reference,
        mean_kl=float(tokens.mean()),
        low=low,
        high=high,
        p99_kl=float(np.quantile(tokens, 0.99)),
        same_top_share=float(np.concatenate([score.same_top for score in scores]).mean()),
        tokens=len(tokens),
    )
