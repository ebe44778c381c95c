"""``ladderize bench``: a run of inference is the prefill of a batch of prompts and the decoding after it.

They are never mixed: prefill is bound by compute and sends long messages, decoding by memory and sends short ones."""

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Walk
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ladderize.checkpoint.config import check_config
from ladderize.console import SILENT, Console
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable, write_json
from ladderize.memory import check_room
from ladderize.ranks.device import default_device
from ladderize.ranks.environment import already_started, is_main_rank
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import BenchDocument, environment, show_bench
from ladderize.runtime.bench.messages import Message, expected_messages, record_messages, sent_sums
from ladderize.runtime.bench.options import BenchOptions, layout_names, named_layout
from ladderize.runtime.bench.reference_check import check_models, checked_specs, longest_checked
from ladderize.runtime.bench.rounds import Benchmark, Variant, measure, synchronize, variant_name
from ladderize.runtime.bench.training import open_steps, step_opener, trained_key
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.differentiable import PendingSum
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.links import Interconnect, read_interconnect
from ladderize.runtime.decode import Generator, Sampling, sample
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.launch import check_group_size, run
from ladderize.runtime.model import TPLlama
from ladderize.runtime.schedule import SEQUENTIAL
from ladderize.runtime.shards import (
    Shape,
    cache_bytes,
    check_runnable,
    dense_config,
    group_size,
    read_shape,
    weight_bytes,
    with_layers,
)
from ladderize.runtime.spec import (
    ModelSpec,
    WeightCache,
    checkpoint_spec,
    choose_operations,
    open_generator,
    shape_spec,
)
from ladderize.runtime.step import Step


def bench(options: BenchOptions, *, console: Console = SILENT) -> BenchDocument:
    """Check the models, time them against each other on the runtime, and return the result; a console that speaks shows
    it. Raises UsageError or UserError if something cannot be measured, a model fails its check, or a trace disproves an
    overlap. What was measured by then is kept in ``options.out`` and shown."""
    if options.engine == "vllm":
        raise UsageError("vLLM is timed by ladderize.vllm.bench.bench_vllm")
    options = replace(options, device=options.device or default_device())
    return run_and_show(options, console, measure_models, plan_bench(options))


def run_and_show(
    options: BenchOptions, console: Console, measure: Callable[..., BenchDocument], models: Any
) -> BenchDocument:
    """Call ``measure(ranks, models, options, console)`` on every rank and return its document. Each document that rank
    0 reports is written to --out at once. The last one is shown at the end, also after an error. Raises UserError for a
    model or schedule that failed its check, and for an overlap that a trace disproves."""
    newest: list[BenchDocument] = []

    def keep(document: BenchDocument) -> None:
        newest[:] = [document]
        if options.out is not None:
            write_json(options.out, document.to_dict())

    if options.out is not None:
        check_writable(options.out, inputs=[options.random_weights, options.link])
    if options.tp_size > 1 and not already_started():
        console.note(f"starting {options.tp_size} ranks")
    work, device = (measure, models, options, console), options.device or default_device()
    try:
        document: BenchDocument = run(
            *work,
            tp_size=options.tp_size,
            device=device,
            threads=options.threads,
            report=keep,
            own_heap=options.engine == "runtime",  # vLLM is timed as it starts
        )
        if is_main_rank():
            keep(document)
    finally:  # also after Ctrl-C
        for shown in newest:
            console.document(shown.to_dict())
            show_bench(shown, console)
            if options.out is not None:
                console.note(f"wrote {options.out}")
    if document.failed:
        first, *others = document.failed.values()
        raise UserError(f"{first}, so it was not timed" + (f", and neither were {len(others)} more" if others else ""))
    overlaps = [(row.model, *item) for row in document.rows for item in (row.overlap or {}).items()]
    if disproved := [f"{model} ({phase})" for model, phase, overlap in overlaps if overlap.proven is False]:
        names = " and ".join(disproved)
        raise UserError(f"nothing overlapped in the trace of {names}, although it should: its row is not valid")
    return document


# ---- the models, before any process starts ----


def plan_bench(options: BenchOptions) -> list[ModelSpec]:
    """Return the checked models. Raises UsageError for faults of the arguments alone, else UserError or LayoutError."""
    specs = chosen_models(options)
    chosen_link(options, specs)
    for spec in specs if options.train else ():
        check_runnable(spec.config, spec.layout, options.ranks, name=options.ranks_option)
        if spec.dtype == "float16":
            raise UserError(f"{spec.name}: float16 has too small a range for training; give --dtype bfloat16")
    if "parallel" in options.baselines:
        check_dense("parallel", specs[0])
    return specs


