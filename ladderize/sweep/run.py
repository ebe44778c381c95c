"""``ladderize sweep`` from a sweep.yaml to sweep.json: run each stage that is not done, and keep its output."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from ladderize.adapt.lora import ADAPTATION
from ladderize.adapt.options import ALIGN, Method
from ladderize.commands.shared import command_line
from ladderize.console import SILENT, Console, human_seconds
from ladderize.convert.inspection import ALIGNMENT, DISTILLATION
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults
from ladderize.eval.table import mean_accuracy
from ladderize.files.documents import read_document, read_own, write_json
from ladderize.files.output import lock_folder
from ladderize.layout import BLOCKING
from ladderize.ranks.environment import already_started
from ladderize.runtime.bench.document import BenchDocument
from ladderize.sweep.builder import SHARDS, trained_folder
from ladderize.sweep.child import run_stage
from ladderize.sweep.plan import Contest, Entrant, Point, SweepPlan, promoted
from ladderize.sweep.stages import MARKER, STAGES, Stage, is_finished, make_folder, outputs_in
from ladderize.sweep.sweep_file import SWEEP_JSON, SweepSpec, find_folder
from ladderize.sweep_document import AS_CONVERTED, THEN, StageState, Status, SweepDocument, SweepPoint

WAITING = StageState("adapt", "", "waiting")
LOST: tuple[Status, ...] = ("failed", "skipped")


def run_sweep(
    file: str | Path, out: str | Path | None = None, *, prune: bool = False, console: Console = SILENT
) -> SweepDocument:
    """Measure every point of a sweep.yaml, from conversion to accuracy and speed; return the document of sweep.json.

    out: the sweep's folder; None: the file's. Outputs of earlier runs in it are kept and reused, also those of another
    sweep.yaml.
    prune: remove outputs in the folder that this sweep does not have.
    Raises UserError for a file, a folder or layouts that do not fit. A stage that fails does not stop the others: see
    the document's points and stages.
    """
    spec, root = find_folder(file, out)
    typed = command_line("sweep", file, *(["--out", out] if out is not None else []))
    return measure(SweepRun(spec, root, console, typed), prune=prune)


def measure(sweep: "SweepRun", *, prune: bool = False) -> SweepDocument:
    """Run a sweep as ``run_sweep`` does."""
    if already_started():
        raise UserError("a sweep starts the processes of its stages itself; run it without torchrun or srun")
    root, console = sweep.root, sweep.console
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(root)
    except BlockingIOError:
        raise UserError(f"another sweep runs in {root}; wait for it, or choose another --out") from None
    try:
        document = sweep.run()
        if prune and document.complete:
            sweep.remove_others(document)
        elif prune:
            console.warn("no outputs were removed: the sweep is not complete, so which it asks for is not known")
        return document
    except (KeyboardInterrupt, UserError) as error:
        sweep.write()
        if isinstance(error, KeyboardInterrupt):
            console.note(f"stopped; complete stages are kept in {root}, and the same command goes on from there")
        raise
    finally:
        if lock is not None:
            os.close(lock)


class SweepRun:
    """A sweep, and what became of its stages.

    failures: the reason of each failed stage, by its key.
    completed: the keys of stages that this run has completed.
    running: the key of the stage that runs.
    decided: the verdicts of contests that are over.
    shown: the statuses that were said last, by key.
    """

    def __init__(self, spec: SweepSpec, root: Path, console: Console, command: str = "") -> None:
        self.root, self.console, self.command = root, console, command
        with console.stage("reading the model, the data and the tasks"):
            self.plan = SweepPlan(spec)  # raises for data that are not there, before hours of training
        self.failures: dict[str, str] = {}
        self.completed: set[str] = set()
        self.running: str | None = None
        self.decided: dict[Contest, dict[str, StageState | None]] = {}
        self.shown: dict[str, Status] = {}

    def run(self) -> SweepDocument:
        """Run every stage that can be run, one after another; return the document.

        Raises UserError for an input that changed meanwhile.
        """
        while True:
            stage = self.next_stage()
            self.running = stage.key if stage is not None else None
            document = self.write()
            self._show_changes()
            if stage is None:
                return document
            self._run_stage(stage)

    def _show_changes(self) -> None:
        """Say which stages have begun, ended or been skipped."""
        for stage in self.stages():
            state = self.state(stage)
            if self.shown.get(stage.key, "waiting") != state.status and not state.reused:
                time_taken = f" in {human_seconds(state.seconds or 0)}" if state.status == "done" else ""
                reason = f": {state.message}" if state.message else ""
                self.console.note(f"{stage.title}: {state.status}{time_taken}{reason}")
            self.shown[stage.key] = state.status

    def next_stage(self) -> Stage | None:
        """Return the first stage that waits for no other; None: nothing is left that can be run."""
        for stage in self.stages():
            if self.status(stage) == "waiting" and all(self.status(needed) == "done" for needed in stage.needs):
                return stage
        return None

    def _run_stage(self, stage: Stage) -> None:
        begin = time.monotonic()
        make_folder(stage, self.root)
        try:
            failure = run_stage(stage, self.root)
        finally:
            self.running = None
        self.plan.builder.inputs.check_unchanged(asked=stage.kind == "eval")
        if failure is not None:
            self.failures[stage.key] = failure
            return
        marker = {"title": stage.title, "command": stage.command, "seconds": time.monotonic() - begin}
        write_json(self.root / stage.output / MARKER, marker)  # last of all
        self.completed.add(stage.key)

    # ---- what there is by now ----

    def stages(self) -> list[Stage]:
        """Return the stages that are known to be wanted, in the order in which they run, benchmarks last."""
        stages = [stage for point in self.points() for stage in self.stages_of(point)]
        return list({stage.key: stage for stage in [*stages, *self.benches()]}.values())

    def points(self) -> list[Point]:
        """Return the points but entrants that lost an earlier contest, whose end says so."""
        return [point for point in self.plan.points if not (point.is_entrant and self.hold(point) is not None)]

    def stages_of(self, point: Point) -> list[Stage]:
        """Return the stages of a point, up to a contest that it has not won."""
        hold = self._held_before(point)
        adapting = point.adapting if hold is None else point.adapting[: hold.stages]
        stages = [point.planned.converting, *adapting, point.evaluating if hold is None else None]
        return [stage for stage in stages if stage is not None]

    def unplanned(self) -> list[str]:
        """Return the names of points whose stages depend on what is not measured yet."""
        return [point.name for point in self.points() if self.hold(point) == WAITING]

    def benches(self) -> list[Stage]:
        """Return the benchmarks, of the layouts that could be made."""
        return [self._bench(number) for number in range(len(self.plan.spec.bench))]

    def _bench(self, number: int) -> Stage:
        entry = self.plan.spec.bench[number]
        made = [stage for stage in self.plan.converted(entry) if self.status(stage) not in LOST]
        return self.plan.builder.benchmark(entry, made)

    def status(self, stage: Stage) -> Status:
        """Return the status of a stage by its folder, and by what happened in this run."""
        if stage.key == self.running:
            return "running"
        if is_finished(stage, self.root):
            return "done"
        if stage.key in self.failures:
            return "failed"
        return "skipped" if any(self.status(needed) in LOST for needed in stage.needs) else "waiting"

    def state(self, stage: Stage) -> StageState:
        """Return a stage as sweep.json has it."""
        status, message, seconds = self.status(stage), self.failures.get(stage.key), None
        if status == "skipped":
            lost = next(needed for needed in stage.needs if self.status(needed) in LOST)
            fate = "failed" if self.status(lost) == "failed" else "was skipped"
            message = f"the stage {lost.kind} that it needs {fate}"
        if status == "done":
            seconds = read_own(self.root / stage.output / MARKER).get("seconds")
        is_reused = status == "done" and stage.key not in self.completed
        return StageState(stage.kind, stage.output, status, seconds, is_reused, message, stage.command)

    # ---- promotion ----

    def hold(self, point: Point) -> StageState | None:
        """Return the state that stands for the stages which a point does not get, or not yet; None: it gets all."""
        contest = self._held_before(point)
        return None if contest is None else self._verdict(contest)[point.planned.key]

    def _held_before(self, point: Point) -> Contest | None:
        """Return the first contest that a point has not won."""
        lost = (contest for contest in point.contests if self._verdict(contest)[point.planned.key] is not None)
        return next(lost, None)

    def _verdict(self, contest: Contest) -> dict[str, StageState | None]:
        """Return None for each promoted layout, by its key, and the reason for each other one."""
        if contest in self.decided:
            return self.decided[contest]
        holds: dict[str, StageState | None] = {}
        for entrant in contest.entrants:
            holds[entrant.planned.key] = self.hold(entrant) or self._undecided([entrant.evaluating, *self._timing()])
        of_dense = self._undecided([self.plan.dense.evaluating])
        if WAITING in (*holds.values(), of_dense):
            return {key: hold or WAITING for key, hold in holds.items()}
        entrants = [entrant for entrant in contest.entrants if holds[entrant.planned.key] is None]
        dense = self._entrant(self.plan.dense) if of_dense is None else None
        late = StageState("adapt", "", "not promoted", message=f"it is not among the {contest.count} best")
        wins = promoted([self._entrant(entrant) for entrant in entrants], dense, contest.count)
        for entrant, is_promoted in zip(entrants, wins, strict=True):
            holds[entrant.planned.key] = None if is_promoted else late
        self.decided[contest] = holds
        return holds

    def _timing(self) -> list[Stage]:
        """Return the first benchmark that times every layout, if there is one."""
        timing_all = [number for number, entry in enumerate(self.plan.spec.bench) if not entry.layouts]
        return [self._bench(number) for number in timing_all[:1]]

    def _undecided(self, stages: list[Stage | None]) -> StageState | None:
        """Return the reason why what these stages decide is not known yet, or never will be; None: all are done."""
        statuses = {stage: self.status(stage) for stage in stages if stage is not None}
        for stage, status in statuses.items():
            if status in LOST:
                return StageState("adapt", "", "skipped", message=f"the stage {stage.kind} that decides it failed")
        return None if set(statuses.values()) <= {"done"} else WAITING

    def _entrant(self, point: Point) -> Entrant:
        """Return the measurements of a layout: the mean over its tasks, or without tasks minus the perplexity; and its
        speed, or without times minus its blocking sync points."""
        assert point.evaluating is not None
        path = self.root / point.evaluating.result
        (entry,) = EvalResults.from_dict(read_document(path, "results file"), path).models
        accuracy = mean_accuracy(entry)
        if accuracy is None:
            if entry.model.perplexity is None:
                raise UserError(
                    f"promote cannot choose: {path} has no metric between 0 and 1 of which more is better, and no"
                    " perplexity; add perplexity to the section eval"
                )
            accuracy = -entry.model.perplexity.perplexity
        for bench in self._timing():
            file = self.root / bench.result
            rows = BenchDocument.from_dict(read_document(file, "benchmark"), file).rows
            timed = self.plan.timed(point)
            speeds = (row.speedup["end_to_end"] for row in rows if row.is_model and row.model == timed)
            return Entrant(accuracy, next(speeds, 0.0))  # 0: it failed the benchmark's check
        layout = point.planned.layout
        return Entrant(accuracy, -(layout.attention_sync + layout.mlp_sync).count(BLOCKING))

    # ---- sweep.json ----

    def write(self) -> SweepDocument:
        """Write sweep.json with the state so far, and return the document."""
        points = [self._point(point) for point in self.points()]
        benches = self.benches()
        states = [self.state(stage) for stage in benches]
        every = [*states, *(stage for point in points for stage in point.stages)]
        document = SweepDocument(
            model=self.plan.spec.model,
            command=self.command,
            complete=all(stage.status in ("done", "not promoted") for stage in every),
            margin=self.plan.spec.margin,
            points=points,
            stages=states,
            benches=[stage.result for stage in benches if self.status(stage) == "done"],
        )
        write_json(self.root / SWEEP_JSON, document.to_dict())
        return document

    def _point(self, point: Point) -> SweepPoint:
        """Return a point with the state of its stages."""
        hold, made_by, evaluating = self.hold(point), point.made_by, point.evaluating
        stages = [self.state(stage) for stage in self.stages_of(point)]
        if hold is not None:
            stages.append(hold)
        is_made = hold is None and made_by is not None and self.status(made_by) == "done"
        is_evaluated = hold is None and evaluating is not None and self.status(evaluating) == "done"
        folders = [f"{stage.output}/{trained_folder(stage.steps[0].options)}" for stage in point.adapting]
        methods = [entry.options.method for entry in point.asked]
        trained = [folder for folder, method in zip(folders, methods, strict=True) if method in SHARDS]
        tokens = sum(map(self._tokens, folders, methods)) if is_made else 0
        model = self.plan.spec.model if made_by is None else None
        return SweepPoint(
            name=point.name,
            layout=str(point.planned.layout),
            **point.planned.layout.to_config(),
            adapted=THEN.join(methods) or AS_CONVERTED,
            tokens=tokens or None,
            model=made_by.model if made_by is not None and is_made else model,
            results=evaluating.result if evaluating is not None and is_evaluated else None,
            adaptation=trained[-1] if is_made and trained else None,
            stages=stages,
            timed=self.plan.timed(point),
        )

    def _tokens(self, folder: str, method: Method) -> int:
        """Return the number of tokens that a stage has read, by its document.

        folder: of what it wrote, which has the documents of earlier stages too.
        """
        if method in SHARDS:
            return int(read_own(self.root / folder / ADAPTATION).get("tokens", 0))
        document = read_own(self.root / folder / (ALIGNMENT if method == ALIGN else DISTILLATION))
        data: dict[str, Any] = document.get("data", {})
        return int(data.get("samples", 0) * data.get("seq_len", 0))

    def remove_others(self, document: SweepDocument) -> None:
        """Remove the outputs in the folder that the sweep does not have."""
        kept = {stage.output for stage in document.every_stage}
        for folder in outputs_in(self.root):
            if f"{STAGES}/{folder.name}" not in kept:
                shutil.rmtree(folder)
