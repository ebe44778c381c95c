"""The time of an all-reduce over a link: given by hand, from a table of published latencies, or measured. Imports no
torch."""

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ladderize.errors import UsageError, UserError
from ladderize.files.documents import read_section
from ladderize.files.records import Record
from ladderize.files.regular import names_a_file

LINK_TABLE = Path(__file__).parent / "links.csv"
LONGEST_US, SLOWEST_GB_S = 1e8, 1e-6  # slower than any link, and short enough for a clock
SLICED_BYTES = 32 << 10  # messages between groups: from here on a link's time is bytes, worth another message within
REACH = 2  # how many times fewer or more ranks than measured ones a link is extrapolated to


@dataclass(frozen=True)
class Link(Record):
    """The time of one all-reduce over the whole group: ``alpha_us`` + bytes / ``beta_gb_s`` (GB = 1e9 bytes).

    beta_gb_s: None where only the latency is known; messages longer than ``max_bytes`` are then refused.
    derived: the way in which the figures follow from those of other numbers of ranks; "" where they are of this one.
    """

    name: str
    alpha_us: float
    beta_gb_s: float | None
    min_bytes: int = 0
    max_bytes: int | None = None
    source: str = "given by hand"
    derived: str = ""

    def seconds(self, size: int) -> float:
        if self.beta_gb_s is None:
            if self.max_bytes is not None and size > self.max_bytes:
                raise UserError(
                    f"--link {self.name} was measured up to {self.max_bytes} bytes only, and a message has {size}"
                    " bytes; give --link ALPHA_US,BETA_GB_S"
                )
            return self.alpha_us * 1e-6
        return self.alpha_us * 1e-6 + size / (self.beta_gb_s * 1e9)

    def in_range(self, size: int) -> bool:
        return size >= self.min_bytes and (self.max_bytes is None or size <= self.max_bytes)


NO_LINK = Link("no communication", 0.0, None, source="nothing is sent")


@dataclass(frozen=True)
class InterconnectRow(Record):
    """A link at one number of ranks.

    bus_gb_s: bandwidth of each rank, in sending and in receiving, as NCCL's tests count it; None where only the latency
    is known. A ring of N ranks carries 2 (N - 1) / N of a message over each of its links.
    min_bytes, max_bytes: of the messages that were timed.
    """

    ranks: int
    alpha_us: float
    bus_gb_s: float | None
    min_bytes: int = 0
    max_bytes: int | None = None

    @property
    def beta_gb_s(self) -> float | None:
        return None if self.bus_gb_s is None else self.bus_gb_s / ring_share(self.ranks)


