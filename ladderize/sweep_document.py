"""sweep.json: the models that a sweep measures, and their results. Reports and plans read it. Imports no torch. Paths
in it are relative to the sweep's folder, so that the folder can be moved."""

from dataclasses import dataclass
from typing import Literal

from ladderize.files.records import Record

AS_CONVERTED, THEN = "none", " + "  # of ``adapted``: no stage; between two stages
# skipped: a stage that it depends on failed; not promoted: others are better (promote of a sweep.yaml)
Status = Literal["waiting", "running", "done", "failed", "skipped", "not promoted"]


@dataclass(frozen=True)
class StageState(Record):
    """One stage of one point, or of the whole sweep."""

    stage: str
    output: str  # its folder
    status: Status
    seconds: float | None = None  # in the run that made it
    reused: bool = False  # an earlier run made it
    message: str | None = None  # why it failed, was skipped, or was not promoted
    command: str | None = None  # that does the same, typed in the sweep's folder


@dataclass(frozen=True)
class SweepPoint(Record):
    """One model of the trade-off: a layout, and how it was adapted. The first point is the dense model."""

    name: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    adapted: str  # ``none``, or the methods of its stages, such as ``align + full``
    tokens: int | None  # that these stages read, together
    model: str | None  # its folder; of the dense model the name that the user gave
    results: str | None  # results.json of its evaluation
    adaptation: str | None  # the folder of the last stage that retrained, or of the last stage
    stages: list[StageState]
    timed: str | None = None  # the model of this layout that bench.json names: speed depends on the layout alone

    @property
    def is_dense(self) -> bool:
        return set(self.attention_sync) | set(self.mlp_sync) == {"blocking"}

    @property
    def failure(self) -> str | None:
        return next((stage.message for stage in self.stages if stage.status == "failed"), None)

    @property
    def not_promoted(self) -> str | None:
        return next((stage.message for stage in self.stages if stage.status == "not promoted"), None)


@dataclass(frozen=True)
class SweepDocument(Record):
    """All of sweep.json but the schema in front."""

    model: str  # the dense one
    command: str  # that made it, as a user types it
    complete: bool
    margin: float  # the accuracy that may be lost, in points (hundredths)
    points: list[SweepPoint]
    stages: list[StageState]  # of the whole sweep: the benchmarks
    benches: list[str]  # their files

    @property
    def every_stage(self) -> list[StageState]:
        return [stage for point in self.points for stage in point.stages] + self.stages

    @property
    def failed(self) -> list[StageState]:
        failed = [stage for stage in self.every_stage if stage.status == "failed"]
        return list({stage.output or stage.message: stage for stage in failed}.values())
