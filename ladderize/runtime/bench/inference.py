"""``ladderize bench`` of inference: a sample is the prefill of a batch of prompts and the decoding after it.

Two regimes, never mixed: prefill is bound by compute and sends long messages; decoding is bound by memory bandwidth and
sends short ones, whose latency counts.
"""

import functools
import time
from collections.abc import Generator as Walk
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.layout import OVERLAPPED
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    BASELINE_ROW,
    MODEL_ROW,
    NO_COMM,
    PARALLEL,
    PHASES,
    UNSCHEDULED,
    BenchDocument,
    BenchRow,
    Overlap,
    ReferenceAgreement,
    inference_figures,
)
from ladderize.runtime.bench.options import BenchOptions, ModelChoice
from ladderize.runtime.bench.plan import (
    BenchPlan,
    check_bench_memory,
    expected_messages,
    needed_bytes,
    plan_bench,
    sent_sums,
)
from ladderize.runtime.bench.reference_check import check_models, checked_specs
from ladderize.runtime.bench.report import check_sound, run_and_show, show_bench
from ladderize.runtime.bench.rounds import (
    BenchRun,
    Timed,
    TimedVariant,
    both,
    sending_over,
    synchronize,
    take_messages,
    time_rounds,
)
from ladderize.runtime.bench.trace import trace
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.differentiable import PendingSum
from ladderize.runtime.collectives.observed import Recording, Traced
from ladderize.runtime.cpu_operations import choose_operations
from ladderize.runtime.decode import Generator, Sampling, sample
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.model import TPLlama
from ladderize.runtime.schedule import SEQUENTIAL
from ladderize.runtime.spec import ModelSpec, WeightCache, open_generator
from ladderize.runtime.step import Step

TRACED_STEPS = 4


def bench(
    choice: ModelChoice,
    options: BenchOptions,
    link: str | None = None,
    *,
    out: Path | None = None,
    console: Console = SILENT,
) -> BenchDocument:
    """Check the chosen models, time them against each other, and return the result; a console that speaks shows it.

    Raises UsageError or UserError if something cannot be measured, a model fails the reference check, or a trace
    disproves an overlap. What was measured by then is kept in ``out`` and shown.

    link: of the ranks that ``options.emulate_tp`` emulates, as ``--link`` takes it.
    out: a JSON file, written after each batch size, and before traces are made.
    """
    check_device(options.device)
    plan = plan_bench(choice, options, link)
    document = run_and_show(measure_inference, plan, options.device, out, console, show_bench)
    domino = options.schedule != "sequential"
    check_sound(document, f"--schedule {options.schedule}" if domino else "the layout")
    return document


@torch.inference_mode()
def measure_inference(group: Ranks, plan: BenchPlan[BenchOptions], console: Console) -> BenchDocument:
    """Check the models and time those that pass. All ranks call it.

    Raises UserError if none passes, or if they do not fit into memory.
    """
    options = plan.options
    check_bench_memory(sum(needed_bytes(plan.specs, options, group.device)), group)
    if options.compile:
        torch._dynamo.reset()
    operations = choose_operations(group, plan.specs[0].torch_dtype, compile=options.compile)
    if operations.note:
        console.warn(operations.note)
    run = BenchRun.open(group, plan, console, operations.name)
    loaded = _weight_cache(run, replicate_vocab=options.replicate_vocab)
    collectives, weights = run.collectives, loaded
    if options.emulate_tp is not None:  # emulated sums are not sums: the whole model is checked on one rank
        collectives, weights = Collectives(), _weight_cache(run, replicate_vocab=False)
    checks, failed = check_models(checked_specs(plan.specs, options), options, collectives, weights, group, console)
    del weights
    specs = [spec for spec in plan.specs if spec.name not in failed]
    if not specs:
        raise UserError(f"{next(iter(failed.values()))}, so nothing was timed")
    # baselines are of the first model that was named: where that is not timed, there are none
    baselines = options.baselines if specs[0] is plan.specs[0] else ()
    rows: list[BenchRow] = []

    def document(*, complete: bool) -> BenchDocument:
        return BenchDocument(complete=complete, rows=list(rows), failed=failed, checks=checks, **run.document_figures())

    for batch in options.batch_sizes:
        variants = _open_variants(run, specs, baselines, loaded, batch)
        time_rounds(group, both(variants), options, console, f"timing, batch {batch}")
        done = len(rows)
        with console.stage("timing the communication alone"):
            rows += _rows(run, variants, baselines, checks, batch)
        group.report(document(complete=False))
        if options.profile is not None:
            with console.stage(f"profiling, traces in {options.profile}"):
                for number, variant in enumerate(variants):
                    group.barrier()
                    path = variant.trace_path(options.profile, number, batch, group.rank)
                    variant.overlap = _trace(run, variant, path)
            rows[done:] = _rows(run, variants, baselines, checks, batch)
            group.report(document(complete=False))
    run.collectives.close()
    return document(complete=True)


