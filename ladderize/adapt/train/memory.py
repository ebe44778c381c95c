"""The memory and disk space that a training takes, by one formula from headers alone. Tests compare it with measured
peaks."""

import math
from dataclasses import dataclass

from ladderize.adapt.methods import FLASH
from ladderize.adapt.train.options import RetrainOptions, TrainOptions
from ladderize.adapt.train.states import STATE_BYTES, STATES_KEPT, WEIGHT_BYTES
from ladderize.adapt.train.student import trained_tensors
from ladderize.adapt.train.task import Launch, Task, open_task, sharding_asked
from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.checkpoint.config import expected_tensors, head_dim, kv_head_count, parameter_count
from ladderize.console import human_bytes, human_count
from ladderize.files.records import Record
from ladderize.layout import DROPPED
from ladderize.ranks.environment import launched

FP32 = 4
OTHER_BYTES = 500_000_000  # for the interpreter and the libraries, roughly


@dataclass(frozen=True)
class TrainingEstimate(Record):
    """The document of --dry-run.

    memory_parts: the memory of each process by its parts, in bytes, approximately.
    state_bytes: the most that unfinished work takes on disk.
    """

    model: str
    options: TrainOptions
    processes: int
    parameters: int
    trained_parameters: int
    memory_bytes: int
    memory_parts: dict[str, int]
    state_bytes: int

    def text(self) -> str:
        """Return the estimate in words."""
        parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in self.memory_parts.items() if value)
        trained, whole = human_count(self.trained_parameters), human_count(self.parameters)
        return (
            f"{self.options.method}: {trained} of {whole} parameters in training, {self.options.in_words}. Memory of"
            f" each process ({self.processes} in all): about {human_bytes(self.memory_bytes)} ({parts}). Unfinished"
            f" work takes {human_bytes(self.state_bytes)} of the disk at most. The data were not read, and no time is"
            " estimated."
        )


def trained_numbers(task: Task) -> int:
    """Return the number of parameters that are trained."""
    shapes, lora = expected_tensors(task.checkpoint.config), task.options.lora
    if task.is_lora:
        inside = trained_tensors(shapes, task.layers, False)
        return sum(lora.rank * sum(shapes[name]) for name in inside if name.endswith(lora.tensors))
    return sum(math.prod(shapes[name]) for name in trained_tensors(shapes, task.layers, task.everything))


def estimate(task: Task) -> TrainingEstimate:
    """Return the memory of each process: weights, gradients, moments, activations and the teacher."""
    config, training, layout, tp_size = task.checkpoint.config, task.training, task.layout, task.options.tp_size
    vocab, hidden, inner, heads = (
        int(config[key]) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    )
    compute, is_sharded, has_teacher = task.compute.itemsize, task.launch.sharded, task.teacher is not None
    width = FP32 if compute == FP32 else 3  # of an activation, on the average: streams are wide, products are not
    parameters, trained = parameter_count(config), trained_numbers(task)
    layer, frozen = parameters // layout.num_layers, parameters if task.is_lora else parameters - trained
    own = parameters if is_sharded else parameters - frozen  # of the teacher; what is frozen is held once for both
    if task.is_lora and task.changed and not is_sharded:
        own = layer * (layout.num_layers - min(layout.converted_layers, default=0))
    # Left out: norms and replicated KV heads are on every rank.
    ranks, tokens = task.launch.processes if is_sharded else tp_size, training.micro_batch_size * training.seq_len
    kept = []  # per token: both norms' inputs and outputs, q, k, v, the heads, and four of the MLP's width
    for mode in layout.attention_sync[0 if task.everything else min(task.layers, default=0) :]:
        virtual = (layout.sync_tp_size or 1) // tp_size if mode == DROPPED else 1
        attention = 3 * heads // tp_size + 4 * max(1, kv_head_count(config) // tp_size)
        kept.append((3 + 4 * virtual) * hidden + attention * head_dim(config) + 4 * inner // tp_size)
    activations = sum(kept) * width
    # logits with their gradient, the teacher's; and of a part of them in fp32 both, exponentials, and what is between
    logits = tokens * -(-vocab // tp_size)
    of_logits = logits * compute * (2 + has_teacher) + min(logits, LOGITS_AT_ONCE) * FP32 * (4 + has_teacher)
    if task.options.gradient_checkpointing:  # a layer is computed again when the logits are gone
        activations = hidden * FP32 * len(kept) + max(0, max(kept) * width - of_logits // tokens)
    if task.compared:  # both models' outputs of attention and MLP, and fp32 copies
        activations += hidden * (4 * len(task.compared) * compute + 3 * FP32)
    if task.options.attention != FLASH:  # the mask, a copy made on the way, and the values added to the scores
        activations += training.seq_len * (2 + compute)
    parts = {
        "weights": (trained * FP32 + frozen * compute) // ranks,
        "gradients": trained * FP32 // ranks,
        "moments": 2 * trained * FP32 // ranks,
        "teacher": own * compute // ranks * has_teacher,
        # two layers and the ends, and a layer's gradients; without sharding, the narrow copies of a pass
        "gathered": (2 + 2 * has_teacher) * (layer + vocab * hidden) * compute + layer * FP32
        if is_sharded
        else trained * compute // ranks * (compute < FP32),
        "activations": tokens * activations,
        "logits": of_logits,
        "other": OTHER_BYTES,
    }
    # the kept states, the one being written, and the best weights
    on_disk = trained * (STATE_BYTES * (STATES_KEPT + 1) + WEIGHT_BYTES)
    processes = task.launch.processes
    return TrainingEstimate(
        task.model, training, processes, parameters, trained, sum(parts.values()), parts, state_bytes=on_disk
    )


def estimate_training(model: str, options: RetrainOptions) -> TrainingEstimate:
    """Return what ``adapt_checkpoint`` would take with these options; of the models only headers are read.

    Raises UserError, UsageError or LayoutError for models and options that do not go together.
    """
    options.check()
    options.budget.check()
    options.check_data()
    launch = Launch(options.device, max(launched().size, options.tp_size), sharded=sharding_asked())
    return estimate(open_task(model, options, launch))
