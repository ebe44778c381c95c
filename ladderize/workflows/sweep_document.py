"""sweep.json: what a sweep has measured and where it lies. ``ladderize sweep`` writes it, ``ladderize report`` reads
it. Imports no torch.

Paths in it are relative to the sweep's folder, so that the folder can be moved.
"""

from dataclasses import dataclass
from typing import Literal

from ladderize.files.records import Record

AS_CONVERTED, THEN = "none", " + "  # of ``adapted``: no stage; between two stages
# skipped: what it depends on failed; not promoted: others are better (promote of a sweep.yaml)
Status = Literal["waiting", "running", "done", "failed", "skipped", "not promoted"]


@dataclass(frozen=True)
class StageState(Record):
    """One stage of one point, or of the whole sweep.

    output: its folder. seconds: it took, in the run that made it. reused: it was there from an earlier run. message:
    why it failed, was skipped, or was not promoted. command: the same by hand, typed in the sweep's folder.
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
    """One model of the trade-off: a layout, and how it was adapted. The first point is the dense model.

    adapted: ``none``, or the methods of its stages, such as ``align + full``. tokens: that these stages read, together.
    model: its folder (or, of the dense one, what the user named). results: results.json of its evaluation; adaptation:
    the folder of the last stage that retrained, or of the last. timed: the model that bench.json names: speed depends
    on the layout alone, so one model of each is timed, the one that is as converted. control: the model that the dense
    one became by the same training, where that was asked for.
    Where the layout is not known yet (its sensitivity failed), the lists of modes are empty.
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
    control: str | None = None

    @property
    def methods(self) -> list[str]:
        """Of its stages of adaptation, in their order."""
        return [] if self.adapted == AS_CONVERTED else self.adapted.split(THEN)

    @property
    def is_dense(self) -> bool:
        return set(self.attention_sync) | set(self.mlp_sync) == {"blocking"}

    @property
    def failure(self) -> str | None:
        """What its first failed stage said."""
        return next((stage.message for stage in self.stages if stage.status == "failed"), None)

    @property
    def not_promoted(self) -> str | None:
        """Why it did not get its last stages."""
        return next((stage.message for stage in self.stages if stage.status == "not promoted"), None)


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
