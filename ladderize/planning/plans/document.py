"""plan.json: described in docs/files.md. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ladderize.files.records import Record
from ladderize.planning.hardware import DeviceSpec, EngineFacts
from ladderize.planning.planner.document import PlanChoice
from ladderize.planning.plans.options import PlanModel, PlanOptions
from ladderize.runtime.bench.rows import PhaseCommunication, SpeedRow
from ladderize.runtime.collectives.links import Interconnect, Link

# predicted: from figures of other machines; calibrated: device and link were timed by `ladderize calibrate`
Basis = Literal["predicted", "calibrated"]
NO_WEIGHTS = "none"  # of a row: a layout of a shape, not a checkpoint


@dataclass(frozen=True)
class PlannedRow(SpeedRow):
    """A row of bench.json that nothing ran for. Its intervals are 95 % bands of the prediction.

    end_to_end_tokens_per_s: new tokens of the whole batch over prefill and all decode steps. parameters: of the model.
    memory_need_bytes: a rank's weights, KV cache and prefill; fits: whether its device has that much, None where that
    is unknown. peak_memory_bytes: None, it is measured or nothing.
    """

    parameters: int
    basis: Basis
    end_to_end_tokens_per_s: float
    end_to_end_tokens_per_s_interval: list[float]
    prefill_ms_interval: list[float]
    decode_ms_per_token_interval: list[float]
    exposed_end_to_end_ms: float
    memory_need_bytes: int
    fits: bool | None
    communication: dict[str, PhaseCommunication]


@dataclass(frozen=True)
class GroupLink(Record):
    """The link as it was taken for a group of ``ranks``. derived: how, where it was not timed with so many.

    bytes_outside_range: of messages, the smallest and the largest beyond the sizes that were timed.
    """

    ranks: int
    link: Link
    derived: str | None
    bytes_outside_range: list[int]


@dataclass(frozen=True)
class PlanResult(Record):
    """All of plan.json but the schema in front. model: what was asked for.

    link, links: None and empty where only one rank was asked for. choice: the layout that was chosen, if one was to be.
    """

    LEFT_OUT: ClassVar = ("choice",)

    model: PlanModel
    options: PlanOptions
    device: DeviceSpec
    link: Interconnect | None
    links: list[GroupLink]
    engine: EngineFacts
    rows: list[PlannedRow]
    choice: PlanChoice | None = None

    def rows_of(self, ranks: int, batch: int) -> list[PlannedRow]:
        """Of one group at one batch size, the dense model first."""
        return [row for row in self.rows if (row.tp_size, row.batch_size) == (ranks, batch)]
