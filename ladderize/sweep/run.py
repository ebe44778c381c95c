"""The command ``ladderize sweep`` from a sweep.yaml to sweep.json: plan, run the next stage, keep its output, plan
again."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from ladderize.adapt.lora import ADAPTATION
from ladderize.adapt.methods import ALIGN, Method
from ladderize.commands.shared import command_line
from ladderize.console import SILENT, Console
from ladderize.convert.inspection import ALIGNMENT, DISTILLATION
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.temporaries import lock_folder
from ladderize.ranks.environment import already_started
from ladderize.sweep.child import run_stage
from ladderize.sweep.plan import LOST, Planner, Point, SweepPlan
from ladderize.sweep.show import Board
from ladderize.sweep.stages import (
    MARKER,
    SHARDS,
    Stage,
    is_finished,
    make_folder,
    remove_others,
    trained_folder,
)
from ladderize.sweep.sweep_file import SWEEP_JSON, find_folder
from ladderize.sweep_document import AS_CONVERTED, THEN, StageState, Status, SweepDocument, SweepPoint


def run_sweep(
    file: str | Path, out: str | Path | None = None, *, prune: bool = False, console: Console = SILENT
) -> SweepDocument:
    """Measure every point of a sweep.yaml, from conversion to accuracy and speed; return the document of sweep.json.

    Raises UserError for a file, a folder or layouts that do not fit.

    out: the sweep's folder; None: the file's. Outputs of earlier runs in it are kept and reused, also those of another
    sweep.yaml.
    prune: remove outputs in the folder that this sweep does not have.

    A stage that fails does not stop the others: see the document's points and stages.
    """
    if already_started():
        raise UserError("a sweep starts the processes of its stages itself; run it without torchrun or srun")
    run = _new_run(file, out, console)
    root = run.planner.root
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(root)
    except BlockingIOError:
        raise UserError(f"another sweep runs in {root}; wait for it, or choose another --out") from None
    try:
        with Board(console) as board:
            document = _run_all(run, board)
        if prune and document.complete:
            remove_others(root, {stage.output for stage in document.every_stage})
        elif prune:
            console.warn("no outputs were removed: the sweep is not complete, so which it asks for is not known")
        return document
    except (KeyboardInterrupt, UserError) as error:
        run.write(run.plan())
        if isinstance(error, KeyboardInterrupt):
            console.note(f"stopped; complete stages are kept in {root}, and the same command goes on from there")
        raise
    finally:
        if lock is not None:
            os.close(lock)


def plan_sweep(file: str | Path, out: str | Path | None = None, *, console: Console = SILENT) -> tuple[SweepPlan, Path]:
    """Return the plan of ``run_sweep``, and the sweep's folder. Nothing is written."""
    run = _new_run(file, out, console)
    return run.plan(), run.planner.root


def _new_run(file: str | Path, out: str | Path | None, console: Console) -> "SweepRun":
    """Return a sweep about to begin."""
    spec, root = find_folder(file, out)
    typed = command_line("sweep", file, *(["--out", out] if out is not None else []))
    with console.stage("reading the model, the data and the tasks"):
        run = SweepRun(Planner(spec, root), typed)
        run.plan()  # raises for data that are not there, before hours of training
    return run


# ---- running ----


