"""``ladderize bench``: a run of inference is the prefill of a batch of prompts and the decoding after it.

They are never mixed: prefill is bound by compute and sends long messages, decoding by memory and sends short ones."""

from collections.abc import Generator as Walk
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ladderize.console import SILENT, Console
from ladderize.errors import UsageError
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import BenchDocument, environment
from ladderize.runtime.bench.messages import Message, expected_messages, record_messages, sent_sums
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.plan import BenchPlan, check_bench_memory, plan_bench
from ladderize.runtime.bench.reference_check import check_models
from ladderize.runtime.bench.report import run_and_show
from ladderize.runtime.bench.rounds import Variant, measure, synchronize, variant_name
from ladderize.runtime.bench.training import open_steps, step_opener
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.differentiable import PendingSum
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.decode import Generator, Sampling, sample
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.model import TPLlama
from ladderize.runtime.schedule import SEQUENTIAL
from ladderize.runtime.spec import ModelSpec, WeightCache, choose_operations, open_generator
from ladderize.runtime.step import Step


def bench(options: BenchOptions, *, console: Console = SILENT) -> BenchDocument:
    """Check the models, time them against each other on the runtime, and return the result; a console that speaks shows
    it. Raises UsageError or UserError if something cannot be measured, a model fails its check, or a trace disproves an
    overlap. What was measured by then is kept in ``options.out`` and shown."""
    if options.engine == "vllm":
        raise UsageError("vLLM is timed by ladderize.vllm.bench.bench_vllm")
    options = replace(options, device=options.device or default_device())
    check_device(str(options.device))
    return run_and_show(measure_models, plan_bench(options), console)


def measure_models(group: Ranks, plan: BenchPlan, console: Console) -> BenchDocument:
    """Check the models and time those that pass. All ranks call it. Raises UserError if none passes, or if they do not
    fit into memory."""
    options, specs, operations = plan.options, plan.specs, None
    check_bench_memory(specs, options, group)
    if not options.train:
        chosen = choose_operations(group, specs[0].torch_dtype)
        operations = chosen.name
        if chosen.note:
            console.warn(chosen.note)
    if options.emulate_tp is not None and plan.link is not None:
        collectives = emulate(options.emulate_tp, plan.link, group.device, plan.interconnect)
        backend = f"emulated: {options.emulate_tp} ranks over {plan.link.name}"
    else:
        in_flight = max(schedule.in_flight for schedule in options.timed_schedules)
        collectives, backend = choose(options.backend, group, max_bytes=plan.longest_message, in_flight=in_flight)
    document = BenchDocument(False, options, backend, environment(group, operations=operations), plan.link)
    with torch.inference_mode(not options.train):
        if options.train:
            open_step = step_opener(group, options.ranks)
            opener = partial(open_steps, specs, open_step, collectives, document, group, console)
        else:
            weights = WeightCache(group.device, pack=True, replicate_vocab=options.replicate_vocab)
            check_models(document, specs, collectives, weights, group, console)
            sound = [spec for spec in specs if spec.name not in document.failed]
            # baselines are of the first model that was named
            baselines = options.baselines if specs[0] in sound else ()
            opener = partial(open_models, sound, baselines, collectives, weights, options, group, console)
        measure(document, opener, group, console)
    collectives.settle()
    return document


