"""``ladderize bench`` of inference: a run is the prefill of a batch of prompts and the decoding after it.

Two regimes, never mixed: prefill is bound by compute and sends long messages; decoding is bound by memory bandwidth and
sends short ones, whose latency counts.
"""

from collections.abc import Generator as Walk
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladderize.console import SILENT, Console
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import (
    BASELINE_ROW,
    MODEL_ROW,
    PARALLEL,
    PHASES,
    BenchDocument,
    environment,
    variant_name,
)
from ladderize.runtime.bench.options import BenchOptions, ModelChoice
from ladderize.runtime.bench.plan import BenchPlan, check_bench_memory, plan_bench
from ladderize.runtime.bench.reference_check import check_models, checked_specs
from ladderize.runtime.bench.report import run_and_show
from ladderize.runtime.bench.rounds import (
    Timed,
    Variant,
    expected_messages,
    record_messages,
    sent_sums,
    sums_in_groups,
)
from ladderize.runtime.bench.run import BenchRun
from ladderize.runtime.bench.training import TrainingRun
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.differentiable import PendingSum
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.observed import Message
from ladderize.runtime.decode import Generator, Sampling, sample
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.model import TPLlama
from ladderize.runtime.schedule import SEQUENTIAL
from ladderize.runtime.spec import WeightCache, choose_operations, open_generator
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

    Raises UsageError or UserError if something cannot be measured, a model fails its check, or a trace disproves an
    overlap. What was measured by then is kept in ``out`` and shown.

    link: of the ranks that ``options.emulate_tp`` emulates, as ``--link`` takes it.
    out: a JSON file, written after each batch size, and before traces are made.
    """
    check_device(options.device)
    return run_and_show(measure_models, plan_bench(choice, options, link), options.device, out, console)


def measure_models(group: Ranks, plan: BenchPlan, console: Console) -> BenchDocument:
    """Check the models and time those that pass. All ranks call it.

    Raises UserError if none passes, or if they do not fit into memory.
    """
    options, operations = plan.options, None
    check_bench_memory(plan.specs, options, group)
    if not options.train:
        operations = choose_operations(group, plan.specs[0].torch_dtype)
        if operations.note:
            console.warn(operations.note)
    collectives, backend = _collectives(group, plan)
    run_class = TrainingRun if options.train else InferenceRun
    with torch.inference_mode(not options.train):
        one = run_class(group, plan, console, collectives)
        one.backend = backend
        one.environment = environment(group, operations=operations and operations.name)
        document = one.measure()
    collectives.settle()
    return document


def _collectives(group: Ranks, plan: BenchPlan) -> tuple[Collectives, str]:
    """Return the collectives that carry the messages, and words for them. All ranks call it."""
    ranks, link = plan.options.emulate_tp, plan.link
    if ranks is not None and link is not None:
        emulated = emulate(ranks, link, group.device, plan.interconnect)
        return emulated, f"emulated: {ranks} ranks over {link.name}"
    in_flight = max(schedule.in_flight for schedule in plan.options.timed_schedules)
    return choose(plan.options.backend, group, max_bytes=plan.longest_message, in_flight=in_flight)


class InferenceRun(BenchRun):
    """A run of prefills and decode steps.

    specs: the models that are timed.
    """

    def __init__(self, group: Ranks, plan: BenchPlan, console: Console, collectives: Collectives) -> None:
        """Compare checkpoints with transformers, and leave those that fail out. All ranks call it."""
        super().__init__(group, plan.options, console, plan.link)
        options, self.collectives = plan.options, collectives
        self.silence = NoCommunication(collectives.ranks)
        self.weights = weights = WeightCache(group.device, pack=True, replicate_vocab=options.replicate_vocab)
        if options.emulate_tp is not None:  # emulated sums are not sums: the whole model is checked on one rank
            collectives, weights = Collectives(), WeightCache(group.device, pack=True)
        checked = checked_specs(plan.specs, options)
        self.checks, self.failed = check_models(checked, options, collectives, weights, group, console)
        if plan.specs[0].name in self.failed:  # they are of the first model that was named
            self.baselines = ()
        self.specs = [spec for spec in plan.specs if spec.name not in self.failed]

    def open_variants(self, batch: int) -> list[Variant]:
        """Open the models, then the baseline of the first.

        Models with caches of one size share one, since only one runs at a time. Raises UserError if one sends other
        messages than its layout asks for.
        """
        options = self.options
        timed = [(spec, schedule, TPLlama) for spec in self.specs for schedule in options.timed_schedules]
        if "parallel" in self.baselines:
            timed.append((self.specs[0], SEQUENTIAL, ParallelLlama))
        variants: list[Variant] = []
        caches: list[KVCache] = []
        with self.console.stage("loading weights"):
            for spec, schedule, model_class in timed:
                generators = []
                for collectives in (self.collectives, self.silence):
                    how: dict[str, Any] = {"model_class": model_class, "caches": caches}
                    generator = open_generator(
                        spec, collectives, self.weights, self.group, batch, options.columns, **how
                    )
                    generator.schedule = schedule
                    caches.append(generator.cache)
                    generators.append(TimedGenerator(generator, options, batch))
                loud, silent = generators
                if model_class is ParallelLlama:
                    variants.append(Variant(PARALLEL, spec, loud, silent, BASELINE_ROW))
                    continue
                name = variant_name(spec.name, schedule.name, options)
                kind = MODEL_ROW if name == spec.name else BASELINE_ROW
                variants.append(Variant(name, spec, loud, silent, kind, schedule.name))
        for variant in variants:
            variant.messages = _messages(variant)
        return variants


# ---- the timed models ----


class ParallelLlama(TPLlama):
    """A Llama with GPT-J's and PaLM's block: attention and MLP read the same input, and one blocking all-reduce sums
    both.

    For timing only: with a Llama's weights its output means nothing.
    """

    def walk(self, ids: Tensor, step: Step, cache: KVCache) -> Walk[None, None, Tensor]:
        pending = self.embed(ids)
        yield
        residual, x = self.arrived(pending)
        for index in range(self.shape.layers):
            attention, mlp = self.weights.attention(index), self.weights.mlp(index)
            (partial,) = self.partials(2 * index, attention, x, None, step, cache)
            (partial_mlp,) = self.partials(2 * index + 1, mlp, x, None, step, cache)
            for bias in (self.scaled(attention.bias), self.scaled(mlp.bias)):
                residual, _ = self.add_bias(residual, residual, bias)
            pending = PendingSum(self.collectives, residual, None, partial + partial_mlp)
            yield
            residual, x = self.arrived(pending)
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

    def prepare(self) -> None:
        for _ in range(2):  # a prompt is captured when it comes again, which must not be in a counted round
            self.generator.prepare([len(prompt) for prompt in self.prompts], self.decode_steps)

    def run(self, passes: int | None = None, *, eager: bool = False) -> Iterator[int]:
        generator, steps = self.generator, min(self.decode_steps, passes or self.decode_steps)
        if eager:  # on the same cache
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
    inner = sums_in_groups(model.layout, model.shape.tp_size)
    shared = int(not model.shape.replicate_vocab)
    prefill = expected_messages(model.shape, sums, itemsize, schedule, rows, tokens, inner)
    decode = expected_messages(model.shape, sums, itemsize, SEQUENTIAL, rows, 1, inner)
    expected = {
        "prefill": replace(prefill, vocabulary=shared * schedule.parts(rows, tokens)),
        "decode": replace(decode, vocabulary=shared),
    }
    return record_messages(timed, variant.name, expected)
