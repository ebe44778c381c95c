"""``ladderize sweep --dry-run``: what would run, about how long, and how much disk it takes."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.adapt.methods import LORA
from ladderize.checkpoint.llama import check_model
from ladderize.console import human_bytes, human_seconds
from ladderize.files.records import Record
from ladderize.tradeoff.sweep.points import SweepPlan
from ladderize.tradeoff.sweep.stages import STAGES, FinishedStage, Stage, finished_stage, read_marker


@dataclass(frozen=True)
class StageEstimate:
    """Of one stage that would run. None: nothing is known to estimate it from."""

    seconds: float | None
    bytes: int | None


@dataclass(frozen=True)
class History:
    """What earlier runs in the same folder took. weights: bytes of the dense model's. linked: whether a conversion
    shares its weights' place on the disk."""

    markers: list[FinishedStage]
    weights: int
    linked: bool

    @classmethod
    def of(cls, root: Path, model: str, revision: str | None) -> "History":
        folder = check_model(model, revision)
        files = [path.resolve() for path in folder.glob("*.safetensors")]
        parent = next(place for place in (root, *root.parents) if place.exists())
        found = [read_marker(entry) for entry in sorted((root / STAGES).glob("*"))]
        return cls(
            [marker for marker in found if marker is not None],
            sum(path.stat().st_size for path in files),
            all(path.stat().st_dev == parent.stat().st_dev for path in files),
        )

    def estimate(self, stage: Stage) -> StageEstimate:
        """Seconds: the mean of earlier stages of the same kind, which of retrainings is for each token. Bytes: of a
        conversion none if its weights are links, of a retraining the model's weights once more."""
        alike = [marker for marker in self.markers if marker.stage == stage.kind]
        seconds = None
        if stage.kind == "adapt":
            same = [one for one in alike if one.identity.get("method") == stage.identity.get("method") and one.amount]
            if same and stage.amount:
                seconds = stage.amount * sum(one.seconds for one in same) / sum(one.amount or 0 for one in same)
        elif alike:
            seconds = sum(marker.seconds for marker in alike) / len(alike)
        if stage.kind == "convert":
            return StageEstimate(
                seconds, 0 if self.linked and "head_map" not in stage.identity["recipe"] else self.weights
            )
        if stage.kind == "adapt":
            return StageEstimate(seconds, self.weights * (2 if stage.identity.get("method") == LORA else 1))
        sizes = [marker.bytes for marker in alike]
        return StageEstimate(seconds, round(sum(sizes) / len(sizes)) if sizes else None)


@dataclass(frozen=True)
class PlannedStage(Record):
    """seconds, bytes: about what it will take; None: nothing is known to estimate it from, or it is kept."""

    stage: str
    title: str
    output: str
    command: str
    kept: bool
    seconds: float | None
    bytes: int | None


@dataclass(frozen=True)
class PlanDocument(Record):
    """``ladderize sweep --dry-run --json``. unplanned: points whose layout, or whose promotion, is decided by
    what is not measured yet: their other stages are known then. notes: what the user should know of the file."""

    model: str
    out: str
    stages: list[PlannedStage]
    unplanned: list[str]
    notes: list[str]

    @classmethod
    def of(cls, plan: SweepPlan, model: str, root: Path, history: History) -> "PlanDocument":
        stages = []
        for stage in plan.stages:
            kept = finished_stage(stage, root) is not None
            about = StageEstimate(None, None) if kept else history.estimate(stage)
            stages.append(
                PlannedStage(stage.kind, stage.title, stage.output, stage.command, kept, about.seconds, about.bytes)
            )
        unplanned = [point.name for point in plan.points if point.layout is None or point.is_open]
        return cls(model, str(root), stages, unplanned, plan.notes)

    @property
    def rows(self) -> list[dict[str, str]]:
        """A row for each stage, for people."""
        rows = []
        for stage in self.stages:
            time = "unknown" if stage.seconds is None else f"about {human_seconds(stage.seconds)}"
            disk = "unknown" if stage.bytes is None else human_bytes(stage.bytes)
            about = {"": "kept", "time": "", "disk": ""} if stage.kept else {"": "to run", "time": time, "disk": disk}
            rows.append({"stage": stage.title, **about})
        later = {"": "planned when what decides it is measured", "time": "unknown", "disk": "unknown"}
        return rows + [{"stage": name, **later} for name in self.unplanned]

    @property
    def total(self) -> str:
        """The sum of what is known, and of how many stages nothing is."""
        left = [stage for stage in self.stages if not stage.kept]
        known = [stage.seconds for stage in left if stage.seconds is not None]
        missing = len(left) - len(known) + len(self.unplanned)
        disk = sum(stage.bytes or 0 for stage in left)
        time = "about " + human_seconds(sum(known)) if known else "an unknown time: no stage like these has run here"
        if known and missing:
            time = f"more than {human_seconds(sum(known))}: of {missing} nothing is known yet"
        kept = f"{len(self.stages) - len(left)} of {len(self.stages)} stages are kept"
        if not left and not self.unplanned:
            return f"{kept}; nothing is to be run"
        return f"{kept}; the others take {time}; at least {human_bytes(disk)} of disk"
