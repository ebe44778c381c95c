"""The memory and disk space that a training takes, roughly, from headers. Tests compare it with measured peaks."""

import math
from typing import Any

from ladderize.adapt.train.options import RetrainOptions
from ladderize.adapt.train.states import STATE_BYTES, STATES_KEPT, WEIGHT_BYTES
from ladderize.adapt.train.student import trained_tensors
from ladderize.adapt.train.task import Launch, Task, open_task, sharding_asked
from ladderize.checkpoint.config import expected_tensors, parameter_count
from ladderize.console import human_bytes, human_count
from ladderize.ranks.environment import launched

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

    Its memory_parts are the memory of each process in bytes, roughly; its state_bytes are the most that unfinished work
    takes on disk.
    """
    config, options, layers = task.checkpoint.config, task.options, task.layout.num_layers
    vocab, hidden, inner = (int(config[key]) for key in ("vocab_size", "hidden_size", "intermediate_size"))
    compute, parameters, trained = task.compute.itemsize, parameter_count(config), trained_numbers(task)
    frozen = parameters if task.is_lora else parameters - trained
    is_sharded = task.launch.sharded
    ranks = task.launch.processes if is_sharded else options.tp_size
    # what is frozen is held once for both, but for what an alignment changes
    of_teacher = parameters if is_sharded or (task.is_lora and options.align) else parameters - frozen
    # of a token: what a layer keeps for its backward pass, as if in float32; and its logits, with their gradient
    layer = FP32 * (12 * hidden + 4 * inner // options.tp_size)
    kept = layers * FP32 * hidden + layer if options.gradient_checkpointing else layers * layer
    logits = (2 + 2 * (task.teacher is not None)) * compute * vocab // options.tp_size
    parts = {
        "weights": (trained * (FP32 + compute * (compute < FP32)) + frozen * compute) // ranks,
        "gradients": trained * FP32 // ranks,
        "moments": 2 * trained * FP32 // ranks,
        "teacher": of_teacher * compute // ranks * task.loads_teacher,
        "activations": options.micro_batch_size * options.seq_len * (kept + logits),
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
