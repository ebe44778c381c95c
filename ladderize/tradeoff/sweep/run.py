"""``ladderize sweep`` from a sweep.yaml to sweep.json: plan, run what is missing, keep, and say what was measured."""

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import ALIGN, FULL, LORA, Method
from ladderize.checkpoint.opening import check_model
from ladderize.console import SILENT, Console, human_bytes
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.regular import resolved
from ladderize.files.temporaries import lock_folder, replacement
from ladderize.ranks.device import visible_gpus
from ladderize.ranks.threads import cores
from ladderize.tradeoff.sweep.builder import CACHE, Inputs, StageBuilder
from ladderize.tradeoff.sweep.estimate import Estimator
from ladderize.tradeoff.sweep.execute import Execution
from ladderize.tradeoff.sweep.hosts import HostLink, OtherHost, linked, other_hosts, say_end, started_hosts, take_orders
from ladderize.tradeoff.sweep.margin import Questions, count_questions, margin_words, questions_needed
from ladderize.tradeoff.sweep.meeting import hidden_launcher
from ladderize.tradeoff.sweep.plan import Planner
from ladderize.tradeoff.sweep.planned import PlanDocument
from ladderize.tradeoff.sweep.points import PlannedPoint, SweepPlan, summed
from ladderize.tradeoff.sweep.shown import Board
from ladderize.tradeoff.sweep.stages import (
    ADAPTER_FOLDER,
    BENCH_JSON,
    MODEL_FOLDER,
    SENSITIVITY_JSON,
    STAGE_VERSIONS,
    STAGES,
    TIMED,
    Stage,
    finished_stage,
    remove_others,
)
from ladderize.tradeoff.sweep.sweep_file import SweepSpec, read_sweep
from ladderize.tradeoff.sweep.workers import ThisHost
from ladderize.workflows.sweep_document import StageState, SweepDocument, SweepPoint

SWEEP_JSON, SWEEP_YAML = "sweep.json", "sweep.yaml"
LOST, OVER = ("failed", "skipped"), ("done", "not promoted")  # of stages


def sweep(
    file: str | Path,
    out: str | Path | None = None,
    *,
    jobs: int | None = None,
    prune: bool = False,
    console: Console = SILENT,
) -> SweepDocument:
    """Measure every point of a sweep.yaml, from conversion to accuracy and speed; returns the document of sweep.json.

    out: the sweep's folder; None takes the file's. jobs: stages that run side by side, where nothing is timed; each
    has its share of the cores, and GPUs of its own; None: as many as there are GPUs, else one. prune: remove outputs
    of the folder that are not of this sweep any more, as soon as all of its layouts are known. What an earlier run has
    completed is kept, also of another sweep.yaml. A stage that fails does not stop the others: see the document's
    points and stages. Where a launcher has started one process on each of several hosts, stages run on all of them, and
    every process returns the same. Raises UserError for a file, a folder or layouts that do not fit.
    """
    with linked(started_hosts()) as link:
        if link is not None and link.place.rank:
            return SweepDocument.from_dict(take_orders(link), "what process 0 of the sweep said")
        with hidden_launcher():  # the stages' commands begin anew
            document = _lead(file, out, jobs, prune, link, console)
        if link is not None:
            say_end(link, document.to_dict())
        return document


