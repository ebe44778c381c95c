"""A model that is opened for evaluation, and transformers' models as such.

Where a launcher has started several processes, each has the whole transformers model.
"""

import gc
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from ladderize.data.windows import needs_tokenizer
from ladderize.errors import LadderizeError, UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvaluatedModel
from ladderize.eval.text import WindowScore, score_windows
from ladderize.families.registry import find_family
from ladderize.layout import Layout
from ladderize.modeling import load, load_tokenizer
from ladderize.ranks.group import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OpenModel = Callable[[str, Path, EvalOptions], "EvalModel"]  # name as the user gave it, folder of the checked model


class EvalModel(ABC):
    """One opened model. Its folder was checked before.

    described: layout, size and numerics.
    vocab_size: ids are below it.
    positions: the longest window that the model reads.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        tokenizer: "PreTrainedTokenizerBase | None",
        *,
        vocab_size: int,
        positions: int,
        **measured: Any,
    ) -> None:
        """Describe the model.

        name: as the user gave it.
        measured: more fields of ``EvaluatedModel``.
        """
        self.name, self.tokenizer, self.vocab_size, self.positions = name, tokenizer, vocab_size, positions
        layout = Layout.from_config(dict(config))
        self.described = EvaluatedModel(
            model=name,
            layout=str(layout),
            **layout.to_config(),
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            **measured,
        )

    @property
    def begins_with_bos(self) -> bool:
        """True if its tokenizer puts a BOS token in front of texts."""
        tokenizer = self.tokenizer
        return tokenizer is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]

    @abstractmethod
    def score(self, windows: list[np.ndarray], *, advance: Callable[[int], None], **how: Any) -> list[WindowScore]:
        """Score windows, on all ranks alike.

        how: further arguments of ``score_windows``.
        """

    @abstractmethod
    def harness(self, options: EvalOptions) -> Any:
        """Return an ``lm_eval.api.model.LM`` of this model."""

    @abstractmethod
    def close(self) -> None:
        """Release what the model holds. It cannot be used afterwards."""


class HFModel(EvalModel):
    """A loaded transformers model.

    ranks: the processes that share windows and questions.
    """

    def __init__(self, name: str, folder: Path, options: EvalOptions, ranks: Ranks) -> None:
        """Load a checked model and, if the options need one, its tokenizer.

        Raises LadderizeError; errors of transformers become one sentence.
        """
        tokenizer = None
        if options.tasks or (options.perplexity is not None and needs_tokenizer(options.perplexity)):
            tokenizer = load_tokenizer(folder)
        if options.tasks and tokenizer is None:
            raise UserError(f"{name} has no tokenizer that transformers can open, and lm-eval's tasks are text")
        try:
            model = load(folder, dtype=options.dtype, device=str(ranks.device))
        except LadderizeError:
            raise
        except Exception as error:  # whatever a config of another architecture makes transformers do
            raise UserError(f"{name} cannot be loaded: {' '.join(str(error).split())[:400]}") from error
        self.model, self.ranks = model, ranks
        super().__init__(
            name,
            {"num_hidden_layers": model.config.num_hidden_layers, **model.config.to_dict()},  # GPT-2 says n_layer
            tokenizer,
            vocab_size=model.config.vocab_size,
            positions=model.config.max_position_embeddings,
            parameters=model.num_parameters(),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
        )

    def score(self, windows: list[np.ndarray], *, advance: Callable[[int], None], **how: Any) -> list[WindowScore]:
        """Score windows. Each rank scores neighbouring ones, and all ranks return all scores."""
        rank, size = self.ranks.rank, self.ranks.size
        chosen = range(rank * len(windows) // size, (rank + 1) * len(windows) // size)
        scores = score_windows(self.model, windows, chosen=chosen, advance=lambda count: advance(count * size), **how)
        return [*itertools.chain.from_iterable(self.ranks.gather(scores))]

    def harness(self, options: EvalOptions) -> Any:
        """Return lm-eval's HF backend around the loaded model, for families that ladderize knows with faster scoring.

        Its logits_cache is off: with it lm-eval 0.4.13 scores a continuation of one token at a wrong position, where
        context and continuation together are another request's context.
        """
        from lm_eval.models.huggingface import HFLM

        from ladderize.eval.likelihoods import LikelihoodLM

        is_known = find_family(self.model.config.to_dict()) is not None
        backend = LikelihoodLM if is_known else HFLM
        return backend(
            pretrained=self.model, tokenizer=self.tokenizer, batch_size=options.batch_size, logits_cache=False
        )

    def close(self) -> None:
        del self.model
        gc.collect()
