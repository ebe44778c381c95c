"""The check before any timing that this is really the model: logits against transformers in float32.

A fast wrong model is worth nothing. So a benchmark of a checkpoint first compares logits with an fp32 forward of the
Hugging Face model: of two texts that are read at once, and of the same texts decoded token by token after prompts of
equal and of different length. The texts are as long as the prompts that are timed, up to a limit. The forward holds one
layer at a time: the whole model in float32 need not fit. The effect of rounding depends on the model. So the same
layers compute in its own dtype, too, and transformers' own error sets the tolerance of the runtime.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ladderize.blocks import Blocks, window_streams
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import Console
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.decode import Generator
from ladderize.runtime.spec import ModelSpec, WeightCache, open_generator

TEXTS = 2
# The longer prompt is as long as those that are timed, within these limits: a short one shows neither a wrong position
# nor a lost key, and the reference of a long one takes as long as the benchmark.
SHORTEST_PROMPT, LONGEST_PROMPT = 64, 256
DECODE_STEPS = 32
# Positions of the texts whose logits are compared after reading them, beside all that are decoded.
SAMPLED = 32
# Positions whose logits are gathered at once: shared memory is as large as the longest message.
PIECE = 8
# Tolerances as multiples of transformers' own error in the model's dtype: of the root mean square of all differences,
# and of the largest. The runtime's errors were 0.7 to 1.1 and 0.6 to 2 times as large, for random models of 2 to 30
# layers, the demo's and SmolLM2's.
_RMS, _LARGEST = 3, 5
# The tolerance for another order of sums in float32: standard deviations of the reference's logits, for each square
# root of a layer.
_FLOAT32 = 5e-5


@dataclass(frozen=True)
class Reference:
    """Random texts, and the logits of transformers for them.

    ids: [texts, tokens].
    prompts: tokens of each text that are its prompt where the prompts' lengths differ; the first is the longer.
    logits: after each of ``positions``, float32 [texts, len(positions), vocab].
    rms_error, largest_error: the error of transformers' logits in the model's dtype.
    """

    ids: list[list[int]]
    prompts: tuple[int, int]
    positions: list[int]
    logits: np.ndarray[Any, Any]
    rms_error: float
    largest_error: float


def text_lengths(positions: int, prompt_len: int) -> tuple[int, int, int]:
    """Return the tokens of the longer prompt, of the shorter prompt, and the decode steps after either.

    positions: the most that the model handles.
    prompt_len: tokens of the prompts that are timed.
    """
    steps = min(DECODE_STEPS, positions // 2)
    longer = min(max(prompt_len, SHORTEST_PROMPT), LONGEST_PROMPT, positions - steps)
    return longer, max(1, longer - max(1, longer // 3)), steps


def checked_specs(specs: list[ModelSpec], options: BenchOptions) -> list[ModelSpec]:
    """Return the models that are compared with a reference: all checkpoints; none with --no-check, ``--backend none``
    or --train."""
    if not options.check or options.backend == "none" or options.train:
        return []
    return [spec for spec in specs if spec.folder is not None]


def longest_checked(specs: list[ModelSpec], prompt_len: int) -> int:
    """Return the number of elements of the check's longest message: hidden states of the texts, or logits."""
    longer, _, steps = text_lengths(max(spec.positions for spec in specs), prompt_len)
    hidden, vocab = (max(int(spec.config[key]) for spec in specs) for key in ("hidden_size", "vocab_size"))
    return TEXTS * max(hidden * (longer + steps), vocab * PIECE)


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
    """Return the logits of transformers' layers in ``dtype`` after each of ``positions``: float32 [texts,
    len(positions), vocab]."""
    assert spec.folder is not None
    blocks = Blocks(open_checkpoint(str(spec.folder)), dtype, device)
    with torch.no_grad():
        (stream,) = window_streams(blocks, lambda index: blocks.layer(index, blocks.layout), ids, batch_size=len(ids))
        return blocks.logits(stream[:, positions].to(device)).cpu()


