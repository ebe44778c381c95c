"""The interface of a model that is opened for evaluation, whatever computes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.data import needs_tokenizer
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvaluatedModel
from ladderize.layout import Layout
from ladderize.modeling import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


OpenModel = Callable[[str, Path, EvalOptions], "EvalModel"]  # name as the user gave it, folder of the checked model


@dataclass(frozen=True)
class WindowScores:
    """Scores of windows, in their order. A window of n ids has n - 1 scored tokens: all but its first.

    nll: the summed negative log-likelihood of each window in nats, float64 [windows].
    kl: for each window KL(reference || this model) at each scored token in nats, float32 [n - 1]; None without a
    reference.
    same_top: for each window and scored token, True if both models hold the same token most likely, bool [n - 1]; None
    without a reference.
    """

    nll: np.ndarray
    kl: list[np.ndarray] | None = None
    same_top: list[np.ndarray] | None = None


class EvalModel(ABC):
    """One opened model, used as a context that closes it. Its folder was checked before.

    described: layout, size and numerics.

    vocab_size: ids are below it.
    positions: the longest window that the model reads.
    hidden_size: of the states that are kept as predictions.
    """

    no_predictions: str | None = None  # why its predictions cannot be kept, for the end of a sentence

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        tokenizer: "PreTrainedTokenizerBase | None",
        *,
        vocab_size: int,
        positions: int,
        hidden_size: int,
        **measured: Any,
    ) -> None:
        """Describe the model.

        name: as the user gave it.
        measured: more fields of ``EvaluatedModel``.
        """
        import torch
        import transformers

        self.name, self.tokenizer = name, tokenizer
        self.vocab_size, self.positions, self.hidden_size = vocab_size, positions, hidden_size
        layout = Layout.from_config(dict(config))
        self.described = EvaluatedModel(
            model=name,
            layout=str(layout),
            **layout.to_config(),
            torch_version=torch.__version__,
            transformers_version=transformers.__version__,
            add_bos_token=None,
            **measured,
        )

    @abstractmethod
    def score(
        self,
        windows: list[np.ndarray],
        *,
        batch_size: int,
        keep: Path | None = None,
        reference: Path | None = None,
        advance: Callable[[int], None] = lambda n: None,
    ) -> WindowScores:
        """Score windows, int64 [n] each.

        keep: a folder to write this model's states and output layer into, for comparing others with
        (``eval.predictions``; the caller writes the description).
        reference: a folder that ``keep`` of another model filled for the same windows.
        advance: is called with the number of windows scored.
        Raises UserError where the disk is full or fails.
        """

    @abstractmethod
    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        """Return an ``lm_eval.api.model.LM`` of this model.

        add_bos: texts begin with BOS; the same for all models.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the model holds. It cannot be used afterwards."""

    def __enter__(self) -> "EvalModel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_tokenizer(name: str, folder: Path, options: EvalOptions) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer of a checked model, where the options need one. Raises UserError where tasks need a missing
    one."""
    needed = bool(options.tasks) or (options.perplexity is not None and needs_tokenizer(options.perplexity))
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code) if needed else None
    if options.tasks and tokenizer is None:
        raise UserError(f"{name} has no tokenizer that transformers can open, and lm-eval's tasks are text")
    return tokenizer
