"""What ``ladderize generate`` was asked for. Imports no torch."""

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
    BackendName,
    Dtype,
    check_options,
    option,
)
from ladderize.errors import UsageError
from ladderize.ranks.device import default_device
from ladderize.runtime.sampling import Sampling

DEFAULT_SAMPLES_AT_A_TIME = 64  # of a corpus, or answers


@dataclass(frozen=True)
class GenerateOptions:
    """How to generate. Raises UsageError for what takes no effect or makes no text."""

    tp_size: int = option(TP_SIZE, 1)
    max_new_tokens: int = option("Most tokens per text; an EOS token ends it earlier.", 128, min=1)
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = option("Do not stop at EOS tokens.", False)
    stop: tuple[str, ...] = option(
        "With --prompt-file: end an answer before this text. Give it several times for several.", (), metavar="TEXT"
    )
    chat: bool = option("Format prompts with the model's chat template, as conversations always are.", False)
    backend: BackendName = option(BACKEND, "auto")
    replicate_vocab: bool = option(REPLICATE_VOCAB, False)
    compile: bool = option(COMPILE, False)
    dtype: Dtype = option(DTYPE, "auto")
    device: str = option(DEVICE, default_device)
    threads: int | None = option(THREADS)
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_options(self)
        if "" in self.stop:
            raise UsageError("--stop is empty, which every text holds; give some text")
        if self.backend == "none":
            raise UsageError("--backend none sums nothing, so the text would be meaningless; it is for bench")
        if self.replicate_vocab and self.tp_size == 1:
            raise UsageError("--replicate-vocab has no effect with one rank")
