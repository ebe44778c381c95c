"""The benchmark of training steps: models and schedules against each other in one run, interleaved.

A step is a forward and a backward pass over a batch of random tokens: cross-entropy on random targets, gradients of
all parameters in float32. The optimizer is no part of it: it does not communicate. Every variant also runs without
communication; the difference is what it waits for.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import record_function

from ladderize.checkpoint.llama import expected_tensors
from ladderize.checkpoint.reading import read_checkpoint
from ladderize.console import Console, human_bytes
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.memory import PeakMemory, available_bytes
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.alone_times import AloneTimes, synchronize
from ladderize.runtime.bench.environment import environment
from ladderize.runtime.bench.instrument import PhaseOperations, device_clock, phase_operations
from ladderize.runtime.bench.message_check import expected_messages, read_sums, sent_sums
from ladderize.runtime.bench.rank_bytes import weight_bytes
from ladderize.runtime.bench.trace import Overlap, trace_passes
from ladderize.runtime.bench.training.check import check_sent, check_step, reference_outcome, step_name
from ladderize.runtime.bench.training.document import (
    GradientAgreement,
    TimedStep,
    TimedVariant,
    TrainingBenchDocument,
    TrainingBenchRow,
    training_rows,
)
from ladderize.runtime.bench.training.options import TrainingBenchOptions
from ladderize.runtime.bench.training.plan import TrainingBenchPlan
from ladderize.runtime.bench.training.steps import STEP_PASSES, Batch, OpenStep, TrainingStep
from ladderize.runtime.collectives.base import Collectives, NoCommunication
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.collectives.emulated import emulate
from ladderize.runtime.collectives.observed import ObservedAllReduce, Recording, Traced
from ladderize.runtime.loader import CheckpointSource, RandomSource, Source, files_identity
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape, virtual_ranks
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import TrainedWeights, build_weights


def check_training_memory(plan: TrainingBenchPlan, group: Ranks) -> None:
    """Raise UserError if the ranks of this machine cannot hold the models. All ranks call it.

    On a CPU the ranks of a machine share its memory; each GPU has its own.
    """
    free = available_bytes(group.device)
    if free is None:
        return
    sharing = group.local_size if group.device.type == "cpu" else 1
    where = f" on each of {sharing} ranks" if sharing > 1 else ""
    weights, work = training_bytes(plan)
    if sharing * (weights + work) > free:
        raise UserError(
            f"{plan.specs[0].name}: weights take {human_bytes(weights)}, and a step {human_bytes(work)} of memory"
            f"{where}, and {human_bytes(free)} are free; choose a smaller model or --batch-size, a shorter --seq-len,"
            " fewer layers or models, or more ranks"
        )


def training_bytes(plan: TrainingBenchPlan) -> tuple[int, int]:
    """One rank's weights, those that layouts share counted once, and at the end of a forward pass of the largest batch
    what is kept for the backward pass and its gradients; what is not known is left out."""
    options = plan.options
    tokens = max(options.batch_sizes) * options.seq_len
    weights: dict[object, int] = {}
    work = 0
    for spec in plan.specs:
        shape = Shape.from_config(spec.config, tp_size=options.ranks, rank=0)
        weights[weights_key(spec, shape)] = weight_bytes(shape, 4, packed=False)
        width = spec.torch_dtype.itemsize
        converted = weight_bytes(shape, width, packed=False) if width < 4 else 0
        heads = (shape.own_heads + 2 * shape.own_kv_heads) * shape.head_dim
        # of a layer: both streams and what their norms give; q, k and v in fp32; what the MLP's products read and give
        token = shape.layers * (width * (4 * shape.hidden + 4 * shape.own_inner) + 4 * heads)
        token += (4 + width) * shape.own_vocab
        work = max(work, weight_bytes(shape, 4, packed=False) + converted + tokens * token)
    return sum(weights.values()), work


def weights_key(spec: ModelSpec, shape: Shape) -> tuple[object, ...]:
    """Equal for models that share their weights: the same tensors, cut into the same pieces."""
    apart = tuple(virtual_ranks(spec.layout, layer, shape.tp_size) for layer in range(shape.layers))
    # where a sum is dropped, ranks know only parts of the gradient of its bias
    dropped = spec.layout.attention_sync if shape.attention_bias else ()
    files = None if spec.folder is None else files_identity(read_checkpoint(spec.folder))
    return files, shape, apart, dropped, spec.dtype


class ModelStep:
    """See ``steps.TrainingStep``. group: the ranks of ``collectives``, or this one alone where they are emulated."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: TrainedWeights,
        schedule: Schedule,
        collectives: Collectives,
        batch: Batch,
        group: Ranks,
    ) -> None:
        self.spec, self.weights, self.schedule, self.batch, self.group = spec, weights, schedule, batch, group
        self.collectives = collectives
        self.model = TPTraining(weights, spec.config, spec.layout, collectives, schedule=schedule)
        self.positions = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
        # numbers of the one message in which the ranks sum what they know parts of (weights.sum_partial_gradients)
        self.partial = sum(parameter.numel() for parameter in weights.partial_parameters())
        for parameter, rows, copies in weights.copied_rows():
            self.partial += parameter[rows].numel() * weights.shape.tp_size // copies

    @property
    def is_real(self) -> bool:
        """Whether there are other ranks, and sums are sums."""
        return self.group.size > 1 and self.collectives.name != "none"

    def forward(self) -> Tensor:
        sums: Tensor = self.model(self.batch.ids, self.positions, self.batch.targets)
        return sums[0] / self.batch.targets.numel()

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if self.is_real:
            self.weights.sum_partial_gradients(self.group)
        elif self.collectives.ranks > 1:  # the same message, which others are said to wait for
            self.collectives.all_reduce(loss.new_zeros(self.partial))

    def gradients(self) -> Mapping[str, Tensor]:
        return {
            name: parameter.grad for name, parameter in self.weights.named_parameters() if parameter.grad is not None
        }

    def clear(self) -> None:
        self.weights.zero_grad(set_to_none=True)

    def messages(self) -> dict[str, Counter[int]]:
        """The gradient of what a sub-module reads is as large as the sum that it reads."""
        forward, backward = (self._messages(sums) for sums in (sent_sums, read_sums))
        emulated = self.collectives.ranks > 1 and not self.is_real
        once = Counter([4 * self.partial] if emulated else [])
        return {"forward": forward, "backward": backward + once}

    def _messages(self, sums: Callable[[Layout], int]) -> Counter[int]:
        rows, tokens = self.batch.ids.shape
        itemsize, layout = self.spec.torch_dtype.itemsize, self.spec.layout
        return expected_messages(self.weights.shape, sums(layout), itemsize, self.schedule, rows, tokens)

    @property
    def own_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.weights.parameters())


