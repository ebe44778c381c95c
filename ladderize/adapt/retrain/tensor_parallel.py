"""Training on the runtime's tensor-parallel model: every rank holds its slices of the weights, their gradients and
their optimizer state, and the ranks of one group work on the same rows.

Beside it data parallel: DDP, or FSDP2 with all of a rank's slices as one unit, since the runtime's walk goes through
parts of layers, in whatever order its schedule says, and not through modules that FSDP2 could gather one by one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from ladderize.adapt.lora.config import PEFT_PREFIX
from ladderize.adapt.methods import LORA
from ladderize.adapt.retrain.engine import MOMENTS, WEIGHT, Engine, adamw
from ladderize.adapt.retrain.models import initial_adapter
from ladderize.adapt.retrain.sharding import assign, local_part, own_rows, shard, shard_rows, whole
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
from ladderize.runtime.training.weights import Piece, TrainedWeights, build_weights


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
    """Wraps one rank of a student and its optimizer.

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
        self.student: TPTraining = student
        self.compared = compared
        self.teacher, self.has_teacher = teacher, teacher is not None
        self.ranks, self.data, self.tensor, self.collectives = places.all, places.data, places.tensor, collectives
        self.sharded = mesh is not None
        if self.sharded:
            shard(student, mesh, compute=compute, reshard=None)
            if teacher is not None:
                shard(teacher, mesh, compute=compute, reshard=None)
                register_fsdp_forward_method(teacher, "scored_logits")  # what is called instead of forward
        self.pieces: dict[str, Piece] = student.weights.pieces()
        self.shapes = {name: tuple(piece.shape) for name, piece in self.pieces.items()}
        parameters = [parameter for piece in self.pieces.values() for parameter in piece.parameters]
        self.parameters = list(dict.fromkeys(parameters))  # q, k and v are pieces of one
        self.shares = self._shares()
        fused = places.all.device.type == "cuda" or not self.sharded
        self.optimizer = adamw(self.parameters, weight_decay, fused=fused)
        self.parallel = None
        if self.data.size > 1 and not self.sharded:
            own = [self.ranks.device] if self.ranks.device.type == "cuda" else None
            self.parallel = DistributedDataParallel(
                student,
                device_ids=own,
                process_group=self.data.group,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # every rank reads the same files
                init_sync=False,
            )

    def _shares(self) -> list[Tensor]:
        """Of each parameter's rows, how much of their squares this rank counts, so that what several ranks of a group
        hold counts once: [rows that it holds]."""
        shares = {parameter: torch.ones(len(parameter)) for parameter in self.parameters}
        for piece in self.pieces.values():
            for parameter, rows in piece.parts:
                shares[parameter][rows] /= self.tensor.size if piece.dim is None else piece.copies
        return [shard_rows(share.to(self.ranks.device), parameter) for parameter, share in shares.items()]

    # ---- a step ----

    def to_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.ranks.device, non_blocking=True) for name, tensor in batch.items()}

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        scores, outputs = None, self.outputs(batch)
        if self.teacher is not None:
            with torch.no_grad():
                scores = self.teacher.scored_logits(*_inputs(batch), outputs)
        forward: nn.Module = self.student if self.parallel is None else self.parallel
        sums: Tensor = forward(**batch, teacher_logits=scores, teacher_outputs=outputs)
        return sums

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """First sums the gradients that each rank of a group knows a part of."""
        self.student.weights.sum_partial_gradients(self.tensor, own_rows)
        squares = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for parameter, share in zip(self.parameters, self.shares, strict=True):
            if parameter.grad is not None:
                rows = (
                    local_part(parameter.grad).flatten(1) if parameter.ndim > 1 else local_part(parameter.grad)[:, None]
                )
                squares += (torch.linalg.vector_norm(rows, dim=1).square() * share).sum()
        self.ranks.sum(squares)
        if not self.sharded:
            squares /= self.data.size  # they all have the same gradients
        norm = squares.sqrt()
        scale = float(max_norm / (norm + 1e-6))
        if scale < 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(scale)
        return norm

    def sum(self, values: Tensor) -> Tensor:
        return self.ranks.sum(values).div_(self.tensor.size)

    # ---- scoring ----

    @torch.no_grad()
    def teacher_entropy(self, batch: Mapping[str, Tensor]) -> Tensor:
        assert self.teacher is not None
        shape, targets = self.teacher.shape, batch["targets"][batch["targets"] >= 0]
        logits = self.teacher.scored_logits(*_inputs(batch))
        return vocab_parallel_losses(logits, targets, None, 1.0, self.collectives, shape.vocab_start, shape.vocab)[0]

    # ---- what is trained, whole and by name ----

    def gather(self, name: str, kept: str) -> Tensor:
        """All ranks get it."""
        return self.pieces[name].whole(lambda parameter: whole(self._kept(parameter, kept)), self.tensor).detach()

    def has_moments(self, name: str) -> bool:
        return all(parameter in self.optimizer.state for parameter in self.pieces[name].parameters)

    def assign(self, name: str, value: Tensor) -> None:
        self._assign(self.pieces[name], lambda parameter: parameter, value)

    def assign_moments(self, name: str, step: int, moments: Mapping[str, Tensor]) -> None:
        piece = self.pieces[name]
        for parameter in piece.parameters:
            state = self.optimizer.state[parameter]
            if not state:  # no other piece of this parameter came before
                device = parameter.device if self.optimizer.defaults["fused"] else "cpu"
                state["step"] = torch.tensor(float(step), device=device)
                state.update({moment: torch.zeros_like(parameter) for moment in MOMENTS})
        for moment in MOMENTS:
            self._assign(piece, functools.partial(self._kept, kept=moment), moments[moment])

    def _kept(self, parameter: Tensor, kept: str) -> Tensor:
        tensor: Tensor = parameter if kept == WEIGHT else self.optimizer.state[parameter][kept]
        return tensor

    @torch.no_grad()
    def _assign(self, piece: Piece, of: Callable[[Tensor], Tensor], value: Tensor) -> None:
        """Put this rank's slice of a whole value into what ``of`` says of the piece's parameters."""
        value = value.to(self.ranks.device, torch.float32)
        if not self.sharded:
            piece.assign(of, value)
            return
        own = {parameter: whole(of(parameter)).clone() for parameter in piece.parameters}
        piece.assign(own.__getitem__, value)
        for parameter, tensor in own.items():
            assign(of(parameter), tensor)

    @torch.no_grad()
    def round_weights(self, dtype: torch.dtype) -> None:
        for parameter in self.parameters:
            parameter.copy_(parameter.to(dtype))

    def close(self) -> None:
        """Finish all communication; all ranks call it."""
        self.collectives.close()


def _inputs(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return batch["input_ids"], batch["position_ids"], batch["targets"]


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
        start = functools.partial(adapter_start, seed=task.training.seed)
        lora = TrainedLora(lora_plan(task), shape, layout, start, tensor.device)
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
        gradient_checkpointing=task.options.gradient_checkpointing and not frozen,
    )


def lora_plan(task: Task) -> LoraPlan:
    """LoRA as the task asks for it, on the runtime's projections."""
    lora = task.options.lora
    return LoraPlan(
        rank=lora.rank,
        scaling=lora.scale / lora.rank,
        dropout=lora.dropout,
        targets=lora.targets,
        layers=tuple(task.layers),
    )


def adapter_start(name: str, shape: tuple[int, ...], *, seed: int) -> Tensor:
    """A whole adapter matrix as it begins, by its name in a file: the numbers that ``build_student`` draws."""
    own = name.removeprefix(PEFT_PREFIX).removesuffix(".weight") + ".default.weight"
    return initial_adapter(own, torch.Size(shape), seed)
