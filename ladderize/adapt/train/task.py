"""The subject of a retraining: models, layers and options, checked against each other before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from ladderize.adapt.lora import lora_config
from ladderize.adapt.methods import CONVERTED, LORA
from ladderize.adapt.teacher import check_pair
from ladderize.adapt.train.options import FIXED, LORA_FIELDS, RetrainOptions, TrainOptions
from ladderize.adapt.train.student import trained_tensors
from ladderize.blocks import compute_dtype
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint, torch_dtype
from ladderize.checkpoint.tensors import fingerprint
from ladderize.convert.inspection import read_retrainings
from ladderize.data.files import source_identity
from ladderize.errors import UserError
from ladderize.files.regular import resolved
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

    @property
    def aligned(self) -> Path:
        """The folder of the aligned checkpoint that ``--align`` leaves beside OUT."""
        return Path(f"{resolved(self.out)}-aligned")


@dataclass(frozen=True)
class Launch:
    """The launcher's decisions.

    precision: Accelerate's mixed precision.
    accumulation: its steps of gradient accumulation; 1: none were asked for.
    sharded: by FSDP or DeepSpeed.
    """

    processes: int = 1
    precision: str = "no"
    accumulation: int = 1
    sharded: bool = False


def sharding_asked() -> bool:
    return any(map(parse_flag_from_env, ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")))


@dataclass(frozen=True)
class Task:
    """A retraining, checked but not loaded yet."""

    model: str
    checkpoint: Checkpoint
    teacher: Checkpoint | None
    layout: Layout
    layers: tuple[int, ...]
    options: TrainOptions
    compute: torch.dtype
    launch: Launch

    @property
    def is_lora(self) -> bool:
        return self.options.method == LORA

    @property
    def stored(self) -> dict[str, torch.dtype]:
        """The dtypes in which OUT holds trained tensors, by name; an adapter's, which are float32, are not named."""
        return {name: torch_dtype(self.checkpoint.tensors[name].dtype) for name in self.trained}

    @property
    def sources(self) -> list[Checkpoint]:
        return [self.checkpoint] if self.teacher is None else [self.checkpoint, self.teacher]

    @property
    def loads_teacher(self) -> bool:
        """True if the dense model is in memory while the other one trains."""
        return self.teacher is not None and self.options.teacher_cache is None

    @property
    def everything(self) -> bool:
        """True where embedding, norm and LM head are trained, too."""
        return self.options.train == "all" and not self.is_lora

    @property
    def trained(self) -> frozenset[str]:
        return frozenset() if self.is_lora else trained_tensors(self.checkpoint.tensors, self.layers, self.everything)

    @property
    def lora(self) -> Any:
        options = self.options
        if not self.is_lora:
            return None
        return lora_config(
            self.layers, options.lora_rank, options.lora_alpha, options.lora_dropout, options.lora_targets
        )


def open_task(model: str, options: RetrainOptions, launch: Launch) -> Task:
    """Return the task of these options; raises UserError or LayoutError where models and options do not go together."""
    checkpoint, teacher, tp_size = open_checkpoint(model), None, options.tp_size
    layout = Layout.from_config(checkpoint.config)
    if options.train != CONVERTED:
        layers = parse_ranges(options.train, layout.num_layers, option="--train")
    elif not (layers := layout.converted_layers):
        raise UserError(
            f"{model} is dense and has no converted layers to train; convert it first, or, to train the dense model"
            " itself as a control, name layers with --train, such as all"
        )
    if options.distill_from is not None:
        teacher = open_checkpoint(options.distill_from)
        check_pair(checkpoint, teacher, model, options.distill_from)
    check_runnable(checkpoint.config, layout, tp_size)
    if tp_size > 1:
        check_trainable(checkpoint.config)
    if launch.processes % tp_size or (tp_size > 1 and launch.sharded):
        raise UserError(
            f"--tp-size {tp_size} does not go together with the launcher's {launch.processes} processes"
            f"{', which share the model by FSDP or DeepSpeed' if launch.sharded else ''}; start a multiple of it, plain"
        )
    if options.teacher_cache is not None and launch.sharded:
        raise UserError(
            "--teacher-cache does not go together with FSDP or DeepSpeed, which share the dense model out; leave it out"
        )
    if launch.precision not in ("no", "bf16"):
        raise UserError(
            f"accelerate launch asks for mixed_precision {launch.precision}, whose range is too small for training;"
            " take bf16 or no"
        )
    launched = "bfloat16" if options.dtype == "auto" and launch.precision == "bf16" else options.dtype
    compute = compute_dtype(launched, stored_dtype(checkpoint))
    history = read_retrainings(checkpoint.folder)
    return Task(
        model=model,
        checkpoint=checkpoint,
        teacher=teacher,
        layout=layout,
        layers=tuple(layers),
        options=options.resolve(
            checkpoint.config,
            launch.processes // tp_size,
            accumulation=launch.accumulation,
            left_by_alignment=history[-1].left_by_alignment if history else None,
        ),
        compute=compute,
        launch=launch,
    )


def run_identity(task: Task) -> dict[str, Any]:
    """Return everything that a run must have in common with the one it resumes."""
    options = task.options.to_dict()
    return {
        "model": fingerprint(task.checkpoint),
        "layout": task.layout.to_config(),
        "teacher": fingerprint(task.teacher) if task.teacher is not None else None,
        "tokenizer": tokenizer_hash(task.checkpoint.folder),
        "data": [source_identity(name) for name in task.options.data],
        "eval_data": [source_identity(name) for name in task.options.eval_data],
        "dtype": str(task.compute).removeprefix("torch."),
        "processes": task.launch.processes,
        "tp_size": task.options.tp_size,
        "teacher_cache": task.options.teacher_cache is not None,
        **{name: options[name] for name in (*FIXED, *LORA_FIELDS)},
    }
