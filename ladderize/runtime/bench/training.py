"""``ladderize bench --train``: forward and backward passes. The optimizer sends nothing: it is left out.

Before any timing, every schedule must give the loss and gradients of the sequential one whose sums block; the tests
compare that one with transformers. This check computes in float32: bfloat16 alone takes a gradient up to 0.2 off."""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ladderize.checkpoint.config import expected_tensors
from ladderize.layout import APART
from ladderize.ranks.device import avoid_cudnn_attention
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.messages import Message, Observed, expected_messages, read_sums, record_messages, sent_sums
from ladderize.runtime.bench.rounds import Benchmark, Variant, synchronize, variant_name
from ladderize.runtime.collectives.base import Collectives, Handle, NoCommunication
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import TrainedWeights, build_weights

_TOLERANCE = 1e-4  # of the norm of what is compared: for another order of sums in float32
# A tensor whose gradient is tiny beside all others' is compared with this share of their norm instead of its own.
SMALL_TENSOR = 1e-3


def open_steps(
    benchmark: Benchmark, specs: Sequence[ModelSpec], open_step: "OpenStep", collectives: Collectives, rows: int
) -> list[Variant]:
    """Open every model with every schedule, and leave out those whose gradients are not the sequential schedule's.
    Raises UserError if one sends other messages than its layout asks for."""
    document, group, variants = benchmark.document, benchmark.group, []
    options = document.options
    with benchmark.console.stage(f"opening and checking the schedules, batch {rows}"):
        for spec in specs:
            batch = Batch.random(spec.config["vocab_size"], rows, options.prompt_len, options.seed, group.device)
            expected = None
            if options.check:
                expected = outcome_of(open_step(spec, SEQUENTIAL, Blocking(collectives), batch).in_float32())
            for schedule in options.timed_schedules:
                step = open_step(spec, schedule, collectives, batch)
                silent = open_step(spec, schedule, NoCommunication(collectives.ranks), batch)
                name = variant_name(spec.name, schedule.name, options)
                messages = step.recorded_messages(name)
                if expected is not None:
                    title = f"{name}, {rows} rows"
                    agreement = check_outcome(outcome_of(step.in_float32()), expected, group)
                    if isinstance(agreement, str):
                        document.failed[title] = f"{title}: {agreement}"
                        continue
                    document.checks[title] = agreement
                runs = step.model, step.run, silent.run
                variants.append(Variant(name, spec, *runs, schedule=schedule.name, messages=messages))
    return variants


def step_opener(group: Ranks, ranks: int) -> "OpenStep":
    """Return a function that opens steps of ``ranks`` ranks, real or emulated. Weights are read once for models that
    share them."""
    loaded: dict[object, TrainedWeights] = {}
    avoid_cudnn_attention()  # as in training

    def open_step(spec: ModelSpec, schedule: Schedule, collectives: Collectives, batch: Batch) -> ModelStep:
        shape = Shape.from_config(spec.config, tp_size=ranks, rank=group.rank)
        key = trained_key(spec, shape)
        if key not in loaded:
            source, trained = functools.partial(spec.reader, device=group.device), expected_tensors(spec.config)
            loaded[key] = build_weights(
                source, spec.config, shape, spec.layout, trained=frozenset(trained), compute=spec.torch_dtype
            )
        return ModelStep(spec, loaded[key], schedule, collectives, batch, group)

    return open_step


def trained_key(spec: ModelSpec, shape: Shape) -> tuple[object, ...]:
    """Return a key that is equal for models that share their weights, and how their gradients are summed: where a sum
    is delayed or dropped, each rank knows only a part of the gradient of its bias."""
    biases = (shape.decoder.o_bias, spec.layout.attention_sync), (shape.decoder.mlp_bias, spec.layout.mlp_sync)
    apart = [has_bias and mode in APART for has_bias, modes in biases for mode in modes]
    return *spec.weights_key(shape), tuple(apart)


