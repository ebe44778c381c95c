"""The check of what a model sends: as many all-reduces as its layout has, of the right size, each waited for.

The reference check cannot see a sum that is left out where sums are emulated, or where weights are random.
"""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from ladderize.errors import UserError
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.runtime.bench.baselines import ParallelLlama
from ladderize.runtime.collectives.observed import ObservedAllReduce, Recording
from ladderize.runtime.decode import Generator
from ladderize.runtime.model import TPLlama
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import Shape


def expected_all_reduces(model: TPLlama) -> int:
    """In one forward pass, of the layers: one for each sync point that is not dropped."""
    if isinstance(model, ParallelLlama):
        return model.shape.layers
    return sent_sums(model.layout)


def sent_sums(layout: Layout) -> int:
    """Sync points at which something is sent."""
    return sum(mode != DROPPED for mode in (*layout.attention_sync, *layout.mlp_sync))


def read_sums(layout: Layout) -> int:
    """Sync points after whose sum a sub-module reads the stream, so that a gradient comes back for it.

    An overlapped sum is there when the next sub-module has computed; if that one's own sum then blocks, the sub-module
    after it reads the stream with both.
    """
    modes = [mode for modes in zip(layout.attention_sync, layout.mlp_sync, strict=True) for mode in modes]
    return sent_sums(layout) - sum(pair == (OVERLAPPED, BLOCKING) for pair in pairwise(modes))


def expected_messages(
    shape: Shape, sums: int, itemsize: int, schedule: Schedule, rows: int, tokens: int
) -> Counter[int]:
    """Bytes -> messages of one forward pass over ``rows`` x ``tokens``, the embedding's among them where ranks share
    it: each part of the schedule sends its own, a layer's in column parts.

    sums: of the layers. itemsize: bytes of a number of the stream.
    """
    sent: Counter[int] = Counter()
    parts = schedule.parts(rows, tokens)
    whole = rows if rows > 1 else tokens
    for part in range(parts):
        own = (whole // parts + (part < whole % parts)) * (tokens if rows > 1 else 1)
        width = own * shape.hidden * itemsize
        sent[width // schedule.columns] += schedule.columns * sums
        sent[width] += not shape.replicate_vocab
    return +sent


def check_messages(name: str, generator: Generator, prompts: Sequence[Sequence[int]]) -> None:
    """Run a prefill and a decode step of a generator that communicates; raises UserError if a message is missing.

    All ranks call it. prompts: of equal length, as many as the generator has rows.
    """
    model, plain = generator.model, generator.model.collectives
    eager = Generator(model, generator.rope, generator.cache, schedule=generator.schedule)
    model.collectives = recording = Recording(plain, time.perf_counter)
    rows, tokens = len(prompts), len(prompts[0])

    def expected(logits: Tensor, schedule: Schedule, tokens: int) -> Counter[int]:
        sums, itemsize = expected_all_reduces(model), logits.element_size()
        return expected_messages(model.shape, sums, itemsize, schedule, rows, tokens)

    try:
        logits = eager.prefill(prompts)
        wanted = expected(logits, generator.schedule, tokens)
        compare_messages(f"{name}: a prefill", recording.all_reduces, wanted)
        recording.all_reduces.clear()
        eager.decode_one_token(logits.argmax(-1))
        compare_messages(f"{name}: a decode step", recording.all_reduces, expected(logits, SEQUENTIAL, 1))
    finally:
        model.collectives = plain


def compare_messages(what: str, seen: Sequence[ObservedAllReduce], expected: Counter[int]) -> None:
    """Raise UserError, which begins with ``what``, unless these are the messages that are due, and all waited for."""
    done = Counter(one.bytes for one in seen if one.end > 0)
    if done != expected:
        raise UserError(
            f"{what} completed {_counted(done)}, where its layout asks for {_counted(expected)}: this is not the model"
            " that was asked for, so nothing was timed"
        )


def _counted(messages: Counter[int]) -> str:
    sizes = " and ".join(f"{count} of {size} bytes" for size, count in sorted(messages.items())) or "none"
    return f"{messages.total()} all-reduces ({sizes})"
