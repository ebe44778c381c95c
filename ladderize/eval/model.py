"""A model that is opened for evaluation, and transformers' models as such: each process of a launcher has a whole
one."""

import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import transformers

from ladderize.console import sentence
from ladderize.data.windows import needs_tokenizer
from ladderize.errors import LadderizeError, UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvaluatedModel
from ladderize.eval.text import KeptPredictions, WindowScore, score_windows
from ladderize.families.registry import find_family
from ladderize.layout import Layout
from ladderize.modeling import load, load_tokenizer
from ladderize.ranks.group import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Advance = Callable[[int], None]
Windows = list[np.ndarray]
Kept = KeptPredictions | None
OpenModel = Callable[[str, Path, EvalOptions], "EvalModel"]  # name as the user gave it, folder of the checked model


class EvalModel(Protocol):
    """One opened model: ``score`` is ``score_windows`` on all ranks alike, ``harness`` an ``lm_eval.api.model.LM``, and
    ``close`` releases what it holds."""

    described: EvaluatedModel
    tokenizer: "PreTrainedTokenizerBase | None"
    vocab_size: int
    positions: int  # of the longest window that the model reads

    def score(
        self, windows: Windows, advance: Advance, keep: Kept = None, reference: Kept = None
    ) -> list[WindowScore]: ...
    def harness(self) -> Any: ...
    def close(self) -> None: ...


class HFModel:
    """A loaded transformers model; ranks: the processes that share windows and questions."""

    def __init__(self, name: str, folder: Path, options: EvalOptions, ranks: Ranks) -> None:
        """Load a checked model and, if the options need one, its tokenizer."""
        self.tokenizer = None
        if options.tasks or (options.perplexity is not None and needs_tokenizer(options.perplexity)):
            self.tokenizer = load_tokenizer(folder)
        if options.tasks and self.tokenizer is None:
            raise UserError(f"{name} has no tokenizer that transformers can open, and lm-eval's tasks are text")
        try:
            model = load(folder, dtype=options.dtype, device=str(ranks.device))
        except LadderizeError:
            raise
        except Exception as error:  # whatever a config of another architecture makes transformers do
            raise UserError(f"{name} cannot be loaded: {sentence(error)[:400]}") from error
        self.model, self.batch_size, self.ranks = model, options.batch_size, ranks
        self.vocab_size, self.positions = model.config.vocab_size, model.config.max_position_embeddings
        layers = model.config.num_hidden_layers  # GPT-2 says n_layer
        layout = Layout.from_config({"num_hidden_layers": layers, **model.config.to_dict()})
        self.described = EvaluatedModel(
            model=name,
            layout=str(layout),
            **layout.to_config(),
            parameters=model.num_parameters(),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
        )

    def score(self, windows: Windows, advance: Advance, keep: Kept = None, reference: Kept = None) -> list[WindowScore]:
        """Score windows. Each rank scores neighbouring ones, and all ranks return all scores."""
        rank, size = self.ranks.rank, self.ranks.size
        scores = score_windows(
            self.model,
            windows,
            batch_size=self.batch_size,
            chosen=range(rank * len(windows) // size, (rank + 1) * len(windows) // size),
            keep=keep,
            reference=reference,
            advance=lambda count: advance(count * size),
        )
        return [*itertools.chain.from_iterable(self.ranks.gather(scores))]

    def harness(self) -> Any:
        """Return lm-eval's HF backend, for families that ladderize knows with faster scoring. Its logits_cache is off:
        with it lm-eval 0.4.13 scores a continuation of one token at a wrong position, where context and continuation
        together are another request's context."""
        from lm_eval.models.huggingface import HFLM

        from ladderize.eval.likelihoods import LikelihoodLM

        backend = HFLM if find_family(self.model.config.to_dict()) is None else LikelihoodLM
        return backend(pretrained=self.model, tokenizer=self.tokenizer, batch_size=self.batch_size, logits_cache=False)

    def close(self) -> None:
        del self.model
        gc.collect()
