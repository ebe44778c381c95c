"""How long an all-reduce takes over a link: given by hand, or from a table of published latencies. Imports no torch."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record

LINK_TABLE = Path(__file__).parent / "links.csv"
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
                    f"--link {self.name} was measured up to {self.max_bytes} bytes only, and a message has {size}"
                    " bytes; give --link ALPHA_US,BETA_GB_S"
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
