"""What a sweep is about to do: ``--dry-run`` shows it, ``--print-commands`` prints it for a shell."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ladderize.adapt.methods import LORA
from ladderize.adapt.train.memory import saved_bytes, trained_numbers
from ladderize.adapt.train.options import RetrainOptions
from ladderize.adapt.train.states import WEIGHT_BYTES
from ladderize.checkpoint.opening import check_model
from ladderize.commands.adapt import adapt_options
from ladderize.console import human_bytes, human_seconds
from ladderize.files.records import Record
from ladderize.layout import Layout
from ladderize.tradeoff.sweep.estimate import Estimator
from ladderize.tradeoff.sweep.plan import Planner
from ladderize.tradeoff.sweep.points import SweepPlan, summed
from ladderize.tradeoff.sweep.stages import (
    STAGES,
    TIMED,
    FinishedStage,
    Stage,
    asked_by,
    finished_stage,
    read_marker,
    stage_files,
)


@dataclass(frozen=True)
class PlannedStage(Record):
    """seconds, bytes: about what it will take; None: nothing is known to estimate it from, or it is kept.
    unfinished_bytes: at most what lies on the disk beside that while it runs, where it trains. on: how many GPUs, or
    processes, in words. share: of the machine, while it runs. needs: outputs that it reads."""

    stage: str
    title: str
    output: str
    command: str
    kept: bool
    on: str
    share: float
    needs: list[str]
    seconds: float | None = None
    bytes: int | None = None
    unfinished_bytes: int = 0


@dataclass(frozen=True)
class Forecaster:
    """What stages take: by what earlier ones in the same folder took, else by the estimator. size: of the model's
    weights; are_linked: those that no stage changes take no room."""

    planner: Planner
    gpus: int
    estimator: Estimator | None
    history: Sequence[FinishedStage]
    size: int
    are_linked: bool

    @classmethod
    def of(cls, planner: Planner, gpus: int, estimator: Estimator | None) -> "Forecaster":
        root, spec = planner.root, planner.spec
        weights = [path.resolve() for path in check_model(spec.model, spec.revision).glob("*.safetensors")]
        parent = next(place for place in (root, *root.parents) if place.exists())
        found = [read_marker(entry) for entry in sorted((root / STAGES).glob("*"))]
        return cls(
            planner=planner,
            gpus=gpus,
            estimator=estimator,
            history=[marker for marker in found if marker is not None],
            size=sum(path.stat().st_size for path in weights),
            are_linked=all(path.stat().st_dev == parent.stat().st_dev for path in weights),
        )

    def measured(self, stage: Stage) -> float | None:
        """Seconds: the mean of earlier stages of the same kind, which of retrainings is for each token."""
        alike = [one for one in self.history if one.stage == stage.kind]
        if stage.kind != "adapt":
            times = [one.seconds for one in alike if one.seconds is not None]
            return fmean(times) if times else None
        same = [one for one in alike if one.identity.get("method") == stage.identity["method"] and one.amount]
        if not same or not stage.amount:
            return None
        return stage.amount * sum(one.seconds or 0.0 for one in same) / sum(one.amount or 0 for one in same)

    def seconds(self, stage: Stage) -> float | None:
        known = self.measured(stage)
        return self.estimator.seconds(stage) if known is None and self.estimator is not None else known

    def share(self, stage: Stage) -> float:
        """Of all hosts."""
        own = max(1, stage.launch.gpus) / self.gpus if self.gpus and stage.kind != TIMED else 1.0
        return own * stage.launch.hosts / self.planner.builder.hosts

    def machine_seconds(self, stage: Stage) -> float | None:
        known = self.seconds(stage)
        return known * self.share(stage) if known is not None else None

    def bytes(self, stage: Stage, layout: Layout | None) -> tuple[int | None, int]:
        """What its output takes, and at most what its unfinished work takes beside that. layout: of the model that a
        stage of adapt trains."""
        if stage.kind == "convert":
            return 0 if self.are_linked and "head_map" not in stage.identity["recipe"] else self.size, 0
        if stage.kind == "adapt":
            options = adapt_options(asked_by(stage.commands[0]))
            if layout is None or not isinstance(options, RetrainOptions):
                return self.size, 0
            trained = trained_numbers(self.planner.config, layout, options)
            adapter = trained * WEIGHT_BYTES if options.method == LORA else 0
            here = sum(stage_files(self.planner.root / stage.output).values())  # of a run that was killed
            return self.size + adapter, max(0, saved_bytes(trained) - here)
        alike = [one.bytes for one in self.history if one.stage == stage.kind]
        return round(fmean(alike)) if alike else None, 0


@dataclass(frozen=True)
class PlanDocument(Record):
    """``ladderize sweep --dry-run --json``. unplanned: points whose layout, or whose promotion, is decided by
    what is not measured yet: their other stages are known then. unplanned_seconds: about what each of them will take,
    of the whole machine's time. are_layouts_known: so that benchmarks have all their models. notes: what the user
    should know of the file."""

    model: str
    out: str
    stages: list[PlannedStage]
    unplanned: list[str]
    unplanned_seconds: list[float | None]
    are_layouts_known: bool
    notes: list[str]

    @classmethod
    def of(
        cls, plan: SweepPlan, planner: Planner, gpus: Sequence[str] = (), estimator: Estimator | None = None
    ) -> "PlanDocument":
        forecaster = Forecaster.of(planner, len(gpus), estimator)
        outputs = {stage.key: stage.output for stage in plan.stages}
        layouts = {stage.key: point.layout for point in plan.points for stage in point.adapting}

        def planned(stage: Stage) -> PlannedStage:
            known = (stage.kind, stage.title, stage.output, stage.command)
            needs = [outputs[key] for key in stage.needs if key in outputs]
            on = stage.launch.words(len(gpus)) if stage.kind != TIMED else "alone"
            where = (on, forecaster.share(stage), needs)
            if finished_stage(stage, planner.root) is not None:
                return PlannedStage(*known, True, *where)
            taken = forecaster.bytes(stage, layouts.get(stage.key))
            return PlannedStage(*known, False, *where, forecaster.seconds(stage), *taken)

        stages = [planned(stage) for stage in plan.stages]
        later = [point for point in plan.points if point.layout is None or point.is_open]
        to_come = [planner.to_come(point) if point.layout is None else [] for point in later]
        left = [stage for stage, told in zip(plan.stages, stages, strict=True) if not told.kept]
        to_run = [*left, *(stage for own in to_come for stage in own)]
        is_guessed = any(forecaster.measured(stage) is None for stage in to_run)
        notes = [*plan.notes, *([estimator.words] if estimator is not None and is_guessed else [])]
        return cls(
            model=planner.spec.model,
            out=str(planner.root),
            stages=stages,
            unplanned=[point.name for point in later],
            unplanned_seconds=[summed(map(forecaster.machine_seconds, own)) for own in to_come],
            are_layouts_known=not any(point.layout is None and point.is_open for point in plan.points),
            notes=notes,
        )

    @property
    def rows(self) -> list[dict[str, str]]:
        """A row for each stage."""

        def time(seconds: float | None) -> str:
            return "unknown" if seconds is None else f"about {human_seconds(seconds)}"

        rows = []
        for stage in self.stages:
            disk = "unknown" if stage.bytes is None else human_bytes(stage.bytes)
            about = {"": "kept", "on": "", "time": "", "disk": ""}
            if not stage.kept:
                about = {"": "to run", "on": stage.on, "time": time(stage.seconds), "disk": disk}
            rows.append({"stage": stage.title, **about})
        for name, seconds in zip(self.unplanned, self.unplanned_seconds, strict=True):
            about = {"": "planned when what decides it is measured", "on": "", "time": time(seconds), "disk": "unknown"}
            rows.append({"stage": name, **about})
        return rows

    @property
    def total(self) -> str:
        """The sum of what is known, and of how many stages nothing is."""
        left = [stage for stage in self.stages if not stage.kept]
        times = [stage.seconds * stage.share if stage.seconds is not None else None for stage in left]
        times += self.unplanned_seconds
        known = [seconds for seconds in times if seconds is not None]
        missing = len(times) - len(known)
        kept = f"{len(self.stages) - len(left)} of {len(self.stages)} stages are kept"
        if not left and not self.unplanned:
            return f"{kept}; nothing is to be run"
        time = f"about {human_seconds(sum(known))}"
        if missing:
            time = f"more than {human_seconds(sum(known))}: of {missing} nothing is known yet"
        unfinished = f", and {human_bytes(self.unfinished_bytes)} while it trains" if self.unfinished_bytes else ""
        return f"{kept}; the others take {time}; at least {human_bytes(self.output_bytes)} of disk{unfinished}"

    @property
    def output_bytes(self) -> int:
        """What stays."""
        return sum(stage.bytes or 0 for stage in self.stages)

    @property
    def unfinished_bytes(self) -> int:
        """At most what lies beside that at one time: of the largest trainings that run side by side."""
        room, found = 1.0, 0
        for stage in sorted(self.stages, key=lambda stage: -stage.unfinished_bytes):
            if stage.share <= room:
                room, found = room - stage.share, found + stage.unfinished_bytes
        return found

    @property
    def script(self) -> str:
        """The commands of all stages that are to run, as a shell takes them, each with a comment that says what must be
        done before."""
        stages = [stage for stage in self.stages if stage.stage != TIMED or self.are_layouts_known]
        later = [*self.unplanned, *(stage.title for stage in self.stages if stage not in stages)]
        numbers = {stage.output: number for number, stage in enumerate(stages, 1)}
        lines = [f"cd {shlex.quote(self.out)}"]
        for stage in stages:
            needs = ", ".join(map(str, sorted(numbers[output] for output in stage.needs)))
            when = f"after {needs}" if needs else "at any time"
            words = [f"{stage.title}: {'kept' if stage.kept else when}", *([stage.on] if stage.on else [])]
            lines.append(f"\n# {numbers[stage.output]}. {'; '.join(words)}")
            if not stage.kept:
                lines.append(f"mkdir -p {stage.output} && {stage.command}")
        lines += [f"\n# {name}: to be printed when what decides it is measured" for name in later]
        return "\n".join(lines)