@dataclass
class SweepRun:
    """The results of this run so far.

    failures: the reason of each failed stage, by its key.
    new: the keys of stages that this run has completed.
    running: the key of the stage that runs.
    """

    planner: Planner
    command: str
    failures: dict[str, str] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    running: str | None = None

    def plan(self) -> SweepPlan:
        """Return the plan as far as it is known by now."""
        return self.planner.plan(self.status)

    def status(self, stage: Stage) -> Status:
        """Return the status of a stage by its folder, and by what happened in this run."""
        if stage.key == self.running:
            return "running"
        if is_finished(stage, self.planner.root):
            return "done"
        if stage.key in self.failures:
            return "failed"
        return "skipped" if any(self.status(needed) in LOST for needed in stage.needs) else "waiting"

    def state(self, stage: Stage) -> StageState:
        """Return a stage as sweep.json has it."""
        status, message, seconds = self.status(stage), self.failures.get(stage.key), None
        if status == "skipped":
            lost = next(needed for needed in stage.needs if self.status(needed) in LOST)
            how = "failed" if self.status(lost) == "failed" else "was skipped"
            message = f"the stage {lost.kind} that it needs {how}"
        if status == "done":
            seconds = read_own(self.planner.root / stage.output / MARKER).get("seconds")
        is_reused = status == "done" and stage.key not in self.new
        return StageState(stage.kind, stage.output, status, seconds, is_reused, message, stage.command)

    def write(self, plan: SweepPlan) -> SweepDocument:
        """Write sweep.json with the state so far, and return the document."""
        points = [_point(point, self) for point in plan.points]
        benches = [self.state(stage) for stage in plan.benches]
        every = [*benches, *(stage for point in points for stage in point.stages)]
        document = SweepDocument(
            model=self.planner.spec.model,
            command=self.command,
            complete=all(stage.status in ("done", "not promoted") for stage in every),
            margin=self.planner.spec.margin,
            points=points,
            stages=benches,
            benches=[stage.result for stage in plan.benches if self.status(stage) == "done"],
        )
        write_json(self.planner.root / SWEEP_JSON, document.to_dict())
        return document


def _run_all(run: SweepRun, board: Board) -> SweepDocument:
    """Run every stage that can be run, one after another. Measurements may decide on further stages.

    Raises UserError for an input that changed meanwhile.
    """
    root = run.planner.root
    while True:
        plan = run.plan()
        ready = (stage for stage in plan.stages if run.status(stage) == "waiting")
        stage = next((one for one in ready if all(run.status(needed) == "done" for needed in one.needs)), None)
        run.running = stage.key if stage is not None else None
        document = run.write(plan)
        board.show(plan, {one.key: run.state(one) for one in plan.stages})
        if stage is None:
            return document
        begin = time.monotonic()
        make_folder(stage, root)
        try:
            failure = run_stage(stage, root)
        finally:
            run.running = None
        run.planner.builder.inputs.check_unchanged(asked=stage.kind == "eval")
        if failure is not None:
            run.failures[stage.key] = failure
        else:
            marker = {"title": stage.title, "command": stage.command, "seconds": time.monotonic() - begin}
            write_json(root / stage.output / MARKER, marker)  # last of all
            run.new.add(stage.key)


def _point(point: Point, run: SweepRun) -> SweepPoint:
    """Return a planned point with the state of its stages."""
    planned, made_by, evaluating = point.planned, point.made_by, point.evaluating
    stages = [run.state(stage) for stage in point.stages]
    if point.hold is not None:
        stages.append(point.hold)
    is_made = made_by is not None and run.status(made_by) == "done"
    model = run.planner.spec.model if planned.converting is None else None
    adapted = list(zip((stage.method for stage in point.asked), point.adapting, strict=False)) if is_made else []
    read = [_tokens(run.planner.root / made.output, method) for method, made in adapted]
    trained = [f"{made.output}/{trained_folder(method)}" for method, made in adapted if method in SHARDS]
    return SweepPoint(
        name=point.name,
        layout=str(planned.layout),
        **planned.layout.to_config(),
        adapted=THEN.join(stage.method for stage in point.asked) or AS_CONVERTED,
        tokens=sum(read) or None,
        model=made_by.model if made_by is not None and is_made else model,
        results=evaluating.result if evaluating is not None and run.status(evaluating) == "done" else None,
        adaptation=trained[-1] if trained else None,
        stages=stages,
        timed=run.planner.timed(point),
    )


def _tokens(folder: Path, method: Method) -> int:
    """Return the number of tokens that a stage has read, by its document.

    folder: of the stage. The checkpoint in it has the documents of earlier stages too.
    """
    place = folder / trained_folder(method)
    if method in SHARDS:
        return int(read_own(place / ADAPTATION).get("tokens", 0))
    data = read_own(place / (ALIGNMENT if method == ALIGN else DISTILLATION)).get("data", {})
    return int(data.get("samples", 0) * data.get("seq_len", 0))
