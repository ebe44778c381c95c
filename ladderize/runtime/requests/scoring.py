"""Log-likelihoods: how probable a model finds the ends of texts, over a vocabulary that the ranks share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.errors import UserError
from ladderize.runtime.model import TPLlama
from ladderize.runtime.requests.reading import TextReader

STATES_AT_ONCE = 2048
MESSAGE_BYTES = 4 * 3 * STATES_AT_ONCE  # the largest one that is sent here


@dataclass(frozen=True)
class Ending:
    """A text, int64 [n > 1], whose last ``scored`` tokens, fewer than n, are to be scored."""

    ids: np.ndarray
    scored: int


@dataclass(frozen=True)
class EndingScores:
    """Of endings, in their order. sums: log-likelihood of each in nats, float64 [endings]. greedy: whether every token
    of it is the most probable one there, bool [endings]."""

    sums: np.ndarray
    greedy: np.ndarray


def score_endings(
    reader: TextReader, endings: Sequence[Ending], advance: Callable[[int], None] = lambda n: None
) -> EndingScores:
    """Score endings; equal on all ranks. advance: told how many more are done. Raises UserError for NaN or infinity."""
    sums, greedy = np.zeros(len(endings)), np.ones(len(endings), dtype=bool)
    # the last token is predicted and never read
    for hidden, places in reader.read([ending.ids[:-1] for ending in endings]):
        numbers = list(places)
        counts = [endings[number].scored for number in numbers]
        at = np.concatenate([places[number][-count:] for number, count in zip(numbers, counts, strict=True)])
        targets = np.concatenate([endings[n].ids[-count:] for n, count in zip(numbers, counts, strict=True)])
        found, best = token_scores(reader.model, hidden, at, targets)
        first = np.cumsum([0, *counts[:-1]])
        sums[numbers] = np.add.reduceat(found, first)
        greedy[numbers] = np.logical_and.reduceat(best, first)
        advance(len(numbers))
    return EndingScores(sums, greedy)


def token_scores(model: TPLlama, hidden: Tensor, at: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability, float64 [n], of the tokens ``targets`` [n] after the states ``hidden[at]``, and whether each is
    the most probable one: bool [n].

    hidden: [tokens, hidden], normed. A state that several tokens follow is multiplied with the LM head once. Each rank
    looks at its own part of the vocabulary only; three numbers of each state travel, not its logits.
    """
    states, where = np.unique(at, return_inverse=True)
    order = np.argsort(where, kind="stable")
    sums, best = np.zeros(len(at)), np.zeros(len(at), dtype=bool)
    at_once = min(STATES_AT_ONCE, max(1, LOGITS_AT_ONCE // model.shape.own_vocab))
    for first in range(0, len(states), at_once):
        part = states[first : first + at_once]
        low, high = np.searchsorted(where[order], [first, first + len(part)])
        chosen = order[low:high]
        index = torch.from_numpy(part).to(hidden.device)
        rows = torch.from_numpy(where[chosen] - first).to(hidden.device)
        wanted = torch.from_numpy(targets[chosen]).to(hidden.device)
        logits, top, normaliser = own_logits(model, hidden[index])
        if not normaliser.isfinite().all():
            raise UserError(
                "the model's logits are NaN or infinite, so nothing was scored with them; check its weights, or"
                " compute in float32"
            )
        target = logits_of(model, logits, rows, wanted)
        sums[chosen] = (target.double() - normaliser[rows]).cpu().numpy()
        best[chosen] = (top[rows] == wanted).cpu().numpy()
    return sums, best


def logits_of(model: TPLlama, logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """The logits of tokens ``ids`` [n] in ``rows`` [n] of every rank's ``logits`` [states, own vocabulary]; equal on
    all ranks."""
    own = ids - model.shape.vocab_start
    inside = (own >= 0) & (own < logits.shape[1])
    found = logits[rows, own.clamp(0, logits.shape[1] - 1)].masked_fill(~inside, -torch.inf)
    if model.shape.replicate_vocab:
        return found
    parts = found[:, None].split(STATES_AT_ONCE)  # more tokens than states where one state has many successors
    return torch.cat([model.collectives.all_gather(part.contiguous()).amax(-1) for part in parts])


def own_logits(model: TPLlama, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [n, hidden] -> this rank's logits [n, own vocabulary] in float32, and what ``summarised`` says of all."""
    return summarised(model, model.head(hidden).float())


def summarised(model: TPLlama, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's logits [n, own vocabulary], -inf where they are padding; and, equal on all ranks, the token with the
    largest logit [n] and the logarithm of the sum of all logits' exponentials, float64 [n]."""
    own = min(model.shape.own_vocab, model.shape.vocab - model.shape.vocab_start)
    if own < logits.shape[1]:  # padding of a vocabulary that the ranks do not divide
        logits = logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= own, -torch.inf)
    largest, top = logits.max(-1)
    normaliser = logits.logsumexp(-1)
    if model.shape.replicate_vocab:
        return logits, top, normaliser.double()
    # ids below 2^24 are exact in float32
    ranks = model.collectives.ranks
    own_part = torch.stack([largest, (top + model.shape.vocab_start).float(), normaliser], -1)
    parts = model.collectives.all_gather(own_part).unflatten(-1, (ranks, 3))
    winner = parts[..., 0].argmax(-1, keepdim=True)  # the first of equal ones, as argmax over all takes it
    top = parts[..., 1].gather(-1, winner)[:, 0].long()
    return logits, top, parts[..., 2].double().logsumexp(-1)