def check_models(
    specs: list[ModelSpec],
    options: BenchOptions,
    collectives: Collectives,
    weights: WeightCache,
    group: Ranks,
    console: Console,
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Compare every checkpoint with its reference before it is timed; all ranks call it.

    Returns the differences of the models that pass, and the failures of the others in words, both by name.
    """  # fmt: skip
    checks: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    if not specs:
        return checks, failed
    expected = None
    with console.stage("computing the reference with transformers in float32"):
        if group.is_main:
            expected = {spec.name: compute_reference(spec, group.device, options.prompt_len) for spec in specs}
        expected = group.broadcast(expected)
    # one row by itself, too: domino cuts it along its tokens
    reads = [(one, rows) for one in options.timed_schedules for rows in ((TEXTS, 1) if one.is_domino else (TEXTS,))]
    for spec in specs:
        with console.stage(f"checking {spec.name} against transformers"):
            reference = expected[spec.name]
            generators = []
            for schedule, rows in reads:
                columns = len(reference.ids[0])
                generator = open_generator(spec, collectives, weights, group, rows, columns)
                generator.schedule = schedule
                generators.append(generator)
            outcome = check_against_reference(generators, reference, spec, group)
            if isinstance(outcome, str):
                failed[spec.name] = outcome
            else:
                checks[spec.name] = outcome
    return checks, failed


def check_against_reference(
    generators: Sequence[Generator], reference: Reference, spec: ModelSpec, group: Ranks
) -> dict[str, float] | str:
    """Compare the model's logits with the reference; return the differences (docs/files.md), or a failure in words.

    All ranks call it. Each checks its own results, and all return the same failure.

    generators: of the model; each reads as many of the texts as it has rows.
    """
    logits, place_of = torch.from_numpy(reference.logits), {one: k for k, one in enumerate(reference.positions)}
    least = _FLOAT32 * spec.layout.num_layers**0.5 * float(logits.std())
    rms_tolerance, tolerance = _RMS * reference.rms_error + least, _LARGEST * (reference.largest_error + least)
    squares, count, largest, equal, tokens = 0.0, 0, 0.0, 0, 0
    failures = []
    if not math.isfinite(reference.largest_error):
        failures.append(
            f"transformers' own logits are NaN or infinite in {spec.dtype}: check the weights, or take another --dtype"
        )
    wrong = "{} {:.3g} off the fp32 reference, over the tolerance of {:.3g}: this is not the model that was converted"
    for what, answers in (pair for generator in generators for pair in _answers(generator, reference)):
        for (text, position), own in answers:
            wanted = logits[text, place_of[position]]
            difference = own - wanted
            worst = float(difference.abs().max())
            if not worst <= tolerance:  # also for NaN
                failures.append(wrong.format(f"{what}: a logit is", worst, tolerance))
            largest, squares, count = max(largest, worst), squares + float(difference.square().sum()), count + len(own)
            equal, tokens = equal + int(own.argmax() == wanted.argmax()), tokens + 1
    rms = (squares / count) ** 0.5
    if not rms <= rms_tolerance:
        failures.append(wrong.format("the logits are, in their root mean square,", rms, rms_tolerance))
    if failure := next((found[0] for found in group.gather(failures[:1]) if found), None):
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


def _answers(generator: Generator, reference: Reference) -> Iterator[tuple[str, list[tuple[tuple[int, int], Tensor]]]]:
    """Yield logits [vocab] of the runtime, each with the text and the position after which it is, and how they were
    computed: the texts read at once, then decoded after prompts of one length and of two."""
    texts = min(TEXTS, generator.cache.keys.shape[1])
    ids = torch.tensor(reference.ids[:texts], device=generator.device)
    hidden = generator.read(ids)[:, reference.positions]
    read = torch.cat([generator.model.logits(piece).float().cpu() for piece in hidden.split(PIECE, 1)], 1)
    places = [(text, position) for text in range(texts) for position in reference.positions]
    yield f"reading {ids.shape[1]} tokens", list(zip(places, read.flatten(0, 1), strict=True))
    longer, shorter = reference.prompts
    for what, prompts in (("decoding", (longer, longer)), ("decoding with padding", (longer, shorter)))[:texts]:
        for _ in range(2):  # so that a GPU answers through the graph that is timed
            generator.prepare(prompts[:texts], 0)
        logits = generator.prefill([row[:prompt] for row, prompt in zip(reference.ids, prompts, strict=False)][:texts])
        for step in range(ids.shape[1] - longer + 1):
            if step:
                logits = generator.decode_one_token(
                    ids[range(texts), [prompt + step - 1 for prompt in prompts[:texts]]]
                )
            places = [(text, prompts[text] + step - 1) for text in range(texts)]
            yield f"{what}, step {step}", list(zip(places, logits.float().cpu(), strict=True))
