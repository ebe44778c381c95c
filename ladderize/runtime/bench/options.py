"""The options of ``ladderize bench``, and all that they alone decide."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

from ladderize.checkpoint.config import MOST_LAYERS
from ladderize.choices import (
    BACKEND,
    DEVICE,
    MEASUREMENT,
    MEMORY,
    MODELS,
    OUTPUT,
    REPLICATE_VOCAB,
    SHAPE_NAMES,
    THREADS,
    TP_SIZE,
    BackendName,
    DeviceName,
    Dtype,
    EngineName,
    Option,
    argument,
    check_options,
    distinct_names,
    flag,
    option,
    parameter_name,
    split_names,
)
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.layout import Layout, LayoutError, parse_ranges
from ladderize.runtime.schedule import SEQUENTIAL, Schedule, ScheduleName

LAYOUT_NAMES = ("dense", "ladder", "delayed", "spd", "spd+ladder", "spd+delayed")
BASELINES = {"runtime": ("parallel", "no-comm"), "vllm": ("plugin",)}
OF_INFERENCE = ("output_len", "baselines", "replicate_vocab")
OF_RUNTIME = ("train", "schedules", "check", "device", "replicate_vocab")
OF_MESSAGES = ("backend", "emulate_tp", "link", "outer_link")
OF_SHAPES = ("layout", "num_layers", "sync_tp_size")


def parse_counts(text: str, option: str = "--batch-size") -> tuple[int, ...]:
    """Read ``1,8,64``, each number once."""
    try:
        sizes = tuple(dict.fromkeys(map(int, text.split(","))))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{option} {text!r} is not a comma-separated list of positive integers")
    return sizes


BATCH_SIZES = Option("Batch sizes.", "A,B", MEASUREMENT, flags="--batch-size", parse=parse_counts)
PROMPT_LEN = Option("Tokens per prompt.", panel=MEASUREMENT, min=1)
OUTPUT_LEN = Option("Tokens to generate. The prefill makes the first one.", panel=MEASUREMENT, min=2)


@dataclass(frozen=True)
class BenchOptions(Record):
    """The models to time, and how: checkpoints, or one shape with random weights in several layouts."""

    models: tuple[str, ...] = argument("[MODEL]...", "Checkpoints. The first is the reference.", ())
    random_weights: str | None = option(
        f"Time a shape instead of checkpoints: {SHAPE_NAMES}.", panel=MODELS, metavar="CONFIG"
    )
    layout: str | None = option(
        "With --random-weights: layouts, each a name or name=RANGE of layers.",
        panel=MODELS,
        metavar="A,B",
        shown=", ".join(LAYOUT_NAMES),
    )
    num_layers: int | None = option(
        "With --random-weights: number of layers.", panel=MODELS, min=1, max=MOST_LAYERS, shown="the config's"
    )
    sync_tp_size: int | None = option(
        "With --random-weights: virtual ranks of delayed and spd.", panel=MODELS, min=1, shown="as many as ranks"
    )
    engine: EngineName = option(
        "Whose inference to time: ladderize's runtime, or vLLM with ladderize's layers in it.", "runtime", panel=MODELS
    )
    baselines: tuple[str, ...] = option(
        "Time these too, of the first model: parallel (one all-reduce per layer), no-comm (none); with --engine vllm:"
        " plugin (in the class that runs layouts).",
        (),
        panel=MODELS,
        metavar="A,B",
        parse=distinct_names,
    )
    tp_size: int = option(TP_SIZE, 1)
    emulate_tp: int | None = option(
        "Emulate TP size N in one process: it computes rank 0's part, and --link gives the delays.", panel=MEMORY, min=2
    )
    link: str | None = option(
        "With --emulate-tp: ALPHA_US,BETA_GB_S (an all-reduce takes alpha + bytes/beta), a name such as nccl_pcie,"
        " or a file of calibrate.",
        panel=MEMORY,
        metavar="LINK",
    )
    outer_link: str | None = option(
        "With --emulate-tp and several ranks for each virtual rank: the link between these groups; --link is within.",
        panel=MEMORY,
        metavar="LINK",
    )
    backend: BackendName = option(
        BACKEND, "auto", help="How ranks communicate. none: no communication, for timing only; results are wrong."
    )
    dtype: Dtype = option(
        "float32, bfloat16, float16, or auto: as stored, bfloat16 for random weights.",
        "auto",
        panel=MEMORY,
        metavar="DTYPE",
    )
    device: DeviceName | None = option(DEVICE)
    threads: int | None = option(THREADS)
    train: bool = option(
        "Time training steps (forward and backward, no optimizer) instead of inference.", False, panel=MEASUREMENT
    )
    schedules: tuple[str, ...] = option(
        "Time every model by each: sequential, and domino, which computes a chunk of the batch while another's sum is"
        " sent. In inference, of the prefill.",
        (SEQUENTIAL.name,),
        panel=MEASUREMENT,
        metavar="A,B",
        parse=distinct_names,
        shown=SEQUENTIAL.name,
    )
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1,), shown="1")
    prompt_len: int = option(PROMPT_LEN, 128, help="Tokens per prompt; with --train, per row.")
    output_len: int = option(OUTPUT_LEN, 33)
    warmup: int = option("Rounds that are not counted.", 2, panel=MEASUREMENT, min=1)
    repeat: int = option("Rounds that are counted. Medians are reported.", 7, panel=MEASUREMENT, min=1)
    seed: int = 0  # of prompts, and of the order in each round
    check: bool = option(
        "Skip comparing checkpoints with transformers in float32 before timing; with --train, gradients with those of"
        " the sequential schedule.",
        True,
        panel=MEASUREMENT,
        flags="--no-check",
    )
    out: Path | None = option("Write everything as JSON, raw samples too.", panel=OUTPUT, metavar="FILE", decides=False)
    profile: Path | None = option(
        "Write Chrome traces here. On the runtime it fails if a layout that should overlap shows no overlap.",
        panel=OUTPUT,
        metavar="DIR",
        decides=False,
    )
    replicate_vocab: bool = option(REPLICATE_VOCAB, False)

    def __post_init__(self) -> None:
        check_options(self)
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise UsageError(f"--batch-size {self.batch_sizes} must name positive integers")
        schedules, baselines = get_args(ScheduleName), BASELINES[self.engine]
        if not self.schedules or set(self.schedules) - set(schedules):
            raise UsageError(f"--schedules {','.join(self.schedules)} must name {' or '.join(schedules)}")
        if set(self.baselines) - set(baselines):
            raise UsageError(f"--baselines {','.join(self.baselines)} must name {' or '.join(baselines)}")
        if self.random_weights is None:
            self._refuse(OF_SHAPES, "without --random-weights")
        if self.emulate_tp is None:
            self._refuse(("link", "outer_link"), "without --emulate-tp")
        if self.train:
            self._refuse(OF_INFERENCE, "with --train")
        if self.engine == "vllm":
            self._refuse(OF_RUNTIME, "with --engine vllm")
            instead = "LADDERIZE_VLLM_BACKEND says what carries its messages, or stands for ranks that are not there"
            self._refuse(OF_MESSAGES, f"with --engine vllm; {instead}")
        if self.models and self.random_weights is not None:
            raise UsageError("name checkpoints, or a shape with --random-weights, and not both")
        if len(set(self.models)) < len(self.models):
            raise UsageError("a model is named twice; every variant is timed once")
        if self.emulate_tp is not None and self.tp_size != 1:
            raise UsageError("--emulate-tp runs one process in place of a group; leave --tp-size out")

    def _refuse(self, names: tuple[str, ...], reason: str) -> None:
        for field in fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                raise UsageError(f"{flag(parameter_name(field))} has no effect {reason}")

    def check_named(self) -> None:
        """Raise UsageError for what is missing. An earlier bench.json, which is read as well, names no models."""
        if not self.models and self.random_weights is None:
            raise UsageError("name checkpoints, or a shape with --random-weights")
        if self.emulate_tp is not None and self.link is None:
            raise UsageError("--emulate-tp has no effect without --link")

    @property
    def ranks(self) -> int:
        """The number of ranks that the model is split over, real or emulated."""
        return self.emulate_tp or self.tp_size

    @property
    def ranks_option(self) -> str:
        return "--tp-size" if self.emulate_tp is None else "--emulate-tp"

    @property
    def timed_schedules(self) -> list[Schedule]:
        return [Schedule("domino") if name == "domino" else SEQUENTIAL for name in self.schedules]

    @property
    def passes(self) -> dict[str, int]:
        """The phases that are timed, and the number of passes of each in the total. The first token after a prompt
        belongs to the prefill."""
        return {"forward": 1, "backward": 1} if self.train else {"prefill": 1, "decode": self.output_len - 1}

    @property
    def columns(self) -> int:
        return self.prompt_len + (0 if self.train else self.output_len)


def layout_names(text: str | None) -> list[str]:
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
