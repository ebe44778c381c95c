"""The memory and disk space that a training takes, roughly, from headers. Tests compare it with measured peaks."""

from typing import Any

from ladderize.adapt.options import AdaptOptions
from ladderize.adapt.train.states import STATE_BYTES, STATES_KEPT, WEIGHT_BYTES
from ladderize.adapt.train.student import trained_tensors
from ladderize.adapt.train.task import Launch, Task, open_task, sharding_asked
from ladderize.checkpoint.config import parameter_count
from ladderize.console import human_bytes, human_count
from ladderize.ranks.environment import launched

FP32 = 4
OTHER_BYTES = 500_000_000  # for the interpreter and the libraries, roughly


def estimate(task: Task) -> dict[str, Any]:
    """Return the document of --dry-run: the memory of each process, and the most that unfinished work takes on disk, in
    bytes."""
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
    """Return what ``adapt_checkpoint`` would take, as a document and in words. Of the models only headers are read."""
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
