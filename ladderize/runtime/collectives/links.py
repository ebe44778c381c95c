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
BETWEEN_MACHINES = ("infiniband", "ethernet")  # media
LEAST_LATENCY = 0.5  # of the nearest measured one: below the fewest ranks a line falls faster than any latency does
# Of a link whose contention and error are unknown: the contention of NVLink (links.csv)
ASSUMED_CONTENTION, ASSUMED_ERROR = 0.26, 0.15
UNKNOWN_WIRES = ("pcie", 15.75)  # the slowest over which both NCCL and a kernel that reads all peers were timed
# What a time that was not measured may be off besides, one standard deviation: between measured numbers of ranks, with
# twice or half as many, at other sizes, and over wires of another bandwidth. Assumed.
BETWEEN_ERROR, BEYOND_ERROR, OTHER_SIZE_ERROR, OTHER_WIRES_ERROR, MOST_ERROR = 0.1, 0.2, 0.2, 0.2, 0.9


@dataclass(frozen=True)
class Link(Record):
    """The time of one all-reduce over the whole group: ``alpha_us`` + bytes / ``beta_gb_s`` (GB = 1e9 bytes)."""

    name: str
    alpha_us: float
    beta_gb_s: float | None  # None where bytes take no time
    min_bytes: int = 0
    max_bytes: int | None = None
    source: str = "given by hand"
    derived: str = ""  # the way in which the figures follow from other numbers of ranks; "" where they are of this one
    relative_error: float = ASSUMED_ERROR  # of its time at a size that was timed, one standard deviation

    def seconds(self, size: int) -> float:
        return self.alpha_us * 1e-6 + (0.0 if self.beta_gb_s is None else size / (self.beta_gb_s * 1e9))

    def in_range(self, size: int) -> bool:
        return size >= self.min_bytes and (self.max_bytes is None or size <= self.max_bytes)

    def error(self, size: int) -> float:
        """Return the error of the time of a message of ``size`` bytes, relative, one standard deviation."""
        return min(MOST_ERROR, self.relative_error if self.in_range(size) else self.relative_error + OTHER_SIZE_ERROR)


NO_LINK = Link("no communication", 0.0, None, source="nothing is sent", relative_error=0.0)


@dataclass(frozen=True)
class InterconnectRow(Record):
    """A link at one number of ranks, and the sizes of the messages that were timed."""

    ranks: int
    alpha_us: float
    bus_gb_s: float | None  # of each rank, in each direction, as NCCL's tests count it; None: bytes take no time
    min_bytes: int = 0
    max_bytes: int | None = None

    @property
    def beta_gb_s(self) -> float | None:
        return None if self.bus_gb_s is None else self.bus_gb_s / ring_share(self.ranks)


