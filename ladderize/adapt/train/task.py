"""The subject of a retraining: models, layers and options, checked against each other before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from ladderize.adapt.data.sources import source_identity
from ladderize.adapt.lora import lora_config
from ladderize.adapt.methods import CONVERTED, LORA
from ladderize.adapt.teacher import check_pair
from ladderize.adapt.train.options import RetrainOptions, TrainOptions
from ladderize.adapt.train.student import check_attention, trained_tensors
from ladderize.blocks import compute_dtype, open_checkpoint, stored_dtype
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.convert.retraining import read_retrainings
from ladderize.errors import UserError
from ladderize.files.work import run_digest
from ladderize.layout import Layout, parse_ranges
from ladderize.modeling import tokenizer_hash
from ladderize.runtime.shards import check_runnable
from ladderize.runtime.training.model import check_trainable


@dataclass(frozen=True)
class RetrainJob:
    """The arguments of ``adapt_checkpoint``, which every rank receives."""

    model: str
    out: str
    options: RetrainOptions
    overwrite: bool
    verify: bool
    revision: str | None


@dataclass(frozen=True)
class Launch:
    """The launcher's decisions.

    device: its type.
    processes: the number of all of them.
    precision: Accelerate's mixed precision.
    accumulation: Accelerate's gradient accumulation steps; 1: none were asked for.
    sharded: by FSDP or DeepSpeed.
    """

    device: str
    processes: int = 1
    precision: str = "no"
    accumulation: int = 1
    sharded: bool = False


@dataclass(frozen=True)
class Task:
    """A retraining, checked but not loaded yet.

    everything: train embedding, norm and LM head too.
    """

    model: str
    checkpoint: Checkpoint
    teacher: Checkpoint | None
    layout: Layout
    layers: tuple[int, ...]
    everything: bool
    options: RetrainOptions
    training: TrainOptions
    compute: torch.dtype
    launch: Launch

    @property
    def is_lora(self) -> bool:
        return self.options.method == LORA

    @property
    def stored(self) -> torch.dtype:
        """The dtype in which OUT holds trained weights; float32 for an adapter."""
        dtype: torch.dtype = torch.float32 if self.is_lora else getattr(torch, stored_dtype(self.checkpoint))
        return dtype

    @property
    def sources(self) -> list[Checkpoint]:
        return [self.checkpoint] if self.teacher is None else [self.checkpoint, self.teacher]

    @property
    def compared(self) -> tuple[int, ...]:
        """The layers whose sub-modules are compared with the teacher's."""
        return tuple(self.layout.converted_layers) if self.options.objective.hidden_weight else ()

    @property
    def trained(self) -> frozenset[str]:
        """The tensors that full retraining changes."""
        return frozenset() if self.is_lora else trained_tensors(self.checkpoint.tensors, self.layers, self.everything)

    @property
    def lora(self) -> Any:
        return lora_config(self.checkpoint.config, self.layers, self.options.lora) if self.is_lora else None


def sharding_asked() -> bool:
    """Return whether ``accelerate launch`` was told to shard the model, by FSDP or DeepSpeed."""
    return any(map(parse_flag_from_env, ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")))


def open_task(model: str, options: RetrainOptions, launch: Launch, revision: str | None) -> Task:
    """Return the task of these options; raises UserError or LayoutError where models and options do not go together."""
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
    tp_size = options.tp_size
    check_runnable(checkpoint.config, layout, tp_size)
    if tp_size > 1:
        check_trainable(checkpoint.config)
        if launch.sharded:
            raise UserError(
                f"--tp-size {tp_size} shares the model out over the processes already, and accelerate launch asks for"
                " FSDP or DeepSpeed, too; leave one of them out"
            )
    if launch.processes % tp_size:
        raise UserError(
            f"--tp-size {tp_size} does not divide the {launch.processes} processes that the launcher started; start a"
            " multiple of it"
        )
    if launch.precision not in ("no", "bf16"):
        raise UserError(
            f"accelerate launch asks for mixed_precision {launch.precision}, whose range is too small for training;"
            " take bf16 or no"
        )
    launched = "bfloat16" if options.dtype == "auto" and launch.precision == "bf16" else options.dtype
    compute = compute_dtype(launched, stored_dtype(checkpoint))
    check_attention(options.attention, launch.device, compute)
    return Task(
        model=model,
        checkpoint=checkpoint,
        teacher=teacher,
        layout=layout,
        layers=layers_to_train(layout, options.train),
        options=options,
        everything=options.train == "all",
        training=options.resolve(
            checkpoint.config,
            launch.processes // tp_size,
            accumulation=launch.accumulation,
            left_by_alignment=left_by_alignment(checkpoint.folder),
        ),
        compute=compute,
        launch=launch,
    )


def check_control(model: str, options: RetrainOptions) -> None:
    """Raise UserError where a dense model, which is trained as a control, is given options for a converted one."""
    if options.train == CONVERTED:
        raise UserError(
            f"{model} is dense and has no converted layers to train; convert it first, or, to train the dense model"
            " itself as a control, name layers with --train, such as all"
        )
    if options.objective.hidden_weight:
        raise UserError(f"{model} is dense and has no converted layers for --hidden-weight to compare; leave it out")


def check_teaches(student: Checkpoint, teacher: Checkpoint, model: str, options: RetrainOptions) -> None:
    """Raise UserError where nothing would be learnt: a dense model whose only target is its own predictions has its
    minimal loss."""
    if options.objective.distill_weight == 1 and fingerprint(student) == fingerprint(teacher):
        raise UserError(
            f"{model} and --distill-from {options.distill_from} are the same dense model, whose divergence from itself"
            " and the gradient of it are zero; train the control on the text too, with a --distill-weight below 1, or"
            " on the text alone, without --distill-from"
        )


def left_by_alignment(folder: Path) -> float | None:
    """Return the held-out divergence that alignment left; None if the weights were changed after it."""
    found = read_retrainings(folder)
    return found[-1].left_by_alignment if found else None


def layers_to_train(layout: Layout, train: str) -> tuple[int, ...]:
    """Return the layers that ``--train`` names."""
    if train == CONVERTED:
        return tuple(layout.converted_layers)
    return tuple(parse_ranges(train, layout.num_layers, option="--train"))


def run_identity(task: Task) -> dict[str, Any]:
    """Return everything that a run must have in common with the one it resumes."""
    return {
        "model": fingerprint(task.checkpoint),
        "layout": task.layout.to_config(),
        "teacher": fingerprint(task.teacher) if task.teacher is not None else None,
        "tokenizer": tokenizer_hash(task.checkpoint.folder),
        "data": [source_identity(spec) for spec in (*task.options.data, *task.options.eval_data)],
        "dtype": str(task.compute).removeprefix("torch."),
        "processes": task.launch.processes,
        "tp_size": task.options.tp_size,
        **task.training.fixed(),
    }


def result_digest(task: Task, identity: Mapping[str, Any]) -> str:
    """Return a digest of everything that decides the result: ``run_identity``, and the options that may change between
    runs."""
    asked = {"write": task.options.write, "eval_every": task.training.eval_every}
    return run_digest({**identity, **task.training.settings(), **asked})
