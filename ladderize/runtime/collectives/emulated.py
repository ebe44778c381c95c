"""One rank of a group that is not there: every collective becomes a delay of the length that a link is said to take."""

import csv
import functools
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ladderize.console import UsageError, UserError
from ladderize.files.records import Record
from ladderize.runtime.collectives.base import Collectives, Handle, side_by_side

LINK_TABLE = Path(__file__).parent / "links.csv"
# Only the long part of a long delay is slept: waking up is late by a fraction of a millisecond, and the core is cold by
# then.
SLEEP_SLACK = 2e-3
LONGEST_US, SLOWEST_GB_S = 1e8, 1e-6  # slower than any link, and short enough for a clock


@dataclass(frozen=True)
class Link(Record):
    """The time of one all-reduce over the whole group: ``alpha_us`` + bytes / ``beta_gb_s`` (GB = 1e9 bytes).

    beta_gb_s: None where only the latency is known; longer messages than ``max_bytes`` are then refused.
    """

    name: str
    alpha_us: float
    beta_gb_s: float | None
    min_bytes: int = 0
    max_bytes: int | None = None
    source: str = "given by hand"

    def seconds(self, size: int) -> float:
        if self.beta_gb_s is None:
            if self.max_bytes is not None and size > self.max_bytes:
                raise UserError(
                    f"--link {self.name} is known up to {self.max_bytes} bytes only, and a message of {size} bytes"
                    " would be sent; give --link ALPHA_US,BETA_GB_S"
                )
            return self.alpha_us * 1e-6
        return self.alpha_us * 1e-6 + size / (self.beta_gb_s * 1e9)

    def in_range(self, size: int) -> bool:
        return size >= self.min_bytes and (self.max_bytes is None or size <= self.max_bytes)


def parse_link(text: str, ranks: int) -> Link:
    """``200,1`` or the name of a row of links.csv; several rows of one name are told apart by ``ranks``."""
    first, comma, second = text.partition(",")
    if comma:
        try:
            alpha, beta = float(first), float(second)
        except ValueError:
            raise UsageError(f"--link {text!r} is not ALPHA_US,BETA_GB_S, such as 20,100") from None
        if not (0 <= alpha <= LONGEST_US and beta >= SLOWEST_GB_S):
            raise UsageError(
                f"--link {text!r}: alpha must be from 0 to {LONGEST_US:g} us, beta at least {SLOWEST_GB_S:g} GB/s"
            )
        return Link(f"{alpha:g} us + bytes / {beta:g} GB/s", alpha, None if math.isinf(beta) else beta)
    rows = known_links()
    named = [(number, link) for number, link in rows if link.name == text]
    if not named:
        raise UsageError(
            f"--link {text!r} is neither ALPHA_US,BETA_GB_S nor one of"
            f" {', '.join(sorted({link.name for _, link in rows}))}"
        )
    fitting = [link for number, link in named if number == ranks]
    if not fitting:
        raise UserError(
            f"--link {text} was measured with {' and '.join(str(number) for number, _ in named)} ranks, not {ranks};"
            " choose another --emulate-tp, or give --link ALPHA_US,BETA_GB_S"
        )
    return fitting[0]


def known_links() -> list[tuple[int, Link]]:
    """(ranks, link) for each row of the table of published latencies."""
    with LINK_TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [
        (
            int(row["ranks"]),
            Link(
                row["path"], float(row["alpha_us"]), float(row["beta_gb_s"]) if row["beta_gb_s"] else None,
                int(row["min_bytes"]), int(row["max_bytes"]), row["source"],
            ),
        )
        for row in rows
    ]  # fmt: skip


class Emulated(Collectives):
    """Collectives of ``ranks`` ranks over ``link``, for one process on a CPU: a timer. Sums are this rank's partials
    alone.

    One message is on the link at a time: a second one starts when the first is through.
    """

    name = "emulated"

    def __init__(self, ranks: int, link: Link) -> None:
        super().__init__(ranks)
        self.seconds = functools.cache(link.seconds)
        self.free_at = 0.0

    def all_reduce_async(self, x: Tensor) -> Handle:
        now = time.perf_counter()  # first of all: what follows is this program's own time, not the link's
        start = now if now > self.free_at else self.free_at
        self.free_at = done_at = start + self.seconds(x.nbytes)
        return Handle(functools.partial(_through, x, done_at))

    def all_gather(self, x: Tensor) -> Tensor:
        return self.all_reduce_async(side_by_side(x, self.ranks)).wait()


class EmulatedOnGpu(Collectives):
    """The same on a GPU: a kernel that idles for that long, on a communication stream; CUDA graphs can capture it."""

    name = "emulated"

    def __init__(self, ranks: int, link: Link, device: torch.device) -> None:
        super().__init__(ranks)
        self.link = link
        self.stream = torch.cuda.Stream(device)
        self.cycles_per_second = _cycles_per_second()

    def all_reduce_async(self, x: Tensor) -> Handle:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(int(self.link.seconds(x.nbytes) * self.cycles_per_second))

        def finish() -> Tensor:
            torch.cuda.current_stream().wait_stream(self.stream)
            return x

        return Handle(finish)

    def all_gather(self, x: Tensor) -> Tensor:
        return self.all_reduce_async(side_by_side(x, self.ranks)).wait()


def emulate(ranks: int, link: Link, device: torch.device) -> Collectives:
    return EmulatedOnGpu(ranks, link, device) if device.type == "cuda" else Emulated(ranks, link)


def _through(x: Tensor, done_at: float) -> Tensor:
    sleep_until(done_at)
    return x


def sleep_until(deadline: float) -> None:
    """Return at ``deadline`` (time.perf_counter) and not before: sleep first, so that the core is free, then watch the
    clock."""
    clock = time.perf_counter
    left = deadline - clock()
    if left > SLEEP_SLACK:
        time.sleep(left - SLEEP_SLACK)
    while clock() < deadline:
        pass


def _cycles_per_second() -> float:
    """The rate of the clock that the idling kernel counts, measured: its documentation promises none."""
    cycles = 20_000_000
    samples = []
    torch.cuda._sleep(20 * cycles)  # until an idle GPU's clock has risen
    for _ in range(5):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(cycles)
        stop.record()
        torch.cuda.synchronize()
        samples.append(cycles / (start.elapsed_time(stop) / 1e3))
    return statistics.median(samples[1:])
