"""``ladderize sweep`` from a sweep.yaml to sweep.json: plan, run what is missing, keep, and say what was measured."""

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.console import SILENT, Console
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.locks import lock_folder
from ladderize.files.regular import resolved
from ladderize.files.temporaries import replacement
from ladderize.ranks.group import already_started
from ladderize.ranks.threads import cores
from ladderize.tradeoff.sweep.board import Board
from ladderize.tradeoff.sweep.builder import StageBuilder
from ladderize.tradeoff.sweep.document import StageState, SweepDocument, SweepPoint
from ladderize.tradeoff.sweep.estimate import History, PlanDocument
from ladderize.tradeoff.sweep.execute import Execution
from ladderize.tradeoff.sweep.inputs import CACHE, Inputs
from ladderize.tradeoff.sweep.plan import PlannedPoint, Planner, SweepPlan
from ladderize.tradeoff.sweep.reading import read_sweep
from ladderize.tradeoff.sweep.spec import SweepSpec
from ladderize.tradeoff.sweep.stages import BENCH_JSON, SENSITIVITY_JSON, Stage, other_outputs

SWEEP_JSON, SWEEP_YAML = "sweep.json", "sweep.yaml"


def sweep(
    file: str | Path,
    out: str | Path | None = None,
    *,
    jobs: int = 1,
    prune: bool = False,
    console: Console = SILENT,
) -> SweepDocument:
    """Measure every point of a sweep.yaml, from conversion to accuracy and speed; returns the document of sweep.json.

    out: the sweep's folder; None takes the file's. jobs: stages that run side by side, where nothing is timed; each has
    its share of the cores. prune: remove outputs of the folder that are not of this sweep any more. What an earlier
    run has completed is kept, also of another sweep.yaml. A stage that fails does not stop the others: see the
    document's points and stages. Raises UserError for a file, a folder or layouts that do not fit.
    """
    if already_started():
        raise UserError("a sweep starts its own processes; run it without torchrun or accelerate launch")
    if jobs < 1 or jobs > len(cores()):
        raise UsageError(f"--jobs {jobs} must be from 1 to {len(cores())}, the cores that this process may use")
    spec = read_sweep(Path(file))
    root = _folder(out, spec, file)
    with _owned(root):
        inputs = Inputs(root / CACHE)
        planner = _planner(spec, inputs, root, console)
        plan = planner.plan()
        inputs.save()
        with replacement(root / SWEEP_YAML) as kept:
            kept.write(spec.text)
        return _Sweep(planner, plan, inputs, jobs, sweep_by_hand(file, out), console).run(prune)


def plan_sweep(file: str | Path, out: str | Path | None = None, *, console: Console = SILENT) -> PlanDocument:
    """What ``sweep`` would do: nothing is written. Raises the same errors for what does not fit."""
    spec = read_sweep(Path(file))
    root = _folder(out, spec, file)
    planner = _planner(spec, Inputs(root / CACHE), root, console)
    return PlanDocument.of(planner.plan(), spec.model, root, History.of(root, spec.model, spec.revision))


def _planner(spec: SweepSpec, inputs: Inputs, root: Path, console: Console) -> Planner:
    with console.stage("reading the model and the data"):
        return Planner.of(spec, StageBuilder.of(spec, inputs), root)


def sweep_folder(file: str | Path, out: str | Path | None = None) -> Path:
    """Where a sweep keeps everything; raises UserError for a folder that holds something else."""
    return _folder(out, read_sweep(Path(file)), file)


def sweep_by_hand(file: str | Path, out: str | Path | None) -> str:
    """What made a sweep.json."""
    return shlex.join(["ladderize", "sweep", str(file), *(["--out", str(out)] if out is not None else [])])


def _folder(out: str | Path | None, spec: SweepSpec, file: str | Path) -> Path:
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
    return root


def _is_sweep(root: Path) -> bool:
    return "points" in read_own(root / SWEEP_JSON)


@contextmanager
def _owned(root: Path) -> Iterator[None]:
    """Around the work in a sweep's folder: it is this process's alone. A new one is marked before anything is in it."""
    made = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(root)
    except BlockingIOError:
        raise UserError(f"another sweep runs in {root}; wait for it, or choose another --out") from None
    try:
        yield
    except BaseException:
        if made and not any(entry.name != CACHE for entry in root.iterdir()):
            shutil.rmtree(root, ignore_errors=True)  # nothing was done in it
        raise
    finally:
        if lock is not None:
            os.close(lock)


