"""The document bench.json (docs/files.md): its rows, the machine they were measured on, and how they are shown. Imports
no torch, so that reports read it at once."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ladderize.choices import EngineName
from ladderize.console import Console, human_bytes
from ladderize.files.records import Record
from ladderize.layout import HIDING
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import ScheduleName

if TYPE_CHECKING:
    from ladderize.ranks.group import Ranks

MODEL_ROW = "model"  # another kind of row is a baseline

LEAST_ROUNDS = 3  # with fewer there is no interval
ENOUGH_ROUNDS = 5  # with fewer an interval is too narrow


@dataclass(frozen=True)
class Environment(Record):
    LEFT_OUT: ClassVar = ("operations", "gpus", "gpu_memory_bytes", "gpu_memory_gb_s", "cuda", "nccl", "vllm")

    device: str
    processor: str
    cores: int
    threads_per_rank: int
    python: str
    torch: str
    transformers: str
    system: str
    hosts: int
    settings: dict[str, str]  # environment variables that change times
    operations: str | None = None  # between the products, of inference
    gpus: list[str] | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_gb_s: float | None = None  # by the data sheet; None for a GPU that is not in devices.yaml
    cuda: str | None = None
    nccl: str | None = None
    vllm: str | None = None


SECRETS = re.compile("KEY|TOKEN|SECRET|PASSWORD")  # in names of variables, such as VLLM_API_KEY: files are published


def environment(
    group: "Ranks", *, settings: tuple[str, ...] = (), operations: str | None = None, vllm: str | None = None
) -> Environment:
    """Describe the machine; all ranks call it. settings: prefixes of further environment variables to note."""
    import torch
    import transformers

    from ladderize.ranks.device import cores, known_gpu, processor

    prefixes = ("NCCL_", "GLOO_", "OMP_", "TORCH_", *settings)
    noted = [name for name in sorted(os.environ) if name.startswith(prefixes) and not SECRETS.search(name)]
    of_gpus: dict[str, Any] = {}
    if group.device.type == "cuda":
        name = torch.cuda.get_device_name(group.device)
        of_gpus = {
            "gpus": group.gather(name),
            "gpu_memory_bytes": torch.cuda.get_device_properties(group.device).total_memory,
            "gpu_memory_gb_s": known_gpu(name).get("memory_bandwidth_gb_s"),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return Environment(
        device=group.device.type,
        processor=processor(),
        cores=len(cores()),
        threads_per_rank=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        transformers=transformers.__version__,
        system=f"{platform.system()} {platform.release()}",
        hosts=len(set(group.gather(platform.node()))),
        settings={name: os.environ[name] for name in noted},
        operations=operations,
        vllm=vllm,
        **of_gpus,
    )


# ---- rows: docs/files.md describes the fields ----


@dataclass(frozen=True)
class PhaseCommunication(Record):
    """The communication of one pass: a prefill, a decode step, or one of the two passes of a training step."""

    all_reduces: int  # of the layers
    bytes: int
    no_communication_ms: float
    alone_ms: float  # of all collectives, the vocabulary's too
    exposed_ms: float  # a difference of two medians, so it may come out below 0
    exposed_interval_ms: list[float]


@dataclass(frozen=True)
class Overlap(Record):
    """The milliseconds in flight of some traced passes, and those under compute among them."""

    LEFT_OUT: ClassVar = ("proven",)

    in_flight_ms: float
    under_compute_ms: float
    proven: bool | None = None  # there is any overlap at all; None where nothing promises any

    @property
    def share(self) -> float:
        return self.under_compute_ms / self.in_flight_ms if self.in_flight_ms else 0.0


@dataclass(frozen=True)
class BenchRow(Record):
    """A model, or a baseline, at one batch size, by one schedule. Dicts are by phase, ``ms`` by the total, too."""

    LEFT_OUT: ClassVar = (
        "communication", "no_communication_samples_ms", "overlap", "bound_share", "architecture",
    )  # fmt: skip

    model: str
    kind: str
    schedule: ScheduleName
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    weights: str
    dtype: str
    tp_size: int
    batch_size: int
    ms: dict[str, float]
    speedup: dict[str, float]
    speedup_interval: dict[str, list[float]]
    tokens_per_s: float
    samples_ms: dict[str, list[float]]
    communication: dict[str, PhaseCommunication] | None = None
    no_communication_samples_ms: dict[str, list[float]] | None = None
    overlap: dict[str, Overlap] | None = None
    bound_share: float | None = None  # of the model's fastest step without communication, in training
    architecture: str | None = None  # vLLM's model class
    decode_read_bytes: int | None = None  # by one rank in the mean step; None in training
    bandwidth_share: float | None = None  # of the memory's bandwidth, which it takes to read them in a step's time

    @property
    def is_model(self) -> bool:
        return self.kind == MODEL_ROW

    @property
    def is_random(self) -> bool:
        return self.weights == "random"

    def overlaps(self, phase: str) -> bool:
        return may_overlap((*self.attention_sync, *self.mlp_sync), self.schedule, phase)


def may_overlap(modes: Sequence[str], schedule: str, phase: str) -> bool:
    """Return True if the modes of a layout, or the schedule, let a sum of ``phase`` run under compute. In a backward
    pass a sum always may, under weights' gradients; decoding is never cut by a schedule."""
    is_cut = schedule == "domino" and phase != "decode"
    return phase == "backward" or is_cut or any(mode in HIDING for mode in modes)


