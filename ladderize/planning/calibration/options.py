"""What ``ladderize calibrate`` is asked for, and all that its arguments alone decide. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path

from ladderize.choices import BackendName, Dtype, check_choices
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.ranks.device import default_device


@dataclass(frozen=True)
class CalibrateOptions(Record):
    """What to time, and how.

    tp_sizes: numbers of ranks, each of which is timed in turn. shapes: config.json files or bundled sizes; none: two
    that are made for it. prefill_tokens: of all rows of a batch together; None: 256 on a CPU, 8192 on a GPU.
    hardware: a device whose peaks are kept, so that shares of them are fitted. name: of the device and the link in the
    file.
    """

    tp_sizes: tuple[int, ...] = (1,)
    shapes: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = (1, 4, 64)
    dtype: Dtype = "auto"
    prefill_tokens: int | None = None
    output_len: int = 9
    backend: BackendName = "auto"
    warmup: int = 2
    repeat: int = 7
    hardware: str | None = None
    name: str = "this machine"
    device: str = field(default_factory=default_device)
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)

    def check(self) -> None:
        """Raise UsageError for what cannot be timed, or takes no effect."""
        least = {"output_len": 2, "warmup": 1, "repeat": 1, "seed": 0, "prefill_tokens": 1, "threads": 1}
        for name, value in least.items():
            given = getattr(self, name)
            if given is not None and given < value:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {value}, not {given}")
        for option, counts in (("--tp-size", self.tp_sizes), ("--batch-size", self.batch_sizes)):
            if not counts or min(counts) < 1 or len(set(counts)) < len(counts):
                raise UsageError(f"{option} {','.join(map(str, counts))} must name positive integers, each once")
        if self.backend != "auto" and max(self.tp_sizes) == 1:
            raise UsageError(f"--backend {self.backend} has no effect with one rank; leave it out or raise --tp-size")
        if self.backend == "none":
            raise UsageError("--backend none sends nothing, so there is no link to calibrate; leave it out")
        if not self.name.strip():
            raise UsageError("--name is empty; name the machine")


@dataclass(frozen=True)
class TimingsOptions(Record):
    """What to fit to timings that are there already.

    timings: bench.json files or tables (.csv). hardware, link: the figures that are held, and where others begin.
    shape: of bench.json files with random weights, which name none. engine: whose timings they are; None: the
    device's. free: figures to fit; empty: what the timings say something about.
    """

    timings: tuple[Path, ...]
    hardware: str
    link: str | None = None
    shape: str | None = None
    engine: str | None = None
    free: tuple[str, ...] = ()
    name: str = "this link"
