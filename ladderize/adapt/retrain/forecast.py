"""``ladderize adapt --dry-run`` with ``--method full`` or ``lora``: what a training would take. Of the models only
headers are read, and of the data what is small."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ladderize.adapt.data.stream import open_source
from ladderize.adapt.methods import LORA
from ladderize.adapt.retrain.memory_estimate import Cut, demand_of, fitted, others, saved_bytes
from ladderize.adapt.retrain.options import RetrainOptions
from ladderize.adapt.retrain.task import Task, open_task
from ladderize.blocks import timed
from ladderize.checkpoint.config import parameter_count
from ladderize.console import human_bytes, human_count, human_seconds
from ladderize.files.records import Record
from ladderize.files.regular import split_name
from ladderize.layout import format_ranges
from ladderize.memory import available_bytes
from ladderize.ranks.environment import launched
from ladderize.ranks.group import Ranks, rank_device

SHOWN_PROCESSES = 8  # at most, beside what was asked for
RATE = 4e14  # operations a second and GPU that time is said for: 40 % of an H100's bf16 peak
CPU_EFFICIENCY = 0.8  # of the rate of a product, as in the estimates of a sweep
PRODUCT_WIDTH = 512
MOST_READ = 64_000_000  # bytes of a source that is read


@dataclass(frozen=True)
class TrainingWay(Record):
    """One way to run the training. how: in words. memory_bytes: of each process, and its parts by name. fits: None
    where the memory is unknown. seconds: at the forecast's rate, validation left out."""

    how: str
    processes: int
    cut: Cut
    memory_bytes: int
    memory_parts: dict[str, int]
    fits: bool | None
    seconds: float


@dataclass(frozen=True)
class TrainingForecast(Record):
    """The document. device_memory_bytes: that ways are held to. tokens: about. state_bytes: most that unfinished work
    takes on the disk; output_bytes: most that OUT does. unread: sources whose rows were not checked. operations_per_s:
    that times are said for."""

    model: str
    method: str
    layout: str
    layers: list[int]
    parameters: int
    trained_parameters: int
    steps: int
    batch_size: int
    seq_len: int
    tokens: int
    device_memory_bytes: int | None
    state_bytes: int
    output_bytes: int
    unread: list[str]
    operations_per_s: float
    is_on_gpu: bool
    ways: list[TrainingWay]

    def rows(self) -> list[dict[str, str]]:
        """A table of the ways."""
        fits = {None: "", True: "yes", False: "no"}
        return [
            {
                "how": way.how,
                "rows at once": str(way.cut.micro_batch_size),
                "checkpointing": "yes" if way.cut.gradient_checkpointing else "no",
                "memory of each process": human_bytes(way.memory_bytes),
                "fits": fits[way.fits],
                "time": human_seconds(way.seconds),
            }
            for way in self.ways
        ]

    def text(self) -> str:
        """What stands above the table."""
        free = f" Each process may take {human_bytes(self.device_memory_bytes)}." if self.device_memory_bytes else ""
        rate = f"{human_count(self.operations_per_s)} operations per second"
        if self.is_on_gpu:
            rate = f"{RATE / 1e12:.0f} TFLOP/s for each process (40 % of an H100's peak)"
        times = f" Times are estimates at {rate}, without communication and validation."
        unread = f" Not read, and so not checked: {', '.join(self.unread)}." if self.unread else ""
        return (
            f"{self.method}, layers {format_ranges(self.layers)}: {human_count(self.trained_parameters)} of"
            f" {human_count(self.parameters)} parameters in training, about {self.steps:,} steps of"
            f" {self.batch_size} rows of {self.seq_len} tokens. On the disk at most {human_bytes(self.state_bytes)} of"
            f" unfinished work, and {human_bytes(self.output_bytes)} for OUT.{free}{times}{unread}"
        )


