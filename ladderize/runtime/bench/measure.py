"""The benchmark: layouts against each other in one run, interleaved, so that whatever the machine does hits all alike.

Two regimes, never mixed: prefill is bound by compute and sends long messages; decoding is bound by memory bandwidth and
sends short ones, whose latency counts. Every model also runs without communication; the difference is what it waits
for.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from ladderize.console import Console
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench import reference_check
from ladderize.runtime.bench.alone_times import AloneTimes
from ladderize.runtime.bench.baselines import ParallelLlama
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.environment import environment
from ladderize.runtime.bench.instrument import instrument_model
from ladderize.runtime.bench.memory_need import check_bench_memory
from ladderize.runtime.bench.message_check import check_messages
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.plan import BenchPlan
from ladderize.runtime.bench.reference_check import ReferenceAgreement
from ladderize.runtime.bench.rows import TimedGenerator, TimedModel, rows_of
from ladderize.runtime.bench.speed_row import PARALLEL, UNSCHEDULED
from ladderize.runtime.bench.timing import TimedPass, random_prompts, time_passes
from ladderize.runtime.bench.trace import trace
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.observed import Traced
from ladderize.runtime.decode import Generator
from ladderize.runtime.model import TPLlama
from ladderize.runtime.schedule import SEQUENTIAL
from ladderize.runtime.spec import ModelSpec, WeightCache, open_generator

TRACED_STEPS = 4


def measure_plan(group: Ranks, plan: BenchPlan, console: Console) -> BenchDocument:
    """One rank's part: check and time the models of ``plan``; reports the document as often as there is more of it.

    Raises UserError if a model is not what it should be, or does not fit into memory.
    """
    options = plan.options
    check_bench_memory(plan.specs, options, group)
    surroundings = environment(group)
    if options.compile:
        torch._dynamo.reset()
    collectives, backend = _collectives(group, plan)
    weights = WeightCache(
        group.device,
        pack=not options.compile,
        replicate_vocab=options.replicate_vocab,
        columns=options.prefill_schedule.columns,
    )
    checks = _check(group, plan, collectives, weights, console) if options.check else {}
    alone = AloneTimes(group, collectives, plan.link, plan.specs[0].torch_dtype)
    rows: list[BenchRow] = []

    def document(rows: list[BenchRow], *, complete: bool) -> BenchDocument:
        return BenchDocument(
            complete=complete,
            emulated=options.emulate_tp is not None,
            options=options,
            link=plan.link,
            message_bytes_outside_link_range=alone.sizes_outside_range(),
            backend=backend,
            environment=surroundings,
            checks=checks,
            alone_ms=alone.milliseconds(),
            rows=rows,
        )

    with torch.inference_mode():
        for batch in options.batch_sizes:
            done = len(rows)
            for measured in _measure_batch(group, plan, collectives, weights, alone, batch, set(checks), console):
                rows[done:] = measured
                group.report(document(rows, complete=False))
    collectives.close()
    return document(rows, complete=True)


def _measure_batch(
    group: Ranks,
    plan: BenchPlan,
    collectives: Collectives,
    weights: WeightCache,
    alone: AloneTimes,
    batch: int,
    checked: set[str],
    console: Console,
) -> Iterator[list[BenchRow]]:
    """Yield the rows of one batch size as soon as they are timed, and again with what traces show."""
    options = plan.options
    with console.stage("loading weights" if plan.specs[0].folder is not None else "making random weights"):
        models = _open_models(group, plan, collectives, weights, batch)
    for timed in models:
        generator = timed.communicating.generator
        check_messages(timed.name, generator, random_prompts(generator, options, batch))
    passes = [TimedPass(timed, way, options, batch) for timed in models for way in (timed.communicating, timed.silent)]
    time_passes(group, passes, console, f"timing, batch {batch}")
    with console.stage("timing the communication alone"):
        for timed in models:
            generator = timed.silent.generator
            prompts = random_prompts(generator, options, batch)
            timed.operations = instrument_model(generator, prompts, alone, group.device)

    def rows() -> list[BenchRow]:
        return [
            row for timed in models for row in rows_of(timed, models[0], options, batch, checked=timed.name in checked)
        ]

    yield rows()
    if options.profile is not None:
        with console.stage(f"profiling, traces in {options.profile}"):
            _trace_models(group, models, options, options.profile, batch, collectives, alone)
        yield rows()


def _collectives(group: Ranks, plan: BenchPlan) -> tuple[Collectives, str]:
    """The means of communication, and one sentence on them."""
    options, link = plan.options, plan.link
    if options.emulate_tp is not None:
        assert link is not None
        means = emulate(options.emulate_tp, link, group.device)
        return means, f"emulated: {options.emulate_tp} ranks over {link.name}"
    hidden, vocab = (max(int(spec.config[key]) for spec in plan.specs) for key in ("hidden_size", "vocab_size"))
    batch = max(options.batch_sizes)
    longest = max(hidden * batch * options.prompt_len, vocab * batch)
    if _checkpoints(plan):
        longest = max(longest, reference_check.longest_message(plan.specs, options))
    return choose(options.backend, group, max_bytes=4 * longest, in_flight=options.prefill_schedule.in_flight)


def _checkpoints(plan: BenchPlan) -> list[ModelSpec]:
    """The models that are compared with a reference."""
    if not plan.options.check or plan.options.backend == "none":
        return []
    return [spec for spec in plan.specs if spec.folder is not None]


def _check(
    group: Ranks, plan: BenchPlan, collectives: Collectives, weights: WeightCache, console: Console
) -> dict[str, ReferenceAgreement]:
    """The reference check of every checkpoint. Emulated sums are not sums, so there the whole model is checked on one
    rank."""
    options = plan.options
    specs = _checkpoints(plan)
    if not specs:
        return {}
    with console.stage("computing the reference with transformers in float32"):
        expected = group.broadcast(reference_check.references(specs, options) if group.is_main else None)
    if options.emulate_tp is not None:
        collectives = Collectives()
        weights = WeightCache(group.device, pack=not options.compile, columns=options.prefill_schedule.columns)
    results: dict[str, ReferenceAgreement] = {}
    with torch.inference_mode():
        for spec in specs:
            with console.stage(f"checking {spec.name} against transformers"):
                reference = expected[spec.name]
                columns = len(reference.ids[0])
                # one row by itself: domino cuts it along its tokens
                for rows in (len(reference.ids), *([1] if options.prefill_schedule.is_domino else [])):
                    generator = open_generator(
                        spec, collectives, weights, group, rows, columns, compile=options.compile
                    )
                    generator.schedule = options.prefill_schedule
                    found = reference_check.check_against_reference(generator, reference.first(rows), spec)
                    results[spec.name] = found if rows > 1 else results[spec.name].with_row(found)
    return results


def _open_models(
    group: Ranks, plan: BenchPlan, collectives: Collectives, weights: WeightCache, batch: int
) -> list[TimedModel]:
    """The models first, then the baselines of the first; models of one shape share a cache, since only one runs at a
    time."""
    options = plan.options
    planned: list[tuple[str, ModelSpec, type[TPLlama]]] = [(spec.name, spec, TPLlama) for spec in plan.specs]
    if "parallel" in options.baselines:
        planned.append((PARALLEL, plan.specs[0], ParallelLlama))
    if "sequential" in options.baselines:
        planned.append((UNSCHEDULED, plan.specs[0], TPLlama))
    models = []
    cache = None
    for name, spec, model_class in planned:
        ways = []
        for means in (collectives, NoCommunication(collectives.ranks)):
            generator = open_generator(
                spec,
                means,
                weights,
                group,
                batch,
                options.prompt_len + options.output_len,
                compile=options.compile,
                model_class=model_class,
                cache=cache,
            )
            generator.schedule = SEQUENTIAL if name == UNSCHEDULED else options.prefill_schedule
            ways.append(TimedGenerator(generator))
            cache = generator.cache
        communicating, silent = ways
        models.append(TimedModel(name, spec, communicating, silent, is_baseline=name in (PARALLEL, UNSCHEDULED)))
    return models


def _trace_models(
    group: Ranks,
    models: list[TimedModel],
    options: BenchOptions,
    folder: Path,
    batch: int,
    collectives: Collectives,
    alone: AloneTimes,
) -> None:
    """Write a trace of each model into ``folder``, and note what it shows."""
    for number, timed in enumerate(models):
        generator = timed.communicating.generator
        model = generator.model
        model.collectives = traced = Traced(collectives)
        eager = Generator(model, generator.rope, generator.cache, schedule=generator.schedule)
        prompts = random_prompts(generator, options, batch)

        def steps(eager: Generator = eager, prompts: list[list[int]] = prompts) -> None:
            tokens = eager.prefill(prompts).argmax(-1)
            for _ in range(min(TRACED_STEPS, options.decode_steps)):
                tokens = eager.decode_one_token(tokens).argmax(-1)

        group.barrier()
        name = "".join(c if c.isalnum() or c in "+-." else "_" for c in Path(timed.name).name)
        path = folder / f"{number}-{name}-batch{batch}-rank{group.rank}.json"
        try:
            timed.overlap = trace(steps, path, group.device, traced, lambda size: alone.seconds("all_reduce", size))
        finally:
            model.collectives = collectives
