"""What ``ladderize generate`` was asked for. Imports no torch."""

from dataclasses import dataclass, field

from ladderize.choices import BackendName, Dtype, check_at_least, check_choices
from ladderize.errors import UsageError
from ladderize.ranks.device import default_device
from ladderize.runtime.sampling import Sampling

DEFAULT_SAMPLES_AT_A_TIME = 64  # of a corpus, or answers


@dataclass(frozen=True)
class GenerateOptions:
    """See ``ladderize generate --help``. Raises UsageError for what takes no effect or makes no text."""

    tp_size: int = 1
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    chat: bool = False
    backend: BackendName = "auto"
    replicate_vocab: bool = False
    compile: bool = False
    dtype: Dtype = "auto"
    device: str = field(default_factory=default_device)
    threads: int | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "tp_size", "max_new_tokens", "threads")
        if "" in self.stop:
            raise UsageError("--stop is empty, which every text holds; give some text")
        if self.backend == "none":
            raise UsageError("--backend none sums nothing, so the text would be meaningless; it is for bench")
        if self.replicate_vocab and self.tp_size == 1:
            raise UsageError("--replicate-vocab has no effect with one rank")