@dataclass(frozen=True)
class Interconnect(Record):
    """One link at every number of ranks."""

    LEFT_OUT: ClassVar = ("medium", "wire_gb_s", "kernel", "most_ranks", "groups_of", "outer")

    name: str
    rows: list[InterconnectRow]  # ascending by ranks; empty where ``any_ranks`` was given by hand
    contention: float  # while a message is in flight, compute runs at the rate 1 - contention
    relative_error: float  # of a message's time, one standard deviation
    calibrated: bool  # on this link itself, by ``ladderize calibrate``
    source: str
    any_ranks: Link | None = None
    # nvlink, pcie (cards read each other's memory), host (through the host's), xgmi (AMD's), infiniband, ethernet
    medium: str | None = None
    wire_gb_s: float | None = None  # of these wires, of one card, in one direction
    kernel: str | None = None  # that sums: nccl, one_shot, multimem, published (that of the Ladder Residual authors)
    most_ranks: int | None = None  # that an engine's kernel takes; None: any number
    # this link joins groups of so many ranks, and ``outer`` joins the groups
    groups_of: int | None = None
    outer: "Interconnect | None" = None

    def joined_by(self, outer: "Interconnect", size: int) -> "Interconnect":
        """Return the link of groups of ``size`` ranks over this one, which ``outer`` joins."""
        name, error = f"{self.name} + {outer.name}", max(self.relative_error, outer.relative_error)
        calibrated = self.calibrated and outer.calibrated
        return replace(self, name=name, relative_error=error, calibrated=calibrated, groups_of=size, outer=outer)

    def is_within(self, ranks: int) -> bool:
        return self.groups_of is None or ranks <= self.groups_of

    def over_wires(self, wire_gb_s: float) -> "Interconnect":
        """Return the link over wires of the same kind with another bandwidth, which changes that of messages alike."""
        if self.wire_gb_s in (None, wire_gb_s):
            return self
        factor = wire_gb_s / self.wire_gb_s
        rows = [replace(row, bus_gb_s=None if row.bus_gb_s is None else factor * row.bus_gb_s) for row in self.rows]
        error = math.hypot(self.relative_error, OTHER_WIRES_ERROR)
        return replace(self, rows=rows, wire_gb_s=wire_gb_s, relative_error=error)

    def parts(self, ranks: int, size: int) -> tuple[Link, Link]:
        """Return the links of ``ranks`` ranks in groups of ``size``: within a group, and between groups."""
        between = self if self.outer is None else self.outer
        return self.at(size), between.at(ranks // size)

    def check(self, where: str) -> None:
        """Raise UserError, which begins with ``where``, for figures that no link has."""
        counts, any_ranks = [row.ranks for row in self.rows], self.any_ranks
        if bool(counts) == (any_ranks is not None) or counts != sorted(set(counts)) or min(counts, default=2) < 2:
            raise UserError(f"{where} needs rows of 2 ranks or more, ascending, or else any_ranks, and not both")
        figures: list[tuple[str, float | None, float, float]]
        figures = [("contention", self.contention, 0, 0.99), ("relative_error", self.relative_error, 0, 1)]
        for row in self.rows:
            figures.append((f"{row.ranks} ranks: alpha_us", row.alpha_us, 0, LONGEST_US))
            figures.append((f"{row.ranks} ranks: bus_gb_s", row.bus_gb_s, SLOWEST_GB_S, 1e9))
            figures.append((f"{row.ranks} ranks: max_bytes", row.max_bytes, row.min_bytes, math.inf))
        if any_ranks is not None:
            figures.append(("alpha_us", any_ranks.alpha_us, 0, LONGEST_US))
            figures.append(("beta_gb_s", any_ranks.beta_gb_s, SLOWEST_GB_S, 1e9))
        for name, value, least, most in figures:
            if value is not None and not least <= value <= most:
                raise UserError(f"{where}: {name} is {value:g}, but must be between {least:g} and {most:g}; correct it")

    def at(self, ranks: int) -> Link:
        """Return the link of a group of ``ranks``. Raises UserError for ranks that are no whole groups. Between the
        rows and beyond them it is derived, with a larger error: the latency is a line in the number of ranks, as of a
        ring; the bus bandwidth changes between the rows and stays beyond them."""
        if ranks == 1:
            return NO_LINK
        if self.groups_of is not None and not self.is_within(ranks):
            return self._between_groups(ranks, self.groups_of)
        if self.any_ranks is not None:
            return replace(self.any_ranks, relative_error=self.relative_error)
        counts = [row.ranks for row in self.rows]
        row, derived, error = self._row(ranks), "", self.relative_error
        if ranks not in counts:
            is_between = counts[0] < ranks < counts[-1]
            doublings = min(abs(math.log2(ranks / count)) for count in counts)
            error = math.hypot(error, BETWEEN_ERROR if is_between else BEYOND_ERROR * doublings)
            listed = " and ".join(", ".join(map(str, counts)).rsplit(", ", 1))
            derived = f"{'interpolated' if is_between else 'extrapolated'} from {listed} ranks"
        return Link(self.name, row.alpha_us, row.beta_gb_s, row.min_bytes, row.max_bytes, self.source, derived, error)

    def _row(self, ranks: int) -> InterconnectRow:
        """Return the row of ``ranks``, or the point on the line through the two rows next to it; through a single row
        it is the line by which half of its latency is of the ranks."""
        for row in self.rows:
            if row.ranks == ranks:
                return row
            if len(self.rows) == 1:
                return replace(row, ranks=ranks, alpha_us=row.alpha_us * (1 + ranks / row.ranks) / 2)
        above = next((number for number, row in enumerate(self.rows) if row.ranks > ranks), len(self.rows) - 1)
        low, high = self.rows[max(above, 1) - 1], self.rows[max(above, 1)]
        share = (ranks - low.ranks) / (high.ranks - low.ranks)
        alpha = low.alpha_us + share * (high.alpha_us - low.alpha_us)
        least = LEAST_LATENCY * (low if share < 0.5 else high).alpha_us
        bus = None
        if low.bus_gb_s is not None and high.bus_gb_s is not None:
            bus = low.bus_gb_s + min(max(share, 0.0), 1.0) * (high.bus_gb_s - low.bus_gb_s)
        most_bytes = _least(low.max_bytes, high.max_bytes)
        return InterconnectRow(ranks, max(alpha, least), bus, max(low.min_bytes, high.min_bytes), most_bytes)

    def _between_groups(self, ranks: int, size: int) -> Link:
        """Return the link of all ranks: groups of ``size`` reduce and scatter a message, sum the slices between groups,
        and gather them. The first and the last step together take as long as the group's own all-reduce."""
        if ranks % size:
            raise UserError(f"{ranks} ranks are no groups of {size}, which --outer-link joins")
        inner, outer = self.parts(ranks, size)
        beta = None
        if inner.beta_gb_s is not None and outer.beta_gb_s is not None:
            beta = 1 / (1 / inner.beta_gb_s + 1 / (size * outer.beta_gb_s))
        most_bytes = _least(inner.max_bytes, None if outer.max_bytes is None else size * outer.max_bytes)
        sizes = max(inner.min_bytes, size * outer.min_bytes), most_bytes
        source, derived = f"{inner.source}; {outer.source}", ", ".join(filter(None, (inner.derived, outer.derived)))
        error = max(inner.relative_error, outer.relative_error)
        return Link(self.name, inner.alpha_us + outer.alpha_us, beta, *sizes, source, derived, error)


def _least(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def ring_share(ranks: int) -> float:
    """Return the share of a message's bytes that a ring's all-reduce carries over each of its links."""
    return 2 * (ranks - 1) / ranks


def read_interconnect(text: str, option: str = "--link") -> Interconnect:
    """Return the link of an option's value: ALPHA_US,BETA_GB_S for any number of ranks, a name of
    ``known_interconnects``, or a file with a ``link``. Raises UsageError or UserError for anything else."""
    interconnects = known_interconnects()
    if text in interconnects:
        if option == "--link" and interconnects[text].medium in BETWEEN_MACHINES:
            raise UsageError(f"--link {text} joins machines; give it as --outer-link, and --link within a machine")
        return interconnects[text]
    if names_a_file(text):
        where = f"{text}: link"
        interconnect = Interconnect.from_dict(read_section(Path(text), "link", option), where)
        interconnect.check(where)
        return interconnect
    try:
        alpha, beta = map(float, text.split(","))
    except ValueError:
        names = ", ".join(sorted(interconnects))
        raise UsageError(f"{option} {text!r} is neither ALPHA_US,BETA_GB_S nor one of {names}, nor a file") from None
    if not (0 <= alpha <= LONGEST_US and beta >= SLOWEST_GB_S):
        raise UsageError(
            f"{option} {text!r}: alpha must be from 0 to {LONGEST_US:g} us, beta at least {SLOWEST_GB_S:g} GB/s"
        )
    link = Link(f"{alpha:g} us + bytes / {beta:g} GB/s", alpha, None if math.isinf(beta) else beta)
    return Interconnect(link.name, [], ASSUMED_CONTENTION, ASSUMED_ERROR, False, link.source, link)


def known_interconnects() -> dict[str, Interconnect]:
    """Return the links of links.csv by name."""
    table: dict[str, list[dict[str, str]]] = {}
    with LINK_TABLE.open(encoding="utf-8") as file:
        rows_of_all = csv.DictReader(line for line in file if not line.startswith("#"))
        for line in sorted(rows_of_all, key=lambda line: int(line["ranks"])):
            table.setdefault(line["name"], []).append(line)
    links = {}
    for name, lines in table.items():
        rows = []
        for line in lines:
            ranks, sizes = int(line["ranks"]), (int(line["min_bytes"]), int(line["max_bytes"]))
            bus_gb_s = float(line["beta_gb_s"]) * ring_share(ranks)
            rows.append(InterconnectRow(ranks, float(line["alpha_us"]), bus_gb_s, *sizes))
        error = max(float(line["relative_error"]) for line in lines)
        source = "; ".join(dict.fromkeys(line["source"] for line in lines))
        medium, wire_gb_s, kernel = lines[0]["medium"], float(lines[0]["wire_gb_s"]), lines[0]["kernel"]
        links[name] = Interconnect(
            name, rows, ASSUMED_CONTENTION, error, False, source, medium=medium, wire_gb_s=wire_gb_s, kernel=kernel
        )
    return links


def over_similar_wires(kernel: str, medium: str, wire_gb_s: float) -> Interconnect | None:
    """Return a kernel's link over wires of this kind and bandwidth, from the one that was timed over the most similar
    wires; None where none was."""
    links = [link for link in known_interconnects().values() if (link.kernel, link.medium) == (kernel, medium)]
    nearest = min(links, key=lambda link: abs(math.log(wire_gb_s / (link.wire_gb_s or wire_gb_s))), default=None)
    return None if nearest is None else nearest.over_wires(wire_gb_s)


def one_shot_limit(ranks: int, medium: str, wire_gb_s: float) -> float:
    """Return the bytes up to which one kernel, in which every rank reads all peers, is faster than NCCL. Over wires
    without times of both it is that over UNKNOWN_WIRES."""
    one_shot, nccl = (over_similar_wires(kernel, medium, wire_gb_s) for kernel in ("one_shot", "nccl"))
    if one_shot is None or nccl is None:
        return one_shot_limit(ranks, *UNKNOWN_WIRES)
    ring, row = nccl.at(ranks), min(one_shot.rows, key=lambda row: abs(row.ranks - ranks))
    assert row.beta_gb_s is not None
    assert ring.beta_gb_s is not None
    # Each rank sends its message to all others: with every rank bytes take longer, but not the start. On H100 it is
    # 5.5 us and 117 GB/s with 4 ranks, 4.8 us and 64 GB/s with 6 (vLLM pull request 24111).
    beta_gb_s = row.beta_gb_s * (row.ranks - 1) / (ranks - 1)
    gained_us, lost_us_per_byte = ring.alpha_us - row.alpha_us, 1e-3 / beta_gb_s - 1e-3 / ring.beta_gb_s
    return gained_us / lost_us_per_byte if lost_us_per_byte > 0 else math.inf
