"""What ``ladderize bench --engine vllm`` was asked for, and all that its arguments alone decide. No torch, no vLLM."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.choices import SEED_OF_ROUNDS, THREADS, TP_SIZE, check_options, option
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.runtime.bench.options import (
    ALSO_TIMED,
    BATCH_SIZES,
    COUNTED_ROUNDS,
    OUTPUT_LEN,
    PROMPT_LEN,
    TRACE_FOLDER,
    UNCOUNTED_ROUNDS,
    ModelChoice,
    check_model_choice,
)

PLUGIN = "plugin"  # of --baselines: the first model, which is dense, in the class that runs layouts


@dataclass(frozen=True)
class VllmBenchOptions(Record):
    """How to time vLLM: ``options`` of its bench.json."""

    tp_size: int = option(TP_SIZE, 1)
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1, 8, 64))
    prompt_len: int = option(PROMPT_LEN, 128)
    output_len: int = option(OUTPUT_LEN, 33)
    warmup: int = option(UNCOUNTED_ROUNDS, 2)
    repeat: int = option(COUNTED_ROUNDS, 7)
    baselines: tuple[str, ...] = option(ALSO_TIMED, ())
    seed: int = option(SEED_OF_ROUNDS, 0)
    threads: int | None = option(THREADS)  # OpenMP threads, on a CPU
    profile: Path | None = option(TRACE_FOLDER)

    @property
    def decode_steps(self) -> int:
        """Tokens after the first, which belongs to the prefill."""
        return self.output_len - 1


def check_vllm_usage(choice: ModelChoice, options: VllmBenchOptions) -> None:
    """Raise UsageError for arguments that do not go together, or that vLLM has no use for."""
    check_model_choice(choice)
    check_options(options)
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
