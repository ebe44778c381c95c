"""The subject of a retraining: models, layers and options, checked against each other before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import parse_flag_from_env

from ladderize.adapt.lora import lora_config
from ladderize.adapt.methods import CONVERTED, LORA
from ladderize.adapt.options import LORA_FIELDS, AdaptOptions
from ladderize.adapt.teacher import check_pair
from ladderize.adapt.train.pace import Pace
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

OF_THE_COMMAND = ("model", "out", "dry_run", "overwrite", "verify")  # options that train nothing
# A run that resumes must have these in common with the one before. Others may change, as after the loss exploded.
FIXED = (
    *("method", "train", "align", "samples", "heldout", "seq_len", "batch_size", "weight_decay", "seed"),
    *("distill_weight", "tp_size", *LORA_FIELDS),
)


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

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Launch":
        accumulation: Any = accelerator.gradient_accumulation_steps
        plugin = accelerator.state.deepspeed_plugin
        if plugin is not None and plugin.get_value("gradient_accumulation_steps") not in (None, "auto"):
            accumulation = plugin.get_value("gradient_accumulation_steps")
        sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        return cls(accelerator.num_processes, accelerator.mixed_precision, int(accumulation), sharded)


def sharding_asked() -> bool:
    return any(map(parse_flag_from_env, ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")))


@dataclass(frozen=True)
class Task:
    """A retraining, checked but not loaded yet.

    model: the checkpoint's name: that of the options, or the aligned one's.
    """

    options: AdaptOptions
    launch: Launch
    model: str
    checkpoint: Checkpoint
    teacher: Checkpoint | None
    layout: Layout
    layers: tuple[int, ...]
    pace: Pace
    compute: torch.dtype

    @property
    def out(self) -> Path:
        return resolved(str(self.options.out), "OUT ")

    @property
    def aligned(self) -> Path:
        return Path(f"{self.out}-aligned")

    @property
    def is_lora(self) -> bool:
        return self.options.method == LORA

    @property
    def loads_teacher(self) -> bool:
        """True if the dense model is in memory while the other one trains."""
        return self.teacher is not None and self.options.teacher_cache is None

    @property
    def trained(self) -> frozenset[str]:
        """The names of the checkpoint's tensors that change; an adapter changes none."""
        if self.is_lora:
            return frozenset()
        return trained_tensors(self.checkpoint.tensors, self.layers, self.options.train == "all")

    @property
    def stored(self) -> dict[str, torch.dtype]:
        """Their dtypes in OUT, by name; an adapter's tensors are float32."""
        return {name: torch_dtype(self.checkpoint.tensors[name].dtype) for name in self.trained}

    @property
    def lora(self) -> Any:
        options = self.options
        if not self.is_lora:
            return None
        return lora_config(
            self.layers, options.lora_rank, options.lora_alpha, options.lora_dropout, options.lora_targets
        )

    @property
    def resolved_options(self) -> dict[str, Any]:
        """The options with every default resolved, as adaptation.json has them."""
        options, pace = vars(self.options), vars(self.pace)
        asked = {name: pace.get(name, value) for name, value in options.items() if name not in OF_THE_COMMAND}
        return asked | {"train": self.options.train or CONVERTED}

    def identity(self) -> dict[str, Any]:
        """Return everything that a run must have in common with the one it resumes. Reads files."""
        asked = self.resolved_options
        return {
            "model": fingerprint(self.checkpoint),
            "layout": self.layout.to_config(),
            "teacher": None if self.teacher is None else fingerprint(self.teacher),
            "tokenizer": tokenizer_hash(self.checkpoint.folder),
            "data": [source_identity(name) for name in self.options.data],
            "eval_data": [source_identity(name) for name in self.options.eval_data],
            "dtype": str(self.compute).removeprefix("torch."),
            "processes": self.launch.processes,
            "teacher_cache": self.options.teacher_cache is not None,
            **{name: asked[name] for name in FIXED},
        }


def open_task(options: AdaptOptions, launch: Launch) -> Task:
    """Return the task of these options; raises UserError or LayoutError where models and options do not go together."""
    model, tp_size = options.model, options.tp_size
    checkpoint, teacher = open_checkpoint(model), None
    layout, history = Layout.from_config(checkpoint.config), read_retrainings(checkpoint.folder)
    if options.align and (history or layout.is_dense):
        reason = f"was retrained already ({history[-1].method})" if history else "is dense"
        raise UserError(f"{model} {reason}; --align aligns converted weights that were not trained yet; leave it out")
    if options.train not in (None, CONVERTED):
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
    dtype = "bfloat16" if options.dtype == "auto" and launch.precision == "bf16" else options.dtype
    pace = Pace.of(options, checkpoint.config, launch.processes // tp_size, launch.accumulation)
    if history and history[-1].left_by_alignment is not None:
        pace = pace.after_alignment(history[-1].left_by_alignment)
    compute = compute_dtype(dtype, stored_dtype(checkpoint))
    return Task(options, launch, model, checkpoint, teacher, layout, tuple(layers), pace, compute)
