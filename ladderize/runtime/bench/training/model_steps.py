"""A training step of the runtime's own model, with all its parameters trained."""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ladderize.checkpoint.llama import expected_tensors
from ladderize.checkpoint.reading import read_checkpoint
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.message_check import expected_messages, read_sums, sent_sums
from ladderize.runtime.bench.training.memory_need import weights_key
from ladderize.runtime.bench.training.steps import Batch, OpenStep
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.loader import CheckpointSource, RandomSource, Source
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.weights import TrainedWeights, build_weights


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
