"""What a model's forward sends, and under how much of its compute that could run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ladderize.runtime.bench.alone_times import AloneTimes, synchronize
from ladderize.runtime.bench.cost_model import Operation, covers
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.collectives.observed import ObservedAllReduce, Recording
from ladderize.runtime.decode import Generator

INSTRUMENTED_RUNS = 8


@dataclass(frozen=True)
class PhaseOperations:
    """Of one phase: the layers' all-reduces, and the seconds of the vocabulary's collectives, which every layout waits
    for."""

    all_reduces: list[Operation]
    vocabulary: float


def instrument_model(
    generator: Generator, prompts: Sequence[Sequence[int]], alone: AloneTimes, device: torch.device
) -> dict[str, PhaseOperations]:
    """Run a model that does not communicate a few times and note its all-reduces, by phase; all ranks call it."""
    model, plain = generator.model, generator.model.collectives
    recording = Recording(plain, device_clock(device))
    eager = Generator(model, generator.rope, generator.cache, schedule=generator.schedule)
    found = {}
    model.collectives = recording
    try:
        tokens = eager.prefill(prompts).argmax(-1)
        after_prompt = eager.position
        for phase in PHASES:
            runs = []
            for _ in range(INSTRUMENTED_RUNS):
                recording.all_reduces.clear()
                recording.gathered.clear()
                if phase == "prefill":
                    eager.prefill(prompts)
                else:
                    eager.position = after_prompt
                    eager.decode_one_token(tokens)
                runs.append(list(recording.all_reduces))
            parts = eager.schedule.parts(len(prompts), len(prompts[0])) if phase == "prefill" else 1
            # the first belong to the embedding, and are the same for every layout
            found[phase] = phase_operations(
                runs, recording.gathered, alone, embeddings=0 if model.shape.replicate_vocab else parts
            )
    finally:
        model.collectives = plain
    return found


def device_clock(device: torch.device) -> Callable[[], float]:
    """Seconds, at a moment when the device has done all that it was told to."""

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    return clock


def phase_operations(
    runs: list[list[ObservedAllReduce]], gathered: list[int], alone: AloneTimes, *, embeddings: int
) -> PhaseOperations:
    """runs: the same all-reduces each time, and the first run is not warm. gathered: bytes of the all-gathers.
    embeddings: how many of the all-reduces, the first ones, are the vocabulary's."""
    sizes = [seen.bytes for seen in runs[0]]
    seconds = [alone.seconds("all_reduce", size) for size in sizes]
    hiding = [covers([(seen.started, seen.wait) for seen in run], seconds) for run in runs[1:]]
    vocabulary = sum(alone.seconds("all_gather", size) for size in gathered) + sum(seconds[:embeddings])
    operations = map(Operation, sizes, seconds, zip(*hiding, strict=True))
    return PhaseOperations(list(operations)[embeddings:], vocabulary)
