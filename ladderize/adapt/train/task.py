"""The subject of a retraining: models, layers, options and pace (the rows and number of its steps, and the learning
rate), checked against each other before anything is loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import parse_flag_from_env

from ladderize.adapt.lora import lora_config
from ladderize.adapt.options import CONVERTED, LORA, LORA_FIELDS, AdaptOptions
from ladderize.adapt.teacher import check_pair
from ladderize.adapt.train.training_model import trained_tensors
from ladderize.blocks import compute_dtype
from ladderize.checkpoint.config import most_positions, parameter_count, stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint, torch_dtype
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import human_bytes, human_count
from ladderize.convert.inspection import read_retrainings
from ladderize.data.files import source_identity
from ladderize.data.windows import row_of_ids
from ladderize.errors import UserError
from ladderize.files.regular import resolved
from ladderize.layout import Layout, parse_ranges
from ladderize.modeling import tokenizer_hash
from ladderize.ranks.environment import launched
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import check_runnable
from ladderize.runtime.training.model import check_trainable

STATES_KEPT = 2
OF_THE_COMMAND = ("model", "out", "dry_run", "overwrite", "verify")  # options that train nothing
# A run that resumes must have these in common with the one before. Others may change, as after the loss exploded.
FIXED = (
    *("method", "train", "align", "samples", "heldout", "seq_len", "batch_size", "weight_decay", "seed"),
    *("distill_weight", "tp_size", *LORA_FIELDS),
)
# Peak learning rates at width 4096; a step of Adam moves a sum over twice the width twice as far.
WIDTH, FULL_LR, LORA_LR = 4096, 2e-5, 1e-4
# After alignment: the fewest steps of warm-up, the largest share of all steps that these may be, the least peak, and
# the divergence in nats per token from which on the whole peak suits. Sooner and higher rates undo the alignment, and a
# longer warm-up is training lost (60k tokens, ladder on all layers of the bundled model: KL 0.173 without, 0.103 with
# a fifth of the steps).
ALIGNED_WARMUP, ALIGNED_SHARE, LEAST_PEAK, WHOLE_PEAK_FROM = 10, 0.2, 0.2, 0.6
SHARE_OF_WARMUP, MOST_WARMUP = 0.05, 200  # of the steps, and steps
# Tokens of a step: a two-thousandth of the budget within these bounds, since a short training gains more from steps
# than from large ones.
LEAST_PER_STEP, MOST_PER_STEP = 2048, 65536
PER_STEP = 16384  # where --max-steps are given
MICRO_BATCH_TOKENS = 8192
# the share of the time for validation; with fewer tokens in each one there are fewer validations instead
VALIDATION_SHARE, ENOUGH_SCORED = 0.1, 4096


@dataclass(frozen=True)
class Pace:
    """batch_size: rows of a step, over all processes. micro_batch_size: rows that a process computes at once."""

    options: AdaptOptions
    seq_len: int
    batch_size: int
    micro_batch_size: int
    lr: float
    warmup_steps: int

    @classmethod
    def of(cls, options: AdaptOptions, config: Mapping[str, Any], ranks: int, accumulation: int = 1) -> "Pace":
        """Return the pace of training a model. ranks: that read different data: all processes / ``tp_size``."""
        positions = most_positions(config)
        seq_len = options.seq_len or min(row_of_ids(options.data) or 2048, positions)
        if seq_len > positions:
            raise UserError(f"--seq-len {seq_len} is more than the {positions} positions that the model supports")
        per_step = PER_STEP
        if options.max_tokens:
            per_step = max(LEAST_PER_STEP, min(MOST_PER_STEP, options.max_tokens // 2000))
        multiple = ranks * accumulation
        batch_size = options.batch_size or -(-max(1, per_step // seq_len) // multiple) * multiple
        rows, rest = divmod(batch_size, ranks)
        if rest:
            raise UserError(
                f"--batch-size {batch_size} (rows of a step, over all processes) must be divisible by the {ranks}"
                " processes that read different data"
            )
        most = rows // accumulation if accumulation > 1 else min(rows, MICRO_BATCH_TOKENS // seq_len)
        micro = options.micro_batch_size or next(count for count in range(max(1, most), 0, -1) if rows % count == 0)
        if rows % micro:
            raise UserError(
                f"--micro-batch-size {micro} does not divide the {rows} rows of a step that are each process's"
            )
        if accumulation > 1 and rows // micro != accumulation:
            raise UserError(
                f"accelerate's {accumulation} steps of gradient accumulation and --batch-size {batch_size} do not leave"
                f" --micro-batch-size {micro} rows at once; leave one of them out"
            )
        Schedule(options.schedule).check(micro, seq_len, rows_name="--micro-batch-size", tokens_name="--seq-len")
        lr = (LORA_LR if options.method == LORA else FULL_LR) * WIDTH / config["hidden_size"]
        pace = cls(options, seq_len, batch_size, micro, options.lr or lr, warmup_steps=0)
        warmup = min(MOST_WARMUP, int(pace.steps * SHARE_OF_WARMUP))
        return replace(pace, warmup_steps=warmup if options.warmup_steps is None else options.warmup_steps)

    def after_alignment(self, left: float) -> "Pace":
        """Return the pace on aligned weights, with a lower peak and a longer rise where the options leave them
        open. A divergence grows with the square of the distance to go, and Adam's rate is the length of its
        steps. left: the held-out divergence from the dense model, in nats per token."""
        lr, warmup = self.options.lr, self.options.warmup_steps
        if lr is None:
            lr = self.lr * min(1.0, max(LEAST_PEAK, math.sqrt(left / WHOLE_PEAK_FROM)))
        if warmup is None:
            warmup = max(self.warmup_steps, min(ALIGNED_WARMUP, int(self.steps * ALIGNED_SHARE)))
        return replace(self, lr=lr, warmup_steps=warmup)

    @property
    def steps(self) -> int:
        """The number of steps; with ``max_tokens`` at least, since rows have padding."""
        tokens = self.options.max_tokens or 1
        return self.options.max_steps or math.ceil(tokens / (self.batch_size * self.seq_len))

    @property
    def in_words(self) -> str:
        about = "about " if self.options.max_tokens else ""
        rows = f"{self.batch_size} rows of {self.seq_len} tokens, {self.micro_batch_size} at once"
        return f"{about}{self.steps:,} steps of {rows}"

    def share(self, step: int, tokens: int) -> float:
        """Return the share of the training that is done, 0 to 1, after ``step`` steps that read ``tokens`` tokens."""
        most_steps, most_tokens = self.options.max_steps, self.options.max_tokens or 1
        return min(1.0, step / most_steps if most_steps else tokens / most_tokens)

    def rate(self, step: int, share: float) -> float:
        """Return the learning rate of step ``step`` (from 0), before which this share of the budget was spent: a budget
        of tokens has no known number of steps, by which transformers' schedules go."""
        decay = {"cosine": 0.5 * (1 + math.cos(math.pi * share)), "linear": 1 - share, "constant": 1.0}
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1)) * decay[self.options.lr_schedule]

    def validations(self, rows: int) -> tuple[int, int]:
        """Return how many of the held-out ``rows`` are scored, and how often. What was not asked for takes at most a
        tenth of the time, if a row is scored as slowly as it is trained on."""
        options = self.options
        all_asked = options.heldout is not None or bool(options.eval_data)
        before = 1.5 if options.distill_from else 1.0  # validations before the first step: the dense model's, too
        affordable = VALIDATION_SHARE * self.steps * self.batch_size
        times = self.steps // (options.eval_every or max(1, min(500, self.steps // 10)))
        if not options.eval_every:
            fewest = rows if all_asked else min(rows, ENOUGH_SCORED // self.seq_len)
            times = max(1, min(times, int(affordable / max(1, fewest) - before)))
        if all_asked:
            return rows, times
        return min(rows, max(1, int(affordable / (times + before)))), times


@dataclass(frozen=True)
class Launch:
    """The launcher's decisions: accumulation 1: no gradient accumulation; sharded: by FSDP or DeepSpeed."""

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
    """A retraining, checked but not loaded yet. model: the checkpoint's name: the options', or the aligned one's."""

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
        rank, alpha, dropout, targets = (getattr(self.options, name) for name in LORA_FIELDS)
        return lora_config(self.layers, rank, alpha, dropout, targets) if self.is_lora else None

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


FP32 = 4
STATE_BYTES, WEIGHT_BYTES = 12, 4  # per trained number: a state (weights and two moments), and weights alone
OTHER_BYTES = 500_000_000  # for the interpreter and the libraries, roughly


def estimate(task: Task) -> dict[str, Any]:
    """Return the document of --dry-run: roughly the memory of each process, and the disk space of unfinished work."""
    config, options, pace = task.checkpoint.config, task.options, task.pace
    compute, parameters, tensors = task.compute.itemsize, parameter_count(config), task.checkpoint.tensors
    trained = sum(tensors[name].numel for name in task.trained)
    if task.is_lora:
        targets = tuple(f"{target}.weight" for target in options.lora_targets)
        adapted = [name for name in trained_tensors(tensors, task.layers, False) if name.endswith(targets)]
        trained = options.lora_rank * sum(sum(tensors[name].shape) for name in adapted)
    frozen = parameters if task.is_lora else parameters - trained
    is_sharded = task.launch.sharded
    ranks = task.launch.processes if is_sharded else options.tp_size
    # what is frozen is held once for both, but for what an alignment changes
    of_teacher = parameters if is_sharded or (task.is_lora and options.align) else parameters - frozen
    # of a token: what a layer keeps for its backward pass, as if in float32; and its logits, with their gradient
    layer = FP32 * (12 * config["hidden_size"] + 4 * config["intermediate_size"] // options.tp_size)
    kept = task.layout.num_layers * layer
    if options.gradient_checkpointing:
        kept = task.layout.num_layers * FP32 * config["hidden_size"] + layer
    logits = (2 + 2 * (task.teacher is not None)) * compute * config["vocab_size"] // options.tp_size
    memory = {
        "weights": (trained * (FP32 + compute * (compute < FP32)) + frozen * compute) // ranks,
        "gradients": trained * FP32 // ranks,
        "moments": 2 * trained * FP32 // ranks,
        "teacher": of_teacher * compute // ranks * task.loads_teacher,
        "activations": pace.micro_batch_size * pace.seq_len * (kept + logits),
        "other": OTHER_BYTES,
    }
    return {
        "model": task.model,
        "options": task.resolved_options,
        "processes": task.launch.processes,
        "parameters": parameters,
        "trained_parameters": trained,
        "memory_bytes": sum(memory.values()),
        "memory_parts": memory,
        # the kept states, the one being written, and the best weights
        "state_bytes": trained * (STATE_BYTES * (STATES_KEPT + 1) + WEIGHT_BYTES),
    }


def estimate_training(options: AdaptOptions) -> tuple[dict[str, Any], str]:
    """Return what ``adapt_checkpoint`` would take, as a document and in words."""
    task = open_task(options, Launch(max(launched().size, options.tp_size), sharded=sharding_asked()))
    document = estimate(task)
    memory = ", ".join(f"{name} {human_bytes(value)}" for name, value in document["memory_parts"].items() if value)
    trained, whole = human_count(document["trained_parameters"]), human_count(document["parameters"])
    asking = ""
    if options.teacher_cache is not None:
        whole_bytes = human_bytes(document["parameters"] * task.compute.itemsize)
        asking = f" Before, while the dense model answers, each process holds it whole ({whole_bytes})."
    return document, (
        f"{options.method}: {trained} of {whole} parameters in training, {task.pace.in_words}. Memory of each"
        f" process ({task.launch.processes} in all): about {human_bytes(document['memory_bytes'])} ({memory}).{asking}"
        f" Unfinished work takes {human_bytes(document['state_bytes'])} of the disk at most. The data were not"
        " read, and no time is estimated."
    )
