"""``ladderize bench`` of inference: a run is the prefill of a batch of prompts and the decoding after it.

Two regimes, never mixed: prefill is bound by compute and sends long messages; decoding is bound by memory bandwidth and
sends short ones, whose latency counts.
"""

import functools
from collections.abc import Generator as Walk
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladderize.console import SILENT, Console
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
    VariantRow,
    inference_figures,
    variant_name,
)
from ladderize.runtime.bench.options import BenchOptions, ModelChoice
from ladderize.runtime.bench.plan import BenchPlan, check_bench_memory, needed_bytes, plan_bench
from ladderize.runtime.bench.reference_check import check_models, checked_specs
from ladderize.runtime.bench.report import run_and_show
from ladderize.runtime.bench.rounds import (
    Message,
    Timed,
    Variant,
    expected_messages,
    record_messages,
    sent_sums,
)
from ladderize.runtime.bench.run import RuntimeRun
from ladderize.runtime.choose_operations import choose_operations
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.differentiable import PendingSum
from ladderize.runtime.decode import Generator, Sampling, sample
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.model import TPLlama
from ladderize.runtime.schedule import SEQUENTIAL
from ladderize.runtime.spec import WeightCache, open_generator
from ladderize.runtime.step import Step


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
    return run_and_show(measure_inference, plan, options.device, out, console)


@torch.inference_mode()
def measure_inference(group: Ranks, plan: BenchPlan[BenchOptions], console: Console) -> BenchDocument:
    """Check the models and time those that pass. All ranks call it.

    Raises UserError if none passes, or if they do not fit into memory.
    """
    options = plan.options
    check_bench_memory(sum(needed_bytes(plan.specs, options, group.device)), group)
    operations = choose_operations(group, plan.specs[0].torch_dtype)
    if operations.note:
        console.warn(operations.note)
    run = InferenceRun(group, plan, console, operations.name)
    run.check()
    document: BenchDocument = run.measure()
    run.collectives.close()
    return document


