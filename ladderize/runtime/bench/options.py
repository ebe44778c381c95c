"""What ``ladderize bench`` was asked for, and all that its arguments alone decide.

No torch here: the command line takes its defaults from these classes, and ``--help`` is instant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ladderize.checkpoint.config import MOST_LAYERS
from ladderize.choices import (
    BACKEND,
    COMPILE,
    DEVICE,
    REPLICATE_VOCAB,
    REVISION,
    SEED_OF_ROUNDS,
    SHAPE_NAMES,
    THREADS,
    TP_SIZE,
    BackendName,
    Dtype,
    Option,
    argument,
    check_choices,
    check_options,
    flag,
    option,
    split_names,
)
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.layout import Layout, LayoutError, parse_ranges
from ladderize.ranks.device import default_device
from ladderize.runtime.schedule import SEQUENTIAL, Schedule, ScheduleName

LAYOUT_NAMES = {"dense": (), "ladder": ("ladder",), "spd": ("spd",), "spd+ladder": ("spd", "ladder")}
BASELINES = ("parallel", "no-comm", "sequential")


def parse_counts(text: str, option: str = "--batch-size") -> tuple[int, ...]:
    """``1,8,64``, each number once."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{option} {text!r} is not a comma-separated list of positive integers")
    return sizes


BATCH_SIZES = Option(
    "Batch sizes.",
    "A,B",
    flags="--batch-size",
    parse=parse_counts,
    shown="1; 2 with --train; 1,8,64 with --engine vllm",
)
PROMPT_LEN = Option("Tokens per prompt.", min=1)
OUTPUT_LEN = Option("Tokens to generate. The prefill makes the first one.", min=2)
UNCOUNTED_ROUNDS = Option("Rounds that are not counted.", min=1)
COUNTED_ROUNDS = Option("Rounds that are counted. Medians are reported.", min=1)


@dataclass(frozen=True)
class ModelChoice:
    """What to time: checkpoints, or one shape with random weights in several layouts. None was not given."""

    models: tuple[str, ...] = argument("[MODEL]...", "Checkpoints. The first is the reference.", ())
    random_weights: str | None = option(f"Time a shape instead of checkpoints: {SHAPE_NAMES}.", metavar="CONFIG")
    layout: str | None = option(
        "With --random-weights: layouts, each a name or name=RANGE of layers.",
        metavar="A,B",
        shown=",".join(LAYOUT_NAMES),
    )
    num_layers: int | None = option("With --random-weights: number of layers.", min=1, shown="the config's")
    sync_tp_size: int | None = option("With --random-weights: virtual ranks of spd.", min=1, shown="as many as ranks")
    dtype: Dtype = option(
        "float32, bfloat16, float16, or auto: as stored, bfloat16 for random weights.", "auto", metavar="DTYPE"
    )
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True)
class RoundsOptions(Record):
    """What every benchmark is asked: over how many ranks, and how often. None was not given."""

    tp_size: int = option(TP_SIZE, 1)
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1,))
    warmup: int = option(UNCOUNTED_ROUNDS, 2)
    repeat: int = option(COUNTED_ROUNDS, 7)
    profile: Path | None = option(
        "Write Chrome traces here. Fails if a layout that should overlap shows no overlap.", metavar="DIR"
    )
    threads: int | None = option(THREADS)
    seed: int = option(SEED_OF_ROUNDS, 0)

    def __post_init__(self) -> None:
        check_choices(self)


@dataclass(frozen=True)
class GroupOptions(RoundsOptions):
    """What is asked of the runtime, for inference and for training."""

    backend: BackendName = option(
        BACKEND, "auto", help="How ranks communicate. none: no communication, for timing only; results are wrong."
    )
    emulate_tp: int | None = option(
        "Emulate TP size N in one process: it computes rank 0's part, and --link gives the delays.", min=2
    )
    check: bool = option(
        "Skip comparing checkpoints with transformers in float32 before timing; with --train, the schedules' gradients"
        " with each other.",
        True,
        flags="--no-check",
    )
    device: str = option(DEVICE, default_device)
    domino_chunks: int | None = option(
        "Domino: parts that the batch is cut into. One row is cut along its tokens.", min=2, shown=str(Schedule.chunks)
    )
    domino_columns: int | None = option(
        "Domino: parts in which a sub-module's sum is computed and sent.", min=1, shown=str(Schedule.columns)
    )

    @property
    def ranks(self) -> int:
        """Ranks that the model is split over, real or emulated."""
        return self.emulate_tp or self.tp_size

    @property
    def ranks_option(self) -> str:
        """The option that said how many."""
        return "--tp-size" if self.emulate_tp is None else "--emulate-tp"

    def scheduled(self, name: str) -> Schedule:
        """The schedule of this name, domino with the chunks and columns that were asked for."""
        if name != "domino":
            return SEQUENTIAL
        given = {"chunks": self.domino_chunks, "columns": self.domino_columns}
        return Schedule("domino", **{key: value for key, value in given.items() if value is not None})


