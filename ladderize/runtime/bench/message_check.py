"""The check of what a model sends: as many all-reduces as its layout has, of the right size, each waited for.

The reference check cannot see a sum that is left out where sums are emulated, or where weights are random.
"""

import time
from collections.abc import Sequence

from ladderize.errors import UserError
from ladderize.layout import DROPPED
from ladderize.runtime.bench.baselines import ParallelLlama
from ladderize.runtime.collectives.observed import Recording
from ladderize.runtime.decode import Generator
from ladderize.runtime.model import TPLlama


def expected_all_reduces(model: TPLlama) -> int:
    """In one forward pass: one for each sync point that is not dropped, and the embedding's where ranks share it."""
    own = 0 if model.shape.replicate_vocab else 1
    if isinstance(model, ParallelLlama):
        return own + model.shape.layers
    return own + sum(mode != DROPPED for mode in (*model.layout.attention_sync, *model.layout.mlp_sync))


def check_messages(name: str, generator: Generator, prompts: Sequence[Sequence[int]]) -> None:
    """Run a prefill and a decode step of a generator that communicates; raises UserError if a message is missing.

    All ranks call it. prompts: of equal length, as many as the generator has rows.
    """
    model, plain = generator.model, generator.model.collectives
    eager = Generator(model, generator.rope, generator.cache)
    model.collectives = recording = Recording(plain, time.perf_counter)
    expected = expected_all_reduces(model)
    try:
        logits = eager.prefill(prompts)
        tokens, width = logits.argmax(-1), model.shape.hidden * logits.element_size()
        _compare(f"{name}: a prefill", recording, expected, len(prompts) * len(prompts[0]) * width)
        recording.all_reduces.clear()
        eager.decode_one_token(tokens)
        _compare(f"{name}: a decode step", recording, expected, len(prompts) * width)
    finally:
        model.collectives = plain


def _compare(what: str, recording: Recording, expected: int, size: int) -> None:
    done = [seen.bytes for seen in recording.all_reduces if seen.end > 0]
    if done != [size] * expected:
        raise UserError(
            f"{what} completed {len(done)} all-reduces of {sorted(set(done))} bytes, where its layout asks for"
            f" {expected} of {size} bytes: this is not the model that was asked for, so nothing was timed"
        )
