"""Scores of windows with a transformers model: its body runs on batches, its output layer on so many tokens at a time
that memory stays bounded however large the vocabulary is."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from ladderize.checkpoint.dtypes import DTYPE_BYTES
from ladderize.eval.backends.base import WindowScores
from ladderize.memory import check_room
from ladderize.predictions import PredictionsReader, StatesWriter, divergence, write_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_BYTES = 64 << 20  # of fp32 logits that are held at once; about six such arrays exist while models are compared
PROBE_TOKENS = 8


def score_windows(
    model: "PreTrainedModel",
    windows: list[np.ndarray],
    *,
    batch_size: int = 8,
    chosen: range | None = None,
    keep: Path | None = None,
    keep_head: bool = True,
    reference: Path | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> WindowScores:
    """Score the ``chosen`` windows (None: all); windows of equal length that follow each other go in batches.

    keep: the folder for this model's predictions; all processes that share it give the same windows, and one of them
    keeps the head. reference: a folder of predictions for the same windows. Raises UserError where memory does not do.
    """
    chosen = range(len(windows)) if chosen is None else chosen
    head = PlainHead(model) if no_plain_head(model) is None else None
    check_scoring_room(model, head, windows, batch_size, compared=reference is not None)
    device = next(model.get_input_embeddings().parameters()).device
    scores = _Scores([], [], [])
    with ExitStack() as stack:
        writer = compared = None
        if keep is not None:
            assert head is not None  # whoever asks has looked at ``no_plain_head``
            counts = [len(window) - 1 for window in windows]
            writer = stack.enter_context(StatesWriter(keep, counts, head.weight.shape[1], head.weight.dtype))
            if keep_head:
                write_head(keep, head.weight, head.bias)
        if reference is not None:
            compared = _Reference(stack.enter_context(PredictionsReader(reference)), device)
        for batch in window_batches(windows, chosen, batch_size):
            ids = torch.from_numpy(np.stack([windows[index] for index in batch])).to(device)
            with torch.inference_mode():
                found = head.states(ids) if head is not None else model(input_ids=ids, use_cache=False).logits
                for row, index in enumerate(batch):
                    if writer is not None:
                        writer.write(index, found[row, :-1])
                    theirs = compared.states(index) if compared is not None else None
                    scores.add(found[row, :-1], head, ids[row, 1:].to(found.device), theirs, compared)
            advance(len(batch))
    return scores.done(compared is not None)


class _Reference:
    """Logits of the reference at the scored positions, from what was kept."""

    def __init__(self, reader: PredictionsReader, device: torch.device) -> None:
        nbytes = reader.about.vocab_size * reader.about.hidden_size * DTYPE_BYTES[reader.about.dtype]
        check_room(nbytes, device, "the reference's output layer", "use a device with more memory")
        self.reader, self.device = reader, device
        self.weight, self.bias = reader.head(device)

    def states(self, window: int) -> Tensor:
        return self.reader.states(window, self.device)

    def logits(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)


@dataclass
class _Scores:
    """What the windows got so far."""

    nll: list[float]
    kl: list[np.ndarray]
    same_top: list[np.ndarray]

    def add(
        self,
        found: Tensor,
        head: "PlainHead | None",
        target: Tensor,
        theirs: Tensor | None,
        reference: _Reference | None,
    ) -> None:
        """Score a window. found: its states, or without a ``head`` its logits [n, ...]; theirs: the reference's
        states; target: the ids to be predicted [n]."""
        vocab_size = found.shape[-1] if head is None else len(head.weight)
        rows = max(1, LOGITS_BYTES // (4 * vocab_size))
        total, kl, same_top = 0.0, [], []
        for start in range(0, len(target), rows):
            part = slice(start, start + rows)
            logits = (found[part] if head is None else head.logits(found[part])).float()
            total += cross_entropy(logits, target[part], reduction="none").double().sum().item()
            if reference is not None and theirs is not None:
                part_kl, part_same = divergence(reference.logits(theirs[part]), logits)
                kl.append(part_kl)
                same_top.append(part_same)
        self.nll.append(total)
        if kl:
            self.kl.append(torch.cat(kl).cpu().numpy())
            self.same_top.append(torch.cat(same_top).cpu().numpy())

    def done(self, compared: bool) -> WindowScores:
        nll = np.array(self.nll, dtype=np.float64)
        return WindowScores(nll, self.kl, self.same_top) if compared else WindowScores(nll)


def window_batches(windows: list[np.ndarray], chosen: range, batch_size: int) -> Iterator[range]:
    """Consecutive windows of equal length, at most ``batch_size``."""
    start = chosen.start
    while start < chosen.stop:
        stop = start + 1
        while stop < chosen.stop and stop - start < batch_size and len(windows[stop]) == len(windows[start]):
            stop += 1
        yield range(start, stop)
        start = stop


class PlainHead:
    """A model in two parts: what makes states, and the output layer alone, where ``no_plain_head`` is None."""

    def __init__(self, model: "PreTrainedModel") -> None:
        layer = model.get_output_embeddings()
        self.body, self.layer = model.base_model, layer
        self.weight: Tensor = layer.weight
        self.bias: Tensor | None = getattr(layer, "bias", None)

    def states(self, ids: Tensor) -> Tensor:
        """The normed final hidden states [windows, tokens, hidden]."""
        states: Tensor = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.layer(states)
        return logits


def no_plain_head(model: "PreTrainedModel") -> str | None:
    """Why this model's logits are not its output layer's product with its final states; None where they are.

    Some architectures scale or cap their logits. It is tried out, on a few tokens.
    """
    layer, body = model.get_output_embeddings(), model.base_model
    if not isinstance(layer, torch.nn.Linear) or body is model:
        return "its architecture has no output layer of the usual kind"
    device = next(model.get_input_embeddings().parameters()).device
    ids = torch.arange(min(PROBE_TOKENS, model.config.vocab_size), device=device)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        found = layer(body(input_ids=ids, use_cache=False).last_hidden_state).float()
    if found.shape != expected.shape or (found - expected).abs().max() > 1e-6 * expected.abs().max():
        return "its architecture changes its logits after its output layer"
    return None


def check_scoring_room(
    model: "PreTrainedModel", head: PlainHead | None, windows: list[np.ndarray], batch_size: int, *, compared: bool
) -> None:
    """Raise UserError where a batch does not fit into memory: one layer's work, and logits of as many tokens as are
    held at once."""
    longest, at_once = max(map(len, windows)), min(batch_size, len(windows))
    embedding = next(model.get_input_embeddings().parameters())
    vocab_size, itemsize = model.config.vocab_size, embedding.dtype.itemsize
    logits = min(longest, max(1, LOGITS_BYTES // (4 * vocab_size))) * vocab_size * 4 * (6 if compared else 2)
    if head is None:
        batch = at_once * longest * vocab_size * itemsize
    else:
        hidden = model.config.hidden_size
        batch = at_once * longest * (4 * hidden + 3 * getattr(model.config, "intermediate_size", 4 * hidden)) * itemsize
    check_room(
        batch + logits,
        embedding.device,
        f"scoring {at_once:,} windows of {longest:,} tokens at a time",
        "lower --batch-size or --seq-len",
    )
