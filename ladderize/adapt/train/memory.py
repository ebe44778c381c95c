"""The memory and disk space that a training takes, by one formula from headers alone. Tests compare it with measured
peaks."""

import math
from typing import Any

from ladderize.adapt.train.options import RetrainOptions
from ladderize.adapt.train.states import STATE_BYTES, STATES_KEPT, WEIGHT_BYTES
from ladderize.adapt.train.student import trained_tensors
from ladderize.adapt.train.task import Launch, Task, open_task, sharding_asked
from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.checkpoint.config import expected_tensors, head_dim, kv_head_count, parameter_count
from ladderize.console import human_bytes, human_count
from ladderize.convert.inspection import read_retrainings
from ladderize.layout import APART, DELAYED
from ladderize.ranks.environment import launched
from ladderize.runtime.shards import hosted_ranks

FP32 = 4
OTHER_BYTES = 500_000_000  # for the interpreter and the libraries, roughly


def trained_numbers(task: Task) -> int:
    """Return the number of parameters that are trained."""
    shapes, rank = expected_tensors(task.checkpoint.config), task.options.lora_rank
    if task.is_lora:
        inside = trained_tensors(shapes, task.layers, False)
        targets = tuple(f"{target}.weight" for target in task.options.lora_targets)
        return sum(rank * sum(shapes[name]) for name in inside if name.endswith(targets))
    return sum(math.prod(shapes[name]) for name in trained_tensors(shapes, task.layers, task.everything))


def estimate(task: Task) -> dict[str, Any]:
    """Return the document of --dry-run.

    Its memory_parts are the memory of each process in bytes, approximately: weights, gradients, moments, activations
    and the teacher. Its state_bytes are the most that unfinished work takes on disk.
    """
    config, options, layout, tp_size = task.checkpoint.config, task.options, task.layout, task.options.tp_size
    vocab, hidden, inner, heads = (
        int(config[key]) for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    )
    compute, is_sharded, has_teacher = task.compute.itemsize, task.launch.sharded, task.teacher is not None
    width = FP32 if compute == FP32 else 3  # of an activation, on the average: streams are wide, products are not
    parameters, trained = parameter_count(config), trained_numbers(task)
    layer, frozen = parameters // layout.num_layers, parameters if task.is_lora else parameters - trained
    own = parameters if is_sharded else parameters - frozen  # of the teacher; what is frozen is held once for both
    # an alignment or a training changes frozen weights too, from the first converted layer on
    if task.is_lora and not is_sharded and (options.align or read_retrainings(task.checkpoint.folder)):
        own = layer * (layout.num_layers - min(layout.converted_layers, default=0))
    # Left out: norms and replicated KV heads are on every rank.
    ranks, tokens = task.launch.processes if is_sharded else tp_size, options.micro_batch_size * options.seq_len
    kept = []  # per token: both norms' inputs and outputs, q, k, v, the heads, and four of the MLP's width
    for index in range(0 if task.everything else min(task.layers, default=0), layout.num_layers):
        is_apart = layout.attention_sync[index] in APART or DELAYED in (layout.entering(index), layout.mlp_sync[index])
        virtual = hosted_ranks(layout.sync_tp_size, tp_size) if is_apart else 1
        attention = 3 * heads // tp_size + 4 * max(1, kv_head_count(config) // tp_size)
        kept.append((3 + 4 * virtual) * hidden + attention * head_dim(config) + 4 * inner // tp_size)
    activations = sum(kept) * width
    # logits with their gradient, the teacher's; and of a part of them in fp32 both, exponentials, and what is between
    logits = tokens * -(-vocab // tp_size)
    of_teacher = has_teacher * (compute if task.loads_teacher else FP32)
    of_logits = logits * (2 * compute + of_teacher) + min(logits, LOGITS_AT_ONCE) * FP32 * (4 + has_teacher)
    if task.options.gradient_checkpointing:  # a layer is computed again when the logits are gone
        activations = hidden * FP32 * len(kept) + max(0, max(kept) * width - of_logits // tokens)
    activations += options.seq_len * (2 + compute)  # the mask, a copy made on the way, and what is added to the scores
    parts = {
        "weights": (trained * FP32 + frozen * compute) // ranks,
        "gradients": trained * FP32 // ranks,
        "moments": 2 * trained * FP32 // ranks,
        "teacher": own * compute // ranks * task.loads_teacher,
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
    return {
        "model": task.model,
        "options": options.to_dict(),
        "processes": task.launch.processes,
        "parameters": parameters,
        "trained_parameters": trained,
        "memory_bytes": sum(parts.values()),
        "memory_parts": parts,
        "state_bytes": on_disk,
    }


def estimate_training(model: str, options: RetrainOptions) -> tuple[dict[str, Any], str]:
    """Return what ``adapt_checkpoint`` would take, as a document and in words. Of the models only headers are read.

    Raises UserError, UsageError or LayoutError for models and options that do not go together.
    """
    options.check()
    launch = Launch(max(launched().size, options.tp_size), sharded=sharding_asked())
    task = open_task(model, options, launch)
    document = estimate(task)
    parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in document["memory_parts"].items() if value)
    trained, whole = human_count(document["trained_parameters"]), human_count(document["parameters"])
    asking = ""
    if options.teacher_cache is not None:
        whole_bytes = human_bytes(document["parameters"] * task.compute.itemsize)
        asking = f" Before, while the dense model answers, each process holds it whole ({whole_bytes})."
    return document, (
        f"{options.method}: {trained} of {whole} parameters in training, {task.options.in_words}. Memory of each"
        f" process ({launch.processes} in all): about {human_bytes(document['memory_bytes'])} ({parts}).{asking}"
        f" Unfinished work takes {human_bytes(document['state_bytes'])} of the disk at most. The data were not"
        " read, and no time is estimated."
    )
