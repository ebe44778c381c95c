"""The tensor-parallel engine of a task: process groups, messages, and the models, of which each rank reads its
slices."""

import functools

import torch
from torch import Tensor

from ladderize.adapt.lora.config import PEFT_PREFIX
from ladderize.adapt.methods import LORA
from ladderize.adapt.retrain.models import initial_adapter
from ladderize.adapt.retrain.task import Task
from ladderize.adapt.retrain.tp_engine import TPEngine, TPRanks
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
from ladderize.runtime.training.weights import TrainedWeights, build_weights

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
