"""Training on the runtime's tensor-parallel model: every rank holds its slices of the weights, their gradients and
their optimizer state, and the ranks of one group work on the same rows.

Beside it data parallel: DDP, or FSDP2, which gathers a rank's slices sub-module by sub-module and sums their gradients
so. The runtime's walk goes through parts of layers, in whatever order its schedule says, and not through modules: it
calls one where it begins to use its weights, and these stay until their gradients are known.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from ladderize.adapt.lora import PEFT_PREFIX, initial_adapter
from ladderize.adapt.methods import LORA
from ladderize.adapt.retrain.engine import Engine, distributed_like, shard
from ladderize.adapt.retrain.task import Task
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import Console
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.loader import CheckpointSource
from ladderize.runtime.shards import Shape
from ladderize.runtime.training.lora import LoraPlan, TrainedLora
from ladderize.runtime.training.model import TPTraining
from ladderize.runtime.training.vocab_losses import vocab_parallel_losses
from ladderize.runtime.training.weights import TrainedWeights, build_weights


@dataclass(frozen=True)
class TPRanks:
    """all: every rank. tensor: those that share a model. data: those that hold the same part of it, for other rows."""

    all: Ranks
    tensor: Ranks
    data: Ranks

    @classmethod
    def of(cls, ranks: Ranks, tp_size: int) -> "TPRanks":
        data, tensor = ranks.split(tp_size)
        return cls(ranks, tensor, data)


class TPEngine(Engine):
    """One rank of a student, which the runtime computes.

    mesh: FSDP2's, of the data ranks; None: each of them holds all of its slices. teacher: the dense model, shared out
    over the same ranks. compared: see ``Engine``.
    """

    def __init__(
        self,
        student: TPTraining,
        places: TPRanks,
        collectives: Collectives,
        *,
        compute: torch.dtype,
        weight_decay: float,
        mesh: Any = None,
        teacher: TPTraining | None = None,
        compared: Sequence[int] = (),
    ) -> None:
        for model in (student, teacher):
            if model is not None and mesh is not None:
                for own in (*model.weights.attentions, *model.weights.mlps, model):
                    shard(own, mesh, compute=compute, reshard=False)
        if teacher is not None and mesh is not None:
            register_fsdp_forward_method(teacher, "scored_logits")  # what is called instead of forward
        super().__init__(
            student,
            None if teacher is None else teacher.scored_logits,
            student.weights.pieces(),
            ranks=places.all,
            tensor=places.tensor,
            data=places.data,
            sharded=mesh is not None,
            weight_decay=weight_decay,
            compared=compared,
            collectives=collectives,
        )
        self.weights, self.shape = student.weights, student.shape
        # Of each parameter's rows, how much of their squares this rank counts, so that what several ranks of a group
        # hold counts once: [rows that it holds].
        shares = {parameter: torch.ones(len(parameter)) for parameter in self.parameters}
        for piece in self.pieces.values():
            for parameter, rows in piece.parts:
                shares[parameter][rows] /= self.tensor.size if piece.dim is None else piece.copies
        device = self.ranks.device
        self.shares = [local_part(distributed_like(own, share.to(device))) for own, share in shares.items()]

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """First sums the gradients that each rank of a group knows a part of."""
        self.weights.sum_partial_gradients(self.tensor, own_rows)
        squares = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        gradients = [None if parameter.grad is None else local_part(parameter.grad) for parameter in self.parameters]
        for gradient, share in zip(gradients, self.shares, strict=True):
            if gradient is not None:
                rows = gradient.flatten(1) if gradient.ndim > 1 else gradient[:, None]
                squares += (torch.linalg.vector_norm(rows, dim=1).square() * share).sum()
        self.ranks.sum(squares)
        if not self.sharded:
            squares /= self.data.size  # they all have the same gradients
        norm = squares.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)  # nobody asks the device whether it is less
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(scale)
        return norm

    def entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        assert self.collectives is not None
        start, vocab = self.shape.vocab_start, self.shape.vocab
        return vocab_parallel_losses(logits, targets, None, 1.0, self.collectives, start, vocab)[0]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: Tensor, rows: slice) -> Tensor:
    """Of ``rows`` of a tensor that may be sharded those that this rank holds: a view, outside of autograd."""
    begin, end, _ = rows.indices(len(tensor))
    first = 0
    if isinstance(tensor, DTensor):  # FSDP2 shares rows out as torch.chunk does
        first = tensor.device_mesh.get_local_rank() * -(-len(tensor) // tensor.device_mesh.size())
    return local_part(tensor)[max(0, begin - first) : max(0, end - first)]


STATISTICS_BYTES = 28  # of a token, that vocabulary-parallel losses send


def build_tp_engine(task: Task, ranks: Ranks, console: Console) -> TPEngine:
    """Join the ranks of a model, load it and its teacher, and make the optimizer. All ranks call it."""
    places = TPRanks.of(ranks, task.tp_size)
    collectives = open_collectives(task, places.tensor, console)
    with console.stage("loading the models" if task.teacher is not None else "loading the model"):
        student = _model(task, task.checkpoint, task.layout, places.tensor, collectives)
        teacher = None
        if task.teacher is not None:
            dense = Layout.dense(task.layout.num_layers)
            shared = student.weights if not task.sharded else None  # what FSDP2 shares out is the student's alone
            teacher = _model(task, task.teacher, dense, places.tensor, collectives, shared, frozen=True).eval()
    return TPEngine(
        student.train(),
        places,
        collectives,
        compute=task.compute,
        weight_decay=task.training.weight_decay,
        mesh=places.data.mesh() if task.sharded else None,
        teacher=teacher,
        compared=task.compared,
    )


def open_collectives(task: Task, tensor: Ranks, console: Console) -> Collectives:
    """What the ranks of a model send each other their sums with: one object for student and teacher."""
    tokens = task.training.micro_batch_size * task.training.seq_len
    stream = tokens * int(task.checkpoint.config["hidden_size"]) * task.compute.itemsize
    most = max(stream, tokens * STATISTICS_BYTES)
    in_flight = task.schedule.in_flight + (task.schedule.chunks if task.compared else 0)  # sums of dropped attentions
    collectives, chosen = choose("auto", tensor, max_bytes=most, in_flight=in_flight)
    console.note(f"sums over {chosen}")
    return collectives


def _model(
    task: Task,
    checkpoint: Checkpoint,
    layout: Layout,
    tensor: Ranks,
    collectives: Collectives,
    shared: TrainedWeights | None = None,
    *,
    frozen: bool = False,
) -> TPTraining:
    """The student, or with ``frozen`` its teacher, which takes frozen tensors from ``shared`` where they are equal."""
    shape = Shape.from_config(checkpoint.config, tp_size=tensor.size, rank=tensor.rank)
    lora = None
    if task.options.method == LORA and not frozen:
        asked, start = task.options.lora, functools.partial(adapter_start, seed=task.training.seed)
        plan = LoraPlan(asked.rank, asked.scale / asked.rank, asked.targets, task.layers, asked.dropout)
        lora = TrainedLora(plan, shape, start, tensor.device)
    weights = build_weights(
        lambda dtype: CheckpointSource(checkpoint, dtype, tensor.device),
        checkpoint.config,
        shape,
        layout,
        trained=frozenset() if frozen else task.trained,
        compute=task.compute,
        lora=lora,
        shared=shared,
    )
    return TPTraining(
        weights,
        checkpoint.config,
        layout,
        collectives,
        schedule=task.schedule,
        temperature=task.training.objective.temperature,
        gradient_checkpointing=bool(task.options.gradient_checkpointing) and not frozen,
    )


def adapter_start(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """A whole adapter matrix as it begins, by its name in a file: the numbers that ``build_student`` draws."""
    own = name.removeprefix(PEFT_PREFIX).removesuffix(".weight") + ".default.weight"
    return initial_adapter(own, torch.Size(shape), seed)