@dataclass(frozen=True)
class Interconnect(Record):
    """One link at every number of ranks.

    rows: ascending by ranks; empty where ``any_ranks`` was given by hand.
    contention: while a message is in flight, compute runs at the rate 1 - contention.
    relative_error: of a message's time, one standard deviation.
    calibrated: measured on this link itself, by ``ladderize calibrate``.
    nvlink_gb_s: of the NVLink that it was measured over, in one direction; None of other links, and where it is
    unknown.
    medium: the wires.
    groups_of, outer: this link joins groups of so many ranks, and ``outer`` joins the groups.
    """

    LEFT_OUT: ClassVar = ("medium", "groups_of", "outer")

    name: str
    rows: list[InterconnectRow]
    contention: float
    relative_error: float
    calibrated: bool
    source: str
    any_ranks: Link | None = None
    nvlink_gb_s: float | None = None
    medium: str | None = None
    groups_of: int | None = None
    outer: "Interconnect | None" = None

    def joined_by(self, outer: "Interconnect", size: int) -> "Interconnect":
        """Return the link of groups of ``size`` ranks over this one, which ``outer`` joins."""
        return replace(
            self,
            name=f"{self.name}, groups of {size} joined by {outer.name}",
            relative_error=max(self.relative_error, outer.relative_error),
            calibrated=self.calibrated and outer.calibrated,
            medium=f"{self.medium} and {outer.medium}",
            groups_of=size,
            outer=outer,
        )

    def parts(self, ranks: int, size: int) -> tuple[Link, Link]:
        """Return the links of ``ranks`` ranks in groups of ``size``: within a group, and between the ranks at one place
        of every group."""
        between = self if self.outer is None else self.outer
        return self.at(size), between.at(ranks // size)

    def check(self, where: str) -> None:
        """Raise UserError, which begins with ``where``, for figures that no link has."""
        counts = [row.ranks for row in self.rows]
        if bool(counts) == (self.any_ranks is not None) or counts != sorted(set(counts)) or min(counts, default=2) < 2:
            raise UserError(f"{where} needs rows of 2 ranks or more, ascending, or else any_ranks, and not both")
        _check_figures(where, self, contention=(0, 0.99), relative_error=(0, 1))
        latency, bandwidth, sizes = (0, LONGEST_US), (SLOWEST_GB_S, 1e9), (0, math.inf)
        for row in self.rows:
            more = {"min_bytes": sizes, "max_bytes": (row.min_bytes, math.inf)}
            _check_figures(f"{where}: {row.ranks} ranks", row, alpha_us=latency, bus_gb_s=bandwidth, **more)
        if self.any_ranks is not None:
            _check_figures(where, self.any_ranks, alpha_us=latency, beta_gb_s=bandwidth)

    def at(self, ranks: int) -> Link:
        """Return the link of a group of ``ranks``.

        Between the rows and beyond them it is derived: the latency is a line in the number of ranks, as of a ring; the
        bus bandwidth changes between the rows and stays beyond them. Raises UserError where the rows do not reach so
        far.
        """
        if ranks == 1:
            return NO_LINK
        if self.outer is not None and self.groups_of is not None and ranks > self.groups_of:
            if ranks % self.groups_of:
                raise UserError(f"{ranks} ranks are no groups of {self.groups_of}, which --outer-link joins")
            return _in_turn(self.name, self.groups_of, *self.parts(ranks, self.groups_of))
        if self.any_ranks is not None:
            return self.any_ranks
        for row in self.rows:
            if row.ranks == ranks:
                return self._link(row)
        counts = [row.ranks for row in self.rows]
        measured = f"measured with {_listed(counts)} ranks, not {ranks}"
        if len(counts) < 2 or not counts[0] / REACH <= ranks <= counts[-1] * REACH:
            raise UserError(
                f"--link {self.name} was {measured}; choose another number of ranks, or give --link ALPHA_US,BETA_GB_S"
            )
        between = counts[0] < ranks < counts[-1]
        how = f"{'interpolated' if between else 'extrapolated'} from {_listed(counts)} ranks"
        return self._link(self._between(ranks), how)

    def _link(self, row: InterconnectRow, derived: str = "") -> Link:
        return Link(self.name, row.alpha_us, row.beta_gb_s, row.min_bytes, row.max_bytes, self.source, derived)

    def _between(self, ranks: int) -> InterconnectRow:
        """Return the point at ``ranks`` on the line through the two rows next to it."""
        above = next((n for n, row in enumerate(self.rows) if row.ranks > ranks), len(self.rows) - 1)
        low, high = self.rows[max(above, 1) - 1], self.rows[max(above, 1)]
        place = (ranks - low.ranks) / (high.ranks - low.ranks)
        alpha = low.alpha_us + place * (high.alpha_us - low.alpha_us)
        nearest = low if place < 0.5 else high
        bus = None
        if low.bus_gb_s is not None and high.bus_gb_s is not None:
            bus = low.bus_gb_s + min(max(place, 0.0), 1.0) * (high.bus_gb_s - low.bus_gb_s)
        ceilings = [row.max_bytes for row in (low, high) if row.max_bytes is not None]
        # below the fewest ranks the line may fall faster than any latency does
        least = nearest.alpha_us / REACH
        return InterconnectRow(
            ranks,
            max(alpha, least),
            bus,
            max(low.min_bytes, high.min_bytes),
            min(ceilings) if ceilings else None,
        )


def _in_turn(name: str, size: int, inner: Link, outer: Link) -> Link:
    """Return the link of all ranks: groups of ``size`` reduce and scatter a message, sum the slices between groups, and
    gather them.

    The first and the last step together take as long as the group's own all-reduce.
    """
    ceilings = [inner.max_bytes, None if outer.max_bytes is None else size * outer.max_bytes]
    known = [ceiling for ceiling in ceilings if ceiling is not None]
    beta = None
    if inner.beta_gb_s is not None and outer.beta_gb_s is not None:
        beta = 1 / (1 / inner.beta_gb_s + 1 / (size * outer.beta_gb_s))
    return Link(
        name,
        inner.alpha_us + outer.alpha_us,
        beta,
        max(inner.min_bytes, size * outer.min_bytes),
        min(known, default=None),
        f"{inner.source}; {outer.source}",
        ", ".join(one.derived for one in (inner, outer) if one.derived),
    )


def ring_share(ranks: int) -> float:
    """Return the share of a message's bytes that a ring's all-reduce carries over each of its links."""
    return 2 * (ranks - 1) / ranks


def read_interconnect(text: str, option: str = "--link") -> Interconnect:
    """Read the value of ``option``, which is one of three. Raises UsageError or UserError for anything else.

    ``ALPHA_US,BETA_GB_S`` is for any number of ranks. A name is one of ``known_interconnects``. A file has a ``link``;
    it is of ``ladderize calibrate`` or written by hand.
    """
    interconnects = known_interconnects()
    if text in interconnects:
        return interconnects[text]
    if names_a_file(text):
        where = f"{text}: link"
        interconnect = Interconnect.from_dict(read_section(Path(text), "link", option), where)
        interconnect.check(where)
        return interconnect
    first, comma, second = text.partition(",")
    if not comma:
        raise UsageError(
            f"{option} {text!r} is neither ALPHA_US,BETA_GB_S nor one of {', '.join(sorted(interconnects))}, nor a file"
        )
    try:
        alpha, beta = float(first), float(second)
    except ValueError:
        raise UsageError(f"{option} {text!r} is not ALPHA_US,BETA_GB_S, such as 20,100") from None
    if not (0 <= alpha <= LONGEST_US and beta >= SLOWEST_GB_S):
        raise UsageError(
            f"{option} {text!r}: alpha must be from 0 to {LONGEST_US:g} us, beta at least {SLOWEST_GB_S:g} GB/s"
        )
    link = Link(f"{alpha:g} us + bytes / {beta:g} GB/s", alpha, None if math.isinf(beta) else beta)
    return Interconnect(link.name, [], ASSUMED_CONTENTION, ASSUMED_ERROR, False, link.source, link)


# of a link whose contention and error are unknown: the contention of NVLink, below
ASSUMED_CONTENTION, ASSUMED_ERROR = 0.26, 0.15


def known_interconnects() -> dict[str, Interconnect]:
    """Return the links of links.csv by name, and ``nvlink``, which was fitted to published speeds of whole models."""
    by_path: dict[str, list[dict[str, str]]] = {}
    with LINK_TABLE.open(encoding="utf-8") as file:
        table = list(csv.DictReader(line for line in file if not line.startswith("#")))
    for one in sorted(table, key=lambda one: int(one["ranks"])):
        by_path.setdefault(one["path"], []).append(one)
    interconnects = {name: _of_table(name, published) for name, published in by_path.items()}
    # NVLink as the Ladder Residual authors' published speeds show it (benchmarks/planning.py fits these figures):
    # microseconds for 2 ranks, and for each one more; GB/s. Shorter messages than the 16 KiB that were timed take the
    # same latency
    rows = [InterconnectRow(n, 12.8 + 2.25 * (n - 2), 398.0, 0, 1 << 30) for n in (2, 4, 8)]
    interconnects["nvlink"] = Interconnect(
        "nvlink",
        rows,
        contention=0.26,
        relative_error=0.05,
        calibrated=False,
        source="fitted to the speeds that the Ladder Residual authors published (H100)",
        nvlink_gb_s=450.0,  # of H100's data sheet: 900 in both directions
        medium=interconnects["nccl_nvlink_h100"].medium,
    )
    return interconnects


def _of_table(name: str, published: list[dict[str, str]]) -> Interconnect:
    """Return the link of the lines of links.csv that have this name, ascending by ranks."""
    rows = []
    for one in published:
        ranks, beta = int(one["ranks"]), one["beta_gb_s"]
        bus = float(beta) * ring_share(ranks) if beta else None
        rows.append(InterconnectRow(ranks, float(one["alpha_us"]), bus, int(one["min_bytes"]), int(one["max_bytes"])))
    return Interconnect(
        name,
        rows,
        ASSUMED_CONTENTION,
        ASSUMED_ERROR,
        False,
        "; ".join(dict.fromkeys(one["source"] for one in published)),
        medium=published[0]["medium"],
    )


def _check_figures(where: str, record: Record, **bounds: tuple[float, float]) -> None:
    """Raise UserError for a field of ``record`` outside of its bounds; None is unknown."""
    for name, (least, most) in bounds.items():
        value = getattr(record, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"{where}: {name} is {value:g}, but must be between {least:g} and {most:g}; correct it")


def _listed(counts: list[int]) -> str:
    *first, last = map(str, counts)
    return f"{', '.join(first)} and {last}" if first else last
