"""sweep.json: the models that a sweep measures, and the places of their results. Reports and plans read it. Imports no
torch.

Paths in it are relative to the sweep's folder, so that the folder can be moved.
"""

from dataclasses import dataclass
from typing import Literal

from ladderize.files.records import Record

AS_CONVERTED, THEN = "none", " + "  # of ``adapted``: no stage; between two stages
# skipped: a stage that it depends on failed; not promoted: others are better (promote of a sweep.yaml)
Status = Literal["waiting", "running", "done", "failed", "skipped", "not promoted"]


@dataclass(frozen=True)
class StageState(Record):
    """One stage of one point, or of the whole sweep.

    output: its folder.
    seconds: the time that it took, in the run that made it.
    reused: True if an earlier run made it.
    message: why it failed, was skipped, or was not promoted.
    command: the command that does the same, typed in the sweep's folder.
    """

    stage: str
    output: str
    status: Status
    seconds: float | None = None
    reused: bool = False
    message: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class SweepPoint(Record):
    """One model of the trade-off: a layout, and how it was adapted. The first point is the dense model.

    adapted: ``none``, or the methods of its stages, such as ``align + full``.
    tokens: the number that these stages read, together.
    model: its folder; of the dense model the name that the user gave.
    results: results.json of its evaluation.
    adaptation: the folder of the last stage that retrained, or of the last stage.
    timed: the model that bench.json names. Speed depends on the layout alone, so one model of each layout is timed.
    """

    name: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    adapted: str
    tokens: int | None
    model: str | None
    results: str | None
    adaptation: str | None
    stages: list[StageState]
    timed: str | None = None

    @property
    def is_dense(self) -> bool:
        return set(self.attention_sync) | set(self.mlp_sync) == {"blocking"}

    @property
    def failure(self) -> str | None:
        """The message of its first failed stage."""
        return next((stage.message for stage in self.stages if stage.status == "failed"), None)

    @property
    def not_promoted(self) -> str | None:
        """The reason for which it did not get its last stages."""
        return next((stage.message for stage in self.stages if stage.status == "not promoted"), None)


@dataclass(frozen=True)
class SweepDocument(Record):
    """All of sweep.json but the schema in front.

    model: the dense one.
    command: the command that made it, as a user types it.
    margin: the accuracy that may be lost, in points (hundredths).
    stages: those of the whole sweep, the benchmarks.
    benches: their files.
    """

    model: str
    command: str
    complete: bool
    margin: float
    points: list[SweepPoint]
    stages: list[StageState]
    benches: list[str]

    @property
    def every_stage(self) -> list[StageState]:
        return [stage for point in self.points for stage in point.stages] + self.stages

    @property
    def failed(self) -> list[StageState]:
        """Every stage that failed, once."""
        failed = [stage for stage in self.every_stage if stage.status == "failed"]
        return list({stage.output or stage.message: stage for stage in failed}.values())