def open_models(
    specs: Sequence[ModelSpec],
    baselines: Sequence[str],
    collectives: Collectives,
    weights: WeightCache,
    options: BenchOptions,
    group: Ranks,
    console: Console,
    batch: int,
) -> list[Variant]:
    """Open the models by every schedule, then the baseline of the first. Models with caches of one size share one,
    since only one runs at a time. Raises UserError if one sends other messages than its layout asks for."""
    timed = [(spec, schedule, TPLlama) for spec in specs for schedule in options.timed_schedules]
    if "parallel" in baselines:
        timed.append((specs[0], SEQUENTIAL, ParallelLlama))
    variants: list[Variant] = []
    caches: list[KVCache] = []
    with console.stage("loading weights"):
        for spec, schedule, model_class in timed:
            generators = []
            for sender in (collectives, NoCommunication(collectives.ranks)):
                generator = open_generator(
                    spec, sender, weights, group, batch, options.columns, model_class=model_class, caches=caches
                )
                generator.schedule = schedule
                caches.append(generator.cache)
                generators.append(generator)
            loud = generators[0]
            prompts = random_prompts(loud.model.shape.vocab, batch, options.prompt_len, options.seed)
            is_parallel = model_class is ParallelLlama
            name = "parallel baseline" if is_parallel else variant_name(spec.name, schedule.name, options)
            run, silent_run = (partial(prefill_and_decode, generator, prompts) for generator in generators)
            variant = Variant(name, spec, loud.model, run, silent_run, schedule=schedule.name)
            variant.messages = recorded_messages(name, spec, loud, prompts)
            variant.has_silent_row = "no-comm" in baselines and not variants
            variants.append(variant)
    return variants


class ParallelLlama(TPLlama):
    """A Llama with GPT-J's and PaLM's block: attention and MLP read the same input, and one blocking all-reduce sums
    both. For timing only: with a Llama's weights its output means nothing."""

    def walk(self, ids: Tensor, step: Step, cache: KVCache) -> Walk[None, None, Tensor]:
        pending = self.embed(ids)
        yield
        residual, x = self.arrived(pending)
        for index in range(self.shape.layers):
            numbers = 2 * index, 2 * index + 1
            attention, mlp = map(self.weights.take_sublayer, numbers)
            (partial_sum,) = self.partials(numbers[0], attention, x, None, step, cache)
            (mlp_sum,) = self.partials(numbers[1], mlp, x, None, step, cache)
            for bias in (self.scaled(attention.bias), self.scaled(mlp.bias)):
                residual, _ = self.add_bias(residual, residual, bias)
            pending = PendingSum(self.collectives, residual, None, partial_sum + mlp_sum)
            yield
            residual, x = self.arrived(pending)
        return self.end(x)


def random_prompts(vocab: int, batch: int, prompt_len: int, seed: int) -> list[list[int]]:
    """Return ids [batch][prompt_len], equal on every rank."""
    numbers = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab, (batch, prompt_len), generator=numbers).tolist()
    return ids


def prefill_and_decode(generator: Generator, prompts: list[list[int]], steps: int) -> Iterator[None]:
    """Run a prefill, and ``steps`` decode steps of one token of each row, as ``Variant.run`` does."""
    draws = torch.zeros(len(prompts), steps, device=generator.device)
    for _ in range(2):  # a prompt is captured when it comes again, which must not be in a counted round
        generator.prepare([len(prompt) for prompt in prompts], steps)
    yield
    tokens = sample(generator.prefill(prompts), Sampling(), draws[:, 0])
    synchronize(generator.device)
    yield
    generator.decode_n_tokens(tokens, draws, Sampling())
    synchronize(generator.device)
    yield


def recorded_messages(
    name: str, spec: ModelSpec, generator: Generator, prompts: list[list[int]]
) -> dict[str, list[Message]]:
    """Return the messages of a prefill and of a decode step. Raises UserError for unexpected ones."""
    model, schedule, itemsize = generator.model, generator.schedule, spec.torch_dtype.itemsize
    sums = sent_sums(model.layout, model.shape.tp_size)
    if isinstance(model, ParallelLlama):
        sums = model.shape.layers
    eager = Generator(model, generator.rope, generator.cache, schedule=schedule)
    rows, tokens = len(prompts), len(prompts[0])
    expected = {
        "prefill": expected_messages(model.shape, sums, itemsize, schedule, rows, tokens),
        "decode": expected_messages(model.shape, sums, itemsize, SEQUENTIAL, rows, 1),
    }
    return record_messages(name, model, prefill_and_decode(eager, prompts, 1), expected)
