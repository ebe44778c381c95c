"""``ladderize bench`` of inference: a sample is the prefill of a batch of prompts and the decoding after it.

Two regimes, never mixed: prefill is bound by compute and sends long messages; decoding is bound by memory bandwidth and
sends short ones, whose latency counts.
"""

import functools
import time
from collections.abc import Generator as Walk
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ladderize.console import SILENT, Console
from ladderize.errors import UserError
from ladderize.layout import OVERLAPPED
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks, host_id
from ladderize.ranks.threads import cores
from ladderize.runtime.bench import reference_check
from ladderize.runtime.bench.document import BenchDocument, BenchRow
from ladderize.runtime.bench.harness import KeptDocument, RuntimeBench, RuntimeVariant, Timed, check_overlaps
from ladderize.runtime.bench.messages import (
    PassOperations,
    PassRecorder,
    compare_messages,
    expected_messages,
    sending_over,
    sent_sums,
    synchronize,
)
from ladderize.runtime.bench.options import BenchOptions, ModelChoice
from ladderize.runtime.bench.plan import BenchPlan, check_bench_memory, plan_bench
from ladderize.runtime.bench.reference_check import ReferenceAgreement
from ladderize.runtime.bench.report import plot_bench, show_bench
from ladderize.runtime.bench.rows import (
    BASELINE_ROW,
    MODEL_ROW,
    NO_COMM,
    PARALLEL,
    PHASES,
    UNSCHEDULED,
    PhaseCommunication,
    inference_figures,
)
from ladderize.runtime.bench.trace import Overlap, trace
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

TRACED_STEPS, INSTRUMENTED_RUNS = 4, 8


