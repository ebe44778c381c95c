"""The benchmark: layouts against each other in one run, interleaved, so that whatever the machine does hits all alike.

Two regimes, never mixed: prefill is bound by compute and sends long messages; decoding is bound by memory bandwidth and
sends short ones, whose latency counts. Every variant also runs without communication; the difference is what it waits
for.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ladderize.console import Console
from ladderize.memory import PeakMemory
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench import reference_check
from ladderize.runtime.bench.alone_times import PHASES, AloneTimes, instrument, synchronize
from ladderize.runtime.bench.baselines import ParallelLlama
from ladderize.runtime.bench.document import Variant, _plain, _rows
from ladderize.runtime.bench.environment import environment
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.trace import trace
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.observed import Traced
from ladderize.runtime.decode import Generator, Sampling, sample
from ladderize.runtime.launch import run
from ladderize.runtime.model import TPLlama
from ladderize.runtime.spec import ModelSpec, WeightCache, open_generator

TRACED_STEPS = 4


def run_bench(specs: list[ModelSpec], options: BenchOptions, console: Console) -> dict[str, Any]:
    """Check and time ``specs``; returns the document of bench.json. Raises UserError if a model is not what it should
    be."""
    document: dict[str, Any] = run(
        _bench, specs, options, console, tp_size=options.tp_size, device=options.device, threads=options.threads
    )
    return document


def _bench(group: Ranks, specs: list[ModelSpec], options: BenchOptions, console: Console) -> dict[str, Any]:
    tokens = options.prompt_len + options.output_len
    hidden, vocab = (max(int(spec.config[key]) for spec in specs) for key in ("hidden_size", "vocab_size"))
    rows_of_gate, batch = reference_check.PROMPT_TOKENS + reference_check.NEW_TOKENS, max(options.batch_sizes)
    max_bytes = 4 * max(hidden * batch * options.prompt_len, vocab * batch, max(hidden, vocab) * rows_of_gate)
    surroundings = environment(group, options.device)
    if options.compile:
        torch._dynamo.reset()
    collectives, chosen = _collectives(group, options, max_bytes)
    weights = WeightCache(group.device, pack=not options.compile, replicate_vocab=options.replicate_vocab)
    checks = _check(group, specs, options, collectives, weights) if options.check else {}
    rows: list[dict[str, Any]] = []
    alone = AloneTimes(group, collectives, options.link, specs[0].torch_dtype)
    rounds = len(options.batch_sizes) * (options.warmup + options.repeat)
    with torch.inference_mode(), console.progress("bench", rounds) as advance:
        for batch in options.batch_sizes:
            variants = _variants(group, specs, options, collectives, weights, batch, tokens)
            _measure(group, variants, options, batch, advance)
            for variant in variants:
                generator = variant.generators["none"]
                variant.communication = instrument(generator, _prompts(generator, options, batch), alone, group.device)
            if options.profile is not None:
                _profile(group, variants, options, batch, collectives, alone)
            rows += [row for variant in variants for row in _rows(group, variant, variants[0], options, batch, checks)]
    collectives.close()
    return {
        "emulated": options.emulate_tp is not None,
        "options": _plain(options),
        "link": options.link.to_dict() if options.link else None,
        "message_bytes_outside_link_range": sorted(
            size for _, size in alone.seen if options.link and not options.link.in_range(size)
        ),
        "backend": chosen,
        "environment": surroundings,
        "checks": checks,
        "alone_ms": {f"{kind} of {size} bytes": seconds * 1e3 for (kind, size), seconds in sorted(alone.seen.items())},
        "rows": rows,
    }


def _collectives(group: Ranks, options: BenchOptions, max_bytes: int) -> tuple[Collectives, str]:
    if options.emulate_tp is None:
        return choose(options.backend, group, max_bytes=max_bytes)
    assert options.link is not None
    return (
        emulate(options.emulate_tp, options.link, group.device),
        f"emulated: {options.emulate_tp} ranks over {options.link.name}",
    )


def _check(
    group: Ranks, specs: list[ModelSpec], options: BenchOptions, collectives: Collectives, weights: WeightCache
) -> dict[str, dict[str, float]]:
    """The correctness gate for every checkpoint. Emulated sums are not sums, so there the whole model is checked on one
    rank."""
    real = [spec for spec in specs if spec.folder is not None]
    if not real or options.backend == "none":
        return {}
    expected = group.broadcast(reference_check.references(real, options.device) if group.is_main else None)
    if options.emulate_tp is not None:
        collectives, weights = Collectives(), WeightCache(group.device, pack=not options.compile)
    results = {}
    with torch.inference_mode():
        for spec in real:
            reference = expected[spec.name]
            generator = open_generator(
                spec, collectives, weights, group, 1, len(reference.ids), compile=options.compile
            )
            results[spec.name] = reference_check.check(generator, reference, spec)
    return results


def _variants(
    group: Ranks,
    specs: list[ModelSpec],
    options: BenchOptions,
    collectives: Collectives,
    weights: WeightCache,
    batch: int,
    tokens: int,
) -> list[Variant]:
    """The models first, then the baselines of the first; models of one shape share a cache, since only one runs at a
    time."""
    planned: list[tuple[str, ModelSpec, str, type[TPLlama]]] = [(spec.name, spec, "model", TPLlama) for spec in specs]
    if "parallel" in options.baselines:
        planned.append(("parallel attention+MLP", specs[0], "baseline, for timing only", ParallelLlama))
    variants = []
    cache = None
    for name, spec, what, kind in planned:
        generators = {}
        for mode, means in (("real", collectives), ("none", NoCommunication(collectives.ranks))):
            generators[mode] = open_generator(
                spec, means, weights, group, batch, tokens, compile=options.compile, kind=kind, cache=cache
            )
            cache = generators[mode].cache
        variants.append(Variant(name, spec, generators, what))
    return variants


# ---- timing ----


def _measure(
    group: Ranks, variants: list[Variant], options: BenchOptions, batch: int, advance: Callable[[int], None]
) -> None:
    """Rounds over all variants, each with and without communication, in an order drawn anew for each round."""
    order = [(variant, mode) for variant in variants for mode in variant.generators]
    shuffle = random.Random(options.seed)  # the same on every rank
    for round_ in range(options.warmup + options.repeat):
        shuffle.shuffle(order)
        for variant, mode in order:
            generator = variant.generators[mode]
            with PeakMemory(group.device) as memory:
                times = _timed(group, generator, options, batch)
            if round_ >= options.warmup:
                for phase, seconds in zip(PHASES, times, strict=True):
                    # the group is done when its last rank is
                    variant.samples.setdefault(f"{mode} {phase}", []).append(max(group.gather(seconds)))
            elif mode == "real":
                own = generator.model.weights.resident_bytes + generator.cache.nbytes
                if memory.rise is not None:
                    variant.peak_memory_bytes = max(variant.peak_memory_bytes or 0, own + memory.rise)
        advance(1)


def _timed(group: Ranks, generator: Generator, options: BenchOptions, batch: int) -> tuple[float, float]:
    """Seconds of the prefill, and per decoded token."""
    prompts = _prompts(generator, options, batch)
    draws = torch.zeros(batch, options.output_len - 1, device=group.device)
    group.barrier()
    synchronize(group.device)
    begin = time.perf_counter()
    tokens = sample(generator.prefill(prompts), Sampling(), draws[:, 0])
    synchronize(group.device)
    middle = time.perf_counter()
    generator.decode_n_tokens(tokens, draws, Sampling())
    synchronize(group.device)
    return middle - begin, (time.perf_counter() - middle) / (options.output_len - 1)


def _prompts(generator: Generator, options: BenchOptions, batch: int) -> list[list[int]]:
    numbers = torch.Generator().manual_seed(options.seed)
    ids: list[list[int]] = torch.randint(
        0, generator.model.shape.vocab, (batch, options.prompt_len), generator=numbers
    ).tolist()
    return ids


# ---- proof of overlap, and the document ----


def _profile(
    group: Ranks,
    variants: list[Variant],
    options: BenchOptions,
    batch: int,
    collectives: Collectives,
    alone: AloneTimes,
) -> None:
    assert options.profile is not None
    for number, variant in enumerate(variants):
        generator = variant.generators["real"]
        model = generator.model
        model.collectives = traced = Traced(collectives)
        eager = Generator(model, generator.rope, generator.cache)
        prompts = _prompts(generator, options, batch)

        def steps(eager: Generator = eager, prompts: list[list[int]] = prompts) -> None:
            tokens = eager.prefill(prompts).argmax(-1)
            for _ in range(min(TRACED_STEPS, options.output_len - 1)):
                tokens = eager.decode_one_token(tokens).argmax(-1)

        group.barrier()
        name = "".join(c if c.isalnum() or c in "+-." else "_" for c in Path(variant.name).name)
        path = options.profile / f"{number}-{name}-batch{batch}-rank{group.rank}.json"
        try:
            variant.overlap = trace(steps, path, group.device, traced, lambda size: alone("all_reduce", size))
        finally:
            model.collectives = collectives
