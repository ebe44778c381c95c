"""The loop in which passes of models are timed, for a benchmark and for a calibration."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ladderize.console import Console
from ladderize.memory import PeakMemory
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.alone_times import synchronize
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.rows import TimedGenerator, TimedModel
from ladderize.runtime.bench.speed_row import PHASES
from ladderize.runtime.decode import Generator, Sampling, sample


@dataclass(frozen=True)
class TimedPass:
    """One way of a model, and what it is timed at: the lengths of ``options``, and ``batch`` rows."""

    model: TimedModel
    way: TimedGenerator
    options: BenchOptions
    batch: int


def time_passes(group: Ranks, passes: Sequence[TimedPass], console: Console, title: str) -> None:
    """Rounds over all passes, in an order drawn anew for each round; all ranks call it. How many, and the seed: of the
    first pass's options."""
    order, options = list(passes), passes[0].options
    shuffle = random.Random(options.seed)  # the same on every rank
    rounds = options.warmup + options.repeat
    # nothing moves on the terminal while a step is timed: the bar is drawn between rounds
    with console.progress(title, rounds, animated=False) as advance:
        for round_ in range(rounds):
            counted = round_ - options.warmup
            advance(
                0,
                f"warm-up {round_ + 1} of {options.warmup}"
                if counted < 0
                else f"round {counted + 1} of {options.repeat}",
            )
            shuffle.shuffle(order)
            for one in order:
                _time_round(group, one, counted=counted >= 0)
            advance(1)


def _time_round(group: Ranks, one: TimedPass, *, counted: bool) -> None:
    timed, way = one.model, one.way
    with PeakMemory(group.device) as memory:
        times = _time_once(group, way.generator, one.options, one.batch)
    if counted:
        for phase, seconds in zip(PHASES, times, strict=True):
            # the group is done when its last rank is
            way.seconds[phase].append(max(group.gather(seconds)))
    elif way is timed.communicating and memory.rise is not None:
        own = way.generator.model.weights.resident_bytes + way.generator.cache.nbytes
        timed.peak_memory_bytes = max(timed.peak_memory_bytes or 0, own + memory.rise)


def _time_once(group: Ranks, generator: Generator, options: BenchOptions, batch: int) -> tuple[float, float]:
    """Seconds of the prefill, and per decoded token."""
    prompts = random_prompts(generator, options, batch)
    draws = torch.zeros(batch, options.decode_steps, device=group.device)
    group.barrier()
    synchronize(group.device)
    begin = time.perf_counter()
    tokens = sample(generator.prefill(prompts), Sampling(), draws[:, 0])
    synchronize(group.device)
    middle = time.perf_counter()
    generator.decode_n_tokens(tokens, draws, Sampling())
    synchronize(group.device)
    return middle - begin, (time.perf_counter() - middle) / options.decode_steps


def random_prompts(generator: Generator, options: BenchOptions, batch: int) -> list[list[int]]:
    """Ids [batch][prompt_len], the same on every rank."""
    numbers = torch.Generator().manual_seed(options.seed)
    ids: list[list[int]] = torch.randint(
        0, generator.model.shape.vocab, (batch, options.prompt_len), generator=numbers
    ).tolist()
    return ids
