"""The text of ``--perplexity``: its windows, their scores, and predictions that are kept to compare other models with.

The logits would be vast. A folder of kept predictions holds ``window-N.safetensors`` (``states`` [scored tokens,
hidden]), ``head.safetensors`` (``weight`` [vocabulary, hidden], perhaps ``bias``: logits are ``states @ weight.T +
bias``), and ``predictions.json`` (``PredictedText``), which is written last: without it the others are worth nothing.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
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
from ladderize.data.windows import cut_windows, default_seq_len, read_documents
from ladderize.errors import UserError
from ladderize.eval.compare import bootstrapped
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import Predictions
from ladderize.families.registry import decoder_of, find_family
from ladderize.files.documents import check_writable, read_document, write_json
from ladderize.files.output import temporary_folder
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.ranks.group import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOGITS_AT_A_TIME = 1 << 24  # about six arrays of this size exist while models are compared
DOCUMENT, HEAD, WINDOW = "predictions.json", "head", "window-{}"


@dataclass(frozen=True)
class PredictedText(Record):
    """Whose predictions a folder holds, and on which windows."""

    model: str
    ids_sha256: str
    vocab_size: int


@dataclass
class KeptPredictions:
    """A folder of predictions."""

    folder: Path
    text: PredictedText | None = None  # None until it is whole

    def save(self, name: str, tensors: Mapping[str, Tensor | None]) -> None:
        path = self.folder / f"{name}.safetensors"
        kept = {
            key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items() if tensor is not None
        }
        try:
            save_file(kept, path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path}: the predictions cannot be kept ({sentence(error)}); name another folder by --keep-predictions"
            ) from error

    def load(self, name: str, device: torch.device) -> dict[str, Tensor]:
        path = self.folder / f"{name}.safetensors"
        try:
            return load_file(path, device=str(device))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({sentence(error)}); evaluate the reference again") from None

    def finish(self, text: PredictedText, ranks: Ranks) -> None:
        self.text = text
        if ranks.is_main:
            write_json(self.folder / DOCUMENT, text.to_dict())
        ranks.barrier()  # no rank goes on before it is written


@contextlib.contextmanager
def open_baseline(options: EvalOptions, ranks: Ranks) -> Iterator[KeptPredictions | None]:
    """Yield a folder for predictions of the first model, or with those of an earlier run; None where none are compared.
    All ranks write into it: several machines must share the one that ``keep_predictions`` names."""
    if options.reference is not None:
        folder = resolved(options.reference, "--reference ")
        path = folder / DOCUMENT
        if not path.is_file():
            raise UserError(f"{folder} holds no kept predictions (no {DOCUMENT}); keep the reference's first")
        yield KeptPredictions(folder, PredictedText.from_dict(read_document(path, "file of kept predictions"), path))
    elif options.keep_predictions is not None:
        folder = resolved(options.keep_predictions, "--keep-predictions ")
        with ranks.main_first():
            if ranks.is_main:
                prepare_folder(folder)
        yield KeptPredictions(folder)
    elif len(options.models) > 1 and options.perplexity is not None and options.engine == "transformers":
        with temporary_folder("predictions") if ranks.is_main else contextlib.nullcontext() as temporary:
            yield KeptPredictions(ranks.broadcast(temporary))
            ranks.barrier()  # no rank reads in the folder any more
    else:
        yield None


def prepare_folder(folder: Path) -> None:
    """Make ``folder`` ready for predictions, in place of earlier ones; anything else in it is refused."""
    if not folder.parent.is_dir():
        raise UserError(f"{folder}: the folder {folder.parent} does not exist")
    # the document first
    earlier = [folder / DOCUMENT, folder / f"{HEAD}.safetensors", *folder.glob(f"{WINDOW.format('*')}.safetensors")]
    if folder.exists() and (not folder.is_dir() or {*folder.iterdir()} - {*earlier}):
        raise UserError(f"{folder} is not an empty folder; name another to keep predictions in")
    folder.mkdir(exist_ok=True)
    check_writable(folder / DOCUMENT)
    for path in earlier:
        path.unlink(missing_ok=True)


def text_windows(
    options: EvalOptions, tokenizer: "PreTrainedTokenizerBase | None", *, vocab_size: int, positions: int
) -> list[np.ndarray]:
    """Return the windows of ``options.perplexity`` in a model's ids."""
    assert options.perplexity is not None
    documents = read_documents(options.perplexity, tokenizer, vocab_size=vocab_size)
    seq_len = options.seq_len or default_seq_len([options.perplexity], positions)
    if not 2 <= seq_len <= positions:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {positions} positions of the model")
    return cut_windows(documents, seq_len)[: options.windows]


def ids_sha256(windows: list[np.ndarray]) -> str:
    """Return a hash of the ids of windows and of their lengths."""
    digest = hashlib.sha256(json.dumps([len(window) for window in windows]).encode())
    for window in windows:
        digest.update(np.ascontiguousarray(window, dtype="<i8").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class WindowScore:
    """The score of a window of n ids, of which all but the first are scored."""

    nll: float  # the summed negative log-likelihood in nats
    # at each scored token [n - 1], empty without a reference: KL(reference || this model) in nats, and whether both
    # models hold the same token most likely
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

    keep: takes this model's states and output layer.
    reference: what ``keep`` of another model took of the same windows.
    advance: is called with the number of windows scored.
    Raises UserError for an architecture that ladderize does not know, which may cap its logits, say.
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
    """Score one window, its logits on so few tokens at a time that memory stays bounded for any vocabulary; ``targets``
    follow the states [n, hidden], ``head`` and ``theirs`` are the reference's output layer and its states."""
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
    """Return the figures of a model whose windows were compared with the reference's."""
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
