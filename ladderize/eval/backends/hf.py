"""A model that transformers computes. Where a launcher has started several processes, each has the whole model."""

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ladderize.errors import UserError
from ladderize.eval.backends.base import EvalModel, open_tokenizer
from ladderize.eval.options import EvalOptions
from ladderize.families.registry import decoder_of, find_family
from ladderize.layout import LayoutError
from ladderize.memory import check_room
from ladderize.modeling import load
from ladderize.predictions import write_head
from ladderize.ranks.group import Ranks
from ladderize.runtime.requests.scoring import COMPARED_AT_ONCE, OutputLayer, WindowScorer, WindowScores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROBE_TOKENS = 8


class HFModel(EvalModel):
    """A loaded transformers model. ranks: the processes that share windows and questions among them."""

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
        """Load a checked model and, if it has one, its tokenizer; errors of transformers become one sentence."""
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
        """Each rank scores neighbouring windows, and every rank gets all scores."""
        rank, size = self.ranks.rank, self.ranks.size
        if keep is not None and self.ranks.is_main:
            layer: Any = self.model.get_output_embeddings()
            write_head(keep, layer.weight, getattr(layer, "bias", None))
        own = score_windows(
            self.model,
            windows,
            batch_size=batch_size,
            chosen=range(rank * len(windows) // size, (rank + 1) * len(windows) // size),
            keep=keep,
            reference=reference,
            advance=lambda count: advance(count * size),
        )
        return joined_scores(self.ranks.gather(own))

    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        """lm-eval's HF backend around the loaded model."""
        from ladderize.eval.backends.lm import SharedHFLM

        return SharedHFLM(
            self.name,
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
    """The scores of windows that several processes have shared, in order."""
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
    """Score the ``chosen`` windows (None: all); windows of equal length that follow each other go in batches.

    The model's body runs on batches, its output layer on so many tokens at a time that memory stays bounded however
    large the vocabulary is. keep: the folder for this model's states; all processes that share it give the same
    windows. reference: a folder of predictions for the same windows. Raises UserError where memory does not do.
    """
    chosen = range(len(windows)) if chosen is None else chosen
    plain, scale = no_plain_head(model) is None, logits_scale(model)
    check_scoring_room(model, windows, batch_size, plain=plain, compared=reference is not None)
    embedding = next(model.get_input_embeddings().parameters())
    head: Any = model.get_output_embeddings()
    # without a plain head the logits themselves are what is scored
    vocab_size = len(head.weight) if plain else model.config.vocab_size
    layer = OutputLayer(head if plain else lambda logits: logits, vocab_size, vocab_size)
    hidden_size, dtype = (head.weight.shape[1], head.weight.dtype) if plain else (vocab_size, embedding.dtype)
    tokens = [len(window) - 1 for window in windows]
    with (
        torch.inference_mode(),
        WindowScorer(layer, tokens, hidden_size, dtype, embedding.device, keep, reference) as scorer,
    ):
        for batch in window_batches(windows, chosen, batch_size):
            ids = torch.from_numpy(np.stack([windows[index] for index in batch])).to(embedding.device)
            if plain:
                found: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state * scale
            else:
                found = model(input_ids=ids, use_cache=False).logits
            for row, index in enumerate(batch):
                scorer.add(index, found[row, :-1], ids[row, 1:].to(found.device))
            advance(len(batch))
        return scorer.scores()


def window_batches(windows: list[np.ndarray], chosen: range, batch_size: int) -> Iterator[range]:
    """Consecutive windows of equal length, at most ``batch_size``."""
    start = chosen.start
    while start < chosen.stop:
        stop = start + 1
        while stop < chosen.stop and stop - start < batch_size and len(windows[stop]) == len(windows[start]):
            stop += 1
        yield range(start, stop)
        start = stop


def logits_scale(model: "PreTrainedModel") -> float:
    """What the logits of a model are multiplied with; 1 for a family that ladderize does not know."""
    config = model.config.to_dict()
    return 1.0 if find_family(config) is None else decoder_of(config).logits_scale


def no_plain_head(model: "PreTrainedModel") -> str | None:
    """Why this model's logits are not its output layer's product with its scaled final states; None where they are.

    Some architectures scale or cap their logits. It is tried out, on a few tokens. Where logits are scaled,
    transformers rounds them once more, which is no other model: states that are scaled first are rounded too.
    """
    layer, body, scale = model.get_output_embeddings(), model.base_model, logits_scale(model)
    if not isinstance(layer, torch.nn.Linear) or body is model:
        return "its architecture has no output layer of the usual kind"
    device = next(model.get_input_embeddings().parameters()).device
    ids = torch.arange(min(PROBE_TOKENS, model.config.vocab_size), device=device)[None]
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        found = layer(body(input_ids=ids, use_cache=False).last_hidden_state).float() * scale
    tolerance = 1e-6 if scale == 1 else max(1e-6, torch.finfo(model.dtype).eps)
    if found.shape != expected.shape or (found - expected).abs().max() > tolerance * expected.abs().max():
        return "its architecture changes its logits after its output layer"
    return None


def check_scoring_room(
    model: "PreTrainedModel", windows: list[np.ndarray], batch_size: int, *, plain: bool, compared: bool
) -> None:
    """Raise UserError where a batch does not fit into memory: one layer's work, or the logits of a model without a
    ``plain`` head; and logits of as many tokens as are held at once."""
    longest, at_once = max(map(len, windows)), min(batch_size, len(windows))
    embedding = next(model.get_input_embeddings().parameters())
    config, itemsize = model.config, embedding.dtype.itemsize
    logits_at_once = min(longest, max(1, COMPARED_AT_ONCE // config.vocab_size)) * config.vocab_size
    width = config.vocab_size
    if plain:
        width = 4 * config.hidden_size + 3 * getattr(config, "intermediate_size", 4 * config.hidden_size)
    check_room(
        at_once * longest * width * itemsize + logits_at_once * 4 * (6 if compared else 2),
        embedding.device,
        f"scoring {at_once:,} windows of {longest:,} tokens at a time",
        "lower --batch-size or --seq-len",
    )