@dataclass(frozen=True)
class InferenceLengths:
    """What is asked of inference, on the runtime and in vLLM."""

    prompt_len: int = option(PROMPT_LEN, 128)
    output_len: int = option(OUTPUT_LEN, 33)
    baselines: tuple[str, ...] = option(
        "Time these too, of the first model: parallel (one all-reduce per layer), no-comm (none), sequential (with"
        " --schedule domino); with --engine vllm: plugin (in the class that runs layouts), unfused (norms not fused"
        " into all-reduces), replicas (two of half the ranks).",
        (),
        metavar="A,B",
        parse=split_names,
    )

    @property
    def decode_steps(self) -> int:
        """Tokens after the first, which belongs to the prefill."""
        return self.output_len - 1


@dataclass(frozen=True)
class BenchOptions(InferenceLengths, GroupOptions):
    """How to time inference: ``options`` of bench.json."""

    replicate_vocab: bool = option(REPLICATE_VOCAB, False)
    compile: bool = option(COMPILE, False)
    schedule: ScheduleName = option(
        "Of prefill: sequential, or domino, which computes one part of the batch while another's sum is sent.",
        "sequential",
        metavar="NAME",
    )

    @property
    def prefill_schedule(self) -> Schedule:
        """When the parts of a prefill run; a decode step is always one part."""
        return self.scheduled(self.schedule)


def parse_schedules(text: str) -> tuple[str, ...]:
    """``sequential,domino``, in this order however they are named."""
    known = get_args(ScheduleName)
    names = [name.strip() for name in text.split(",")]
    if not set(names) <= set(known):
        raise UsageError(f"--schedules {text!r} is not a comma-separated list of {', '.join(known)}")
    return tuple(name for name in known if name in names)


@dataclass(frozen=True)
class TrainingBenchOptions(GroupOptions):
    """How to time training steps: ``options`` of its document. Each schedule is timed with each model; the first with
    the first model is the reference."""

    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (2,))  # rows of a step
    seq_len: int = option("With --train: tokens per row.", 128, min=2)
    schedules: tuple[str, ...] = option(
        "With --train: schedules to time, of sequential and domino.",
        ("sequential", "domino"),
        metavar="A,B",
        shown="both",
        parse=parse_schedules,
    )

    @property
    def timed_schedules(self) -> list[Schedule]:
        return [self.scheduled(name) for name in self.schedules]


def check_rounds_usage(choice: ModelChoice, options: RoundsOptions) -> None:
    """Raise UsageError for models that do not go together, and numbers that are none. The command line checks most of
    them by itself; from Python anything can come."""
    if bool(choice.models) == (choice.random_weights is not None):
        raise UsageError("name checkpoints, or a shape with --random-weights, and not both")
    for name in ("layout", "num_layers", "sync_tp_size"):
        if choice.models and getattr(choice, name) is not None:
            raise UsageError(f"{flag(name)} goes with --random-weights; a checkpoint has its own layout and layers")
    if choice.num_layers is not None and not 1 <= choice.num_layers <= MOST_LAYERS:
        raise UsageError(f"--num-layers {choice.num_layers} is not from 1 to {MOST_LAYERS:,}")
    if len(set(choice.models)) < len(choice.models):
        raise UsageError("a model is named twice; every variant is timed once")
    check_options(options)
    if not options.batch_sizes or min(options.batch_sizes) < 1:
        raise UsageError(f"--batch-size {options.batch_sizes} must name positive integers")


