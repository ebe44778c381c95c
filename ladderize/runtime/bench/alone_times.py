"""What a model's forward sends, what that takes by itself, and under how much compute it could run."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.cost_model import Operation
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.emulated import Link
from ladderize.runtime.collectives.observed import Recording
from ladderize.runtime.decode import Generator

PHASES = ("prefill", "decode")
ALONE_ROUNDS, ALONE_REPEAT = 6, 10
INSTRUMENTED_RUNS = 8


@dataclass(frozen=True)
class Communication:
    """Of one phase: the layers' all-reduces, and the seconds of the vocabulary's collectives, which every layout waits
    for."""

    operations: list[Operation]
    vocabulary: float


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class AloneTimes:
    """Seconds of one collective with nothing beside it, by its kind and the size of its message; measured when first
    asked for."""

    def __init__(self, group: Ranks, collectives: Collectives, link: Link | None, dtype: torch.dtype) -> None:
        self.group, self.collectives, self.link, self.dtype = group, collectives, link, dtype
        self.seen: dict[tuple[str, int], float] = {}

    def __call__(self, kind: str, size: int) -> float:
        """kind: all_reduce or all_gather (of ``size`` bytes from each rank). All ranks call it."""
        if (kind, size) not in self.seen:
            self.seen[kind, size] = self._seconds(kind, size)
        return self.seen[kind, size]

    def _seconds(self, kind: str, size: int) -> float:
        if self.link is not None:
            return self.link.seconds(size * (self.collectives.ranks if kind == "all_gather" else 1))
        if self.collectives.ranks == 1 or isinstance(self.collectives, NoCommunication):
            return 0.0
        message = torch.zeros(size, dtype=torch.uint8, device=self.group.device)
        message = message.view(torch.bfloat16 if size % self.dtype.itemsize else self.dtype)
        collective = getattr(self.collectives, kind)
        samples = []
        for _ in range(ALONE_ROUNDS):
            self.group.barrier()
            synchronize(self.group.device)
            begin = time.perf_counter()
            for _ in range(ALONE_REPEAT):  # back to back: after a barrier ranks do not start at once
                collective(message)
            synchronize(self.group.device)
            samples.append(max(self.group.gather(time.perf_counter() - begin)) / ALONE_REPEAT)
        return statistics.median(samples[1:])


def instrument(
    generator: Generator, prompts: Sequence[Sequence[int]], alone: AloneTimes, device: torch.device
) -> dict[str, Communication]:
    """Run a model that does not communicate a few times and note its all-reduces; all ranks call it."""

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
                recording.records.clear()
                recording.gathered.clear()
                if phase == "prefill":
                    eager.prefill(prompts)
                else:
                    eager.position = after_prompt
                    eager.decode_one_token(tokens)
                runs.append(list(recording.records))
            covers = [tuple(r["wait"] - r["started"] for r in records) for records in zip(*runs[1:], strict=True)]
            sizes = [int(record["bytes"]) for record in runs[0]]
            vocabulary = sum(alone("all_gather", size) for size in recording.gathered)
            if not model.shape.replicate_vocab:  # the first belongs to the embedding, the same for every layout
                vocabulary += alone("all_reduce", sizes[0])
                sizes, covers = sizes[1:], covers[1:]
            operations = [
                Operation(size, alone("all_reduce", size), cover) for size, cover in zip(sizes, covers, strict=True)
            ]
            found[phase] = Communication(operations, vocabulary)
    finally:
        model.collectives = plain
    return found