def step_opener(group: Ranks, ranks: int) -> OpenStep:
    """Opens steps of ``ranks`` ranks, real or emulated; weights are read once for all models that share them."""
    loaded: dict[object, TrainedWeights] = {}

    def open_step(spec: ModelSpec, schedule: Schedule, collectives: Collectives, batch: Batch) -> ModelStep:
        shape = Shape.from_config(spec.config, tp_size=ranks, rank=group.rank)
        key = weights_key(spec, shape)
        if key not in loaded:
            loaded[key] = _load(spec, shape, group.device)
        return ModelStep(spec, loaded[key], schedule, collectives, batch, group)

    return open_step


def _load(spec: ModelSpec, shape: Shape, device: torch.device) -> TrainedWeights:
    checkpoint = None if spec.folder is None else read_checkpoint(spec.folder)
    tensors = expected_tensors(spec.config)

    def source(dtype: torch.dtype) -> Source:
        if checkpoint is None:
            return RandomSource(tensors, dtype, device)
        return CheckpointSource(checkpoint, dtype, device)

    return build_weights(source, spec.config, shape, spec.layout, trained=frozenset(tensors), compute=spec.torch_dtype)


INSTRUMENTED_STEPS = 4


def measure_training(group: Ranks, plan: TrainingBenchPlan, console: Console) -> TrainingBenchDocument:
    """One rank's part: check and time the variants of ``plan``; reports the document as often as there is more of it.

    Raises UserError if a schedule computes something else than the sequential one.
    """
    options = plan.options
    check_training_memory(plan, group)
    surroundings = environment(group)
    open_step = step_opener(group, options.ranks)
    collectives, backend = _collectives(group, plan)
    alone = AloneTimes(group, collectives, plan.link, plan.specs[0].torch_dtype)
    checks: list[GradientAgreement] = []
    rows: list[TrainingBenchRow] = []

    def document(*, complete: bool) -> TrainingBenchDocument:
        return TrainingBenchDocument(
            complete=complete,
            emulated=options.emulate_tp is not None,
            checked=options.check,
            options=options,
            link=plan.link,
            message_bytes_outside_link_range=alone.sizes_outside_range(),
            backend=backend,
            environment=surroundings,
            checks=checks,
            alone_ms=alone.milliseconds(),
            rows=rows,
        )

    for batch_size in options.batch_sizes:
        if options.check:
            with console.stage(f"checking the schedules' gradients, batch {batch_size}"):
                checks += _check(group, plan, open_step, collectives, batch_size)
        done = len(rows)
        for measured in _measure_batch(group, plan, open_step, collectives, alone, batch_size, console):
            rows[done:] = measured
            group.report(document(complete=False))
    collectives.close()
    return document(complete=True)


