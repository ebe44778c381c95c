"""Windows of a text scored as a whole: perplexity, and how far predictions are from another model's that were kept."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.errors import UserError
from ladderize.predictions import PredictionsReader, StatesWriter
from ladderize.runtime.model import TPLlama
from ladderize.runtime.requests.scoring import STATES_AT_ONCE, logits_of, own_logits, summarised
from ladderize.runtime.requests.worker import Worker

COMPARED_AT_ONCE = 1 << 24  # logits of one rank; a handful of arrays of this size exist while models are compared


@dataclass(frozen=True)
class WindowAnswers:
    """Of windows, in their order: nll, summed over the tokens of each, in nats, float64 [windows]; kl and same_top: of
    each token, float32 and bool [n - 1] for each window; None without a reference."""

    nll: np.ndarray
    kl: list[np.ndarray] | None
    same_top: list[np.ndarray] | None


@dataclass(frozen=True)
class WindowsJob:
    """windows: int64 [n > 1] each; all tokens but the first are scored. keep: a folder for the states, which rank 0
    writes (``ladderize.predictions``). reference: a folder with those of another model for the same windows."""

    windows: list[np.ndarray]
    keep: Path | None = None
    reference: Path | None = None

    def run(self, worker: Worker, advance: Callable[[int], None]) -> WindowAnswers:
        reader, model = worker.reader, worker.reader.model
        nll = np.zeros(len(self.windows))
        kl: list[np.ndarray] = [np.empty(0, np.float32)] * len(self.windows)
        same: list[np.ndarray] = [np.empty(0, bool)] * len(self.windows)
        with ExitStack() as stack:
            writer = reference = None
            if self.keep is not None and worker.group.is_main:
                counts = [len(window) - 1 for window in self.windows]
                writer = stack.enter_context(StatesWriter(self.keep, counts, model.shape.hidden, reader.dtype))
            if self.reference is not None:
                kept = stack.enter_context(PredictionsReader(self.reference))
                reference = KeptReference(kept, model, reader.device)
            for hidden, places in reader.read([window[:-1] for window in self.windows]):
                for number, path in places.items():
                    states = hidden[torch.from_numpy(path).to(reader.device)]
                    targets = torch.from_numpy(self.windows[number][1:]).to(reader.device)
                    if writer is not None:
                        writer.write(number, states)
                    theirs = None if reference is None else reference.states(number)
                    nll[number], kl[number], same[number] = score_window(model, states, targets, theirs, reference)
                advance(len(places))
        compared = self.reference is not None
        return WindowAnswers(nll, kl if compared else None, same if compared else None)


class KeptReference:
    """Another model's predictions: its states, and this rank's part of its output layer."""

    def __init__(self, kept: PredictionsReader, model: TPLlama, device: torch.device) -> None:
        if kept.about.vocab_size != model.shape.vocab:
            raise UserError(
                f"{kept.folder} holds predictions over {kept.about.vocab_size} tokens, this model's are over"
                f" {model.shape.vocab}; compare models of one vocabulary"
            )
        self.kept, self.device = kept, device
        start = min(model.shape.vocab_start, model.shape.vocab)
        stop = min(start + model.shape.own_vocab, model.shape.vocab)
        missing = model.shape.own_vocab - (stop - start)
        weight, bias = kept.head(device, start=start, stop=stop)
        self.weight = F.pad(weight, (0, 0, 0, missing))
        self.bias = None if bias is None else F.pad(bias, (0, missing))

    def states(self, window: int) -> Tensor:
        return self.kept.states(window, self.device)

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.weight, self.bias).float()


def score_window(
    model: TPLlama, states: Tensor, targets: Tensor, theirs: Tensor | None, reference: KeptReference | None
) -> tuple[float, np.ndarray, np.ndarray]:
    """A window's summed negative log-likelihood in nats; KL(reference || model) at each token and whether both hold the
    same token most likely there, empty without a reference.

    states: [n, hidden], normed; targets: the tokens that follow them [n]; theirs: the reference's states.
    """
    total, kl, same = 0.0, [], []
    at_once = min(STATES_AT_ONCE, max(1, COMPARED_AT_ONCE // model.shape.own_vocab))
    for first in range(0, len(targets), at_once):
        part = slice(first, first + at_once)
        logits, top, normaliser = own_logits(model, states[part])
        rows = torch.arange(len(top), device=top.device)
        total += float((normaliser - logits_of(model, logits, rows, targets[part]).double()).sum())
        if theirs is not None and reference is not None:
            other, other_top, other_normaliser = summarised(model, reference.logits(theirs[part]))
            log_p = other - other_normaliser[:, None].float()
            gap = log_p - (logits - normaliser[:, None].float())
            # padding has probability 0 in both, and 0 * (inf - inf) is no number
            own = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * gap).sum(-1, keepdim=True)
            kl.append(model.collectives.all_gather(own).sum(-1).clamp_min(0))
            same.append(top == other_top)
    if not kl:
        return total, np.empty(0, np.float32), np.empty(0, bool)
    return total, torch.cat(kl).cpu().numpy(), torch.cat(same).cpu().numpy()
