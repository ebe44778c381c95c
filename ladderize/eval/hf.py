"""A model computed by transformers. Where a launcher has started several processes, each has the whole model."""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ladderize.errors import UserError
from ladderize.eval.model import EvalModel, WindowScores, open_tokenizer
from ladderize.eval.options import EvalOptions
from ladderize.eval.predictions import KeptReference, write_head, write_states
from ladderize.families.registry import decoder_of, find_family
from ladderize.layout import LayoutError
from ladderize.modeling import load
from ladderize.ranks.group import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE_TOKENS = 8
LOGITS_AT_A_TIME = 1 << 24  # about six arrays of this size exist while models are compared


class HFModel(EvalModel):
    """A loaded transformers model.

    ranks: the processes that share windows and questions.
    """

    def __init__(
        self, name: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", ranks: Ranks
    ) -> None:
        self.model, self.ranks = model, ranks
        super().__init__(
            name,
            model.config.to_dict(),
            tokenizer,
            vocab_size=model.config.vocab_size,
            positions=model.config.max_position_embeddings,
            hidden_size=model.config.hidden_size,
            parameters=model.num_parameters(),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
        )

    @cached_property
    def no_predictions(self) -> str | None:  # type: ignore[override]
        return no_plain_head(self.model)

    @classmethod
    def open(cls, name: str, folder: Path, options: EvalOptions, ranks: Ranks) -> "HFModel":
        """Load a checked model and, if it has one, its tokenizer.

        Raises UserError or LayoutError; errors of transformers become one sentence.
        """
        tokenizer = open_tokenizer(name, folder, options)
        try:
            model = load(
                folder, dtype=options.dtype, device=str(ranks.device), trust_remote_code=options.trust_remote_code
            )
        except (UserError, LayoutError):
            raise
        except Exception as error:  # whatever a config of another architecture makes transformers do
            raise UserError(f"{name} cannot be loaded: {' '.join(str(error).split())[:400]}") from error
        return cls(name, model, tokenizer, ranks)

    def score(
        self,
        windows: list[np.ndarray],
        *,
        batch_size: int,
        keep: Path | None = None,
        reference: Path | None = None,
        advance: Callable[[int], None] = lambda n: None,
    ) -> WindowScores:
        """Score windows as ``EvalModel.score`` says. Each rank scores neighbouring windows, and all ranks return all
        scores."""
        rank, size = self.ranks.rank, self.ranks.size
        if keep is not None and self.ranks.is_main:
            layer: Any = self.model.get_output_embeddings()
            write_head(keep, layer.weight, getattr(layer, "bias", None))
        scores = score_windows(
            self.model,
            windows,
            batch_size=batch_size,
            chosen=range(rank * len(windows) // size, (rank + 1) * len(windows) // size),
            keep=keep,
            reference=reference,
            advance=lambda count: advance(count * size),
        )
        return joined_scores(self.ranks.gather(scores))

    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        """Return lm-eval's HF backend around the loaded model."""
        from ladderize.eval.harness import SharedHFLM

        return SharedHFLM(
            self.ranks,
            pretrained=self.model,
            tokenizer=self.tokenizer,
            batch_size=options.batch_size,
            add_bos_token=add_bos,
        )

    def close(self) -> None:
        del self.model
        gc.collect()


def joined_scores(parts: Sequence[WindowScores]) -> WindowScores:
    """Return the scores of windows that several processes shared, in order."""
    nll = np.concatenate([part.nll for part in parts])
    if any(part.kl is None for part in parts):
        return WindowScores(nll)
    kl = [window for part in parts for window in part.kl or []]
    return WindowScores(nll, kl, [window for part in parts for window in part.same_top or []])


def score_windows(
    model: "PreTrainedModel",
    windows: list[np.ndarray],
    *,
    batch_size: int = 8,
    chosen: range | None = None,
    keep: Path | None = None,
    reference: Path | None = None,
    advance: Callable[[int], None] = lambda n: None,
) -> WindowScores:
    """Score the ``chosen`` windows (None: all); consecutive windows of equal length are batched.

    The model's body runs on batches, its output layer on so few tokens at a time that memory stays bounded for any
    vocabulary.

    keep: the folder for this model's states.
    reference: a folder of predictions for the same windows.
    Raises UserError where a folder cannot be written or read.
    """
    chosen = range(len(windows)) if chosen is None else chosen
    device = next(model.get_input_embeddings().parameters()).device
    plain, scale = no_plain_head(model) is None, logits_scale(model)
    # Without a plain head the logits themselves are kept and scored.
    layer: Callable[[Tensor], Tensor] = model.get_output_embeddings() if plain else lambda logits: logits
    kept = None if reference is None else KeptReference(reference, device)
    nll, kl, same_top = [], [], []
    with torch.inference_mode():
        for batch in window_batches(windows, chosen, batch_size):
            ids = torch.from_numpy(np.stack([windows[index] for index in batch])).to(device)
            if plain:
                states: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state * scale
            else:
                states = model(input_ids=ids, use_cache=False).logits
            for row, index in enumerate(batch):
                if keep is not None:
                    write_states(keep, index, states[row, :-1])
                total, divergence, same = score_tokens(
                    layer, states[row, :-1], ids[row, 1:].to(states.device), kept, index, model.config.vocab_size
                )
                nll.append(total)
                kl.append(divergence)
                same_top.append(same)
            advance(len(batch))
    return WindowScores(np.array(nll)) if kept is None else WindowScores(np.array(nll), kl, same_top)


def score_tokens(
    layer: Callable[[Tensor], Tensor],
    states: Tensor,
    targets: Tensor,
    kept: KeptReference | None,
    window: int,
    vocab_size: int,
) -> tuple[float, np.ndarray, np.ndarray]:
    """Score one window; returns its summed negative log-likelihood in nats, and the KL and same-top flag of each token
    [n].

    The latter two are empty without a reference.

    layer: states [n, hidden] -> logits [n, vocabulary].
    targets: the tokens that follow the states [n].
    kept: the reference.
    window: its number.
    """
    total, kl, same = 0.0, [torch.empty(0)], [torch.empty(0, dtype=torch.bool)]
    theirs = None if kept is None else kept.states(window)
    at_once = max(1, LOGITS_AT_A_TIME // vocab_size)
    for first in range(0, len(targets), at_once):
        part = slice(first, first + at_once)
        logits = layer(states[part]).float()
        log_q = logits.log_softmax(-1)
        total -= float(log_q.gather(-1, targets[part, None]).double().sum())
        if kept is not None and theirs is not None:
            other = kept.logits(theirs[part])
            log_p = other.log_softmax(-1)
            kl.append((log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).cpu())
            same.append((other.argmax(-1) == logits.argmax(-1)).cpu())
    return total, torch.cat(kl).numpy(), torch.cat(same).numpy()


def window_batches(windows: list[np.ndarray], chosen: range, batch_size: int) -> Iterator[range]:
    """Yield ranges of at most ``batch_size`` consecutive windows of equal length."""
    start = chosen.start
    while start < chosen.stop:
        stop = start + 1
        while stop < chosen.stop and stop - start < batch_size and len(windows[stop]) == len(windows[start]):
            stop += 1
        yield range(start, stop)
        start = stop


def logits_scale(model: "PreTrainedModel") -> float:
    """Return the factor of a model's logits; 1 for a family that ladderize does not know."""
    config = model.config.to_dict()
    return 1.0 if find_family(config) is None else decoder_of(config).logits_scale


def no_plain_head(model: "PreTrainedModel") -> str | None:
    """Return why this model's logits are not its output layer's product with its scaled final states; None where they
    are.

    Some architectures scale or cap their logits, so this is tried on a few tokens. Where logits are scaled,
    transformers rounds once more. That does not count as another model: states that are scaled first are rounded too.
    """
    layer, body, scale = model.get_output_embeddings(), model.base_model, logits_scale(model)
    if not isinstance(layer, torch.nn.Linear) or body is model:
        return "its architecture has no output layer of the usual kind"
    device = next(model.get_input_embeddings().parameters()).device
    ids = torch.arange(min(PROBE_TOKENS, model.config.vocab_size), device=device)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        product = layer(body(input_ids=ids, use_cache=False).last_hidden_state).float() * scale
    tolerance = 1e-6 if scale == 1 else max(1e-6, torch.finfo(model.dtype).eps)
    if product.shape != expected.shape or (product - expected).abs().max() > tolerance * expected.abs().max():
        return "its architecture changes its logits after its output layer"
    return None