def check_bench_usage(choice: ModelChoice, options: BenchOptions, link: str | None) -> None:
    """Raise UsageError for arguments that do not go together or take no effect. link: of ``--link``."""
    _check_group_usage(choice, options, link, (options.schedule,), "--schedule")
    if unknown := [name for name in options.baselines if name not in BASELINES]:
        raise UsageError(f"--baselines {unknown[0]} is not one of {', '.join(BASELINES)}")
    if "parallel" in options.baselines and options.schedule != "sequential":
        raise UsageError(f"--baselines parallel runs sequentially; leave it out, or --schedule {options.schedule}")
    if "sequential" in options.baselines and options.schedule == "sequential":
        raise UsageError("--baselines sequential has no effect without --schedule domino: every model is timed so")
    if options.replicate_vocab and options.ranks == 1:
        raise UsageError("--replicate-vocab has no effect with one rank")
    if not options.check and choice.random_weights is not None:
        raise UsageError("--no-check has no effect with --random-weights: there is nothing to check")
    if options.backend == "none" and not options.check:
        raise UsageError("--no-check has no effect with --backend none, which sums nothing and is never checked")


def check_training_usage(choice: ModelChoice, options: TrainingBenchOptions, link: str | None) -> None:
    """The same of ``--train``."""
    if choice.dtype == "float16":
        raise UsageError("--dtype float16 has too small a range for training; use bfloat16 or float32")
    if not options.schedules or set(options.schedules) - set(get_args(ScheduleName)):
        raise UsageError(f"--schedules {options.schedules} must name {' or '.join(get_args(ScheduleName))}")
    if len(set(options.schedules)) < len(options.schedules):
        raise UsageError("--schedules names one twice; every variant is timed once")
    _check_group_usage(choice, options, link, options.schedules, "--schedules")


def _check_group_usage(
    choice: ModelChoice, options: GroupOptions, link: str | None, schedules: tuple[str, ...], asked_by: str
) -> None:
    """The same of what both have. asked_by: the option that names the schedules."""
    check_rounds_usage(choice, options)
    if options.backend != "auto" and options.ranks == 1:
        raise UsageError(f"--backend {options.backend} has no effect with one rank; leave it out or raise --tp-size")
    if (options.emulate_tp is None) != (link is None):
        raise UsageError("--emulate-tp and --link must be given together")
    if options.emulate_tp is not None and options.tp_size != 1:
        raise UsageError("--emulate-tp runs one process in place of a group; leave --tp-size out")
    if options.emulate_tp is not None and options.backend != "auto":
        raise UsageError("--backend has no effect with --emulate-tp")
    if options.profile is not None and (options.backend == "none" or options.ranks == 1):
        silent = "--backend none" if options.backend == "none" else "one rank"
        raise UsageError(f"--profile measures overlap of communication with compute; {silent} has no communication")
    if "domino" in schedules:
        if options.ranks == 1:
            raise UsageError(f"{asked_by} domino hides communication, and one rank has none; raise --tp-size")
        options.scheduled("domino")  # checks its numbers
        return
    for name in ("domino_chunks", "domino_columns"):
        if getattr(options, name) is not None:
            raise UsageError(f"{flag(name)} has no effect without {asked_by} domino")


def layout_names(text: str | None) -> list[str]:
    """The parts of ``--layout``; all layouts where it was not given."""
    names = list(LAYOUT_NAMES) if text is None else list(split_names(text))
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--layout {text!r} names no layout, or one twice")
    return names


def named_layout(text: str, num_layers: int, sync_tp_size: int, *, more: Sequence[str] = ()) -> Layout:
    """``ladder`` is all layers, ``ladder=16:32`` some; likewise dense, spd and spd+ladder. more: what else --layout
    takes, for the message."""
    name, equals, ranges = text.partition("=")
    if name not in LAYOUT_NAMES or (equals and name == "dense"):
        raise UsageError(
            f"--layout {text} is not one of {', '.join([*LAYOUT_NAMES, *more])}, or such a name with a range of layers,"
            " ladder=16:32"
        )
    try:
        layers = parse_ranges(ranges, num_layers, option="--layout") if equals else list(range(num_layers))
    except LayoutError as error:
        raise UserError(str(error)) from None
    changes = LAYOUT_NAMES[name]
    return Layout.from_layers(
        num_layers,
        ladder=layers if "ladder" in changes else (),
        spd=layers if "spd" in changes else (),
        sync_tp_size=sync_tp_size if "spd" in changes else None,
    )