def _lead(
    file: str | Path, out: str | Path | None, jobs: int | None, prune: bool, link: HostLink | None, console: Console
) -> SweepDocument:
    """The same, where this process is the only one or leads."""
    gpus = visible_gpus()
    jobs = jobs if jobs is not None else min(len(gpus) or 1, len(cores()))
    if jobs < 1 or jobs > len(cores()):
        raise UsageError(f"--jobs {jobs} must be from 1 to {len(cores())}, the cores that this process may use")
    spec, root = _asked(file, out)
    command = shlex.join(["ladderize", "sweep", str(file), *(["--out", str(out)] if out is not None else [])])
    with _owned(root):
        others = other_hosts(link, root) if link is not None else []
        planner = _planner(spec, root, 1 + len(others), console)
        plan = planner.plan()
        check_gpus(plan, root, gpus)
        if prune and plan.complete:  # first, so that there is room for what follows
            remove_others(root, {stage.output for stage in plan.stages})
        check_room_for(plan, planner)
        questions = check_tasks(plan, planner, console)
        if questions and questions_needed(questions, spec.margin) > sum(task.count for task in questions):
            console.note(f"Note: {margin_words(questions, spec.margin)}")
        document = _Sweep(planner, plan, jobs, ThisHost(root, tuple(gpus)), others, command, console).run()
        if prune and document.complete:
            kept = {stage.output for point in document.points for stage in point.stages}
            remove_others(root, kept | {stage.output for stage in document.stages})
        elif prune and not plan.complete:  # what it could not plan may be among them
            console.warn("no outputs were removed: the sweep is not complete, so which it asks for is not known")
    return document


def plan_sweep(file: str | Path, out: str | Path | None = None, *, console: Console = SILENT) -> PlanDocument:
    """What ``sweep`` would do: nothing is written. Raises the same errors for what does not fit."""
    hosts = started_hosts().size
    with hidden_launcher():
        spec, root = _asked(file, out)
        planner = _planner(spec, root, hosts, console)
        plan, gpus = planner.plan(), visible_gpus()
        check_gpus(plan, root, gpus)
        questions = check_tasks(plan, planner, console)
        with console.stage("measuring this machine"):
            estimator = Estimator.of(planner.config, check_model(spec.model, spec.revision), questions)
        document = PlanDocument.of(plan, planner, gpus, estimator)
        margin = [margin_words(questions, spec.margin)] if questions else []
        return replace(document, notes=[*document.notes, *margin])


def sweep_folder(file: str | Path, out: str | Path | None = None) -> Path:
    """Where a sweep keeps everything; raises UserError for a folder that holds something else."""
    return _asked(file, out)[1]


def _asked(file: str | Path, out: str | Path | None) -> tuple[SweepSpec, Path]:
    """What the file asks for, and the sweep's folder."""
    spec = read_sweep(Path(file))
    if out is None and spec.out is None:
        raise UsageError(f"say where to keep everything: --out DIR, or a line 'out: DIR' in {file}")
    root = resolved(out if out is not None else str(spec.out), "--out ")
    if root.exists() and not root.is_dir():
        raise UserError(f"--out {root} is not a folder; choose another")
    if root.is_dir() and any(root.iterdir()) and not _is_sweep(root):
        raise UserError(f"--out {root} is not empty, and no folder of a sweep (it has no {SWEEP_JSON}); choose another")
    model = Path(spec.model)
    if model.exists() and (root == model or model in root.parents):
        raise UserError(f"--out {root} is the model's folder or lies inside it; choose another")
    return spec, root


def _is_sweep(root: Path) -> bool:
    """Whether a sweep keeps its outputs here, was killed when it had hardly begun, or had its stages run by hand."""
    if "points" in read_own(root / SWEEP_JSON):
        return True
    stages = [entry.name.partition("-")[0] for entry in (root / STAGES).glob("*")]
    others = [entry.name for entry in root.iterdir() if entry.name != STAGES]
    return all(name in STAGE_VERSIONS for name in stages) and all(name.startswith(f".{SWEEP_JSON}.") for name in others)


def _planner(spec: SweepSpec, root: Path, hosts: int, console: Console) -> Planner:
    with console.stage("reading the model and the data"):
        return Planner.of(spec, StageBuilder.of(spec, Inputs(root / CACHE), hosts), root)


def check_gpus(plan: SweepPlan, root: Path, gpus: Sequence[str]) -> None:
    """Raise UserError for a stage that needs more GPUs than there are. On a machine without any, it runs on CPUs."""
    for stage in plan.stages:
        if stage.launch.gpus > len(gpus) > 0 and finished_stage(stage, root) is None:
            raise UserError(
                f"{stage.title} needs {stage.launch.gpus} GPUs, but this machine has {len(gpus)}; give it a smaller"
                " processes or tp_size"
            )