@dataclass
class _Sweep:
    planner: Planner
    plan: SweepPlan
    inputs: Inputs
    jobs: int
    command: str
    console: Console

    def run(self, prune: bool) -> SweepDocument:
        root = self.planner.root
        for note in self.plan.notes:
            self.console.note(f"Note: {note}")
        with Board(self.console) as board:

            def changed(stage: Stage, state: StageState) -> None:
                self._write(execution)
                board.changed(stage, state)

            execution = Execution(root, self.inputs, self.jobs, changed, board.draw)
            self._show(board, execution)
            try:
                if not self.plan.complete:
                    dense = self.plan.points[0]
                    execution.run([*self.plan.sensitivities, *dense.stages])
                    self._replan(board, execution, None)
                execution.run([stage for stage in self.plan.stages if stage.kind != "bench"])
                points = self.plan.points
                converted = {stage.key for point in points if (stage := point.converting) is not None}
                usable = {key for key in converted if execution.states[key].status == "done"}
                if usable != converted:
                    self._replan(board, execution, usable)
                execution.run(self.plan.benches)
            except KeyboardInterrupt:
                self._write(execution)
                self.console.note(
                    f"stopped; complete stages are kept in {root}, and the same command goes on from there"
                )
                raise
            except BaseException:
                self._write(execution)
                raise
        if prune:
            for folder in other_outputs(root, {stage.output for stage in self.plan.stages}):
                shutil.rmtree(folder)
        return self._write(execution, complete=not self._missing(execution))

    def _show(self, board: Board, execution: Execution) -> None:
        for stage in self.plan.stages:
            execution.state(stage)
        self._write(execution)
        board.show(self.plan, execution.states)

    def _replan(self, board: Board, execution: Execution, usable: set[str] | None) -> None:
        before = set(self.plan.notes)
        self.plan = self.planner.plan(usable)
        for note in self.plan.notes:
            if note not in before:
                self.console.note(f"Note: {note}")
        self._show(board, execution)

    def _missing(self, execution: Execution) -> bool:
        """Whether something was not measured."""
        unknown = any(point.layout is None for point in self.plan.points)
        return unknown or any(execution.state(stage).status != "done" for stage in self.plan.stages)

    def _write(self, execution: Execution, *, complete: bool = False) -> SweepDocument:
        """sweep.json, as things stand."""
        plan, root = self.plan, self.planner.root

        def made(stage: Stage, file: str) -> list[str]:
            path = f"{stage.output}/{file}"
            return [path] if execution.state(stage).status == "done" and (root / path).is_file() else []

        document = SweepDocument(
            model=self.planner.builder.model,
            command=self.command,
            complete=complete,
            margin=self.planner.spec.margin,
            points=[_point(point, execution, root) for point in plan.points],
            stages=[execution.state(stage) for stage in (*plan.sensitivities, *plan.benches)],
            sensitivities=[path for stage in plan.sensitivities for path in made(stage, SENSITIVITY_JSON)],
            benches=[path for stage in plan.benches for path in made(stage, BENCH_JSON)],
        )
        write_json(root / SWEEP_JSON, document.to_dict())
        return document


def _point(point: PlannedPoint, execution: Execution, root: Path) -> SweepPoint:
    def when_done(stage: Stage | None, path: str | None) -> str | None:
        return path if stage is not None and execution.state(stage).status == "done" else None

    modes: Mapping[str, Any] = {"attention_sync": [], "mlp_sync": [], "sync_tp_size": None}
    adaptation = when_done(point.adapting, point.adaptation)
    return SweepPoint(
        name=point.name,
        layout=str(point.layout) if point.layout is not None else point.text,
        **(point.layout.to_config() if point.layout is not None else modes),
        adapted=point.adapted,
        tokens=trained_tokens(root / adaptation) if adaptation is not None else point.tokens,
        model=point.model if point.converting is None else when_done(point.adapting or point.converting, point.model),
        results=when_done(point.evaluating, point.results),
        adaptation=adaptation,
        stages=[execution.state(stage) for stage in point.stages],
        timed=point.timed,
    )


def trained_tokens(folder: Path) -> int | None:
    """What a retrained checkpoint or adapter says it was trained on: tokens read, or of blocks those of its windows."""
    tokens = read_own(folder / "adaptation.json").get("tokens")
    data = read_own(folder / "distillation.json").get("data")
    if isinstance(data, dict) and isinstance(data.get("samples"), int) and isinstance(data.get("seq_len"), int):
        tokens = data["samples"] * data["seq_len"]
    return tokens if isinstance(tokens, int) else None
