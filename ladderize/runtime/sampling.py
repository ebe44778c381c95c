"""The options of ``ladderize generate``, and the sampling. Imports no torch until it draws."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.choices import (
    DEVICE,
    DTYPE,
    MAX_SEED,
    TP_SIZE,
    DeviceName,
    Dtype,
    SendingBackend,
    argument,
    check_options,
    option,
)
from ladderize.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

PROMPTS, TRAINING_DATA, SAMPLING = "Prompts", "Training data (--prompt-file or --from-bos)", "Sampling"


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from; a temperature of 0 is greedy. The draws depend on ``seed``, row and
    step only, not on tp_size."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def draws(self, batch: int, steps: int, first_row: int = 0) -> "Tensor":
        """Return uniform numbers [batch, steps] of the rows from ``first_row`` on. A row's numbers do not depend on how
        many rows and steps there are."""
        import torch

        seeds = (self.seed + row * 0x9E3779B1 for row in range(first_row, first_row + batch))
        return torch.stack([torch.rand(steps, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of generation. Raises UsageError for options that take no effect or make no text."""

    model: str = argument("MODEL", "A checkpoint, converted or not: folder or hub id.")
    prompt: tuple[str, ...] = option(
        "Text to continue. Give it several times for a batch.", (), flags="--prompt -p", metavar="TEXT", panel=PROMPTS
    )
    chat: bool = option(
        "Format prompts with the model's chat template, as conversations always are.", False, panel=PROMPTS
    )
    prompt_file: Path | None = option(
        "Answer each row of a file (.jsonl, .parquet: messages, conversations, prompt or text; .txt: one prompt) into"
        " --out. A killed run goes on when run again.",
        metavar="FILE",
        panel=TRAINING_DATA,
    )
    from_bos: bool = option(
        "Sample texts from BOS alone into --out. A killed run goes on when run again.", False, panel=TRAINING_DATA
    )
    num_samples: int | None = option(
        "Texts, or the most rows to answer.", min=1, shown="all rows of --prompt-file", panel=TRAINING_DATA, needs="out"
    )
    out: Path | None = option(
        "The .jsonl file to write, for adapt --data.", metavar="FILE", panel=TRAINING_DATA, decides=False
    )
    concurrency: int = option(
        "Texts at a time. The KV cache grows with it.", 64, min=1, panel=TRAINING_DATA, needs="out", decides=False
    )
    max_new_tokens: int = option("Most tokens per text; an EOS token ends it earlier.", 128, min=1, panel=SAMPLING)
    temperature: float | None = option(
        "Sampling temperature. 0: greedy.", min=0.0, shown="0; 1 for training data", panel=SAMPLING
    )
    top_k: int = option("Sample from the k likeliest tokens.", 0, min=0, shown="all", panel=SAMPLING)
    top_p: float = option(
        "Sample from the fewest tokens whose probabilities sum to p.", 1.0, min=0.0, max=1.0, panel=SAMPLING
    )
    seed: int = option("Sampling seed; the same draws for every --tp-size.", 0, min=0, max=MAX_SEED, panel=SAMPLING)
    ignore_eos: bool = False  # texts as long as they may be
    tp_size: int = option(TP_SIZE, 1, decides=False)
    backend: SendingBackend = "auto"  # how ranks communicate
    dtype: Dtype = option(DTYPE, "auto")
    device: DeviceName | None = option(DEVICE, decides=False)

    def __post_init__(self) -> None:
        if sum(map(bool, (self.prompt, self.prompt_file, self.from_bos))) != 1:
            raise UsageError(
                "give one of --prompt TEXT, --prompt-file FILE to answer many, or --from-bos to sample texts of the"
                " model's own"
            )
        if bool(self.prompt) == bool(self.out):
            raise UsageError(
                "--prompt-file and --from-bos need --out FILE, the .jsonl file to write; --prompt has none"
            )
        check_options(self)
        if self.out is not None and Path(self.out).suffix != ".jsonl":
            raise UsageError(f"--out {self.out} must end in .jsonl, which tells --data how to read it")
        if self.from_bos and self.num_samples is None:
            raise UsageError("--from-bos needs --num-samples N: how many texts")
        is_greedy = self.sampling.temperature == 0
        if self.from_bos and (self.chat or is_greedy):
            raise UsageError("--from-bos begins with BOS alone, so it takes no --chat, and a --temperature above 0")
        if is_greedy and (self.top_k or self.top_p < 1):
            name = "top-k" if self.top_k else "top-p"
            raise UsageError(f"--{name} has no effect with --temperature 0; give a temperature")

    @property
    def sampling(self) -> Sampling:
        temperature = self.temperature
        if temperature is None:
            temperature = 0.0 if self.prompt else 1.0
        return Sampling(temperature, self.top_k, self.top_p, self.seed)