def _weight_cache(run: BenchRun[BenchOptions], *, replicate_vocab: bool) -> WeightCache:
    options, columns = run.options, run.options.prefill_schedule.columns
    return WeightCache(run.group.device, pack=not options.compile, replicate_vocab=replicate_vocab, columns=columns)


# ---- the timed models ----


class ParallelLlama(TPLlama):
    """A Llama with GPT-J's and PaLM's block: attention and MLP read the same input, and one blocking all-reduce sums
    both.

    For timing only: with a Llama's weights its output means nothing.
    """

    def walk(self, ids: Tensor, step: Step, cache: KVCache, columns: int = 1) -> Walk[None, None, Tensor]:
        pending = self.embed(ids)
        yield
        residual, x = pending.wait()
        for index in range(self.shape.layers):
            attention, mlp = self.weights.attention(index), self.weights.mlp(index)
            (partial,) = self.attention_products(index, attention, x, step, cache, 1)
            (partial_mlp,) = self.mlp_products(mlp, x, None, 1)
            for bias in (self.scaled(attention.o_bias), self.scaled(mlp.down_bias)):
                residual = residual if bias is None else residual + bias
            pending = PendingSum(self.collectives, residual, None, [partial + partial_mlp])
            yield
            residual, x = pending.wait()
        return self.end(x)


def random_prompts(vocab: int, batch: int, prompt_len: int, seed: int) -> list[list[int]]:
    """Return ids [batch][prompt_len], equal on every rank."""
    numbers = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab, (batch, prompt_len), generator=numbers).tolist()
    return ids


class TimedGenerator(Timed):
    """The timing of a prefill of random prompts and of decode steps, of one token of each row."""

    parts = PHASES

    def __init__(self, generator: Generator, options: BenchOptions, batch: int) -> None:
        super().__init__()
        self.generator, self.decode_steps = generator, options.decode_steps
        self.prompts = random_prompts(generator.model.shape.vocab, batch, options.prompt_len, options.seed)
        self.draws = torch.zeros(batch, options.decode_steps, device=generator.device)
        self.own_bytes = generator.model.weights.resident_bytes + generator.cache.nbytes

    def sample(self) -> tuple[float, float]:
        generator, device = self.generator, self.generator.device
        generator.prepare(len(self.prompts[0]), self.decode_steps)
        synchronize(device)
        begin = time.perf_counter()
        tokens = sample(generator.prefill(self.prompts), Sampling(), self.draws[:, 0])
        synchronize(device)
        middle = time.perf_counter()
        generator.decode_n_tokens(tokens, self.draws, Sampling())
        synchronize(device)
        return middle - begin, (time.perf_counter() - middle) / self.decode_steps

    def eager(self) -> Generator:
        """Return the generator on the same cache, without CUDA graphs."""
        generator = self.generator
        return Generator(generator.model, generator.rope, generator.cache, schedule=generator.schedule)


