"""The training step of one variant on one rank, which is timed, checked, counted and traced.

A step is a forward and a backward pass over a batch of random tokens: cross-entropy on random targets, gradients of all
parameters in float32. The optimizer is no part of it: it does not communicate.
"""

import copy
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ladderize.checkpoint.config import expected_tensors
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.plan import expected_messages, read_sums, sent_sums
from ladderize.runtime.bench.rounds import Message, Timed, synchronize, take_messages
from ladderize.runtime.bench.training.document import STEP_PASSES
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.observed import Recording
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import TrainedWeights, build_weights


class ModelStep:
    """A model with a batch.

    group: the ranks of ``collectives``, or this one alone where they are emulated.
    """

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
        self.partial = weights.partial_numbers  # in the one message that sums gradients

    def in_float32(self) -> "ModelStep":
        """Return the same step from the same weights, computed in float32."""
        weights = copy.copy(self.weights)
        weights.compute = torch.float32
        spec = replace(self.spec, dtype="float32")
        return ModelStep(spec, weights, self.schedule, self.collectives, self.batch, self.group)

    @property
    def is_real(self) -> bool:
        """True where there are other ranks whose gradients are really summed."""
        return self.group.size > 1 and self.collectives.name != "none"

    def forward(self) -> Tensor:
        """Return the mean loss [], float32."""
        sums: Tensor = self.model(self.batch)
        return sums[0] / self.batch.targets.numel()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, also of parameters that several ranks hold in part. There must be none before."""
        loss.backward()
        if self.is_real:
            self.weights.sum_partial_gradients(self.group)
        elif self.collectives.ranks > 1:  # the same message, for its emulated delay
            self.collectives.all_reduce(loss.new_zeros(self.partial))

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradient of this rank's part of each trained tensor, by name."""
        return {
            name: parameter.grad for name, parameter in self.weights.named_parameters() if parameter.grad is not None
        }

    def clear(self) -> None:
        """Drop the gradients."""
        self.weights.zero_grad(set_to_none=True)

    def record_messages(self, name: str) -> dict[str, list[Message]]:
        """Run the step once, and return the messages of each pass. Raises UserError unless they are the expected ones.

        name: the step, for the message of the error.
        """
        recording, expected = Recording(self.collectives, time.perf_counter), self.expected_messages()
        step = ModelStep(self.spec, self.weights, self.schedule, recording, self.batch, self.group)
        loss = step.forward()
        forward = take_messages(f"{name}: a forward pass", recording, expected["forward"])
        step.backward(loss)
        step.clear()
        backward = take_messages(f"{name}: a backward pass", recording, expected["backward"])
        if self.is_real:  # the message that goes another way (``sum_partial_gradients``)
            backward.append(Message("all_reduce", 4 * self.partial))
        return {"forward": forward, "backward": backward}

    def expected_messages(self) -> dict[str, Counter[int]]:
        """Return the messages of each pass's collectives, as counts by bytes.

        The gradient of a sub-module's input is as large as the sum that it reads.
        """

        def messages(sums: Callable[[Layout], int]) -> Counter[int]:
            rows, tokens = self.batch.input_ids.shape
            itemsize, layout = self.spec.torch_dtype.itemsize, self.spec.layout
            return expected_messages(self.weights.shape, sums(layout), itemsize, self.schedule, rows, tokens)

        emulated = self.collectives.ranks > 1 and not self.is_real
        once = Counter([4 * self.partial] if emulated else [])
        return {"forward": messages(sent_sums), "backward": messages(read_sums) + once}

    @property
    def own_bytes(self) -> int:
        """The bytes of this rank's weights."""
        return sum(parameter.nbytes for parameter in self.weights.parameters())


class TimedStep(Timed):
    """The timing of a forward and a backward pass. ``samples_ms`` has their sum, too, as ``step``."""

    parts = STEP_PASSES

    def __init__(self, step: ModelStep, device: torch.device) -> None:
        super().__init__()
        self.step, self.device, self.own_bytes = step, device, step.own_bytes

    def sample(self) -> tuple[float, float]:
        synchronize(self.device)
        begin = time.perf_counter()
        loss = self.step.forward()
        synchronize(self.device)
        middle = time.perf_counter()
        self.step.backward(loss)
        synchronize(self.device)
        end = time.perf_counter()
        self.step.clear()
        return middle - begin, end - middle

    def step_seconds(self) -> list[float]:
        """Return the seconds of both passes together in each counted round."""
        return [sum(passes) for passes in zip(*self.seconds.values(), strict=True)]

    def samples_ms(self) -> dict[str, list[float]]:
        return {"step": [1e3 * one for one in self.step_seconds()], **super().samples_ms()}


OpenStep = Callable[[ModelSpec, Schedule, Collectives, Batch], ModelStep]


def step_opener(group: Ranks, ranks: int) -> OpenStep:
    """Return a function that opens steps of ``ranks`` ranks, real or emulated. Weights are read once for models that
    share them."""
    loaded: dict[object, TrainedWeights] = {}

    def open_step(spec: ModelSpec, schedule: Schedule, collectives: Collectives, batch: Batch) -> ModelStep:
        shape = Shape.from_config(spec.config, tp_size=ranks, rank=group.rank)
        key = trained_key(spec, shape)
        if key not in loaded:
            loaded[key] = build_weights(
                functools.partial(spec.source, device=group.device),
                spec.config,
                shape,
                spec.layout,
                trained=frozenset(expected_tensors(spec.config)),
                compute=spec.torch_dtype,
            )
        return ModelStep(spec, loaded[key], schedule, collectives, batch, group)

    return open_step


def trained_key(spec: ModelSpec, shape: Shape) -> tuple[object, ...]:
    """Return a key that is equal for models that share their weights and how their gradients are summed."""
    # where a sum is dropped, each rank knows only a part of the gradient of its bias
    dropped = spec.layout.attention_sync if shape.decoder.o_bias else ()
    return *spec.weights_key(shape), dropped
