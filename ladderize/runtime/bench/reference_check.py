"""The check before any timing that this is really the model: logits against transformers in float32.

Two texts are read at once, and decoded after prompts of equal and of different length. The reference holds one layer at
a time. The same layers compute in the model's own dtype, too: transformers' own error sets the tolerance."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ladderize.blocks import Blocks, window_streams
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rounds import Benchmark
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.decode import Generator
from ladderize.runtime.spec import ModelSpec, WeightCache, open_generator

TEXTS = 2
# The longer prompt is as long as those that are timed, within these limits: a short one shows neither a wrong position
# nor a lost key, and the reference of a long one takes as long as the benchmark.
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 256
DECODE_STEPS = 32
SAMPLED = 32  # positions whose logits are compared after reading, besides all that are decoded
PIECE = 8  # positions whose logits are gathered at once: shared memory is as large as the longest message
# Tolerances as multiples of transformers' own error in the model's dtype: of the root mean square of all differences,
# and of the largest. The runtime's errors were 0.7 to 1.1 and 0.6 to 2 times as large, for random models of 2 to 30
# layers, the demo's and SmolLM2's.
_RMS, _LARGEST = 3, 5
# The tolerance for another order of sums in float32: standard deviations of the reference's logits, for each square
# root of a layer.
_FLOAT32 = 5e-5


@dataclass(frozen=True)
class Reference:
    ids: list[list[int]]  # [texts, tokens]
    prompts: tuple[int, int]  # tokens of each text that are its prompt where lengths differ; the first is longer
    positions: list[int]
    logits: np.ndarray[Any, Any]  # after each of ``positions``, float32 [texts, len(positions), vocab]
    rms_error: float  # of transformers' logits in the model's dtype
    largest_error: float


def text_lengths(positions: int, prompt_len: int) -> tuple[int, int, int]:
    """Return the tokens of the longer prompt, of the shorter prompt, and the decode steps after either."""
    steps = min(DECODE_STEPS, positions // 2)
    longer = min(max(prompt_len, SHORTEST_PROMPT), LONGEST_PROMPT, positions - steps)
    return longer, max(1, longer - max(1, longer // 3)), steps


def checked_specs(specs: list[ModelSpec], options: BenchOptions) -> list[ModelSpec]:
    """Return the models that are compared with a reference."""
    is_checked = options.check and options.backend != "none" and not options.train
    return [spec for spec in specs if is_checked and spec.folder is not None]


def longest_checked(spec: ModelSpec, prompt_len: int) -> int:
    """Return the number of elements of the check's longest message: hidden states of the texts, or logits."""
    longer, _, steps = text_lengths(spec.positions, prompt_len)
    longest: int = TEXTS * max(spec.config["hidden_size"] * (longer + steps), spec.config["vocab_size"] * PIECE)
    return longest


def compute_reference(spec: ModelSpec, device: torch.device, prompt_len: int) -> Reference:
    """Return random texts and transformers' logits for them in float32, without padding and without a cache."""
    longer, shorter, steps = text_lengths(spec.positions, prompt_len)
    tokens = longer + steps
    ids = torch.randint(0, spec.config["vocab_size"], (TEXTS, tokens), generator=torch.Generator().manual_seed(0))
    sampled = np.linspace(0, tokens - 1, min(tokens, SAMPLED)).round().astype(int).tolist()
    decoded = [prompt - 1 + step for prompt in (longer, shorter) for step in range(steps + 1)]
    positions = sorted({*sampled, *decoded})
    exact = rounded = _logits(spec, device, ids, positions, torch.float32)
    if spec.torch_dtype != torch.float32:
        rounded = _logits(spec, device, ids, positions, spec.torch_dtype)
    error = rounded - exact
    rms, largest = float(error.square().mean()) ** 0.5, float(error.abs().max())
    return Reference(ids.tolist(), (longer, shorter), positions, exact.numpy(), rms, largest)


def _logits(spec: ModelSpec, device: torch.device, ids: Tensor, positions: list[int], dtype: torch.dtype) -> Tensor:
    """Return the logits of transformers' layers in ``dtype`` after each of ``positions``, in float32."""
    blocks = Blocks(open_checkpoint(str(spec.folder)), dtype, device)
    with torch.no_grad():
        (stream,) = window_streams(blocks, lambda index: blocks.layer(index, blocks.layout), ids, batch_size=len(ids))
        return blocks.logits(stream[:, positions].to(device)).cpu()


