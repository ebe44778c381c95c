"""The options of ``ladderize eval`` and ``ladderize sensitivity``, with their defaults. Imports no torch."""

from dataclasses import dataclass

from ladderize.choices import Dtype, check_choices
from ladderize.convert.sensitivity_file import Mode
from ladderize.errors import UsageError
from ladderize.files.records import Record


@dataclass(frozen=True)
class EvalOptions(Record):
    """What is the same for all models. ``limit``: samples per task. ``perplexity``: a file for ``ladderize.data``."""

    tasks: tuple[str, ...] = ()
    include_path: str | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False
    batch_size: int = 8
    dtype: Dtype = "auto"
    device: str | None = None
    revision: str | None = None
    seed: int = 0
    trust_remote_code: bool = False
    perplexity: str | None = None
    seq_len: int | None = None
    include_default_tasks: bool = True  # False: only include_path, which spares indexing lm-eval's thousands of tasks

    def __post_init__(self) -> None:
        check_choices(self)

    def check(self) -> None:
        """Raise UsageError for what takes no effect, or asks for nothing."""
        if self.seq_len is not None and self.perplexity is None:
            raise UsageError("--seq-len has no effect without --perplexity")
        if not self.tasks and self.perplexity is None:
            raise UsageError("nothing to evaluate: name --tasks, or a file for --perplexity")
        for option in ("include_path", "limit", "num_fewshot", "apply_chat_template"):
            if getattr(self, option) not in (None, False) and not self.tasks:
                raise UsageError(f"--{option.replace('_', '-')} has no effect without --tasks")


@dataclass(frozen=True)
class SensitivityOptions:
    """See ``ladderize sensitivity --help``. tau1, seq_len, batch_size: None takes the model's or the data's default."""

    data: str
    mode: Mode = "spd"
    sync_tp_size: int | None = None
    samples: int = 128
    seq_len: int | None = None
    seed: int = 0
    batch_size: int | None = None
    tau1: float | None = None
    tau2: float = 10.0
    dtype: Dtype = "auto"
    device: str = "cpu"
    revision: str | None = None

    def __post_init__(self) -> None:
        check_choices(self)
