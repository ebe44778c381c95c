"""How probable a model finds the ends of texts, and whole windows of them; and how far its predictions are from another
model's that were kept. The vocabulary may be shared by several ranks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.errors import UserError
from ladderize.memory import check_room
from ladderize.predictions import PredictionsReader, StatesWriter
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.decode import unsound_logits
from ladderize.runtime.model import TPLlama
from ladderize.runtime.requests.service import STATES_AT_ONCE, Worker

COMPARED_AT_ONCE = 1 << 24  # logits of one rank; about six arrays of this size exist while models are compared


@dataclass(frozen=True)
class OutputLayer:
    """An output layer, or one rank's part of it. product: states [n, hidden] -> logits [n, tokens]. tokens: of this
    part, padding included; start: the first of them. vocab_size: of all parts."""

    product: Callable[[Tensor], Tensor]
    tokens: int
    vocab_size: int
    start: int = 0
    collectives: Collectives = field(default_factory=Collectives)

    @classmethod
    def of_rank(cls, model: TPLlama) -> "OutputLayer":
        shape = model.shape
        return cls(model.head, shape.own_vocab, shape.vocab, shape.vocab_start, model.collectives)

    def logits(self, states: Tensor) -> Tensor:
        """[n, tokens] in float32, -inf for padding, where the ranks do not divide the vocabulary."""
        logits = self.product(states).float()
        real = self.vocab_size - self.start
        if real < self.tokens:
            logits = logits.masked_fill(torch.arange(self.tokens, device=logits.device) >= real, -torch.inf)
        return logits

    def summary(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of every rank's logits together, equal on all ranks: the token with the largest [n], and the logarithm of the
        sum of their exponentials, float64 [n]. Three numbers of each state travel, not its logits."""
        largest, top = logits.max(-1)
        # ids below 2^24 are exact in float32
        own = torch.stack([largest, (top + self.start).float(), logits.logsumexp(-1)], -1)
        parts = self.collectives.all_gather(own).unflatten(-1, (self.collectives.ranks, 3))
        winner = parts[..., 0].argmax(-1, keepdim=True)  # the first of equal ones, as argmax over all takes it
        return parts[..., 1].gather(-1, winner)[:, 0].long(), parts[..., 2].double().logsumexp(-1)

    def of_tokens(self, logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """The logits of tokens ``ids`` [n] in ``rows`` [n] of every rank's ``logits``; equal on all ranks."""
        own = ids - self.start
        inside = (own >= 0) & (own < self.tokens)
        found = logits[rows, own.clamp(0, self.tokens - 1)].masked_fill(~inside, -torch.inf)
        parts = found[:, None].split(STATES_AT_ONCE)  # more tokens than states where one state has many successors
        return torch.cat([self.collectives.all_gather(part.contiguous()).amax(-1) for part in parts])


# ---- ends of texts ----


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


def score_endings(worker: Worker, endings: Sequence[Ending], advance: Callable[[int], None]) -> EndingScores:
    """Score endings; equal on all ranks. advance: told how many more are done. Raises UserError for NaN or infinity."""
    layer = OutputLayer.of_rank(worker.reader.model)
    sums, greedy = np.zeros(len(endings)), np.ones(len(endings), dtype=bool)
    # the last token is predicted and never read
    for hidden, places in worker.reader.read([ending.ids[:-1] for ending in endings]):
        numbers = list(places)
        counts = [endings[number].scored for number in numbers]
        at = np.concatenate([places[number][-count:] for number, count in zip(numbers, counts, strict=True)])
        targets = np.concatenate([endings[n].ids[-count:] for n, count in zip(numbers, counts, strict=True)])
        found, best = token_scores(layer, hidden, at, targets)
        first = np.cumsum([0, *counts[:-1]])
        sums[numbers] = np.add.reduceat(found, first)
        greedy[numbers] = np.logical_and.reduceat(best, first)
        advance(len(numbers))
    return EndingScores(sums, greedy)


def token_scores(
    layer: OutputLayer, hidden: Tensor, at: np.ndarray, targets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability, float64 [n], of the tokens ``targets`` [n] after the states ``hidden[at]``, and whether each is
    the most probable one: bool [n].

    hidden: [tokens, hidden], normed. A state that several tokens follow is multiplied with the LM head once.
    """
    states, where = np.unique(at, return_inverse=True)
    order = np.argsort(where, kind="stable")
    sums, best = np.zeros(len(at)), np.zeros(len(at), dtype=bool)
    at_once = min(STATES_AT_ONCE, max(1, LOGITS_AT_ONCE // layer.tokens))
    for first in range(0, len(states), at_once):
        part = states[first : first + at_once]
        low, high = np.searchsorted(where[order], [first, first + len(part)])
        chosen = order[low:high]
        rows = torch.from_numpy(where[chosen] - first).to(hidden.device)
        wanted = torch.from_numpy(targets[chosen]).to(hidden.device)
        logits = layer.logits(hidden[torch.from_numpy(part).to(hidden.device)])
        top, normaliser = layer.summary(logits)
        if not normaliser.isfinite().all():
            raise unsound_logits("scored with")
        target = layer.of_tokens(logits, rows, wanted)
        sums[chosen] = (target.double() - normaliser[rows]).cpu().numpy()
        best[chosen] = (top[rows] == wanted).cpu().numpy()
    return sums, best


# ---- windows: perplexity, and predictions against another model's ----


@dataclass(frozen=True)
class WindowScores:
    """Scores of windows, in their order. A window of n ids has n - 1 scored tokens: all but its first.

    nll: summed negative log-likelihood of each window in nats, float64 [windows]. kl: for each window the divergence
    KL(reference || this model) at each scored token in nats, float32 [n - 1]; same_top: whether both models hold the
    same token most likely there, bool [n - 1]; both None where no reference was given.
    """

    nll: np.ndarray
    kl: list[np.ndarray] | None = None
    same_top: list[np.ndarray] | None = None


class KeptReference:
    """Another model's predictions: its states, and its output layer, or this rank's part of it. Closed by its
    reader."""

    def __init__(self, kept: PredictionsReader, layer: OutputLayer, device: torch.device) -> None:
        if kept.about.vocab_size != layer.vocab_size:
            raise UserError(
                f"{kept.folder} holds predictions over {kept.about.vocab_size} tokens, this model's are over"
                f" {layer.vocab_size}; compare models of one vocabulary"
            )
        start, stop = (min(end, layer.vocab_size) for end in (layer.start, layer.start + layer.tokens))
        nbytes = (stop - start) * kept.about.hidden_size * (4 if kept.about.dtype == "F32" else 2)
        check_room(nbytes, device, "the reference's output layer", "use a device with more memory")
        weight, bias = kept.head(device, start, stop)
        padding = layer.tokens - (stop - start)
        weight, bias = F.pad(weight, (0, 0, 0, padding)), None if bias is None else F.pad(bias, (0, padding))
        self.kept, self.device = kept, device
        self.layer = OutputLayer(
            lambda states: F.linear(states, weight, bias), layer.tokens, layer.vocab_size, start, layer.collectives
        )

    def states(self, window: int) -> Tensor:
        return self.kept.states(window, self.device)


class WindowScorer(ExitStack):
    """Scores windows one after the other, keeps their states, and compares them with a reference's; a context.

    keep: a folder for the states, None on ranks that write none; window_tokens: the scored tokens of all windows that
    go there. reference: a folder with those of another model for the same windows.
    """

    def __init__(
        self,
        layer: OutputLayer,
        window_tokens: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        keep: Path | None,
        reference: Path | None,
    ) -> None:
        super().__init__()
        self.layer, self.found = layer, dict[int, tuple[float, np.ndarray, np.ndarray]]()
        self.writer = self.reference = None
        with ExitStack() as stack:  # closed where the reference does not open
            if keep is not None:
                self.writer = stack.enter_context(StatesWriter(keep, window_tokens, hidden_size, dtype))
            if reference is not None:
                kept = PredictionsReader(reference)
                stack.enter_context(kept)
                self.reference = KeptReference(kept, layer, device)
            self.push(stack.pop_all())

    def add(self, window: int, states: Tensor, targets: Tensor) -> None:
        """states: what the output layer reads [n, hidden]; targets: the tokens that follow [n]."""
        if self.writer is not None:
            self.writer.write(window, states)
        total, kl, same = 0.0, [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
        theirs = None if self.reference is None else self.reference.states(window)
        at_once = min(STATES_AT_ONCE, max(1, COMPARED_AT_ONCE // self.layer.tokens))
        for first in range(0, len(targets), at_once):
            part = slice(first, first + at_once)
            logits = self.layer.logits(states[part])
            top, normaliser = self.layer.summary(logits)
            rows = torch.arange(len(top), device=top.device)
            total += float((normaliser - self.layer.of_tokens(logits, rows, targets[part]).double()).sum())
            if self.reference is not None and theirs is not None:
                other = self.reference.layer.logits(theirs[part])
                other_top, other_normaliser = self.reference.layer.summary(other)
                log_p = other - other_normaliser[:, None].float()
                gap = log_p - (logits - normaliser[:, None].float())
                # padding has probability 0 in both, and 0 * (inf - inf) is no number
                own = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * gap).sum(-1, keepdim=True)
                kl.append(self.layer.collectives.all_gather(own).sum(-1).clamp_min(0).cpu())
                same.append((top == other_top).cpu())
        self.found[window] = total, torch.cat(kl).numpy(), torch.cat(same).numpy()

    def scores(self) -> WindowScores:
        """Of the windows that were added, by their number."""
        found = [self.found[window] for window in sorted(self.found)]
        nll = np.array([total for total, _, _ in found], dtype=np.float64)
        if self.reference is None:
            return WindowScores(nll)
        return WindowScores(nll, [kl for _, kl, _ in found], [same for _, _, same in found])


def score_windows_of_ids(
    worker: Worker,
    windows: list[np.ndarray],
    keep: Path | None,
    reference: Path | None,
    advance: Callable[[int], None],
) -> WindowScores:
    """Scores of windows, int64 [n > 1] each; equal on all ranks. keep: a folder for the states, which rank 0 writes."""
    reader, shape = worker.reader, worker.reader.model.shape
    keep = keep if worker.group.is_main else None
    layer, tokens = OutputLayer.of_rank(reader.model), [len(window) - 1 for window in windows]
    with WindowScorer(layer, tokens, shape.hidden, reader.dtype, reader.device, keep, reference) as scorer:
        for hidden, places in reader.read([window[:-1] for window in windows]):
            for number, path in places.items():
                targets = torch.from_numpy(windows[number][1:]).to(reader.device)
                scorer.add(number, hidden[torch.from_numpy(path).to(reader.device)], targets)
            advance(len(places))
        return scorer.scores()