def _open_variants(
    run: BenchRun[BenchOptions], specs: Sequence[ModelSpec], baselines: Sequence[str], weights: WeightCache, batch: int
) -> list[TimedVariant]:
    """Open the models, then the baselines of the first.

    Models of one shape share a cache, since only one runs at a time. Raises UserError if one sends other messages than
    its layout asks for.
    """
    options, columns = run.options, run.options.prompt_len + run.options.output_len
    planned = [(spec.name, spec, MODEL_ROW) for spec in specs]
    for baseline, name in (("parallel", PARALLEL), ("sequential", UNSCHEDULED)):
        if baseline in baselines:
            planned.append((name, specs[0], BASELINE_ROW))
    variants: list[TimedVariant] = []
    cache: KVCache | None = None
    with run.console.stage("loading weights" if specs[0].folder is not None else "making random weights"):
        for name, spec, kind in planned:
            timed: list[TimedGenerator] = []
            for collectives in (run.collectives, run.silence):
                model_class = ParallelLlama if name == PARALLEL else TPLlama
                how: dict[str, Any] = {"compile": options.compile, "model_class": model_class, "cache": cache}
                generator = open_generator(spec, collectives, weights, run.group, batch, columns, **how)
                cache = generator.cache
                generator.schedule = SEQUENTIAL if name == UNSCHEDULED else options.prefill_schedule
                timed.append(TimedGenerator(generator, options, batch))
            overlapping = set(PHASES) if spec.layout.count(OVERLAPPED) else set()
            overlapping |= {"prefill"} if options.prefill_schedule.is_domino else set()
            promised = overlapping if kind == MODEL_ROW else set()
            variants.append(TimedVariant(name, spec, timed[0], timed[1], kind, promised))
    for variant in variants:
        _record_messages(variant, run.collectives)
    return variants


def _record_messages(variant: TimedVariant, collectives: Collectives) -> None:
    """Run a prefill and a decode step, and keep their messages in ``variant``. Raises UserError for unexpected ones."""
    prompts, generator = variant.timed.prompts, variant.timed.eager()
    model, rows, schedule = generator.model, len(prompts), generator.schedule
    sums = model.shape.layers if isinstance(model, ParallelLlama) else sent_sums(model.layout)
    expected = functools.partial(expected_messages, model.shape, sums, variant.spec.torch_dtype.itemsize)
    shared = not model.shape.replicate_vocab
    with sending_over(model, Recording(collectives, time.perf_counter)) as recording:
        tokens = generator.prefill(prompts).argmax(-1)
        due, parts = expected(schedule, rows, len(prompts[0])), schedule.parts(rows, len(prompts[0]))
        prefill = take_messages(f"{variant.name}: a prefill", recording, due, parts * shared)
        generator.decode_one_token(tokens)
        due = expected(SEQUENTIAL, rows, 1)
        decode = take_messages(f"{variant.name}: a decode step", recording, due, int(shared))
    variant.messages = {"prefill": prefill, "decode": decode}


def _rows(
    run: BenchRun[BenchOptions],
    variants: Sequence[TimedVariant],
    baselines: Sequence[str],
    checks: dict[str, ReferenceAgreement],
    batch: int,
) -> list[BenchRow]:
    options = run.options
    first, rows = variants[0], []
    for variant in variants:
        generator = variant.timed.generator
        figures: dict[str, Any] = {
            **variant.row_figures(options.ranks, batch),
            "kind": variant.kind,
            "schedule": generator.schedule.name,
            "checked": variant.name in checks,
            "emulated": options.emulate_tp is not None,
            "weight_bytes": generator.model.weights.nbytes,
            "kv_cache_bytes": generator.cache.nbytes,
        }
        speed = functools.partial(inference_figures, decode_steps=options.decode_steps, batch=batch)
        rows.append(
            BenchRow(
                **figures,
                **speed(variant.timed.seconds, first.timed.seconds),
                communication={phase: run.communication(variant, phase) for phase in PHASES},
                no_communication_samples_ms=variant.silent.samples_ms(),
            )
        )
        if variant is first and "no-comm" in baselines:
            figures |= {"model": NO_COMM, "kind": BASELINE_ROW, "overlap": None}
            figures["samples_ms"] = variant.silent.samples_ms()
            rows.append(BenchRow(**figures, **speed(variant.silent.seconds, first.timed.seconds)))
    return rows


def _trace(run: BenchRun[BenchOptions], variant: TimedVariant, path: Path) -> dict[str, Overlap]:
    prompts, generator, device = variant.timed.prompts, variant.timed.eager(), run.group.device

    def steps() -> None:
        with record_function("prefill"):
            tokens = generator.prefill(prompts).argmax(-1)
            synchronize(device)
        with record_function("decode"):
            for _ in range(min(TRACED_STEPS, run.options.decode_steps)):
                tokens = generator.decode_one_token(tokens).argmax(-1)
            synchronize(device)

    with sending_over(generator.model, Traced(run.collectives)) as traced:
        return run.judged(trace(steps, PHASES, path, device, traced, run.alone_seconds), variant)
