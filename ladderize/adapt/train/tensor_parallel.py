"""Training on the runtime's tensor-parallel model. The ranks of a group work on the same rows, each with its slices;
groups are data parallel (DDP)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ladderize.adapt.train.task import Task
from ladderize.adapt.train.training_model import TrainingModel, make_optimizer
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import Console
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.vocab_losses import STATISTICS_BYTES
from ladderize.runtime.training.weights import TrainedWeights, build_weights


class TensorParallelTraining(TrainingModel):
    """One rank of a student and its teacher, both computed by the runtime."""

    def __init__(
        self,
        accelerator: Accelerator,
        student: TPTraining,
        teacher: TPTraining | None,
        collectives: Collectives,
        data: Ranks,
        tensor: Ranks,
        stored: Mapping[str, torch.dtype],
        *,
        weight_decay: float = 0.0,
    ) -> None:
        self.weights, self.collectives, self.tensor = student.weights, collectives, tensor
        self.vocabulary = student.vocabulary
        self.pieces = student.weights.pieces()
        self.shapes = {name: tuple(piece.shape) for name, piece in self.pieces.items()}
        self.holders = {name: piece.parameters for name, piece in self.pieces.items()}
        wrapped: Any = student
        if data.size > 1:
            wrapped = DistributedDataParallel(
                student,
                device_ids=[data.device] if data.device.type == "cuda" else None,
                process_group=data.group,
                gradient_as_bucket_view=True,
                init_sync=False,
            )
        scored = None if teacher is None else teacher.scored_logits
        super().__init__(accelerator, wrapped, scored, stored, tp_size=tensor.size)
        self.optimizer = make_optimizer(self.parameters, weight_decay, fused=True)
        # The share of each row's squares that this rank counts, so that rows held by several ranks, or virtual ranks,
        # count once: [rows it holds].
        shares: dict[Tensor, Tensor] = {parameter: torch.ones(len(parameter)) for parameter in self.parameters}
        for piece in self.pieces.values():
            if piece.dim is None:
                for parameter in piece.parameters:
                    shares[parameter] /= tensor.size
        for group in self.weights.copied_rows():
            for parameter, rows, _ in group:
                if parameter in shares:
                    shares[parameter][rows] /= len(group) * tensor.size // student.shape.kv_heads
        self.shares = [share.to(data.device) for share in shares.values()]

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Sum the gradients of which each rank of a group has a part, then clip; returns the norm before."""
        self.weights.sum_partial_gradients(self.tensor)
        squares = torch.zeros((), dtype=torch.float64, device=self.tensor.device)
        gradients = [parameter.grad for parameter in self.parameters]
        for gradient, share in zip(gradients, self.shares, strict=True):
            if gradient is not None:
                rows = gradient.flatten(1) if gradient.ndim > 1 else gradient[:, None]
                squares += (torch.linalg.vector_norm(rows, dim=1).square() * share).sum()
        norm = self.tensor.sum(squares).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)  # clamped on the device, so the host does not wait
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(scale)
        return norm

    def whole(self, name: str) -> Tensor:
        return self.pieces[name].whole(Tensor.detach, self.tensor)

    def save(self, folder: Path) -> None:
        weights = [parameter.detach() for parameter in self.parameters]
        torch.save({"weights": weights, "optimizer": self.optimizer.state_dict()}, self._state(folder))

    def load(self, folder: Path) -> None:
        state = torch.load(self._state(folder), map_location=self.tensor.device, weights_only=True)
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["weights"], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])

    def _state(self, folder: Path) -> Path:
        return folder / f"rank-{self.accelerator.process_index}.pt"

    def close(self) -> None:
        self.collectives.settle()


def build_tensor_parallel(
    task: Task, accelerator: Accelerator, ranks: Ranks, console: Console
) -> TensorParallelTraining:
    """Join the ranks of a model, load it and its teacher, and make the optimizer."""
    options, schedule = task.options, Schedule(task.options.schedule)
    data, tensor = ranks.split(options.tp_size)
    tokens = task.pace.micro_batch_size * task.pace.seq_len
    stream = tokens * int(task.checkpoint.config["hidden_size"]) * task.compute.itemsize
    most = max(stream, tokens * STATISTICS_BYTES)
    collectives, chosen = choose("auto", tensor, max_bytes=most, in_flight=schedule.in_flight)
    console.note(f"sums over {chosen}")

    def load(checkpoint: Checkpoint, layout: Layout, shared: TrainedWeights | None = None) -> TPTraining:
        """Return the student, or its teacher, which has the student's weights where they are frozen and equal."""
        is_student = shared is None
        weights = build_weights(
            lambda dtype: CheckpointSource(checkpoint, dtype, tensor.device).read,
            checkpoint.config,
            Shape.from_config(checkpoint.config, tp_size=tensor.size, rank=tensor.rank),
            layout,
            trained=task.trained if is_student else frozenset(),
            compute=task.compute,
            shared=shared,
        )
        return TPTraining(
            weights,
            checkpoint.config,
            layout,
            collectives,
            schedule=schedule,
            gradient_checkpointing=options.gradient_checkpointing and is_student,
        ).train(is_student)

    with console.stage("loading the models" if task.loads_teacher else "loading the model"):
        student, teacher = load(task.checkpoint, task.layout), None
        if task.teacher is not None and task.loads_teacher:
            teacher = load(task.teacher, Layout.dense(task.layout.num_layers), student.weights)
    groups = collectives, data, tensor
    decay = options.weight_decay
    return TensorParallelTraining(accelerator, student, teacher, *groups, task.stored, weight_decay=decay)