def check_room_for(plan: SweepPlan, planner: Planner) -> None:
    """Raise UserError where the disk is certainly too small: found before hours of work, not after."""
    root = planner.root
    document = PlanDocument.of(plan, planner)
    needed = document.output_bytes + document.unfinished_bytes
    free = shutil.disk_usage(root).free
    if needed > free:
        raise UserError(
            f"the sweep needs at least {human_bytes(needed)} in {root}, but only {human_bytes(free)} are free there;"
            " choose another --out, or adapt fewer layouts (--dry-run shows what each stage takes)"
        )


def check_tasks(plan: SweepPlan, planner: Planner, console: Console) -> list[Questions] | None:
    """The questions of all tasks. Raises UserError for a task that is not there, before anything runs; where the dense
    model's evaluation is kept, they are, and are not read: None."""
    stage, options = plan.points[0].evaluating, planner.spec.evaluation
    if stage is None or options is None or finished_stage(stage, planner.root) is not None:
        return None
    if not options.tasks:
        return []
    with console.stage("reading the tasks of lm-eval"), console.contained():
        return count_questions(options)


@contextmanager
def _owned(root: Path) -> Iterator[None]:
    """Around the work in a sweep's folder: it is this process's alone. One that was made in vain is removed."""
    made = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(root)
    except BlockingIOError:
        raise UserError(f"another sweep runs in {root}; wait for it, or choose another --out") from None
    try:
        yield
    finally:
        if made and not any(root.iterdir()):
            root.rmdir()
        if lock is not None:
            os.close(lock)


class _Sweep:
    """A sweep that runs. plan: is made anew when what decides it was measured."""

    def __init__(
        self,
        planner: Planner,
        plan: SweepPlan,
        jobs: int,
        this: ThisHost,
        others: Sequence[OtherHost],
        command: str,
        console: Console,
    ) -> None:
        self.planner, self.plan, self.command, self.board = planner, plan, command, Board(console)
        self.inputs, self.root = planner.builder.inputs, planner.root
        self.execution = Execution(self.root, self.inputs, jobs, this, others, self._changed, self.board.draw)

    def run(self) -> SweepDocument:
        with self.board:
            self._show([])
            self.inputs.save()
            with replacement(self.root / SWEEP_YAML) as kept:
                kept.write(self.planner.spec.text)
            try:
                if not self.plan.complete:
                    dense = self.plan.points[0]
                    self.execution.run([*dense.stages, *self.plan.sensitivities])
                    self._replan(None)
                usable = self._run_planned()
                while not self.plan.complete:  # what was measured decides who is promoted
                    before = self.plan
                    self._replan(usable)
                    if self.plan == before:  # somebody removed what was measured meanwhile
                        break
                    usable = self._run_planned()
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self.board.note(
                        f"stopped; complete stages are kept in {self.root}, and the same command goes on from there"
                    )
                with contextlib.suppress(OSError):  # of a full disk, which the error speaks of
                    self._write(over=True)
                raise
            return self._write(over=True)

    def _run_planned(self) -> set[str]:
        """Run all stages that are known, timings last; returns the keys of the conversions that can be timed."""
        self.execution.run([stage for stage in self.plan.stages if stage.kind != TIMED])
        converted = {stage.key for point in self.plan.points if (stage := point.converting) is not None}
        usable = {key for key in converted if self.execution.states[key].status == "done"}
        if usable != converted:
            self._replan(usable)
        self.execution.run(self.plan.benches)
        return usable

    def _replan(self, usable: set[str] | None) -> None:
        shown = self.plan.notes
        lost = {key for key, state in self.execution.states.items() if state.status in LOST}
        self.plan = self.planner.plan(usable, lost)
        self._show(shown)

    def _show(self, shown: list[str]) -> None:
        for note in self.plan.notes:
            if note not in shown:
                self.board.note(f"Note: {note}")
        for stage in self.plan.stages:
            self.execution.state(stage)
        self._write()
        self.board.show(self.plan, self.execution.states)

    def _changed(self, stage: Stage, state: StageState) -> None:
        self._write()
        self.board.changed(stage, state)

    def _write(self, *, over: bool = False) -> SweepDocument:
        """sweep.json, as things stand. over: nothing is to come."""
        plan, execution, state = self.plan, self.execution, self.execution.state
        sensitivities = {stage.key: state(stage) for stage in plan.sensitivities}
        points = [_point(point, execution, sensitivities) for point in plan.points]
        of_all = [*sensitivities.values(), *map(state, plan.benches)]
        stages = [*of_all, *(stage for point in points for stage in point.stages)]
        document = SweepDocument(
            model=self.planner.builder.model,
            command=self.command,
            complete=over and all(stage.status in OVER for stage in stages),
            margin=self.planner.spec.margin,
            points=points,
            stages=of_all,
            sensitivities=[f"{one.output}/{SENSITIVITY_JSON}" for one in plan.sensitivities if execution.is_done(one)],
            benches=[f"{one.output}/{BENCH_JSON}" for one in plan.benches if execution.is_done(one)],
        )
        write_json(self.root / SWEEP_JSON, document.to_dict())
        return document


