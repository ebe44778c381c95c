"""sweep.json: what a sweep has measured and where it lies. ``ladderize sweep`` writes it, ``ladderize report`` reads
it. Imports no torch.

Paths in it are relative to the sweep's folder, so that the folder can be moved.
"""

from dataclasses import dataclass
from typing import Literal

from ladderize.files.records import Record

Adapted = Literal["none", "blocks", "full", "lora"]
Status = Literal["waiting", "running", "done", "failed", "skipped"]  # skipped: what it depends on failed


@dataclass(frozen=True)
class StageState(Record):
    """One stage of one point, or of the whole sweep.

    output: its folder. seconds: it took, in the run that made it. reused: it was there from an earlier run. message: of
    a failed one. command: the same by hand, typed in the sweep's folder.
    """

    stage: str
    key: str
    output: str
    status: Status
    seconds: float | None = None
    reused: bool = False
    message: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class SweepPoint(Record):
    """One model of the trade-off: a layout, and how it was retrained. The first point is the dense model.

    model: its folder (or, of the dense one, what the user named). tokens: that it was retrained on. results:
    results.json of its evaluation; adaptation: the folder that has the curves of its retraining. timed: the model that
    bench.json names: speed depends on the layout alone, so one model of each is timed, the one that was not retrained.
    Where the layout is not known yet (its sensitivity failed), the lists of modes are empty.
    """

    name: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    adapted: Adapted
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
        """What its first failed stage said."""
        return next((stage.message for stage in self.stages if stage.status == "failed"), None)


@dataclass(frozen=True)
class SweepDocument(Record):
    """All of sweep.json but the schema in front. model: the dense one. command: what made it, as a user types it.
    sensitivities, benches: files of theirs. margin: what of the accuracy may be lost, in points (hundredths)."""

    model: str
    command: str
    complete: bool
    margin: float
    points: list[SweepPoint]
    stages: list[StageState]
    sensitivities: list[str]
    benches: list[str]

    @property
    def failed(self) -> list[StageState]:
        """Every stage that failed, once."""
        found = [stage for point in self.points for stage in point.stages] + self.stages
        return list({stage.key: stage for stage in found if stage.status == "failed"}.values())