def chosen_models(options: BenchOptions) -> list[ModelSpec]:
    """Return the checked models that the options name, split over the ranks. Makes the folder of --profile."""
    options.check_named()
    check_group_size(options.tp_size, options.device or default_device())
    split: dict[str, Any] = {"tp_size": options.ranks, "dtype": options.dtype, "option": options.ranks_option}
    if options.random_weights is None:
        specs = [checkpoint_spec(model, **split) for model in options.models]
    else:
        config = read_shape(options.random_weights)
        check_config(config)
        config = dense_config(with_layers(config, options.num_layers or config["num_hidden_layers"]))
        specs = []
        for name in layout_names(options.layout):
            layout = named_layout(name, config["num_hidden_layers"], options.sync_tp_size or options.ranks)
            specs.append(shape_spec(config, layout, name=name, **split))
        if options.sync_tp_size is not None and all(spec.layout.sync_tp_size is None for spec in specs):
            raise UsageError("--sync-tp-size has no effect: none of --layout delays or drops a sync point")
    for spec in specs:
        if options.columns > spec.positions:
            names = "--prompt-len" if options.train else "--prompt-len and --output-len"
            raise UserError(
                f"{spec.name}: {names} make {options.columns} tokens, over the model's {spec.positions} positions"
            )
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
    return specs


def chosen_link(options: BenchOptions, specs: Sequence[ModelSpec]) -> Interconnect | None:
    """Return the link of an emulated group. Raises UsageError where --outer-link joins no groups, or unlike ones."""
    if options.link is None:
        return None
    link = read_interconnect(options.link)
    if options.outer_link is not None:
        sizes = {group_size(spec.layout.sync_tp_size, options.ranks) for spec in specs} - {1}
        if len(sizes) != 1:
            raise UsageError(
                f"--outer-link joins groups of ranks: --emulate-tp {options.ranks} must be a multiple of the models'"
                " sync_tp_size, and that the same of all"
            )
        link = link.joined_by(read_interconnect(options.outer_link, "--outer-link"), sizes.pop())
    link.at(options.ranks)  # raises for ranks that are no groups
    return link


def check_dense(baseline: str, spec: ModelSpec) -> None:
    if not spec.layout.is_dense:
        raise UserError(f"--baselines {baseline} needs a dense model as the first one, and {spec.name} is not dense")


# ---- in each rank ----


def measure_models(group: Ranks, specs: list[ModelSpec], options: BenchOptions, console: Console) -> BenchDocument:
    """Check the models and time those that pass. All ranks call it. Raises UserError if none passes, or if they do not
    fit into memory."""
    check_bench_memory(specs, options, group)
    operations = None
    if not options.train:
        chosen = choose_operations(group, specs[0].torch_dtype)
        operations = chosen.name
        if chosen.note:
            console.warn(chosen.note)
    interconnect = chosen_link(options, specs)
    link = None if interconnect is None else interconnect.at(options.ranks)
    if link is not None:
        collectives = emulate(options.ranks, link, group.device, interconnect)
        backend = f"emulated: {options.ranks} ranks over {link.name}"
    else:
        longest = longest_message(specs, options)
        in_flight = max(schedule.in_flight for schedule in options.timed_schedules)
        collectives, backend = choose(options.backend, group, max_bytes=longest, in_flight=in_flight)
    document = BenchDocument(False, options, backend, environment(group, operations=operations), link)
    benchmark = Benchmark(document, group, console)
    with torch.inference_mode(not options.train):
        if options.train:
            open_step = step_opener(group, options.ranks)
            opener = partial(open_steps, benchmark, specs, open_step, collectives)
        else:
            weights = WeightCache(group.device, pack=True, replicate_vocab=options.replicate_vocab)
            check_models(benchmark, specs, collectives, weights)
            sound = [spec for spec in specs if spec.name not in document.failed]
            # baselines are of the first model that was named
            baselines = options.baselines if specs[0] in sound else ()
            opener = partial(open_models, benchmark, sound, baselines, collectives, weights)
        measure(benchmark, opener)
    collectives.settle()
    return document