class ModelStep:
    """A model with a batch. ``group``: the ranks of ``collectives``, or this one alone where they are emulated."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: TrainedWeights,
        schedule: Schedule,
        collectives: Collectives,
        batch: Batch,
        group: Ranks,
    ) -> None:
        self.spec, self.weights, self.batch, self.group = spec, weights, batch, group
        self.model = TPTraining(weights, spec.config, spec.layout, collectives, schedule=schedule)
        # there are other ranks, whose gradients are really summed
        self.is_real = group.size > 1 and collectives.name != "none"

    def in_float32(self) -> "ModelStep":
        """Return the same step from the same weights, computed in float32."""
        weights = copy.copy(self.weights)
        weights.compute = torch.float32
        return ModelStep(self.spec, weights, self.model.schedule, self.model.collectives, self.batch, self.group)

    def run(self, passes: int) -> Iterator[None]:
        """Run a forward and a backward pass, as ``Variant.run`` does."""
        yield
        loss = self.forward()
        synchronize(self.group.device)
        yield
        self.backward(loss)
        synchronize(self.group.device)
        yield
        self.weights.zero_grad(set_to_none=True)

    def forward(self) -> Tensor:
        sums: Tensor = self.model(self.batch)
        return sums[0] / self.batch.targets.numel()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, also of parameters that several ranks hold in part. There must be none before."""
        loss.backward()
        if self.is_real:
            self.weights.sum_partial_gradients(self.group)
        elif self.model.collectives.ranks > 1:  # the same message, for its emulated delay
            self.model.collectives.all_reduce(loss.new_zeros(self.weights.partial_numbers))

    def recorded_messages(self, name: str) -> dict[str, list[Message]]:
        """Return the messages of each pass. Raises UserError for unexpected ones, with the step's name. The gradient of
        a sub-module's input is as large as the sum that it reads."""
        shape, layout, small = self.weights.shape, self.spec.layout, 4 * self.weights.partial_numbers
        size = self.spec.torch_dtype.itemsize, self.model.schedule, *self.batch.input_ids.shape
        forward = expected_messages(shape, sent_sums(layout, shape.tp_size), *size)
        count, total = expected_messages(shape, read_sums(layout, shape.tp_size), *size)
        if self.model.collectives.ranks > 1 and not self.is_real:
            count, total = count + 1, total + small
        sent = record_messages(name, self.model, self.run(1), {"forward": forward, "backward": (count, total)})
        if self.is_real:
            sent["backward"].append(Message("all_reduce", OfGroup(self.group), small))
        return sent


OpenStep = Callable[[ModelSpec, Schedule, Collectives, Batch], ModelStep]


class OfGroup(Collectives):
    """The way of ``sum_partial_gradients``, which is another than the model's."""

    def __init__(self, group: Ranks) -> None:
        super().__init__(group.size)
        self.group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group.sum(x)


# ---- the check ----


class Blocking(Observed):
    """A backend whose all-reduces are waited for at once."""

    def send(self, all_reduce: Callable[[Tensor], Handle], x: Tensor) -> Handle:
        total = all_reduce(x).wait()
        return Handle(lambda: total)


@dataclass(frozen=True)
class Outcome:
    loss: float
    gradients: dict[str, Tensor]  # of this rank
    norm: float  # of all ranks' gradients


def outcome_of(step: ModelStep) -> Outcome:
    """Run ``step`` once and return its outcome. All ranks call it."""
    loss = step.forward()
    step.backward(loss)
    parameters = step.weights.named_parameters()
    gradients = {name: weight.grad.detach().clone() for name, weight in parameters if weight.grad is not None}
    step.weights.zero_grad(set_to_none=True)
    squares = step.group.gather(sum(_norm(gradient) ** 2 for gradient in gradients.values()))
    return Outcome(float(loss.detach()), gradients, sum(squares) ** 0.5)


def check_outcome(outcome: Outcome, wanted: Outcome, group: Ranks) -> dict[str, float] | str:
    """Return the differences of a float32 step from the reference, or a failure in words, equal on all ranks."""
    loss = abs(outcome.loss - wanted.loss) / max(abs(wanted.loss), 1e-12)
    worst, name = max(group.gather(_worst(outcome, wanted)))
    if not math.isfinite(wanted.loss) or not math.isfinite(wanted.norm):
        return (
            f"the loss is {wanted.loss:.6g} and the norm of its gradients {wanted.norm:.6g}: check the model's weights"
        )
    if not loss <= _TOLERANCE:  # also for NaN
        return f"the loss is {outcome.loss:.6g}, where the sequential schedule gives {wanted.loss:.6g}"
    if not worst <= _TOLERANCE:
        return f"the gradient of {name} is {worst:.3g} off that of the sequential schedule, relative"
    return {"loss_difference": loss, "gradient_difference": worst, "tolerance": _TOLERANCE}


def _worst(outcome: Outcome, wanted: Outcome) -> tuple[float, str]:
    """Return the largest relative difference of a tensor's gradient, and its name. NaN counts as infinite, and so does
    a gradient that only one of the two has."""
    if missing := outcome.gradients.keys() ^ wanted.gradients.keys():
        return math.inf, min(missing)
    worst = 0.0, ""
    for name, gradient in wanted.gradients.items():
        scale = max(_norm(gradient), SMALL_TENSOR * wanted.norm, 1e-30)
        difference = _norm(outcome.gradients[name] - gradient) / scale
        worst = max(worst, (math.inf if math.isnan(difference) else difference, name))
    return worst


def _norm(gradient: Tensor) -> float:
    return float(gradient.float().norm())
