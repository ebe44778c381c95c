"""What ``ladderize bench --engine vllm`` was asked for, and all that its arguments alone decide. No torch, no vLLM."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import check_at_least
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.runtime.bench.options import ModelChoice, check_model_choice

PLUGIN = "plugin"  # of --baselines: the first model, which is dense, in the class that runs layouts


@dataclass(frozen=True)
class VllmBenchOptions(Record):
    """How to time vLLM: ``options`` of its bench.json. See ``ladderize bench --help``.

    threads: OpenMP threads of each rank on a CPU; None shares the cores out. profile: a folder for traces, or None.
    """

    tp_size: int = 1
    batch_sizes: tuple[int, ...] = (1, 8, 64)
    prompt_len: int = 128
    output_len: int = 33
    warmup: int = 2
    repeat: int = 7
    baselines: tuple[str, ...] = ()
    seed: int = 0
    threads: int | None = None
    profile: Path | None = None

    @property
    def decode_steps(self) -> int:
        """Tokens after the first, which belongs to the prefill."""
        return self.output_len - 1


def check_vllm_usage(choice: ModelChoice, options: VllmBenchOptions) -> None:
    """Raise UsageError for arguments that do not go together, or that vLLM has no use for."""
    check_model_choice(choice)
    check_at_least(options, 1, "tp_size", "prompt_len", "warmup", "repeat", "threads")
    check_at_least(options, 2, "output_len")
    check_at_least(options, 0, "seed")
    if not options.batch_sizes or min(options.batch_sizes) < 1:
        raise UsageError(f"--batch-size {options.batch_sizes} must name positive integers")
    for name in options.baselines:
        if name != PLUGIN:
            raise UsageError(
                f"--baselines {name} is not for --engine vllm; it takes {PLUGIN}: the first model, which is dense, in"
                " the class that runs layouts"
            )
    if len(set(options.baselines)) < len(options.baselines):
        raise UsageError(f"--baselines names {PLUGIN} twice")
