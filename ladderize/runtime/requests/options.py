"""How the runtime answers requests, and what ``ladderize generate`` was asked for. Imports no torch."""

from dataclasses import dataclass, field

from ladderize.choices import (
    BACKEND,
    COMPILE,
    DEVICE,
    DTYPE,
    REPLICATE_VOCAB,
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
from ladderize.runtime.sampling import Sampling

BUDGETS = {"cpu": 2048, "cuda": 16384}
DEFAULT_SAMPLES_AT_A_TIME = 64  # of a corpus, or answers


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Where and how ranks compute. Raises UsageError."""

    tp_size: int = option(TP_SIZE, 1)
    backend: SendingBackend = option(BACKEND, "auto")
    dtype: Dtype = option(DTYPE, "auto")
    device: str = option(DEVICE, default_device)
    threads: int | None = option(THREADS)
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class RequestOptions(RankOptions):
    """How to answer."""

    rows: int = option("Texts that are continued at a time.", 8, min=1)
    token_budget: int | None = option("Tokens of a forward pass, padding included; None: 2048, on a GPU 16384.", min=16)
    max_length: int | None = option("The longest text; None: what the config promises.", min=2)
    trust_remote_code: bool = False

    @property
    def budget(self) -> int:
        return self.token_budget or BUDGETS["cuda" if self.device.startswith("cuda") else "cpu"]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(RankOptions):
    """How to generate. Raises UsageError for what takes no effect or makes no text."""

    max_new_tokens: int = option("Most tokens per text; an EOS token ends it earlier.", 128, min=1)
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = option("Do not stop at EOS tokens.", False)
    stop: tuple[str, ...] = option(
        "With --prompt-file: end an answer before this text. Give it several times for several.", (), metavar="TEXT"
    )
    chat: bool = option("Format prompts with the model's chat template, as conversations always are.", False)
    replicate_vocab: bool = option(REPLICATE_VOCAB, False)
    compile: bool = option(COMPILE, False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.stop:
            raise UsageError("--stop is empty, which every text holds; give some text")
        if self.replicate_vocab and self.tp_size == 1:
            raise UsageError("--replicate-vocab has no effect with one rank")