def forecast_training(
    model: str, options: RetrainOptions, *, device_memory: int | None = None, revision: str | None = None
) -> TrainingForecast:
    """What ``adapt_checkpoint`` would take with these options, and other ways to run it; of the models
    only headers are read, and the rows of files up to ``MOST_READ`` bytes are checked.

    device_memory: bytes of each device; None: what is free here, for each process of this machine. Raises what
    ``adapt_checkpoint`` does for models and options that do not go together.
    """
    options.check()
    options.budget.check()
    options.check_data()
    unread = check_rows(options)
    place = launched()
    size, local = (place.size, place.local_size) if place.size > 1 else (options.tp_size, options.tp_size)
    device = torch.device(options.device) if place.size == 1 else rank_device(options.device, place.local_rank)
    task = open_task(model, options, Ranks(place.rank, size, device, local), revision)
    on_gpu = device.type == "cuda" or device_memory is not None
    if device_memory is None and (free := available_bytes(device)) is not None:
        device_memory = free if on_gpu else free // local
    training, demand = task.training, demand_of(task)
    tokens = training.budget.tokens or training.about_steps * training.batch_size * training.seq_len
    is_adapter, rate = options.method == LORA, RATE if on_gpu else cpu_rate(task.compute)
    return TrainingForecast(
        model=model,
        method=options.method,
        layout=str(task.layout),
        layers=list(task.layers),
        parameters=parameter_count(task.checkpoint.config),
        trained_parameters=demand.trained,
        steps=training.about_steps,
        batch_size=training.batch_size,
        seq_len=training.seq_len,
        tokens=tokens,
        device_memory_bytes=device_memory,
        state_bytes=saved_bytes(demand.trained, training.keep),
        output_bytes=4 * demand.trained if is_adapter else task.checkpoint.weight_bytes,
        unread=unread,
        operations_per_s=rate,
        is_on_gpu=on_gpu,
        ways=[
            training_way(how, fitted(other, device_memory), tokens, device_memory, rate, on_gpu)
            for how, other in ways(task, on_gpu)
        ],
    )


def ways(task: Task, on_gpu: bool) -> Iterator[tuple[str, Task]]:
    """The task as it was asked for, and what takes less memory."""
    size = task.tp_size * task.data_ranks
    shared = ", FSDP2" if task.sharded else ", data parallel" if task.data_ranks > 1 else ""
    tensor = f", --tp-size {task.tp_size}" if task.tp_size > 1 else ""
    yield f"as asked: {size} process{'es' if size > 1 else ''}{shared}{tensor}", task
    for kind in others(task, on_gpu=on_gpu):
        for other in kind.tasks:
            if other.tp_size * other.data_ranks <= max(size, SHOWN_PROCESSES):
                yield kind.name(other), other


def training_way(
    how: str, task: Task, tokens: int, device_memory: int | None, rate: float, on_gpu: bool
) -> TrainingWay:
    """rate: operations a second, of each process where it has a GPU; else of all, which share the cores."""
    demand, processes = demand_of(task), task.tp_size * task.data_ranks
    return TrainingWay(
        how=how,
        processes=processes,
        cut=Cut.of(task),
        memory_bytes=demand.total,
        memory_parts=demand.parts(),
        fits=None if device_memory is None else demand.total <= device_memory,
        seconds=tokens * demand.operations / rate / (processes if on_gpu else 1),
    )


def check_rows(options: RetrainOptions) -> list[str]:
    """The sources that are too large to be read here, or streamed. Raises UserError for a file that cannot be read, and
    for bad rows of others unless such are to be skipped."""
    unread = []
    for spec in (*options.data, *options.eval_data):
        files = [] if spec.is_streamed else spec.files()
        if not files or sum(Path(split_name(file)[0]).stat().st_size for file in files) > MOST_READ:
            unread.append(spec.name)
        else:
            open_source(spec, options.skip_bad_rows)
    return unread


def cpu_rate(dtype: torch.dtype) -> float:
    """Operations a second that a model reaches here and now, from a product timed."""
    matrix = torch.ones(PRODUCT_WIDTH, PRODUCT_WIDTH, dtype=dtype)
    return CPU_EFFICIENCY * 2 * PRODUCT_WIDTH**3 / min(timed(lambda: matrix @ matrix, matrix.device) for _ in range(3))