def check_models(benchmark: Benchmark, specs: list[ModelSpec], collectives: Collectives, weights: WeightCache) -> None:
    """Compare checkpoints with their references, and note the differences or failures. All ranks call it."""
    options, group, console = benchmark.document.options, benchmark.group, benchmark.console
    specs = checked_specs(specs, options)
    if not specs:
        return
    if options.emulate_tp is not None:  # emulated sums are not sums: the whole model is checked on one rank
        collectives, weights = Collectives(), WeightCache(group.device, pack=True)
    references = None
    with console.stage("computing the reference with transformers in float32"):
        if group.is_main:
            references = {spec.name: compute_reference(spec, group.device, options.prompt_len) for spec in specs}
        references = group.broadcast(references)
    for spec in specs:
        with console.stage(f"checking {spec.name} against transformers"):
            reference, generators = references[spec.name], []
            for schedule in options.timed_schedules:
                # a single row, too: domino cuts it along its tokens
                for rows in (TEXTS, 1) if schedule.is_domino else (TEXTS,):
                    generator = open_generator(spec, collectives, weights, group, rows, len(reference.ids[0]))
                    generator.schedule = schedule
                    generators.append(generator)
            outcome = check_against_reference(generators, reference, spec, group)
        if isinstance(outcome, str):
            benchmark.document.failed[spec.name] = outcome
        else:
            benchmark.document.checks[spec.name] = outcome


def check_against_reference(
    generators: Sequence[Generator], reference: Reference, spec: ModelSpec, group: Ranks
) -> dict[str, float] | str:
    """Compare the model's logits with the reference; return the differences (docs/files.md), or a failure in words. All
    ranks call it. Each checks its own results, and all return the same failure. Each generator reads as many of the
    texts as it has rows."""
    least = _FLOAT32 * spec.layout.num_layers**0.5 * float(reference.logits.std())
    rms_tolerance, tolerance = _RMS * reference.rms_error + least, _LARGEST * (reference.largest_error + least)
    squares, count, largest, equal, tokens = 0.0, 0, 0.0, 0, 0
    failures = []
    if not math.isfinite(reference.largest_error):
        failures.append(
            f"transformers' own logits are NaN or infinite in {spec.dtype}: check the weights, or take another --dtype"
        )
    wrong = "{} {:.3g} off the fp32 reference, over the tolerance of {:.3g}: this is not the model that was converted"
    for generator in generators:
        for title, logits, expected in _answers(generator, reference):
            difference = logits - expected
            worst = float(difference.abs().max())
            if not worst <= tolerance:  # also for NaN
                failures.append(wrong.format(f"{title}: a logit is", worst, tolerance))
            largest = max(largest, worst)
            squares, count = squares + float(difference.square().sum()), count + difference.numel()
            equal, tokens = equal + int((logits.argmax(-1) == expected.argmax(-1)).sum()), tokens + len(logits)
    rms = (squares / count) ** 0.5
    if not rms <= rms_tolerance:
        failures.append(wrong.format("the logits are, in their root mean square,", rms, rms_tolerance))
    for failure in filter(None, group.gather(next(iter(failures), None))):
        ranks = generators[0].model.collectives.ranks
        return f"{spec.name} with {ranks} rank{'s' * (ranks > 1)} in {spec.dtype}, {failure}"
    return {
        "logit_difference": largest,
        "tolerance": tolerance,
        "rms_difference": rms,
        "rms_tolerance": rms_tolerance,
        "equal_greedy_tokens": equal,
        "greedy_tokens": tokens,
    }


def _answers(generator: Generator, reference: Reference) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield logits [n, vocab] of the runtime with those that are expected: of the texts read at once, then decoded
    after prompts of one length and of two. All are float32 on the CPU."""
    texts = min(TEXTS, generator.cache.keys.shape[1])
    ids = torch.tensor(reference.ids[:texts], device=generator.device)
    expected = torch.from_numpy(reference.logits)[:texts]
    index_of = {position: index for index, position in enumerate(reference.positions)}
    hidden = generator.read(ids)[:, reference.positions]
    read = torch.cat([generator.model.logits(piece).float().cpu() for piece in hidden.split(PIECE, 1)], 1)
    yield f"reading {ids.shape[1]} tokens", read.flatten(0, 1), expected.flatten(0, 1)
    longer, shorter = reference.prompts
    rows = range(texts)
    for title, lengths in (("decoding", (longer, longer)), ("decoding with padding", (longer, shorter)))[:texts]:
        prompts = [reference.ids[row][: lengths[row]] for row in rows]
        for _ in range(2):  # so that a GPU answers through the graph that is timed
            generator.prepare(lengths[:texts], 0)
        logits = generator.prefill(prompts)
        for step in range(ids.shape[1] - longer + 1):
            positions = [lengths[row] + step - 1 for row in rows]
            if step:
                logits = generator.decode_one_token(ids[rows, positions])
            wanted = expected[rows, [index_of[position] for position in positions]]
            yield f"{title}, step {step}", logits.float().cpu(), wanted
