"""What a training takes, counted before anything is loaded, and how its steps are cut so that they fit into memory:
what the user left open is chosen, and it decides no result (beyond rounding). Tests compare the estimate with the peaks
of real steps."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import FLASH, FLEX, LORA
from ladderize.adapt.retrain.hf_model import trained_tensors
from ladderize.adapt.retrain.options import RetrainOptions
from ladderize.adapt.retrain.state import STATE_BYTES, WEIGHT_BYTES
from ladderize.adapt.retrain.task import Task, free_bytes, layers_to_train
from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.checkpoint.config import expected_tensors, head_dim, kv_head_count, parameter_count
from ladderize.console import Console, human_bytes
from ladderize.errors import UserError
from ladderize.files.documents import read_own
from ladderize.files.records import Record
from ladderize.files.work import ABOUT
from ladderize.layout import DROPPED, Layout, runnable_sizes
from ladderize.memory import available_bytes
from ladderize.ranks.group import Ranks
from ladderize.ranks.training import accelerate_settings
from ladderize.runtime.shards import with_layers

FP32 = 4
MOMENT_BYTES = 2 * FP32  # Adam's two moments
OTHER_BYTES = 500_000_000  # of the interpreter and the libraries, roughly
CUT = "cut"  # key of a work folder's record: how its steps are computed
SIZES = (2, 4, 8, 16, 32, 64)  # numbers of GPUs to suggest
FSDP2 = " (accelerate launch --config_file examples/accelerate/fsdp2_8_gpus.yaml)"


@dataclass(frozen=True)
class Demand:
    """What decides the memory. trained: numbers that change. adapters: which come on top of the model's own. compute:
    bytes of what is computed in. first: the first layer that something is trained in or before, below which no backward
    pass goes. compared: layers whose sub-modules are compared with the teacher's. shards: ranks that share the
    parameters (FSDP2), else 1; reshard: which give up a layer's between forward and backward. tp_size: ranks that share
    the model and its compute. rows, seq_len: of a micro-batch. masked: whether its rows are read under a mask."""

    config: Mapping[str, Any]
    layout: Layout
    trained: int
    compute: int
    rows: int
    seq_len: int
    first: int = 0
    adapters: bool = False
    teacher: bool = False
    compared: int = 0
    shared_teacher: bool = False  # frozen parameters that student and teacher have in common are held once
    gradient_checkpointing: bool = False
    shards: int = 1
    reshard: bool = True
    tp_size: int = 1
    masked: bool = False

    def parts(self) -> dict[str, int]:
        """Bytes on one device, by what takes them."""
        parameters = parameter_count(self.config)
        frozen = parameters if self.adapters else parameters - self.trained
        own_teacher = parameters - (frozen if self.shared_teacher and self.shards == 1 else 0)
        held = self.shards * self.tp_size  # norms, and KV heads beyond their number, are on every rank: left out
        return {
            "parameters": (self.trained * FP32 + frozen * self.compute) // held,
            "gradients": self.trained * FP32 // held,
            # bf16 copies of fp32 weights last during a pass
            "bf16 copies": self.trained * self.compute // held if self.compute < FP32 and self.shards == 1 else 0,
            "optimizer": self.trained * MOMENT_BYTES // held,
            "teacher": own_teacher * self.compute // held if self.teacher else 0,
            "gathered": self.gathered(parameters, own_teacher if self.teacher else 0),
            "activations": self.activations(),
            # bool, once more on the way to it, and what is added to the scores
            "masks": self.rows * self.seq_len**2 * (2 + self.compute) if self.masked else 0,
            "logits": self.logits(),
            "compared outputs": self.compared_outputs(),
            "other": OTHER_BYTES,
        }

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def gathered(self, parameters: int, teacher: int) -> int:
        """What FSDP2 puts together for a pass. Beside ``tp_size`` all of a rank's slices, as they are computed in, and
        the gradients of a layer or of the ends, once more in fp32 to be summed. Else the LM head, which stays, and two
        layers at a time (without ``reshard`` all, and the embedding), one with its gradients."""
        if self.shards == 1:
            return 0
        layers = self.layout.num_layers
        ends = parameter_count(with_layers(self.config, 0))
        layer, models = (parameters - ends) // layers, 2 if self.teacher else 1
        if self.tp_size > 1:
            summed = max(layer, self.trained - layers * layer)
            return ((parameters + teacher) * self.compute + summed * (self.compute + FP32)) // self.tp_size
        head = int(self.config["vocab_size"]) * int(self.config["hidden_size"])
        held = models * head + 2 * layer if self.reshard else models * parameters
        # the gradient of the embedding, or of tied ends, at the end of the backward pass
        summed = max(layer, head) if self.trained > layers * layer else layer
        return held * self.compute + summed * (self.compute + FP32)

    def activations(self) -> int:
        """What is kept for the backward pass: counted from the products of a layer, an estimate."""
        tokens = self.rows * self.seq_len
        layers = [self._layer_numbers(layer) for layer in range(self.first, self.layout.num_layers)]
        if self.gradient_checkpointing:
            return tokens * (int(self.config["hidden_size"]) * FP32 * len(layers) + max(layers) * self._width)
        return tokens * sum(layers) * self._width

    @property
    def _width(self) -> int:
        # products are narrow, norms and (where it enters as fp32) the stream are not
        return FP32 if self.compute == FP32 else 3

    def _layer_numbers(self, layer: int) -> int:
        """Numbers kept per token: both norms' inputs and outputs, q, k, v, the heads, and four of the MLP's width."""
        hidden, heads = int(self.config["hidden_size"]), int(self.config["num_attention_heads"])
        ranks = (self.layout.sync_tp_size or 1) // self.tp_size if self.layout.attention_sync[layer] == DROPPED else 1
        own_kv_heads = max(1, kv_head_count(self.config) // self.tp_size)
        attention = (3 * heads // self.tp_size + 4 * own_kv_heads) * head_dim(self.config)
        # a dropped layer has a partial stream, and its norm, for each virtual rank
        return 3 * hidden + attention + 4 * hidden * ranks + 4 * int(self.config["intermediate_size"]) // self.tp_size

    def compared_outputs(self) -> int:
        """What attention and MLP of student and teacher add, and fp32 copies of one of them with their difference."""
        numbers = self.rows * self.seq_len * int(self.config["hidden_size"])
        return numbers * (4 * self.compared * self.compute + 3 * FP32) if self.compared else 0

    @property
    def operations(self) -> float:
        """Floating-point operations for a token, of all ranks together: the products with weights, forward (the
        teacher's too), backward to the first layer that is trained, and of what is trained. Attention is left out."""
        ends = parameter_count(with_layers(self.config, 0))
        head = int(self.config["vocab_size"]) * int(self.config["hidden_size"])
        layers = parameter_count(self.config) - ends
        passed = layers * (1 - self.first / self.layout.num_layers)
        forward = (2 if self.teacher else 1) * (layers + head)
        again = passed if self.gradient_checkpointing else 0
        return 2.0 * (forward + passed + head + self.trained + again)

    def logits(self) -> int:
        """Logits, their gradient, the teacher's, and fp32 copies of a part of them."""
        numbers = self.rows * self.seq_len * -(-int(self.config["vocab_size"]) // self.tp_size)
        kept, copies = (3, 5) if self.teacher else (2, 3)
        return numbers * self.compute * kept + min(numbers, LOGITS_AT_ONCE) * FP32 * copies


def demand_of(task: Task) -> Demand:
    """Of one process."""
    return Demand(
        config=task.checkpoint.config,
        layout=task.layout,
        trained=trained_numbers(task.checkpoint.config, task.layout, task.options),
        adapters=task.options.method == LORA,
        compute=task.compute.itemsize,
        first=0 if task.everything and task.options.method != LORA else min(task.layers, default=0),
        rows=task.training.micro_batch_size,
        seq_len=task.training.seq_len,
        teacher=task.teacher is not None,
        compared=len(task.compared),
        shared_teacher=not task.sharded,
        gradient_checkpointing=bool(task.options.gradient_checkpointing),
        shards=task.data_ranks if task.sharded else 1,
        reshard=accelerate_settings().reshard is not False,
        tp_size=task.tp_size,
        masked=task.options.packing and task.options.attention not in (FLASH, FLEX),
    )


def trained_numbers(config: Mapping[str, Any], layout: Layout, options: RetrainOptions) -> int:
    """How many numbers ``full`` or ``lora`` trains of a model of this layout."""
    layers, shapes = layers_to_train(layout, options.train), expected_tensors(config)
    if options.method == LORA:
        matrices = [name for name in trained_tensors(shapes, layers, False) if name.endswith(".weight")]
        adapted = [name for name in matrices if name.split(".")[-2] in options.lora.targets]
        return sum(options.lora.rank * sum(shapes[name]) for name in adapted)
    return sum(math.prod(shapes[name]) for name in trained_tensors(shapes, layers, options.train == "all"))


def saved_bytes(trained: int, keep: int) -> int:
    """Of unfinished work: ``keep`` states and the one being written, and the best one's weights."""
    return trained * (STATE_BYTES * (keep + 1) + WEIGHT_BYTES)


def check_disk(task: Task, folder: Path) -> None:
    """Refuse to begin what cannot be saved."""
    needed = saved_bytes(demand_of(task).trained, task.training.keep)
    if needed > (free := free_bytes(folder)):
        raise UserError(
            f"{folder} needs {human_bytes(needed)} for the states of the training, but only {human_bytes(free)} are"
            " free there; choose another --work-dir, or a lower --keep"
        )


# ---- what is chosen ----


@dataclass(frozen=True)
class Cut(Record):
    """Rows that are computed at once, and whether activations are computed again in the backward pass."""

    micro_batch_size: int
    gradient_checkpointing: bool

    def __str__(self) -> str:
        return f"--micro-batch-size {self.micro_batch_size}" + " --gradient-checkpointing" * self.gradient_checkpointing

    @classmethod
    def of(cls, task: Task) -> "Cut":
        return cls(task.training.micro_batch_size, bool(task.options.gradient_checkpointing))

    def apply(self, task: Task) -> Task:
        return replace(
            task,
            options=replace(task.options, gradient_checkpointing=self.gradient_checkpointing),
            training=replace(task.training, micro_batch_size=self.micro_batch_size),
        )


def cuts_of(task: Task) -> list[Cut]:
    """What may be chosen, as far as the user left it open, the fastest first: fewer rows at once, then activations
    computed again."""
    options, own = task.options, max(1, task.training.batch_size // task.data_ranks)
    asked = options.gradient_checkpointing
    rows = options.micro_batches(own, task.training.seq_len)
    return [Cut(count, again) for again in ((False, True) if asked is None else (asked,)) for count in rows]


def fitted(task: Task, available: int | None, kept: Cut | None = None) -> Task:
    """The task computed in the first way that fits into ``available`` bytes (None: unknown), or, where none does, in
    the one that takes least. kept: of an earlier run, tried first."""
    cuts = cuts_of(task)
    ways = [cut.apply(task) for cut in ([kept, *cuts] if kept in cuts else cuts)]
    return next((way for way in ways if available is None or demand_of(way).total <= available), ways[-1])


@dataclass(frozen=True)
class Kind:
    """A way to take less memory. words: with a place for the number of processes. hint: how to start them. tasks: in
    all sizes, the least first."""

    words: str
    tasks: list[Task]
    hint: str = ""

    def name(self, task: Task) -> str:
        return self.words.format(task.data_ranks if task.sharded else task.tp_size)


def others(task: Task, *, on_gpu: bool) -> Iterator[Kind]:
    """What takes less memory than this task. on_gpu: where there may be more devices; processes on a CPU share its
    memory."""
    options = task.options
    if options.micro_batch_size is not None or options.gradient_checkpointing is False:
        again = options.gradient_checkpointing or None
        left_open = replace(options, micro_batch_size=None, gradient_checkpointing=again)
        yield Kind("leaving the micro-batch and checkpointing open", [replace(task, options=left_open)])
    if on_gpu:
        sizes = set(SIZES) & set(runnable_sizes(task.checkpoint.config, task.layout))
        tensor = [size for size in sorted(sizes) if size > task.tp_size]
        yield Kind("--tp-size {}", [replace(task, options=replace(options, tp_size=size)) for size in tensor])
    if on_gpu and task.tp_size == 1:
        least = task.data_ranks + task.sharded
        shards = [replace(task, data_ranks=size, sharded=True) for size in SIZES if size >= least]
        yield Kind("FSDP2 over {} processes", shards, FSDP2)
    if options.method != LORA:
        yield Kind("--method lora", [replace(task, options=replace(options, method=LORA))])


def remedies(task: Task, available: int, *, on_gpu: bool) -> str:
    """What would fit, with figures: of each kind the least."""
    found = []
    for kind in others(task, on_gpu=on_gpu):
        able = (fitted(each, available) for each in kind.tasks)
        other = next((each for each in able if demand_of(each).total <= available), None)
        if other is not None:
            found.append(f"{kind.name(other)}{kind.hint}: {human_bytes(demand_of(other).total)}")
    if found:
        return f"{'; '.join(found)} for each process would fit"
    shorter = "a shorter --seq-len, or " if task.training.seq_len > 512 else ""
    return f"{shorter}devices with more memory would be needed"


def fit_memory(task: Task, ranks: Ranks, folder: Path, console: Console) -> Task:
    """The task in a way that fits into the memory that is free, which is said; raises UserError where none does. All
    ranks call it.

    folder: of unfinished work, which goes on in the way that it began if that still fits.
    """
    kept: Cut | None = ranks.broadcast(read_cut(folder) if ranks.is_main and task.options.resume else None)
    own, on_gpu = available_bytes(ranks.device), ranks.device.type == "cuda"
    if own is not None and not on_gpu:
        own //= ranks.local_size  # the processes of a machine share its memory
    available = min((free for free in ranks.gather(own) if free is not None), default=None)
    chosen = fitted(task, available, kept)
    demand, cut = demand_of(chosen), Cut.of(chosen)
    parts = ", ".join(f"{name} {human_bytes(value)}" for name, value in demand.parts().items() if value)
    console.note(f"memory of each process: about {human_bytes(demand.total)} ({parts})")
    if available is not None and demand.total > available:
        raise UserError(
            f"this needs about {human_bytes(demand.total)} for each process, with {cut}, and {human_bytes(available)}"
            f" are free; {remedies(task, available, on_gpu=on_gpu)}"
        )
    if cut != (first := cuts_of(task)[0]):
        why = "as the run began" if cut == kept else f"to fit into the {human_bytes(available or 0)} that are free"
        console.note(f"computed with {cut}, {why}; {first} takes {human_bytes(demand_of(first.apply(task)).total)}")
    return chosen


def read_cut(folder: Path) -> Cut | None:
    """How the steps of unfinished work were computed, if it says so."""
    try:
        return Cut.from_dict(read_own(folder / ABOUT).get(CUT), folder / ABOUT)
    except UserError:
        return None
