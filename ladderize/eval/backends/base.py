"""What a model that is opened for evaluation offers, whatever computes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvaluatedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class WindowScores:
    """Scores of windows, in their order. A window of n ids has n - 1 scored tokens: all but its first.

    nll: summed negative log-likelihood of each window in nats, float64 [windows]. kl: for each window the divergence
    KL(reference || this model) at each scored token in nats, float32 [n - 1]; same_top: whether both models hold the
    same token most likely there, bool [n - 1]; both None where no reference was given.
    """

    nll: np.ndarray
    kl: list[np.ndarray] | None = None
    same_top: list[np.ndarray] | None = None


OpenModel = Callable[[str, Path, EvalOptions], "EvalModel"]  # name as the user gave it, folder of the checked model


class EvalModel(ABC):
    """One opened model, which is a context: it is closed at the end. Its folder was checked before.

    name: as the user gave it. vocab_size: ids are below it. positions: the longest window that the model reads.
    hidden_size: of the states that predictions are kept as.
    """

    name: str
    tokenizer: "PreTrainedTokenizerBase | None"
    vocab_size: int
    positions: int
    hidden_size: int

    @property
    def no_predictions(self) -> str | None:
        """Why this model's predictions cannot be kept, for the end of a sentence; None where they can."""
        return None

    @abstractmethod
    def describe(self, add_bos: bool | None) -> EvaluatedModel:
        """Layout, size and numerics. add_bos: whether texts begin with BOS, which is the same for all models."""

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
        """Score windows, int64 [n] each. batch_size: windows at a time. advance: told how many are done.

        keep: a folder into which this model's states and its output layer are written (``ladderize.predictions``; who
        calls writes what they are of), for others to be compared with. reference: a folder that ``keep`` of another
        model filled for the same windows. Raises UserError where memory or the disk does not do.
        """

    @abstractmethod
    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        """An ``lm_eval.api.model.LM`` of this model. Raises UserError for a chat template that is not there."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the model holds. The object is of no use after that."""

    def __enter__(self) -> "EvalModel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