class InferenceRun(RuntimeRun[BenchOptions]):
    """A run of prefills and decode steps.

    specs: the models that are timed.
    baselines: of the first model that was named: where that is not timed, there are none.
    """

    document_class = BenchDocument

    def __init__(
        self, group: Ranks, plan: BenchPlan[BenchOptions], console: Console, operations: str | None = None
    ) -> None:
        super().__init__(group, plan, console, operations)
        self.specs, self.baselines = plan.specs, self.options.baselines
        self.weights = self.weight_cache(replicate_vocab=self.options.replicate_vocab)

    def weight_cache(self, *, replicate_vocab: bool) -> WeightCache:
        """Return an empty cache of weights."""
        columns = self.options.prefill_schedule.columns
        return WeightCache(self.group.device, pack=True, replicate_vocab=replicate_vocab, columns=columns)

    def check(self) -> None:
        """Compare checkpoints with transformers, and leave those that fail out. All ranks call it."""
        collectives, weights = self.collectives, self.weights
        if self.options.emulate_tp is not None:  # emulated sums are not sums: the whole model is checked on one rank
            collectives, weights = Collectives(), self.weight_cache(replicate_vocab=False)
        checked = checked_specs(self.specs, self.options)
        self.checks, self.failed = check_models(checked, self.options, collectives, weights, self.group, self.console)
        if self.specs[0].name in self.failed:
            self.baselines = ()
        self.specs = [spec for spec in self.specs if spec.name not in self.failed]

    def open_variants(self, batch: int) -> list[Variant]:
        """Open the models, then the baselines of the first.

        Models of one shape share a cache, since only one runs at a time. Raises UserError if one sends other messages
        than its layout asks for.
        """
        options, columns = self.options, self.options.prompt_len + self.options.output_len
        planned = [(spec.name, spec, MODEL_ROW) for spec in self.specs]
        for baseline, name in (("parallel", PARALLEL), ("sequential", UNSCHEDULED)):
            if baseline in self.baselines:
                planned.append((name, self.specs[0], BASELINE_ROW))
        variants: list[Variant] = []
        cache: KVCache | None = None
        with self.console.stage("loading weights"):
            for name, spec, kind in planned:
                timed: list[TimedGenerator] = []
                for collectives in (self.collectives, self.silence):
                    model_class = ParallelLlama if name == PARALLEL else TPLlama
                    how: dict[str, Any] = {"model_class": model_class, "cache": cache}
                    generator = open_generator(spec, collectives, self.weights, self.group, batch, columns, **how)
                    cache = generator.cache
                    generator.schedule = options.prefill_schedule if kind == MODEL_ROW else SEQUENTIAL
                    timed.append(TimedGenerator(generator, options, batch))
                overlapping = set(PHASES) if spec.layout.count(OVERLAPPED) else set()
                overlapping |= {"prefill"} if options.prefill_schedule.is_domino else set()
                promised = overlapping if kind == MODEL_ROW else set()
                silent, schedule = timed[1], generator.schedule.name
                variants.append(Variant(name, spec, timed[0], silent, kind, schedule, promised))
        for variant in variants:
            variant.messages = _messages(variant)
        return variants

    def rows_of(self, variants: Sequence[Variant], batch: int) -> list[VariantRow]:
        options, first = self.options, variants[0]
        speed = functools.partial(inference_figures, decode_steps=options.decode_steps, batch=batch)
        rows: list[VariantRow] = []
        for variant in variants:
            generator = variant.timed.generator
            figures: dict[str, Any] = {
                **variant.row_figures(options.ranks, batch),
                "kind": variant.kind,
                "weight_bytes": generator.model.weights.nbytes,
                "kv_cache_bytes": generator.cache.nbytes,
            }
            sent = {phase: self.communication(variant, phase) for phase in PHASES}
            silent = variant.silent.samples_ms()
            measured = speed(variant.timed.seconds, first.timed.seconds)
            rows.append(BenchRow(**figures, **measured, communication=sent, no_communication_samples_ms=silent))
            if variant is first and "no-comm" in self.baselines:
                figures |= {"model": NO_COMM, "kind": BASELINE_ROW, "overlap": None, "samples_ms": silent}
                rows.append(BenchRow(**figures, **speed(variant.silent.seconds, first.timed.seconds)))
        return rows


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
    """A prefill of random prompts, and decode steps of one token of each row."""

    parts = PHASES

    def __init__(self, generator: Generator, options: BenchOptions, batch: int) -> None:
        super().__init__(generator.device)
        self.generator, self.model, self.decode_steps = generator, generator.model, options.decode_steps
        self.prompts = random_prompts(generator.model.shape.vocab, batch, options.prompt_len, options.seed)
        self.draws = torch.zeros(batch, options.decode_steps, device=generator.device)
        self.own_bytes = generator.model.weights.resident_bytes + generator.cache.nbytes

    def prepare(self) -> None:
        for _ in range(2):  # a prompt is captured when it comes again, which must not be in a counted round
            self.generator.prepare([len(prompt) for prompt in self.prompts], self.decode_steps)

    def run(self, passes: int | None = None) -> Iterator[int]:
        generator, steps = self.generator, min(self.decode_steps, passes or self.decode_steps)
        if passes is not None:  # on the same cache, without CUDA graphs
            generator = Generator(generator.model, generator.rope, generator.cache, schedule=generator.schedule)
        tokens = sample(generator.prefill(self.prompts), Sampling(), self.draws[:, 0])
        yield 1
        generator.decode_n_tokens(tokens, self.draws[:, :steps], Sampling())
        yield steps


def _messages(variant: Variant) -> dict[str, list[Message]]:
    """Return the messages of a prefill and of a decode step. Raises UserError for unexpected ones."""
    timed, itemsize = variant.timed, variant.spec.torch_dtype.itemsize
    model, rows, tokens, schedule = timed.model, len(timed.prompts), len(timed.prompts[0]), timed.generator.schedule
    sums = model.shape.layers if isinstance(model, ParallelLlama) else sent_sums(model.layout)
    shared = int(not model.shape.replicate_vocab)
    prefill = expected_messages(model.shape, sums, itemsize, schedule, rows, tokens)
    decode = expected_messages(model.shape, sums, itemsize, SEQUENTIAL, rows, 1)
    expected = {
        "prefill": replace(prefill, vocabulary=shared * schedule.parts(rows, tokens)),
        "decode": replace(decode, vocabulary=shared),
    }
    return record_messages(timed, variant_name(variant.name, variant.schedule), expected)
