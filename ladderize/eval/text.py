"""The text of ``--perplexity``: its windows, their scores, and predictions that are kept to compare other models with.

The logits themselves would be vast. A folder of kept predictions holds ``window-N.safetensors`` (``states`` [scored
tokens, hidden], the normed final hidden states), ``head.safetensors`` (``weight`` [vocabulary, hidden] and perhaps
``bias``), and ``predictions.json`` (``KeptPredictions``), which is written last: without it the others are worth
nothing. Logits are ``states @ weight.T + bias``, in the dtype that both have.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ladderize.blocks import check_finite
from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.eval.compare import bootstrapped
from ladderize.eval.results import Predictions
from ladderize.families.registry import decoder_of, find_family
from ladderize.files.documents import check_writable, read_document
from ladderize.files.records import Record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS_AT_A_TIME = 1 << 24  # about six arrays of this size exist while models are compared
ABOUT_NAME, HEAD_NAME, WINDOW_FILES = "predictions.json", "head.safetensors", "window-*.safetensors"


# ---- kept predictions ----


@dataclass(frozen=True)
class KeptPredictions(Record):
    """The description of a folder of predictions.

    model: as it was named.
    ids_sha256: of the windows' ids.
    """

    model: str
    ids_sha256: str
    vocab_size: int

    def difference(self, other: "KeptPredictions") -> str | None:
        """Return why predictions of ``other`` cannot be compared with these; None where they can."""
        if self.vocab_size != other.vocab_size:
            return f"their vocabulary has {self.vocab_size} tokens, and this one {other.vocab_size}"
        if self.ids_sha256 != other.ids_sha256:
            return "their windows are others (--perplexity, --seq-len, --windows, or the tokenizer differs)"
        return None


def prepare_folder(folder: Path) -> None:
    """Make ``folder`` ready for predictions; earlier ones in it are removed. Raises UserError if it holds anything
    else."""
    if not folder.parent.is_dir():
        raise UserError(f"{folder}: the folder {folder.parent} does not exist")
    earlier = [*folder.glob(WINDOW_FILES), folder / HEAD_NAME, folder / ABOUT_NAME]
    if folder.exists() and (not folder.is_dir() or {*folder.iterdir()} - {*earlier}):
        raise UserError(f"{folder} is not an empty folder; name another to keep predictions in")
    folder.mkdir(exist_ok=True)
    check_writable(folder / ABOUT_NAME)
    for path in reversed(earlier):  # the document first
        path.unlink(missing_ok=True)


def read_about(folder: Path) -> KeptPredictions:
    """Return the description of a folder of predictions; raises UserError for any other folder."""
    path = folder / ABOUT_NAME
    if not path.is_file():
        raise UserError(f"{folder} holds no kept predictions (no {path.name}); keep the reference's first")
    return KeptPredictions.from_dict(read_document(path, "file of kept predictions"), path)


def load_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Read a file of a folder of predictions. Raises UserError where that fails."""
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({sentence(error)}); evaluate the reference again") from None


def save_tensors(path: Path, **tensors: Tensor | None) -> None:
    """Write a file of a folder of predictions. Raises UserError where the disk is full."""
    try:
        known = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in known.items()}, path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: the predictions cannot be kept ({sentence(error)}); name another folder by --keep-predictions"
        ) from error


# ---- the scores of windows ----


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


def output_layer(model: "PreTrainedModel") -> tuple[torch.nn.Linear, float]:
    """Return the output layer, and the factor of the final states with which it makes the logits.

    Raises UserError for an architecture that ladderize does not know, which may cap its logits, say.
    """
    layer, config = model.get_output_embeddings(), model.config.to_dict()
    if not isinstance(layer, torch.nn.Linear) or find_family(config) is None:
        raise UserError(
            f"--perplexity is for the families of models that ladderize converts, not for a {config.get('model_type')}"
        )
    return layer, decoder_of(config).logits_scale


def score_windows(
    model: "PreTrainedModel",
    windows: list[np.ndarray],
    *,
    batch_size: int = 8,
    chosen: range | None = None,
    keep: Path | None = None,
    reference: Path | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> list[WindowScore]:
    """Score the ``chosen`` windows (None: all), int64 [n] each; consecutive windows of equal length are batched.

    The model's body runs on batches, its output layer on so few tokens at a time that memory stays bounded for any
    vocabulary.

    keep: a folder to write this model's states and output layer into; the caller writes the description.
    reference: a folder that ``keep`` of another model filled for the same windows.
    advance: is called with the number of windows scored.
    Raises UserError where a folder cannot be written or read.
    """
    device = next(model.get_input_embeddings().parameters()).device
    layer, scale = output_layer(model)
    chosen = range(len(windows)) if chosen is None else chosen
    if keep is not None and 0 in chosen:  # one of several ranks
        save_tensors(keep / HEAD_NAME, weight=layer.weight, bias=layer.bias)
    head = None if reference is None else load_tensors(reference / HEAD_NAME, device)
    scores = []
    with torch.inference_mode():
        for batch in window_batches(windows, chosen, batch_size):
            ids = torch.from_numpy(np.stack([windows[index] for index in batch])).to(device)
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state * scale
            for row, index in enumerate(batch):
                name = WINDOW_FILES.replace("*", str(index))
                if keep is not None:
                    save_tensors(keep / name, states=states[row, :-1])
                theirs = None if reference is None else load_tensors(reference / name, device)["states"]
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
        part = slice(first, first + at_once)
        logits = layer(states[part]).float()
        log_q = logits.log_softmax(-1)
        total -= float(log_q.gather(-1, targets[part, None]).double().sum())
        if head is not None and theirs is not None:
            other = torch.nn.functional.linear(theirs[part], head["weight"], head.get("bias")).float()
            log_p = other.log_softmax(-1)
            kl.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).cpu())
            same.append((other.argmax(-1) == logits.argmax(-1)).cpu())
    return WindowScore(total, torch.cat(kl).numpy(), torch.cat(same).numpy())


def window_batches(windows: list[np.ndarray], chosen: range, batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of at most ``batch_size`` consecutive windows of equal length."""
    for _, alike in itertools.groupby(chosen, key=lambda index: len(windows[index])):
        while batch := [*itertools.islice(alike, batch_size)]:
            yield batch


def ids_sha256(windows: list[np.ndarray]) -> str:
    """Return a hash of the ids of windows and of their lengths."""
    digest = hashlib.sha256(json.dumps([len(window) for window in windows]).encode())
    for window in windows:
        digest.update(np.ascontiguousarray(window, dtype="<i8").tobytes())
    return digest.hexdigest()


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
