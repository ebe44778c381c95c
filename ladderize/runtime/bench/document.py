"""bench.json: described in docs/files.md. What runs writes it, and reports and pictures read it, by attribute."""

from dataclasses import dataclass
from typing import ClassVar

from ladderize.files.records import Record
from ladderize.runtime.bench.environment import Environment
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.bench.reference_check import ReferenceAgreement
from ladderize.runtime.bench.speed_row import PhaseCommunication, SpeedRow
from ladderize.runtime.bench.trace import Overlap
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.schedule import ScheduleName


@dataclass(frozen=True)
class BenchRow(SpeedRow):
    """A measured row; samples are of every counted round. schedule: of the prefill.

    communication and its samples are None in the row of the first model without communication, overlap without
    --profile.
    """

    LEFT_OUT: ClassVar = ("communication", "no_communication_samples_ms", "overlap")

    samples_ms: dict[str, list[float]]
    communication: dict[str, PhaseCommunication] | None = None
    no_communication_samples_ms: dict[str, list[float]] | None = None
    overlap: Overlap | None = None
    schedule: ScheduleName = "sequential"

    def overlaps(self, phase: str) -> bool:
        """Whether its layout lets a sum run under compute, or its schedule does, which is that of prefill alone."""
        return self.has_overlap or (self.is_model and phase == "prefill" and self.schedule == "domino")


@dataclass(frozen=True)
class BenchDocument(Record):
    """All of bench.json but the schema in front. checks: by checkpoint.

    complete: False in what is written before all is done; it stays so where the rest failed.
    """

    complete: bool
    emulated: bool
    options: BenchOptions
    link: Link | None
    message_bytes_outside_link_range: list[int]
    backend: str
    environment: Environment
    checks: dict[str, ReferenceAgreement]
    alone_ms: dict[str, float]
    rows: list[BenchRow]

    @property
    def disproved(self) -> list[str]:
        """Models whose layout or schedule overlaps, and in whose trace nothing did."""
        return [row.model for row in self.rows if row.overlap is not None and row.overlap.proven is False]
