"""The options of ``ladderize eval`` and ``ladderize sensitivity``, with their defaults. Imports no torch."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ladderize.choices import Dtype, check_at_least, check_choices
from ladderize.convert.sensitivity_file import POINTS, Mode, changes_to_ladder
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.ranks.device import default_device

EvalBackend = Literal["hf", "runtime", "vllm"]  # what computes: transformers, ladderize's own runtime, or vLLM


@dataclass(frozen=True)
class EvalOptions(Record):
    """What is the same for all models. ``limit``: samples per task. ``perplexity``: a file for ``ladderize.data``;
    ``windows``: how many of its windows are scored, the first ones. ``tp_size``: processes that share one model, of
    the runtime and of vLLM. ``batch_size``: sequences per forward pass; of the runtime and of vLLM, sequences that are
    computed side by side. ``max_length``: tokens of the longest text, for which vLLM keeps room; None: the model's
    positions."""

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
    windows: int | None = None
    backend: EvalBackend = "hf"
    tp_size: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)

    def check(self) -> None:
        """Raise UsageError for what takes no effect, or asks for nothing."""
        check_at_least(self, 0, "num_fewshot")
        check_at_least(self, 1, "limit", "batch_size", "windows", "tp_size")
        check_at_least(self, 2, "seq_len", "max_length")
        if self.tp_size != 1 and self.backend == "hf":
            raise UsageError(
                f"--tp-size {self.tp_size} needs --backend runtime or vllm; transformers runs in one process"
            )
        if self.backend == "runtime" and ":" in (self.device or ""):
            raise UsageError(f"--device {self.device} is one device, but each rank takes its own; say cpu or cuda")
        if self.backend == "vllm" and self.device is not None:
            raise UsageError(f"--device {self.device} has no effect on vLLM, which computes where it was built for")
        if self.max_length is not None and self.backend != "vllm":
            raise UsageError(f"--max-length {self.max_length} needs --backend vllm, which keeps room for whole texts")
        for option in ("seq_len", "windows"):
            if getattr(self, option) is not None and self.perplexity is None:
                raise UsageError(f"--{option.replace('_', '-')} has no effect without --perplexity")
        if not self.tasks and self.perplexity is None:
            raise UsageError("nothing to evaluate: name --tasks, or a file for --perplexity")
        for option in ("include_path", "limit", "num_fewshot", "apply_chat_template"):
            if getattr(self, option) not in (None, False) and not self.tasks:
                raise UsageError(f"--{option.replace('_', '-')} has no effect without --tasks")


@dataclass(frozen=True)
class SensitivityOptions:
    """See ``ladderize sensitivity --help``. tau1, seq_len, batch_size: None takes the model's or the data's default.
    align_samples: windows to align on; None: as many as ``adapt --align`` takes."""

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
    device: str = field(default_factory=default_device)
    revision: str | None = None
    align: bool = False
    align_samples: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "sync_tp_size", "samples", "batch_size")
        check_at_least(self, 2, "seq_len")
        check_alignment(self)
        if changes_to_ladder(self.mode) and self.sync_tp_size is not None:
            raise UsageError(f"--mode {self.mode} drops nothing, so --sync-tp-size has no effect")
        if not changes_to_ladder(self.mode) and self.sync_tp_size is None:
            raise UsageError(f"--mode {self.mode} needs --sync-tp-size N")
        check_taus(self.tau1, self.tau2)


@dataclass(frozen=True)
class PointOptions:
    """Of ``ladderize sensitivity --mode points``. sync_tp_size: of dropped sync points; None drops nothing. pairs: also
    two neighbouring layers at a time. The others as in SensitivityOptions."""

    mode: ClassVar[str] = POINTS

    data: str
    sync_tp_size: int | None = None
    pairs: bool = False
    samples: int = SensitivityOptions.samples
    seq_len: int | None = None
    seed: int = SensitivityOptions.seed
    batch_size: int | None = None
    dtype: Dtype = SensitivityOptions.dtype
    device: str = field(default_factory=default_device)
    revision: str | None = None
    align: bool = False
    align_samples: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "sync_tp_size", "samples", "batch_size")
        check_at_least(self, 2, "seq_len")
        check_alignment(self)


def check_alignment(options: Any) -> None:
    """Raise UsageError for a number of windows to align on that has no effect or is impossible."""
    if options.align_samples is not None and not options.align:
        raise UsageError("--align-samples has no effect without --align")
    check_at_least(options, 1, "align_samples")


def check_taus(tau1: float | None, tau2: float) -> None:
    """Raise UsageError for impossible thresholds of sensitivity."""
    for option, value in (("--tau1", tau1), ("--tau2", tau2)):
        if value is not None and not math.isfinite(value):
            raise UsageError(f"{option} must be finite, not {value}")
    if tau1 is not None and tau1 > tau2:
        raise UsageError(f"--tau1 {tau1:g} is above --tau2 {tau2:g}")
