"""The options of ``ladderize bench``, and all that its arguments alone decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from ladderize.checkpoint.config import MOST_LAYERS
from ladderize.choices import (
    BACKEND,
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
    check_options,
    distinct_names,
    flag,
    option,
    split_names,
)
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.layout import Layout, LayoutError, parse_ranges
from ladderize.ranks.device import default_device
from ladderize.runtime.schedule import SEQUENTIAL, Schedule, ScheduleName

LAYOUT_NAMES = ("dense", "ladder", "delayed", "spd", "spd+ladder", "spd+delayed")
BASELINES = ("parallel", "no-comm")
PLUGIN = "plugin"  # with --engine vllm: the dense model in the class that runs layouts


def parse_counts(text: str, option: str = "--batch-size") -> tuple[int, ...]:
    """Read ``1,8,64``, each number once."""
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
)
PROMPT_LEN = Option("Tokens per prompt.", min=1)
OUTPUT_LEN = Option("Tokens to generate. The prefill makes the first one.", min=2)
UNCOUNTED_ROUNDS = Option("Rounds that are not counted.", min=1)
COUNTED_ROUNDS = Option("Rounds that are counted. Medians are reported.", min=1)


@dataclass(frozen=True)
class ModelChoice:
    """The models to time: checkpoints, or one shape with random weights in several layouts. None: not given."""

    models: tuple[str, ...] = argument("[MODEL]...", "Checkpoints. The first is the reference.", ())
    random_weights: str | None = option(f"Time a shape instead of checkpoints: {SHAPE_NAMES}.", metavar="CONFIG")
    layout: str | None = option(
        "With --random-weights: layouts, each a name or name=RANGE of layers.",
        metavar="A,B",
        shown=", ".join(LAYOUT_NAMES),
    )
    num_layers: int | None = option(
        "With --random-weights: number of layers.", min=1, max=MOST_LAYERS, shown="the config's"
    )
    sync_tp_size: int | None = option(
        "With --random-weights: virtual ranks of delayed and spd.", min=1, shown="as many as ranks"
    )
    dtype: Dtype = option(
        "float32, bfloat16, float16, or auto: as stored, bfloat16 for random weights.", "auto", metavar="DTYPE"
    )
    revision: str | None = option(REVISION)


@dataclass(frozen=True)
class BenchOptions(Record):
    """The options of a benchmark: ``options`` of bench.json. vLLM heeds a part of them (``VLLM_OPTIONS``).

    None: not given.
    """

    train: bool = option("Time training steps (forward and backward, no optimizer) instead of inference.", False)
    tp_size: int = option(TP_SIZE, 1)
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1,), shown="1")
    prompt_len: int = option(PROMPT_LEN, 128, help="Tokens per prompt; with --train, per row.")
    output_len: int = option(OUTPUT_LEN, 33)
    schedules: tuple[str, ...] = option(
        "Time every model by each: sequential, and domino, which computes one part of the batch while another's sum is"
        " sent. In inference, of the prefill.",
        (SEQUENTIAL.name,),
        metavar="A,B",
        parse=distinct_names,
    )
    baselines: tuple[str, ...] = option(
        "Time these too, of the first model: parallel (one all-reduce per layer), no-comm (none); with --engine vllm:"
        " plugin (in the class that runs layouts).",
        (),
        metavar="A,B",
        parse=distinct_names,
    )
    warmup: int = option(UNCOUNTED_ROUNDS, 2)
    repeat: int = option(COUNTED_ROUNDS, 7)
    profile: Path | None = option(
        "Write Chrome traces here. On the runtime it fails if a layout that should overlap shows no overlap.",
        metavar="DIR",
    )
    threads: int | None = option(THREADS)
    seed: int = option(SEED_OF_ROUNDS, 0)
    backend: BackendName = option(
        BACKEND, "auto", help="How ranks communicate. none: no communication, for timing only; results are wrong."
    )
    emulate_tp: int | None = option(
        "Emulate TP size N in one process: it computes rank 0's part, and --link gives the delays.", min=2
    )
    outer_link: str | None = option(
        "With --emulate-tp and several ranks for each virtual rank: the link between these groups; --link is within.",
        metavar="LINK",
        needs="emulate_tp",
    )
    check: bool = option(
        "Skip comparing checkpoints with transformers in float32 before timing; with --train, gradients with those of"
        " the sequential schedule.",
        True,
        flags="--no-check",
    )
    device: str = option(DEVICE, default_device)
    replicate_vocab: bool = option(REPLICATE_VOCAB, False)

    @property
    def ranks(self) -> int:
        """The number of ranks that the model is split over, real or emulated."""
        return self.emulate_tp or self.tp_size

    @property
    def ranks_option(self) -> str:
        """The option that gave the number of ranks."""
        return "--tp-size" if self.emulate_tp is None else "--emulate-tp"

    @property
    def timed_schedules(self) -> list[Schedule]:
        """The schedules to time, in the order in which they were given."""
        return [Schedule("domino") if name == "domino" else SEQUENTIAL for name in self.schedules]

    @property
    def passes(self) -> dict[str, int]:
        """The phases that are timed, and the number of passes of each in the total."""
        return {"forward": 1, "backward": 1} if self.train else {"prefill": 1, "decode": self.output_len - 1}

    @property
    def steps(self) -> int:
        """The passes of the last phase. The first token after a prompt belongs to the prefill."""
        return 1 if self.train else self.output_len - 1

    @property
    def total(self) -> str:
        """The name of all phases together."""
        return "step" if self.train else "end_to_end"

    @property
    def columns(self) -> int:
        """The number of tokens of a whole text."""
        return self.prompt_len + (0 if self.train else self.output_len)


OF_INFERENCE = {"output_len", "baselines", "replicate_vocab"}
VLLM_OPTIONS = {"tp_size", "batch_size", "warmup", "repeat", "profile", "threads", "seed", "prompt_len", "output_len",
                "baselines"}  # fmt: skip


def check_bench_usage(
    choice: ModelChoice, options: BenchOptions, link: str | None, *, baselines: Sequence[str] = BASELINES
) -> None:
    """Raise UsageError for arguments that do not go together, take no effect, or are out of range.

    link: of ``--link``.
    baselines: the names that ``--baselines`` takes.
    """
    if bool(choice.models) == (choice.random_weights is not None):
        raise UsageError("name checkpoints, or a shape with --random-weights, and not both")
    for name in ("layout", "num_layers", "sync_tp_size"):
        if choice.models and getattr(choice, name) is not None:
            raise UsageError(f"{flag(name)} goes with --random-weights; a checkpoint has its own layout and layers")
    if len(set(choice.models)) < len(choice.models):
        raise UsageError("a model is named twice; every variant is timed once")
    check_options(choice)
    check_options(options)
    if not options.batch_sizes or min(options.batch_sizes) < 1:
        raise UsageError(f"--batch-size {options.batch_sizes} must name positive integers")
    if not options.schedules or set(options.schedules) - set(get_args(ScheduleName)):
        raise UsageError(f"--schedules {','.join(options.schedules)} must name {' or '.join(get_args(ScheduleName))}")
    if options.train and (options.baselines or options.replicate_vocab):
        raise UsageError("--baselines and --replicate-vocab have no effect with --train")
    for name in options.baselines:
        if name not in baselines:
            raise UsageError(f"--baselines {name} is not one of {', '.join(baselines)}")
    if (options.emulate_tp is None) != (link is None):
        raise UsageError("--emulate-tp and --link must be given together")
    if options.emulate_tp is not None and options.tp_size != 1:
        raise UsageError("--emulate-tp runs one process in place of a group; leave --tp-size out")


def layout_names(text: str | None) -> list[str]:
    """Return the parts of ``--layout``; all layouts where it was not given."""
    names = list(LAYOUT_NAMES) if text is None else list(split_names(text))
    if not names or len(set(names)) < len(names):
        raise UsageError(f"--layout {text!r} names no layout, or one twice")
    return names


def named_layout(text: str, num_layers: int, sync_tp_size: int) -> Layout:
    """Return the layout of a name: ``ladder`` is all layers, ``ladder=16:32`` some; likewise the others."""
    name, equals, ranges = text.partition("=")
    if name not in LAYOUT_NAMES or (equals and name == "dense"):
        raise UsageError(
            f"--layout {text} is not one of {', '.join(LAYOUT_NAMES)}, or such a name with a range of layers,"
            " ladder=16:32"
        )
    try:
        layers = parse_ranges(ranges, num_layers, option="--layout") if equals else list(range(num_layers))
    except LayoutError as error:
        raise UserError(str(error)) from None
    changed = dict.fromkeys(name.split("+") if name != "dense" else (), layers)
    return Layout.from_layers(
        num_layers, **changed, sync_tp_size=sync_tp_size if changed.keys() & {"delayed", "spd"} else None
    )