class ParallelLlama(TPLlama):
    """Attention and MLP of a layer read the same input, and one blocking all-reduce sums both (GPT-J's and PaLM's
    block).

    With a Llama's weights its output means nothing: it was trained for something else. For timing only.
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
    """Ids [batch][prompt_len], the same on every rank."""
    numbers = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab, (batch, prompt_len), generator=numbers).tolist()
    return ids


class TimedGenerator(Timed):
    """A sample is a prefill of random prompts, and a decode step: of one token of each row."""

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
        """The generator on the same cache, without CUDA graphs."""
        generator = self.generator
        return Generator(generator.model, generator.rope, generator.cache, schedule=generator.schedule)


@dataclass
class ModelVariant(RuntimeVariant):
    """A model, or a baseline, by a schedule of its prefill."""

    timed: TimedGenerator
    silent: TimedGenerator


class InferenceBench(RuntimeBench[ModelVariant, BenchDocument, BenchOptions]):
    """Every checkpoint is compared with a reference before it is timed, and is not timed if it is another model; raises
    UserError if all are."""

    def __init__(self, group: Ranks, plan: BenchPlan[BenchOptions], console: Console) -> None:
        super().__init__(group, plan, console)
        if self.options.compile:
            torch._dynamo.reset()
        operations = choose_operations(group, plan.specs[0].torch_dtype, compile=self.options.compile)
        self.environment = replace(self.environment, operations=operations.name)
        if operations.note:
            console.warn(operations.note)
        self.weights = self._weight_cache(replicate_vocab=self.options.replicate_vocab)
        self.checks: dict[str, ReferenceAgreement] = {}
        self.failed: dict[str, str] = {}
        self._check(reference_check.checked_specs(plan.specs, self.options))
        self.specs = [spec for spec in plan.specs if spec.name not in self.failed]
        if not self.specs:
            raise UserError(f"{next(iter(self.failed.values()))}, so nothing was timed")

    @property
    def baselines(self) -> Sequence[str]:
        """They are of the first model that was named: where that is not timed, there are none."""
        return self.options.baselines if self.specs[0] is self.plan.specs[0] else ()

    def _weight_cache(self, *, replicate_vocab: bool) -> WeightCache:
        options = self.options
        columns = options.prefill_schedule.columns
        return WeightCache(
            self.group.device, pack=not options.compile, replicate_vocab=replicate_vocab, columns=columns
        )

    def _check(self, specs: list[ModelSpec]) -> None:
        if not specs:
            return
        options, group, schedule = self.options, self.group, self.options.prefill_schedule
        collectives, weights = self.collectives, self.weights
        if options.emulate_tp is not None:  # emulated sums are not sums: the whole model is checked on one rank
            collectives, weights = Collectives(), self._weight_cache(replicate_vocab=False)
        host, of_ranks = host_id(), group.gather((host_id(), cores()))
        free = set().union(*(own for of_host, own in of_ranks if of_host == host))
        with self.console.stage("computing the reference with transformers in float32"):
            expected = group.broadcast(reference_check.references(specs, options, free) if group.is_main else None)
        for spec in specs:
            with self.console.stage(f"checking {spec.name} against transformers"):
                reference = expected[spec.name]
                columns = len(reference.ids[0])
                # one row by itself: domino cuts it along its tokens
                for rows in (len(reference.ids), *([1] if schedule.is_domino else [])):
                    generator = open_generator(
                        spec, collectives, weights, group, rows, columns, compile=options.compile
                    )
                    generator.schedule = schedule
                    found = reference_check.check_against_reference(generator, reference.first(rows), spec, group)
                    if isinstance(found, str):
                        self.checks.pop(spec.name, None)
                        self.failed[spec.name] = found
                        break
                    self.checks[spec.name] = found if rows > 1 else self.checks[spec.name].with_row(found)

    def open(self, batch: int) -> list[ModelVariant]:
        """The models first, then the baselines of the first; models of one shape share a cache, since only one runs at
        a time."""
        options, first = self.options, self.specs[0]
        planned = [(spec.name, spec, MODEL_ROW) for spec in self.specs]
        for baseline, name in (("parallel", PARALLEL), ("sequential", UNSCHEDULED)):
            if baseline in self.baselines:
                planned.append((name, first, BASELINE_ROW))
        variants, cache = [], None
        with self.console.stage("loading weights" if first.folder is not None else "making random weights"):
            for name, spec, kind in planned:
                timed: list[TimedGenerator] = []
                for collectives in (self.collectives, self.silence):
                    generator = open_generator(
                        spec,
                        collectives,
                        self.weights,
                        self.group,
                        batch,
                        options.prompt_len + options.output_len,
                        compile=options.compile,
                        model_class=ParallelLlama if name == PARALLEL else TPLlama,
                        cache=cache,
                    )
                    cache = generator.cache
                    generator.schedule = SEQUENTIAL if name == UNSCHEDULED else options.prefill_schedule
                    timed.append(TimedGenerator(generator, options, batch))
                overlapping = set(PHASES) if spec.layout.count(OVERLAPPED) else set()
                overlapping |= {"prefill"} if options.prefill_schedule.is_domino else set()
                promised = overlapping if kind == MODEL_ROW else set()
                variants.append(ModelVariant(name, spec, timed[0], timed[1], promised, kind=kind))
        for variant in variants:
            self._check_messages(variant)
        return variants

    def _check_messages(self, variant: ModelVariant) -> None:
        """Run a prefill and a decode step; raises UserError if a message is missing."""
        prompts, generator = variant.timed.prompts, variant.timed.eager()
        model, rows = generator.model, len(prompts)
        sums = model.shape.layers if isinstance(model, ParallelLlama) else sent_sums(model.layout)
        expected = functools.partial(expected_messages, model.shape, sums, variant.spec.torch_dtype.itemsize)
        with sending_over(model, Recording(self.collectives, time.perf_counter)) as recording:
            tokens = generator.prefill(prompts).argmax(-1)
            due = expected(generator.schedule, rows, len(prompts[0]))
            compare_messages(f"{variant.name}: a prefill", recording, due)
            generator.decode_one_token(tokens)
            compare_messages(f"{variant.name}: a decode step", recording, expected(SEQUENTIAL, rows, 1))

    def operations(self, variant: ModelVariant) -> dict[str, PassOperations]:
        prompts, generator = variant.silent.prompts, variant.silent.eager()
        recorder = PassRecorder(self.silence, self.group.device)
        with sending_over(generator.model, recorder.recording):
            tokens = generator.prefill(prompts).argmax(-1)
            after_prompt = generator.position
            for _ in range(INSTRUMENTED_RUNS):
                recorder.note("prefill", lambda: generator.prefill(prompts))
            for _ in range(INSTRUMENTED_RUNS):
                generator.position = after_prompt
                recorder.note("decode", lambda: generator.decode_one_token(tokens))
        # the embedding's are the same for every layout
        parts = {"prefill": generator.schedule.parts(len(prompts), len(prompts[0])), "decode": 1}
        shared = not generator.model.shape.replicate_vocab
        return {phase: recorder.operations(phase, self.alone, embeddings=shared * parts[phase]) for phase in PHASES}

    def rows(self, variants: list[ModelVariant], batch: int) -> list[BenchRow]:
        found = []
        for variant in variants:
            row = self._row(variant, variant.timed, variants[0], batch)
            found.append(
                replace(
                    row,
                    communication={phase: _communication(variant, phase) for phase in PHASES},
                    no_communication_samples_ms=variant.silent.samples_ms(),
                    overlap=variant.overlap,
                )
            )
            if variant is variants[0] and "no-comm" in self.baselines:
                row = self._row(variant, variant.silent, variant, batch)
                found.append(replace(row, model=NO_COMM, kind=BASELINE_ROW))
        return found

    def _row(self, variant: ModelVariant, timed: TimedGenerator, first: ModelVariant, batch: int) -> BenchRow:
        """timed: with or without communication. first: what speed-ups are over."""
        generator, options = timed.generator, self.options
        return BenchRow(
            **variant.model_figures(options.ranks, batch),
            **inference_figures(timed.seconds, first.timed.seconds, options.decode_steps, batch),
            kind=variant.kind,
            checked=variant.name in self.checks,
            emulated=options.emulate_tp is not None,
            weight_bytes=generator.model.weights.nbytes,
            kv_cache_bytes=generator.cache.nbytes,
            peak_memory_bytes=variant.timed.peak_memory_bytes,
            samples_ms=timed.samples_ms(),
            schedule=generator.schedule.name,
        )

    def trace(self, variant: ModelVariant, path: Path) -> Overlap:
        prompts, generator = variant.timed.prompts, variant.timed.eager()

        def steps() -> None:
            tokens = generator.prefill(prompts).argmax(-1)
            for _ in range(min(TRACED_STEPS, self.options.decode_steps)):
                tokens = generator.decode_one_token(tokens).argmax(-1)

        with sending_over(generator.model, Traced(self.collectives)) as traced:
            overlap = trace(steps, path, self.group.device, traced, self.alone_seconds)
        return self.judged(overlap, promised=bool(variant.overlapping))

    def document(self, rows: list[BenchRow], *, complete: bool) -> BenchDocument:
        return BenchDocument(**self.document_figures(rows, complete=complete), checks=self.checks, failed=self.failed)


def _communication(variant: ModelVariant, phase: str) -> PhaseCommunication:
    plain = variant.communication(phase)
    if phase == "decode" and variant.silent.generator.graphs:
        # the compute that covers was seen without CUDA graphs, so far longer
        plain = replace(plain, hideable_ms=None, predicted_ms=None)
    hidden = phase in variant.overlapping and plain.hideable_ms
    return PhaseCommunication(
        **vars(plain),
        vocabulary_alone_ms=variant.operations[phase].vocabulary * 1e3,
        hidden_share=plain.hidden_ms / hidden if hidden else None,
    )


def measure_inference(group: Ranks, plan: BenchPlan[BenchOptions], console: Console) -> BenchDocument:
    """One rank's part. Raises UserError if a model is not what it should be, or does not fit into memory."""
    check_bench_memory(plan.specs, plan.options, group)
    with torch.inference_mode():
        return InferenceBench(group, plan, console).measure()


def bench(
    choice: ModelChoice,
    options: BenchOptions,
    link: str | None = None,
    *,
    out: Path | None = None,
    plot: Path | None = None,
    console: Console = SILENT,
) -> BenchDocument:
    """Check and time the chosen models against each other; returns the result, and shows it where the console speaks.

    link: of the ranks that ``options.emulate_tp`` emulates, as ``--link`` takes it. out: a JSON file, which is written
    after each batch size, and before traces are made. plot: draws ``plot``.png and ``plot``.svg. Raises UsageError or
    UserError for what cannot be measured, where a model fails the reference check, and where a trace disproves an
    overlap; what was measured is kept in ``out`` and shown.
    """
    check_device(options.device)
    kept = KeptDocument(out, plot, console, show_bench, plot_bench)
    document = kept.measured(measure_inference, plan_bench(choice, options, link), device=options.device)
    if document.failed:
        first, *others = document.failed.values()
        raise UserError(f"{first}, so it was not timed" + (f", and neither were {len(others)} more" if others else ""))
    domino = options.schedule != "sequential"
    check_overlaps(document.disproved, f"--schedule {options.schedule}" if domino else "the layout")
    return document