def _collectives(group: Ranks, plan: TrainingBenchPlan) -> tuple[Collectives, str]:
    """The means of communication, and one sentence on them."""
    options, link = plan.options, plan.link
    if options.emulate_tp is not None:
        assert link is not None
        means = emulate(options.emulate_tp, link, group.device)
        return means, f"emulated: {options.emulate_tp} ranks over {link.name}"
    return choose(options.backend, group, max_bytes=plan.longest_message, in_flight=options.in_flight)


def _check(
    group: Ranks, plan: TrainingBenchPlan, open_step: OpenStep, collectives: Collectives, rows: int
) -> list[GradientAgreement]:
    """Every variant against the sequential schedule of its model whose sums block."""
    found = []
    for spec in plan.specs:
        batch = _batch(group, plan, spec.config["vocab_size"], rows)
        reference = reference_outcome(open_step, spec, collectives, batch, group)
        for schedule in plan.options.timed_schedules:
            step = open_step(spec, schedule, collectives, batch)
            found.append(check_step(step, reference, spec, schedule, rows, group))
            recording = Recording(collectives, time.perf_counter)
            check_sent(open_step(spec, schedule, recording, batch), recording, step_name(spec, schedule))
    return found


def _batch(group: Ranks, plan: TrainingBenchPlan, vocab: int, rows: int) -> Batch:
    return Batch.random(vocab, rows, plan.options.seq_len, plan.options.seed, group.device)


def _measure_batch(
    group: Ranks,
    plan: TrainingBenchPlan,
    open_step: OpenStep,
    collectives: Collectives,
    alone: AloneTimes,
    rows: int,
    console: Console,
) -> Iterator[list[TrainingBenchRow]]:
    """Yield the rows of one batch size as soon as they are timed, and again with what traces show."""
    options = plan.options
    silence = NoCommunication(collectives.ranks)
    batches = {spec.name: _batch(group, plan, spec.config["vocab_size"], rows) for spec in plan.specs}

    def opened(timed: TimedVariant, means: Collectives) -> TrainingStep:
        return open_step(timed.spec, timed.schedule, means, batches[timed.spec.name])

    variants = []
    for spec, schedule in plan.variants:
        communicating = TimedStep(open_step(spec, schedule, collectives, batches[spec.name]))
        silent = TimedStep(open_step(spec, schedule, silence, batches[spec.name]))
        variants.append(TimedVariant(spec, schedule, communicating, silent))
    _time_variants(group, variants, options, rows, console)
    with console.stage("timing the communication alone"):
        for timed in variants:
            recording = Recording(silence, device_clock(group.device))
            timed.operations = _instrument(opened(timed, recording), recording, alone)

    def measured() -> list[TrainingBenchRow]:
        shared = collectives.name == "shm"
        return training_rows(variants, options, rows, checked=options.check, shared_memory=shared)

    yield measured()
    if options.profile is not None:
        with console.stage(f"profiling, traces in {options.profile}"):
            for number, timed in enumerate(variants):
                traced = Traced(collectives)
                path = options.profile / _trace_name(number, timed, rows, group.rank)
                group.barrier()
                timed.overlap = _trace(opened(timed, traced), traced, path, group, alone)
        yield measured()