# ---- points ----


def _point(point: PlannedPoint, execution: Execution, sensitivities: Mapping[str, StageState]) -> SweepPoint:
    """A planned point with what became of its stages."""

    def when_done(stage: Stage | None, path: str | None) -> str | None:
        return path if stage is not None and execution.is_done(stage) else None

    stages = [execution.state(stage) for stage in point.stages]
    if point.layout is None:
        lost = any(sensitivities[key].status in LOST for key in point.group.awaits)
        message = "the stage sensitivity that it needs failed" if lost else point.group.problem
        status = "skipped" if lost else "failed" if point.group.problem is not None else "waiting"
        stages = [StageState("convert", "", "", status, message=message)]  # type: ignore[arg-type]
    elif point.held is not None:
        stages.append(StageState("adapt", "", "", point.held.status, message=point.held.message))
    modes: Mapping[str, Any] = {"attention_sync": [], "mlp_sync": [], "sync_tp_size": None}
    made_by = point.adapting[-1] if point.adapting else point.converting
    adapted = bool(point.adapting) and point.held is None and execution.is_done(point.adapting[-1])
    tokens = point.tokens
    if adapted:
        done = zip(point.adapting, point.asked, strict=True)
        tokens = summed(trained_tokens(execution.root / stage.output, asked.method) for stage, asked in done)
    return SweepPoint(
        name=point.name,
        layout=str(point.layout) if point.layout is not None else point.group.text,
        **(point.layout.to_config() if point.layout is not None else modes),
        adapted=point.adapted,
        tokens=tokens,
        model=point.model if made_by is None else when_done(made_by, point.model),
        results=when_done(point.evaluating, point.results),
        adaptation=point.adaptation if adapted else None,
        stages=stages,
        timed=point.timed if point.converting is None else when_done(point.converting, point.timed),
        control=point.control,
    )


def trained_tokens(folder: Path, method: Method) -> int | None:
    """What the output of a stage says that it read: tokens trained on, or those of its windows. folder: the stage's;
    the checkpoint in it has the documents of earlier stages too."""
    place = folder / (ADAPTER_FOLDER if method == LORA else MODEL_FOLDER)
    if method in (FULL, LORA):
        tokens = read_own(place / "adaptation.json").get("tokens")
        return tokens if isinstance(tokens, int) else None
    data = read_own(place / ("alignment.json" if method == ALIGN else "distillation.json")).get("data")
    if isinstance(data, dict) and isinstance(data.get("samples"), int) and isinstance(data.get("seq_len"), int):
        return int(data["samples"] * data["seq_len"])
    return None