@dataclass
class BenchDocument(Record):
    """The document bench.json. Each rank adds to its own while it measures."""

    LEFT_OUT: ClassVar = ("engine", "messages", "extrapolated_bytes")

    complete: bool  # False for good where the rest failed
    options: BenchOptions
    backend: str  # of the all-reduces
    environment: Environment
    link: Link | None  # of an emulated group, whose all-reduces are delays
    alone_ms: dict[str, float] = field(default_factory=dict)  # of a collective with nothing beside it
    rows: list[BenchRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the reason why a variant has no row
    checks: dict[str, dict[str, float]] = field(default_factory=dict)  # of the variants that passed
    engine: EngineName | None = None  # None: ladderize's runtime
    messages: str | None = None  # the backend of messages in flight in vLLM
    extrapolated_bytes: list[int] | None = None  # sizes of messages beyond those that the link was measured at


def few_rounds(repeat: int) -> str:
    """Return a warning about intervals of so few rounds; empty where there are enough."""
    if repeat < LEAST_ROUNDS:
        return f"with fewer than {LEAST_ROUNDS} rounds their scatter is unknown: no intervals; raise --repeat"
    if repeat < ENOUGH_ROUNDS:  # at the widest they reach from the smallest to the largest, around the true median
        return (
            f"intervals of {repeat} rounds are too narrow: about {1 - 2 ** (1 - repeat):.0%} hold the true value, where"
            f" 95 % should; raise --repeat to {ENOUGH_ROUNDS} or more"
        )
    return ""


# ---- tables ----

PHASE_TITLES = {
    "prefill": "Prefill",
    "decode": "Decode, one step",
    "step": "Training step",
    "forward": "Forward pass",
    "backward": "Backward pass",
}
# the columns of a phase's table in their order, and what is said below it; those without any text are left out
COLUMNS = {
    **dict.fromkeys(("model", "class", "batch", "ms", "tokens/s")),
    "of bandwidth": "the share of the memory's bandwidth that it takes to read all weights and the cache in this time.",
    "of no-comm": "the share that the fastest step of this model without communication has of the step.",
    "speed-up": "over the first row of its batch size; its 95 % interval says how far the rounds disagree.",
    **dict.fromkeys(("95 % interval", "all-reduces")),
    "waited ms": "longer than the same model without communication; <: at most (95 %), where the waiting is too short"
    " to be measured; ?: unknown.",
    "comm. alone ms": "with nothing beside it.",
    "in trace": "the share of the communication that ran under compute in the trace.",
}


def _entries(document: BenchDocument, row: BenchRow, phase: str) -> dict[str, str]:
    """Return the texts of a row of the table of a phase, by column."""
    entries = {"batch": str(row.batch_size), "ms": short_ms(row.ms[phase]), "speed-up": f"{row.speedup[phase]:.2f}x"}
    if row.architecture is not None:
        entries["class"] = row.architecture.removesuffix("ForCausalLM")
    if phase in ("decode", "step"):
        entries["tokens/s"] = f"{row.tokens_per_s:.1f}"
    if phase == "decode" and row.bandwidth_share is not None:
        entries["of bandwidth"] = f"{row.bandwidth_share:.0%}"
    if phase == "step":
        entries["of no-comm"] = f"{row.bound_share:.2f}"
    first = next(each for each in document.rows if each.batch_size == row.batch_size)
    if document.options.repeat >= LEAST_ROUNDS and row is not first:
        entries["95 % interval"] = "{:.2f}-{:.2f}".format(*row.speedup_interval[phase])
    sent, overlap = (row.communication or {}).get(phase), (row.overlap or {}).get(phase)
    if sent is not None and sent.alone_ms:
        entries["all-reduces"], entries["waited ms"] = str(sent.all_reduces), waited_text(sent)
        entries["comm. alone ms"] = short_ms(sent.alone_ms)
    if overlap is not None and overlap.in_flight_ms:
        entries["in trace"] = f"{overlap.share:.0%}"
    return entries


def short_ms(milliseconds: float) -> str:
    """Return the number with the four digits that a measurement has at best."""
    digits = sum(milliseconds < limit for limit in (1000, 100, 10))
    return f"{milliseconds:.{digits}f}"


def waited_text(communication: PhaseCommunication) -> str:
    """Return the ms waited for: a bound where the rounds do not tell it from 0, ``?`` where they say less. The
    difference of two medians can come out negative, which no waiting time is."""
    low, high = communication.exposed_interval_ms
    if high <= 0:
        return "?"
    return f"<{short_ms(high)}" if low <= 0 else short_ms(communication.exposed_ms)


def show_bench(document: BenchDocument, console: Console) -> None:
    """Print the tables of a benchmark, one for each phase, what they mean, and doubts as warnings."""
    if not document.rows:
        return
    console.prose(_heading(document))
    # the last part of a model's name, or all of it where labels would be equal
    labels = {row.model: Path(row.model).name for row in document.rows}
    if len(set(labels.values())) < len(labels):
        labels = {name: name for name in labels}
    explained: set[str] = set()
    for phase in ("step", "forward", "backward") if document.options.train else ("prefill", "decode"):
        console.result(f"\n{PHASE_TITLES[phase]}{' (emulated)' if document.link is not None else ''}")
        table = [{"model": labels[row.model], **_entries(document, row, phase)} for row in document.rows]
        shown = set().union(*table)
        explained |= shown
        empty = {title: "" for title in COLUMNS if title in shown}
        table += [{"model": Path(name).name, "ms": "failed"} for name in document.failed]
        console.table([empty | entries for entries in table], right=[*(empty.keys() - {"model", "class"})])
    console.result("")
    for title, explanation in COLUMNS.items():
        if explanation and title in explained:
            console.prose(f"{title}: {explanation}")
    if any(row.is_random for row in document.rows):
        console.prose("Weights are random: only the times are meaningful.")
    for line in _checks(document, labels):
        console.prose(line)
    link, sizes = document.link, document.extrapolated_bytes
    if link is not None and link.derived:
        console.warn(f"{link.name} was not measured with {document.options.ranks} ranks: its times are {link.derived}")
    if link is not None and sizes:
        extrapolated = " to ".join(dict.fromkeys((human_bytes(sizes[0]), human_bytes(sizes[-1]))))
        console.warn(f"extrapolated beyond the sizes that {link.name} was measured at: messages of {extrapolated}")
    if doubt := few_rounds(document.options.repeat):
        console.warn(doubt)


def _heading(document: BenchDocument) -> str:
    options, link = document.options, document.link
    ranks = f"{options.ranks} rank{'s' * (options.ranks > 1)}, {document.backend}"
    if options.emulate_tp is not None and link is not None:
        ranks = f"EMULATED: rank 0 of {options.ranks}, {link.name}"
    if document.engine == "vllm":
        ranks = f"vLLM {document.environment.vllm}, {ranks}"
        ranks += "" if document.messages is None else f", messages in flight by {document.messages}"
    sizes = f"prompt {options.prompt_len} tokens, output {options.output_len}"
    if options.train:
        sizes = f"rows of {options.prompt_len} tokens"
    schedule = "" if options.schedules[0] == "sequential" else f"; schedule {options.schedules[0]}"
    rounds = f"medians of {options.repeat} interleaved rounds" if options.repeat > 1 else "one round"
    doubt = "" if document.complete else "; UNFINISHED, these are the rows measured so far"
    return f"{ranks}; {sizes}{schedule}, {rounds}{doubt}"


def _checks(document: BenchDocument, labels: dict[str, str]) -> Iterator[str]:
    """Yield the outcome of the checks before timing, and what they did not see."""
    for failure in document.failed.values():
        yield f"Check FAILED, so not timed: {failure}."
    if document.options.train:
        if not document.options.check:
            yield "Not checked: whether the schedules give the same gradients."
        elif document.checks:
            worst = max(check["gradient_difference"] / check["tolerance"] for check in document.checks.values())
            yield (
                "Checked before timing: every schedule gives the loss and the gradients of the sequential one whose"
                f" sums block; the largest difference is {worst:.0%} of the tolerance."
            )
        return
    for model, check in document.checks.items():
        yield (
            f"Reference check of {labels.get(model, model)}: passed. Largest logit difference to transformers in"
            f" float32 {check['logit_difference']:.2g} (tolerance {check['tolerance']:.2g}), root mean square"
            f" {check['rms_difference']:.2g} ({check['rms_tolerance']:.2g});"
            f" {check['equal_greedy_tokens']:.0f} of {check['greedy_tokens']:.0f} tokens equal."
        )
    unchecked = {row.model for row in document.rows if row.is_model and not row.is_random} - document.checks.keys()
    if unchecked:
        yield f"Not checked against a reference: {', '.join(sorted(unchecked))}."
