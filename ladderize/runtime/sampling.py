"""The sampling and the options of ``ladderize generate``. Imports no torch until it draws."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ladderize.choices import (
    BACKEND,
    DEVICE,
    DTYPE,
    MAX_SEED,
    REVISION,
    THREADS,
    TP_SIZE,
    Dtype,
    SendingBackend,
    check_options,
    option,
)
from ladderize.errors import UsageError
from ladderize.ranks.device import default_device

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_TEXTS_AT_A_TIME = 64


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from. Raises UsageError for values that make none.

    The draws depend on ``seed``, row and step only, not on tp_size.
    """

    temperature: float = option("Sampling temperature. 0: greedy.", 0.0, min=0.0, shown="0; 1 for training data")
    top_k: int = option("Sample from the k likeliest tokens.", 0, min=0, shown="all")
    top_p: float = option(
        "Sample from the fewest tokens whose probabilities sum to p.", 1.0, min=0.0, max=1.0, shown="1"
    )
    seed: int = option("Sampling seed; the same draws for every --tp-size.", 0, min=0, max=MAX_SEED)

    def __post_init__(self) -> None:
        check_options(self)
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            name = "top-k" if self.top_k else "top-p"
            raise UsageError(f"--{name} has no effect with --temperature 0; give a temperature")

    def draws(self, batch: int, steps: int, first_row: int = 0) -> "Tensor":
        """Return uniform numbers [batch, steps] of the rows from ``first_row`` on.

        A row's numbers do not depend on how many rows and steps there are.
        """
        import torch

        seeds = (self.seed + row * 0x9E3779B1 for row in range(first_row, first_row + batch))
        return torch.stack([torch.rand(steps, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of generation. Raises UsageError for options that take no effect or make no text."""

    max_new_tokens: int = option("Most tokens per text; an EOS token ends it earlier.", 128, min=1)
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = option("Do not stop at EOS tokens.", False)
    chat: bool = option("Format prompts with the model's chat template, as conversations always are.", False)
    tp_size: int = option(TP_SIZE, 1)
    backend: SendingBackend = option(BACKEND, "auto")
    dtype: Dtype = option(DTYPE, "auto")
    device: str = option(DEVICE, default_device)
    threads: int | None = option(THREADS)
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_options(self)
