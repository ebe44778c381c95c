"""What a model's forward sends, and under how much of its compute that could run."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ladderize.runtime.bench.alone_times import AloneTimes, synchronize
from ladderize.runtime.bench.cost_model import Operation
from ladderize.runtime.collectives.observed import ObservedAllReduce, Recording
from ladderize.runtime.decode import Generator

PHASES = ("prefill", "decode")
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

    def clock() -> float:
        synchronize(device)
        return time.perf_counter()

    model, plain = generator.model, generator.model.collectives
    recording = Recording(plain, clock)
    eager = Generator(model, generator.rope, generator.cache)
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
            found[phase] = _operations(runs, recording.gathered, alone, own_embedding=model.shape.replicate_vocab)
    finally:
        model.collectives = plain
    return found


def _operations(
    runs: list[list[ObservedAllReduce]], gathered: list[int], alone: AloneTimes, *, own_embedding: bool
) -> PhaseOperations:
    """runs: the same all-reduces each time, and the first run is not warm. gathered: bytes of the all-gathers."""
    covers = [tuple(seen.wait - seen.started for seen in same) for same in zip(*runs[1:], strict=True)]
    sizes = [seen.bytes for seen in runs[0]]
    vocabulary = sum(alone.seconds("all_gather", size) for size in gathered)
    if not own_embedding:  # then the first belongs to the embedding, the same for every layout
        vocabulary += alone.seconds("all_reduce", sizes[0])
        sizes, covers = sizes[1:], covers[1:]
    return PhaseOperations(
        [Operation(size, alone.seconds("all_reduce", size), cover) for size, cover in zip(sizes, covers, strict=True)],
        vocabulary,
    )