def _time_variants(
    group: Ranks, variants: list[TimedVariant], options: TrainingBenchOptions, rows: int, console: Console
) -> None:
    """Rounds over all variants, each with and without communication, in an order drawn anew for each round."""
    order = [(timed, way) for timed in variants for way in (timed.communicating, timed.silent)]
    shuffle = random.Random(options.seed)  # the same on every rank
    rounds = options.warmup + options.repeat
    # nothing moves on the terminal while a step is timed: the bar is drawn between rounds
    with console.progress(f"timing, batch {rows}", rounds, animated=False) as advance:
        for round_ in range(rounds):
            counted = round_ - options.warmup
            of = f"warm-up {round_ + 1} of {options.warmup}"
            advance(0, of if counted < 0 else f"round {counted + 1} of {options.repeat}")
            shuffle.shuffle(order)
            for timed, way in order:
                _time_round(group, timed, way, counted=counted >= 0)
            advance(1)


def _time_round(group: Ranks, timed: TimedVariant, way: TimedStep, *, counted: bool) -> None:
    with PeakMemory(group.device) as memory:
        passes = time_step(way.step, group)
    if counted:
        # the group is done when its last rank is
        way.add([max(seconds) for seconds in zip(*group.gather(passes), strict=True)])
    elif way is timed.communicating and memory.rise is not None:
        timed.peak_memory_bytes = max(timed.peak_memory_bytes or 0, way.step.own_bytes + memory.rise)


def time_step(step: TrainingStep, group: Ranks) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass. All ranks call it."""
    group.barrier()
    synchronize(group.device)
    begin = time.perf_counter()
    loss = step.forward()
    synchronize(group.device)
    middle = time.perf_counter()
    step.backward(loss)
    synchronize(group.device)
    end = time.perf_counter()
    step.clear()
    return middle - begin, end - middle


def _instrument(step: TrainingStep, recording: Recording, alone: AloneTimes) -> dict[str, PhaseOperations]:
    """What each pass of a step that does not communicate would send, and under how much of its compute."""
    runs: dict[str, list[list[ObservedAllReduce]]] = {name: [] for name in STEP_PASSES}
    gathered: dict[str, list[int]] = {}

    def note(name: str) -> None:
        runs[name].append(recording.all_reduces)
        gathered[name] = recording.gathered
        recording.all_reduces, recording.gathered = [], []

    for _ in range(INSTRUMENTED_STEPS):
        loss = step.forward()
        note("forward")
        step.backward(loss)
        note("backward")
        step.clear()
    return {name: phase_operations(runs[name], gathered[name], alone, embeddings=0) for name in STEP_PASSES}


def _trace(step: TrainingStep, traced: Traced, path: Path, group: Ranks, alone: AloneTimes) -> dict[str, Overlap]:
    def run() -> None:
        with record_function("forward"):
            loss = step.forward()
            synchronize(group.device)
        with record_function("backward"):
            step.backward(loss)
            synchronize(group.device)
        step.clear()

    return trace_passes(run, STEP_PASSES, path, group.device, traced, lambda size: alone.seconds("all_reduce", size))


def _trace_name(number: int, timed: TimedVariant, rows: int, rank: int) -> str:
    name = "".join(c if c.isalnum() or c in "+-." else "_" for c in Path(timed.spec.name).name)
    return f"{number}-{name}-{timed.schedule.name}-batch{rows}-rank{rank}.json"
