"""A model that transformers computes. Where a launcher has started several processes, each has the whole model."""

import gc
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize import data
from ladderize.errors import UserError
from ladderize.eval.backends.base import EvalModel, WindowScores
from ladderize.eval.backends.chat import render_chats
from ladderize.eval.backends.scoring import no_plain_head, score_windows
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvaluatedModel
from ladderize.layout import Layout, LayoutError
from ladderize.ranks.group import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class HFModel(EvalModel):
    """A loaded transformers model. ranks: the processes that share windows and questions among them."""

    def __init__(
        self, name: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", ranks: Ranks
    ) -> None:
        self.name, self.model, self.tokenizer, self.ranks = name, model, tokenizer, ranks
        self.vocab_size: int = model.config.vocab_size
        self.positions: int = model.config.max_position_embeddings
        self.hidden_size: int = model.config.hidden_size

    @cached_property
    def no_predictions(self) -> str | None:
        return no_plain_head(self.model)

    @classmethod
    def open(cls, name: str, folder: Path, options: EvalOptions, ranks: Ranks) -> "HFModel":
        """Load a checked model and, if it has one, its tokenizer; errors of transformers become one sentence."""
        from ladderize.modeling import load

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

    def describe(self, add_bos: bool | None) -> EvaluatedModel:
        import torch
        import transformers

        layout = Layout.from_config(self.model.config.to_dict())
        return EvaluatedModel(
            model=self.name,
            layout=str(layout),
            **layout.to_config(),
            parameters=self.model.num_parameters(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            add_bos_token=add_bos,
        )

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
        own = score_windows(
            self.model,
            windows,
            batch_size=batch_size,
            chosen=range(rank * len(windows) // size, (rank + 1) * len(windows) // size),
            keep=keep,
            keep_head=self.ranks.is_main,
            reference=reference,
            advance=lambda count: advance(count * size),
        )
        return joined_scores(self.ranks.gather(own))

    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        """lm-eval's HF backend around the loaded model. BOS is told explicitly, the same for all models."""
        from ladderize.eval.backends.hf_ranks import SharedHFLM

        backend = SharedHFLM(
            self.ranks,
            pretrained=self.model,
            tokenizer=self.tokenizer,
            batch_size=options.batch_size,
            add_bos_token=add_bos,
        )
        if options.apply_chat_template:
            assert self.tokenizer is not None
            render_chats(backend, self.name, self.tokenizer)
        return backend

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


def open_tokenizer(name: str, folder: Path, options: EvalOptions) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a checked model, where what is asked for needs one. Raises UserError where tasks have none."""
    from ladderize.modeling import load_tokenizer

    needed = bool(options.tasks) or (options.perplexity is not None and data.needs_tokenizer(options.perplexity))
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code) if needed else None
    if options.tasks and tokenizer is None:
        raise UserError(f"{name} has no tokenizer that transformers can open, and lm-eval's tasks are text")
    return tokenizer
