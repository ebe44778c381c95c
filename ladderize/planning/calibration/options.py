"""What ``ladderize calibrate`` is asked for, and all that its arguments alone decide. Imports no torch."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ladderize.choices import (
    BACKEND,
    DEVICE,
    SEED_OF_ROUNDS,
    SHAPE_NAMES,
    THREADS,
    Dtype,
    Option,
    SendingBackend,
    check_choices,
    check_options,
    option,
    split_names,
)
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.ranks.device import default_device
from ladderize.runtime.bench.options import BATCH_SIZES, COUNTED_ROUNDS, OUTPUT_LEN, UNCOUNTED_ROUNDS, parse_counts

HARDWARE = Option("A known device or a file: its peaks are kept. Required with --timings.", "DEVICE")
NAME_OF_DEVICE = Option(
    "What the device and the link are called.", "TEXT", shown="this machine; this link with --timings"
)


@dataclass(frozen=True)
class CalibrateOptions(Record):
    """What to time, and how."""

    tp_sizes: tuple[int, ...] = option(
        "Numbers of ranks to time, one after the other. Under torchrun: as many as it started.",
        (1,),
        metavar="A,B",
        flags="--tp-size",
        shown="1",
        parse=partial(parse_counts, option="--tp-size"),
    )
    shapes: tuple[str, ...] = option(
        f"Time this shape: {SHAPE_NAMES}. Repeatable; two widths tell most. With --timings: the shape of rows that name"
        " none.",
        (),
        metavar="CONFIG",
        flags="--shape",
        shown="two made ones",
    )
    batch_sizes: tuple[int, ...] = option(BATCH_SIZES, (1, 4, 64), shown="1,4,64")
    dtype: Dtype = option("float32, bfloat16, float16, or auto: bfloat16.", "auto", metavar="DTYPE")
    prefill_tokens: int | None = option("Tokens of all prompts of a batch together.", min=1, shown="256; 8192 on a GPU")
    output_len: int = option(OUTPUT_LEN, 9, help="Tokens to generate.")
    backend: SendingBackend = option(BACKEND, "auto")
    warmup: int = option(UNCOUNTED_ROUNDS, 2)
    repeat: int = option(COUNTED_ROUNDS, 7, help="Rounds that are counted. Medians are fitted.")
    hardware: str | None = option(HARDWARE)  # so that shares of its peaks are fitted
    name: str = option(NAME_OF_DEVICE, "this machine")
    device: str = option(DEVICE, default_device)
    threads: int | None = option(THREADS)
    seed: int = option(SEED_OF_ROUNDS, 0)

    def __post_init__(self) -> None:
        check_choices(self)

    def check(self) -> None:
        """Raise UsageError for what cannot be timed, or takes no effect."""
        check_options(self)
        for name, counts in (("--tp-size", self.tp_sizes), ("--batch-size", self.batch_sizes)):
            if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
                raise UsageError(f"{name} {','.join(map(str, counts))} must name positive integers, each once")
        if self.backend != "auto" and max(self.tp_sizes) == 1:
            raise UsageError(f"--backend {self.backend} has no effect with one rank; leave it out or raise --tp-size")
        if not self.name.strip():
            raise UsageError("--name is empty; name the machine")


@dataclass(frozen=True)
class TimingsOptions(Record):
    """What to fit to timings that are there already."""

    timings: tuple[Path, ...] = option(
        "Time nothing: fit to a bench.json, or to a .csv of any engine's timings. Repeatable.",
        ...,
        metavar="FILE",
        optional=True,
    )
    hardware: str = option(HARDWARE, ..., optional=True)
    link: str | None = option("With --timings: a link whose figures are kept.", metavar="LINK", shown="it is fitted")
    shape: str | None = None  # of bench.json files with random weights, which name none
    engine: str | None = option(
        "With --timings of a .csv: whose they are: published, runtime or runtime-cpu.",
        metavar="NAME",
        shown="the device's",
    )
    free: tuple[str, ...] = option(
        "With --timings: the figures to fit, such as alpha_us,bus_gb_s,contention,matmul_share.",
        (),
        metavar="A,B",
        flags="--fit",
        shown="what the timings show",
        parse=split_names,
    )
    name: str = option(NAME_OF_DEVICE, "this link")
