"""What ``ladderize bench --engine vllm`` was asked for, and all that its arguments alone decide. No torch, no vLLM."""

from dataclasses import dataclass

from ladderize.choices import option
from ladderize.errors import UsageError
from ladderize.runtime.bench.options import (
    BATCH_SIZES,
    InferenceLengths,
    ModelChoice,
    RoundsOptions,
    check_rounds_usage,
)

# of --baselines: the first model, which is dense, in the class that runs layouts; in vLLM's own class with norms that
# are not fused into the all-reduces before them; and there twice at the same time, on half of the ranks each
PLUGIN, UNFUSED, REPLICAS = "plugin", "unfused", "replicas"
VLLM_BASELINES = (PLUGIN, UNFUSED, REPLICAS)


@dataclass(frozen=True)
class VllmBenchOptions(InferenceLengths, RoundsOptions):
    """How to time vLLM: ``options`` of its bench.json. threads: OpenMP threads, on a CPU."""

    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1, 8, 64))


def check_vllm_usage(choice: ModelChoice, options: VllmBenchOptions) -> None:
    """Raise UsageError for arguments that do not go together, or that vLLM has no use for."""
    check_rounds_usage(choice, options)
    for name in options.baselines:
        if name not in VLLM_BASELINES:
            raise UsageError(
                f"--baselines {name} is not for --engine vllm; it takes {PLUGIN}: the first model, which is dense, in"
                f" the class that runs layouts, {UNFUSED}: in vLLM's own, without fused norms, and {REPLICAS}: there"
                " twice, on half of the ranks each"
            )
        if options.baselines.count(name) > 1:
            raise UsageError(f"--baselines names {name} twice")
    if REPLICAS in options.baselines and options.tp_size % 2:
        raise UsageError(
            f"--baselines {REPLICAS} needs an even number of ranks, half for each of two, and --tp-size is"
            f" {options.tp_size}"
        )
