"""What a retraining is about: models, layers and options, checked against each other before anything is loaded."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ladderize.adapt.data.sources import source_identity
from ladderize.adapt.data.stream import Stream
from ladderize.adapt.lora import lora_config
from ladderize.adapt.methods import CONVERTED, LORA
from ladderize.adapt.retrain.hf_model import check_attention, trained_tensors
from ladderize.adapt.retrain.options import RetrainOptions, TrainOptions
from ladderize.adapt.teacher import check_pair
from ladderize.blocks import open_checkpoint, stored_dtype
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import human_bytes
from ladderize.convert.retraining import read_retrainings
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.work import run_digest
from ladderize.layout import Layout, parse_ranges
from ladderize.modeling import tokenizer_hash
from ladderize.ranks.group import Ranks
from ladderize.ranks.training import compute_dtype, wants_fsdp
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import check_runnable
from ladderize.runtime.training.model import check_trainable

METRICS_BYTES = 250  # of a step's line in metrics.jsonl


@dataclass(frozen=True)
class RetrainJob:
    """What every rank is to do. Its fields are the arguments of ``adapt_checkpoint``."""

    model: str
    out: str
    options: RetrainOptions
    overwrite: bool
    verify: bool
    revision: str | None


@dataclass(frozen=True)
class Task:
    """What is retrained and how, opened and checked; nothing is loaded yet. everything: embedding, norm and LM head
    too. sharded: over the ``data_ranks``, which read different data, by FSDP2."""

    model: str
    checkpoint: Checkpoint
    teacher: Checkpoint | None
    layout: Layout
    layers: tuple[int, ...]
    everything: bool
    options: RetrainOptions
    training: TrainOptions
    compute: torch.dtype
    sharded: bool
    data_ranks: int

    @property
    def tp_size(self) -> int:
        """Processes that share one copy of the model."""
        return self.options.tp_size

    @property
    def schedule(self) -> Schedule:
        """Of the sub-modules."""
        return self.options.schedule

    @property
    def sources(self) -> list[Checkpoint]:
        return [self.checkpoint] if self.teacher is None else [self.checkpoint, self.teacher]

    @property
    def compared(self) -> tuple[int, ...]:
        """Layers whose sub-modules are compared with the teacher's."""
        return tuple(self.layout.converted_layers) if self.options.objective.hidden_weight else ()

    @property
    def trained(self) -> frozenset[str]:
        """Tensors that full retraining changes."""
        if self.options.method == LORA:
            return frozenset()
        return trained_tensors(self.checkpoint.tensors, self.layers, self.everything)

    @property
    def lora(self) -> Any:
        return (
            lora_config(self.checkpoint.config, self.layers, self.options.lora) if self.options.method == LORA else None
        )


def open_task(model: str, options: RetrainOptions, ranks: Ranks, revision: str | None) -> Task:
    """Check models and options against each other; raises UserError or LayoutError. The ranks say nothing to each
    other."""
    checkpoint = open_checkpoint(model, revision)
    layout = Layout.from_config(checkpoint.config)
    if layout.is_dense:
        check_control(model, options)
    teacher = None
    if options.distill_from is not None:
        teacher = open_checkpoint(options.distill_from)
        check_pair(checkpoint, teacher, model, options.distill_from)
        if layout.is_dense:
            check_teaches(checkpoint, teacher, model, options)
    if (teacher is not None) != options.objective.has_teacher:
        raise UserError("distill_from (the teacher) and distill_weight or hidden_weight must be given together")
    check_runnable(checkpoint.config, layout, options.tp_size)
    if options.tp_size > 1:
        check_trainable(checkpoint.config)
    data_ranks = ranks.groups_of(options.tp_size)
    compute = compute_dtype(options.dtype, stored_dtype(checkpoint))
    check_attention(options.attention, ranks.device.type, compute)
    return Task(
        model=model,
        checkpoint=checkpoint,
        teacher=teacher,
        layout=layout,
        layers=layers_to_train(layout, options.train),
        options=options,
        everything=options.train == "all",
        training=options.resolve(checkpoint.config, data_ranks, left_by_alignment=left_by_alignment(checkpoint.folder)),
        compute=compute,
        sharded=wants_fsdp(ranks.size, options.tp_size),
        data_ranks=data_ranks,
    )


def check_control(model: str, options: RetrainOptions) -> None:
    """Raise UserError where a dense model, which is trained as a control, is to be trained like a converted one."""
    if options.train == CONVERTED:
        raise UserError(
            f"{model} is dense and has no converted layers to train; convert it first, or, to train the dense model"
            " itself as a control, name layers with --train, such as all"
        )
    if options.objective.hidden_weight:
        raise UserError(f"{model} is dense and has no converted layers for --hidden-weight to compare; leave it out")


def check_teaches(student: Checkpoint, teacher: Checkpoint, model: str, options: RetrainOptions) -> None:
    """Raise UserError where nothing would be learnt: the loss of a dense model is at its minimum where its only target
    is its own predictions."""
    if options.objective.distill_weight == 1 and fingerprint(student) == fingerprint(teacher):
        raise UserError(
            f"{model} and --distill-from {options.distill_from} are the same dense model, whose divergence from itself"
            " and the gradient of it are zero; train the control on the text too, with a --distill-weight below 1, or"
            " on the text alone, without --distill-from"
        )


def left_by_alignment(folder: Path) -> float | None:
    """The held-out divergence that alignment left, if that was the last thing done to the weights."""
    found = read_retrainings(folder)
    return found[-1].left_by_alignment if found else None


def layers_to_train(layout: Layout, train: str) -> tuple[int, ...]:
    """The layers that ``--train`` names."""
    if train == CONVERTED:
        return tuple(layout.converted_layers)
    return tuple(parse_ranges(train, layout.num_layers, option="--train"))


def check_length(task: Task, folder: Path) -> None:
    """Refuse a training whose log alone, a line for each step, would not fit on the disk."""
    steps = task.training.about_steps
    if (needed := steps * METRICS_BYTES) > (free := free_bytes(folder)):
        raise UserError(
            f"{steps:,} steps would write {human_bytes(needed)} of metrics to {folder}, where {human_bytes(free)} are"
            " free; lower --max-steps or --max-tokens, or raise --batch-size"
        )


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(output.existing_parent(folder)).free


def run_identity(task: Task, stream: Stream) -> dict[str, Any]:
    """What a run has to have in common with the one that it goes on with."""
    return {
        "model": fingerprint(task.checkpoint),
        "layout": task.layout.to_config(),
        "teacher": fingerprint(task.teacher) if task.teacher is not None else None,
        "tokenizer": tokenizer_hash(task.checkpoint.folder),
        "data": stream.identity(),
        "eval_data": [source_identity(spec) for spec in task.options.eval_data],
        "dtype": str(task.compute).removeprefix("torch."),
        **task.training.fixed(),
    }


def result_digest(task: Task, identity: Mapping[str, Any]) -> str:
    """Of everything that decides the result: with ``run_identity`` also what may change on the way."""
    asked = {"write": task.options.write, "eval_every": task.training.eval_every}
    return run_digest({**identity, **task.training.settings(), **asked})