def longest_message(specs: list[ModelSpec], options: BenchOptions) -> int:
    """Return the bytes of the longest message: hidden states or logits. In training, sums are checked in float32."""
    rows, longest = max(options.batch_sizes), 0
    for spec in specs:
        width = 4 if options.train else spec.torch_dtype.itemsize
        of_row = max(spec.config["hidden_size"] * options.prompt_len, spec.config["vocab_size"])
        longest = max(longest, width * rows * of_row)
    for spec in checked_specs(specs, options):
        longest = max(longest, spec.torch_dtype.itemsize * longest_checked(spec, options.prompt_len))
    return longest


def check_bench_memory(specs: list[ModelSpec], options: BenchOptions, group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold what is checked and timed. All ranks call it."""
    advice = "choose fewer or smaller models, fewer layers, a smaller --batch-size, or more ranks"
    advice += "; with --no-check no whole model is needed"
    needed = needed_bytes(specs, options, group.device)
    check_room(needed, group.device, "what is checked and timed", advice, processes=group.local_size)


def needed_bytes(specs: list[ModelSpec], options: BenchOptions, device: torch.device) -> int:
    """Return the bytes of one rank's weights, and of the largest batch's KV caches or one model's gradients. Weights,
    and caches of one size, that layouts share count once. One model has gradients at a time. An emulated rank has no
    others to be checked with, so before that it holds whole models."""
    weights, whole, caches, on_cpu = {}, {}, set(), device.type == "cpu"
    for spec in specs:
        shape = Shape.from_config(spec.config, tp_size=options.ranks, rank=0, replicate_vocab=options.replicate_vocab)
        if options.train:
            weights[trained_key(spec, shape)] = weight_bytes(shape, 4, packed=False)
            continue
        width = spec.torch_dtype.itemsize
        weights[spec.weights_key(shape)] = weight_bytes(shape, width, packed=on_cpu)
        caches.add(cache_bytes(shape, spec.layout, max(options.batch_sizes), options.columns, width))
    for spec in checked_specs(specs, options) if options.emulate_tp is not None else ():
        shape = Shape.from_config(spec.config, tp_size=1, rank=0)
        whole[spec.weights_key(shape)] = weight_bytes(shape, spec.torch_dtype.itemsize, packed=on_cpu)
    timed = sum(weights.values()) + (max(weights.values()) if options.train else sum(caches))
    return max(timed, sum(whole.values()))


def open_models(
    benchmark: Benchmark,
    specs: Sequence[ModelSpec],
    baselines: Sequence[str],
    collectives: Collectives,
    weights: WeightCache,
    batch: int,
) -> list[Variant]:
    """Open the models by every schedule, then the baseline of the first. Models with caches of one size share one,
    since only one runs at a time. Raises UserError if one sends other messages than its layout asks for."""
    options, group = benchmark.document.options, benchmark.group
    timed = [(spec, schedule, TPLlama) for spec in specs for schedule in options.timed_schedules]
    if "parallel" in baselines:
        timed.append((specs[0], SEQUENTIAL, ParallelLlama))
    variants: list[Variant] = []
    caches: list[KVCache] = []
    with benchmark.console.stage("loading weights"):
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

    def walk(self, ids: Tensor, step: Step, cache: KVCache, *, alone: bool) -> Walk[None, None, Tensor]:
        pending = self.embed(ids, alone)
        yield
        residual, x = self.arrived(pending)
        for index in range(self.shape.layers):
            numbers = 2 * index, 2 * index + 1
            attention, mlp = map(self.weights.take_sublayer, numbers)
            (partial_sum,) = self.partials(numbers[0], attention, x, None, step, cache)
            (mlp_sum,) = self.partials(numbers[1], mlp, x, None, step, cache)
            for bias in (self.scaled(attention.bias), self.scaled(mlp.bias)):
                residual, _ = self.add_bias(residual, residual, bias)
            pending = PendingSum(self.collectives, residual, None, partial_sum + mlp_sum, blocking=alone)
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
    sums = model.shape.layers if isinstance(model, ParallelLlama) else sent_sums(model.layout, model.shape.tp_size)
    eager = Generator(model, generator.rope, generator.cache, schedule=schedule)
    rows, tokens = len(prompts), len(prompts[0])
    expected = {
        "prefill": expected_messages(model.shape, sums, itemsize, schedule, rows, tokens),
        "decode": expected_messages(model.shape, sums, itemsize, SEQUENTIAL, rows, 1),
    }
    messages = record_messages(name, model, prefill_and_decode(eager, prompts, 1), expected)
    if not model.shape.replicate_vocab:  # each chunk's first sum is the embedding's
        for message in (*messages["prefill"][: schedule.parts(rows, tokens)], messages["decode"][0]):
            message.vocabulary = True
    return messages
