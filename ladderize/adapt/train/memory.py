"""The memory and disk space that a training takes, by one formula from headers alone. Tests compare it with measured
peaks."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.methods import FLASH, FLEX, LORA
from ladderize.adapt.train.options import RetrainOptions
from ladderize.adapt.train.states import STATE_BYTES, STATES_KEPT, WEIGHT_BYTES
from ladderize.adapt.train.student import trained_tensors
from ladderize.adapt.train.task import Launch, Task, layers_to_train, open_task, sharding_asked
from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.checkpoint.config import expected_tensors, head_dim, kv_head_count, parameter_count
from ladderize.console import Console, human_bytes, human_count
from ladderize.convert.retraining import read_retrainings
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.records import Record
from ladderize.layout import DROPPED, Layout, format_ranges
from ladderize.memory import available_bytes
from ladderize.ranks.environment import launched

FP32 = 4
OTHER_BYTES = 500_000_000  # for the interpreter and the libraries, roughly


def trained_numbers(config: Mapping[str, Any], layout: Layout, options: RetrainOptions) -> int:
    """Return the number of parameters that ``full`` or ``lora`` trains in a model of this layout."""
    layers, shapes = layers_to_train(layout, options.train), expected_tensors(config)
    if options.method == LORA:
        matrices = [name for name in trained_tensors(shapes, layers, False) if name.endswith(".weight")]
        adapted = [name for name in matrices if name.split(".")[-2] in options.lora.targets]
        return sum(options.lora.rank * sum(shapes[name]) for name in adapted)
    return sum(math.prod(shapes[name]) for name in trained_tensors(shapes, layers, options.train == "all"))


def saved_bytes(trained: int) -> int:
    """Return the disk space of unfinished work in bytes: the kept states, the one being written, and the best
    weights."""
    return trained * (STATE_BYTES * (STATES_KEPT + 1) + WEIGHT_BYTES)


@dataclass(frozen=True)
class TrainingEstimate(Record):
    """The document of --dry-run.

    memory_bytes: of each process, approximately.
    memory_parts: its parts, by name.
    state_bytes: the most that unfinished work takes on disk.
    output_bytes: the most that OUT takes on disk.
    """

    model: str
    method: str
    layout: str
    layers: list[int]
    parameters: int
    trained_parameters: int
    processes: int
    steps: int
    batch_size: int
    micro_batch_size: int
    seq_len: int
    memory_bytes: int
    memory_parts: dict[str, int]
    state_bytes: int
    output_bytes: int

    def text(self) -> str:
        """Return the estimate in words."""
        parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in self.memory_parts.items() if value)
        return (
            f"{self.method}, layers {format_ranges(self.layers)}: {human_count(self.trained_parameters)} of"
            f" {human_count(self.parameters)} parameters in training, about {self.steps:,} steps of"
            f" {self.batch_size} rows of {self.seq_len} tokens, {self.micro_batch_size} at once. Memory of each of"
            f" {self.processes} process{'es' if self.processes > 1 else ''}: about {human_bytes(self.memory_bytes)}"
            f" ({parts}). On the disk at most {human_bytes(self.state_bytes)} of unfinished work, and"
            f" {human_bytes(self.output_bytes)} for OUT."
        )

    def warn_where_short(self, device: torch.device, processes: int, console: Console) -> None:
        """Warn where less memory is free than this.

        processes: those of this machine, which share a CPU's memory.
        """
        free = available_bytes(device)
        if free is not None and self.memory_bytes > (own := free // (processes if device.type == "cpu" else 1)):
            console.warn(
                f"this needs about {human_bytes(self.memory_bytes)} for each process, and {human_bytes(own)} are free;"
                " a smaller --micro-batch-size, --gradient-checkpointing, --method lora, or more GPUs (--tp-size,"
                " FSDP2 by accelerate launch) take less"
            )


def estimate(task: Task) -> TrainingEstimate:
    """Return the memory of each process: weights, gradients, moments, activations and the teacher."""
    config, options, training, layout = task.checkpoint.config, task.options, task.training, task.layout
    tp_size, compute = options.tp_size, task.compute.itemsize
    parameters, trained = parameter_count(config), trained_numbers(config, layout, options)
    hidden, vocab, inner = (int(config[key]) for key in ("hidden_size", "vocab_size", "intermediate_size"))
    tokens = training.micro_batch_size * training.seq_len
    frozen = parameters if task.is_lora else parameters - trained
    # Left out: norms and replicated KV heads are on every rank.
    held = task.launch.processes if task.launch.sharded else tp_size
    shared = 0 if task.launch.sharded else frozen  # held once for both models
    if task.is_lora and shared and read_retrainings(task.checkpoint.folder):  # the base then differs from the teacher
        shapes, behind = expected_tensors(config), range(min(layout.converted_layers, default=0), layout.num_layers)
        shared -= sum(math.prod(shapes[name]) for name in trained_tensors(shapes, behind, False))
    per_layer, width = parameters // layout.num_layers, FP32 if compute == FP32 else 3  # streams are wide, products not

    def kept(layer: int) -> int:
        """Return the numbers kept per token: both norms' inputs and outputs, q, k, v, the heads, and four of the MLP's
        width."""
        ranks = (layout.sync_tp_size or 1) // tp_size if layout.attention_sync[layer] == DROPPED else 1
        heads = 3 * int(config["num_attention_heads"]) // tp_size + 4 * max(1, kv_head_count(config) // tp_size)
        return 3 * hidden + heads * head_dim(config) + 4 * hidden * ranks + 4 * inner // tp_size

    first = 0 if task.everything and not task.is_lora else min(task.layers, default=0)
    numbers = [kept(layer) for layer in range(first, layout.num_layers)]
    activations = tokens * sum(numbers) * width
    if options.gradient_checkpointing:
        activations = tokens * (hidden * FP32 * len(numbers) + max(numbers) * width)
    logits = tokens * -(-vocab // tp_size)
    teacher = task.teacher is not None
    parts = {
        "weights": (trained * FP32 + frozen * compute) // held,
        "gradients": trained * FP32 // held,
        "moments": 2 * trained * FP32 // held,
        "teacher": (parameters - shared) * compute // held if teacher else 0,
        # two layers and the ends, and a layer's gradients; without sharding, the narrow copies of a pass
        "gathered": (2 + 2 * teacher) * (per_layer + vocab * hidden) * compute + per_layer * FP32
        if task.launch.sharded
        else trained * compute // held * (compute < FP32),
        "activations": activations,
        # the mask, a copy made on the way, and the values added to the scores
        "masks": tokens * training.seq_len * (2 + compute) if options.attention not in (FLASH, FLEX) else 0,
        # logits with their gradient, the teacher's, and fp32 copies of a part of them
        "logits": logits * compute * (2 + teacher) + min(logits, LOGITS_AT_ONCE) * FP32 * (3 + 2 * teacher),
        "compared outputs": tokens * hidden * (4 * len(task.compared) * compute + 3 * FP32) * bool(task.compared),
        "other": OTHER_BYTES,
    }
    return TrainingEstimate(
        model=task.model,
        method=options.method,
        layout=str(layout),
        layers=list(task.layers),
        parameters=parameters,
        trained_parameters=trained,
        processes=task.launch.processes,
        steps=training.about_steps,
        batch_size=training.batch_size,
        micro_batch_size=training.micro_batch_size,
        seq_len=training.seq_len,
        memory_bytes=sum(parts.values()),
        memory_parts=parts,
        state_bytes=saved_bytes(trained),
        output_bytes=FP32 * trained if task.is_lora else task.checkpoint.weight_bytes,
    )


def estimate_training(model: str, options: RetrainOptions, *, revision: str | None = None) -> TrainingEstimate:
    """Return what ``adapt_checkpoint`` would take with these options; of the models only headers are read.

    Raises UserError, UsageError or LayoutError for models and options that do not go together.
    """
    options.check()
    options.budget.check()
    options.check_data()
    processes = max(launched().size, options.tp_size)
    launch = Launch(options.device, processes, sharded=sharding_asked())
    return estimate(open_task(model, options, launch, revision))


def check_disk(task: Task, folder: Path) -> None:
    """Raise UserError where the states of a training would not fit on the disk."""
    needed = saved_bytes(trained_numbers(task.checkpoint.config, task.layout, task.options))
    if needed > (free := shutil.disk_usage(output.existing_parent(folder)).free):
        raise UserError(
            f"{folder} needs {human_bytes(needed)} for the states of the training, but only {human_bytes(free)} are"
            " free there; name an OUT on another disk"
        )
