"""The command ``ladderize sweep`` from a sweep.yaml to sweep.json: plan, run the next stage, keep its output, plan
again."""

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.lora import ADAPTATION
from ladderize.adapt.methods import ALIGN, FULL, LORA, Method
from ladderize.commands.shared import command_line
from ladderize.console import SILENT, Console
from ladderize.convert.retraining import ALIGNMENT, DISTILLATION
from ladderize.errors import UsageError, UserError
from ladderize.eval.tasks import open_tasks
from ladderize.files.documents import read_own, write_json
from ladderize.files.regular import resolved
from ladderize.files.temporaries import lock_folder, replacement
from ladderize.ranks.environment import already_started
from ladderize.sweep.builder import CACHE, Inputs, StageBuilder
from ladderize.sweep.child import run_stage
from ladderize.sweep.plan import Planner, Point, SweepPlan
from ladderize.sweep.show import Board
from ladderize.sweep.stages import (
    ADAPTER_FOLDER,
    BENCH_JSON,
    MODEL_FOLDER,
    SENSITIVITY_JSON,
    STAGE_VERSIONS,
    STAGES,
    Stage,
    finished_stage,
    make_folder,
    mark_finished,
    remove_others,
)
from ladderize.sweep.sweep_file import SweepSpec, read_sweep
from ladderize.sweep_document import AS_CONVERTED, THEN, StageState, SweepDocument, SweepPoint

SWEEP_JSON, SWEEP_YAML = "sweep.json", "sweep.yaml"
LOST, OVER = ("failed", "skipped"), ("done", "not promoted")  # of stages


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
    spec, root = find_folder(file, out)
    command = command_line("sweep", file, *(["--out", out] if out is not None else []))
    with _locked(root):
        planner = make_planner(spec, root, console)
        progress = SweepProgress(planner, command)
        planner.builder.inputs.save()
        with replacement(root / SWEEP_YAML) as kept:
            kept.write(spec.text)
        with Board(console) as board:
            try:
                document = _run_all(progress, board)
            except (KeyboardInterrupt, UserError) as error:
                progress.write(progress.planner.plan(progress.lost))
                if isinstance(error, KeyboardInterrupt):
                    board.note(f"stopped; complete stages are kept in {root}, and the same command goes on from there")
                raise
        if prune and document.complete:
            kept_stages = {stage.output for point in document.points for stage in point.stages}
            remove_others(root, kept_stages | {stage.output for stage in document.stages})
        elif prune:
            console.warn("no outputs were removed: the sweep is not complete, so which it asks for is not known")
    return document


def plan_sweep(file: str | Path, out: str | Path | None = None, *, console: Console = SILENT) -> tuple[SweepPlan, Path]:
    """Return the plan of ``run_sweep``, and the sweep's folder. Nothing is written."""
    spec, root = find_folder(file, out)
    return make_planner(spec, root, console).plan(), root


def find_folder(file: str | Path, out: str | Path | None = None) -> tuple[SweepSpec, Path]:
    """Return the content of the file and the sweep's folder. Raises UserError for a folder that holds something
    else."""
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
    """Return True if a folder is a sweep's.

    That includes a sweep that was killed when it had hardly begun, and one whose stages were run by hand.
    """
    if "points" in read_own(root / SWEEP_JSON):
        return True
    stages = [entry.name.partition("-")[0] for entry in (root / STAGES).glob("*")]
    others = [entry.name for entry in root.iterdir() if entry.name != STAGES]
    ours = (CACHE, SWEEP_YAML, f".{CACHE}.", f".{SWEEP_YAML}.", f".{SWEEP_JSON}.")
    return all(name in STAGE_VERSIONS for name in stages) and all(name.startswith(ours) for name in others)


def make_planner(spec: SweepSpec, root: Path, console: Console) -> Planner:
    """Return the planner, after reading the sweep's inputs. Raises UserError for an input that does not fit, or is not
    there."""
    with console.stage("reading the model and the data"):
        planner = Planner.of(spec, StageBuilder.of(spec, Inputs(root / CACHE)), root)
        evaluating = planner.plan().points[0].evaluating
    options = spec.eval_options
    if options is not None and options.tasks and evaluating is not None and finished_stage(evaluating, root) is None:
        with console.stage("reading the tasks of lm-eval"), console.contained():
            open_tasks(options)
    return planner


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Lock the folder against other sweeps. A new folder that stays empty is removed. Raises UserError if it is
    locked."""
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_folder(root)
    except BlockingIOError:
        raise UserError(f"another sweep runs in {root}; wait for it, or choose another --out") from None
    try:
        yield
    finally:
        if is_new and not any(root.iterdir()):
            root.rmdir()
        if lock is not None:
            os.close(lock)


# ---- running ----


@dataclass
class SweepProgress:
    """The results of this run so far.

    failures: the reason of each failed stage, by its key.
    new: the keys of stages that this run has completed.
    running: the key of the stage that runs.
    lost: the keys of stages that failed, or need one that did.
    """

    planner: Planner
    command: str
    failures: dict[str, str] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    running: str | None = None
    lost: set[str] = field(default_factory=set)

    def states(self, plan: SweepPlan) -> dict[str, StageState]:
        """Return the state of each stage by its key."""
        states: dict[str, StageState] = {}
        for stage in plan.stages:
            known = StageState(stage.kind, stage.key, stage.output, "waiting", command=stage.command)
            missing = next((states[key] for key in stage.needs if key in states and states[key].status in LOST), None)
            if stage.key == self.running:
                known = replace(known, status="running")
            elif (marker := finished_stage(stage, self.planner.root)) is not None:
                known = replace(known, status="done", seconds=marker.seconds, reused=stage.key not in self.new)
            elif stage.key in self.failures:
                known = replace(known, status="failed", message=self.failures[stage.key])
            elif missing is not None:
                how = "failed" if missing.status == "failed" else "was skipped"
                known = replace(known, status="skipped", message=f"the stage {missing.stage} that it needs {how}")
            states[stage.key] = known
        return states

    def write(self, plan: SweepPlan, states: Mapping[str, StageState] | None = None) -> SweepDocument:
        """Write sweep.json with the state so far, and return the document."""
        states = self.states(plan) if states is None else states
        document = sweep_document(plan, states, self.planner, self.command)
        write_json(self.planner.root / SWEEP_JSON, document.to_dict())
        return document


def _run_all(progress: SweepProgress, board: Board) -> SweepDocument:
    """Run every stage that can be run, one after another. Measurements may decide on further stages."""
    planner = progress.planner
    while True:
        plan = planner.plan(progress.lost)
        states = progress.states(plan)
        lost = {key for key, state in states.items() if state.status in LOST}
        if lost != progress.lost:
            progress.lost = lost
            continue
        stage = next((stage for stage in plan.stages if _is_ready(stage, states)), None)
        document = progress.write(plan, states)
        board.show(plan, states)
        if stage is None:
            return document
        progress.running = stage.key
        states = progress.states(plan)
        progress.write(plan, states)
        board.show(plan, states)
        _run(stage, progress)


def _is_ready(stage: Stage, states: Mapping[str, StageState]) -> bool:
    return states[stage.key].status == "waiting" and all(states[key].status == "done" for key in stage.needs)


def _run(stage: Stage, progress: SweepProgress) -> None:
    """Run one stage. Raises UserError for an input that changed meanwhile."""
    root, begin = progress.planner.root, time.monotonic()
    make_folder(stage, root)
    try:
        failure = run_stage(stage, root)
    finally:
        progress.running = None
    progress.planner.builder.inputs.check_unchanged()
    if failure is not None:
        progress.failures[stage.key] = failure
    else:
        mark_finished(stage, root, time.monotonic() - begin)
        progress.new.add(stage.key)


# ---- the document ----


def sweep_document(plan: SweepPlan, states: Mapping[str, StageState], planner: Planner, command: str) -> SweepDocument:
    """Return sweep.json.

    states: of each stage, by its key.
    """

    def outputs(stages: Iterable[Stage], name: str) -> list[str]:
        return [f"{stage.output}/{name}" for stage in stages if states[stage.key].status == "done"]

    points = [_point(point, states, planner.root) for point in plan.points]
    shared = [states[stage.key] for stage in (*plan.sensitivities, *plan.benches)]
    every = [*shared, *(stage for point in points for stage in point.stages)]
    return SweepDocument(
        model=planner.builder.model,
        command=command,
        complete=all(stage.status in OVER for stage in every),
        margin=planner.spec.margin,
        points=points,
        stages=shared,
        sensitivities=outputs(plan.sensitivities, SENSITIVITY_JSON),
        benches=outputs(plan.benches, BENCH_JSON),
    )


def _point(point: Point, states: Mapping[str, StageState], root: Path) -> SweepPoint:
    """Return a planned point with the state of its stages."""
    layout, converting = point.group.layout, point.group.converting

    def if_done(stage: Stage | None, path: str | None) -> str | None:
        return path if stage is None or states[stage.key].status == "done" else None

    stages = [states[stage.key] for stage in point.stages]
    if point.hold is not None:
        kind = "convert" if layout is None else "adapt"
        stages.append(StageState(kind, "", "", point.hold.status, message=point.hold.message))
    modes: dict[str, Any] = {"attention_sync": [], "mlp_sync": [], "sync_tp_size": None}
    made_by = point.adapting[-1] if point.adapting else converting
    is_adapted = bool(point.adapting) and point.hold is None and states[point.adapting[-1].key].status == "done"
    adapted = list(zip((stage.method for stage in point.asked), point.adapting, strict=False)) if is_adapted else []
    read = [_tokens(root / stage.output, method) for method, stage in adapted] or [one.tokens for one in point.asked]
    return SweepPoint(
        name=point.name,
        layout=str(layout) if layout is not None else point.group.text,
        **(layout.to_config() if layout is not None else modes),
        adapted=THEN.join(stage.method for stage in point.asked) or AS_CONVERTED,
        tokens=_summed(read),
        model=if_done(made_by, point.model),
        results=if_done(point.evaluating, point.results),
        adaptation=_adaptation(adapted),
        stages=stages,
        timed=if_done(converting, point.timed),
        control=point.control,
    )


def _summed(counts: Collection[int | None]) -> int | None:
    """Return the sum; None where a count is not known, or there is none."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _adaptation(adapted: list[tuple[Method, Stage]]) -> str | None:
    """Return the folder of the last stage that retrained, or of the last."""
    trained = [one for one in adapted if one[0] in (FULL, LORA)] or adapted
    return f"{trained[-1][1].output}/{_folder(trained[-1][0])}" if trained else None


def _folder(method: Method) -> str:
    return ADAPTER_FOLDER if method == LORA else MODEL_FOLDER


def _tokens(folder: Path, method: Method) -> int | None:
    """Return the number of tokens that a stage has read, by its document; None where it is not known.

    folder: of the stage. The checkpoint in it has the documents of earlier stages too.
    """
    place = folder / _folder(method)
    if method in (FULL, LORA):
        tokens = read_own(place / ADAPTATION).get("tokens")
        return tokens if isinstance(tokens, int) else None
    data = read_own(place / (ALIGNMENT if method == ALIGN else DISTILLATION)).get("data")
    try:
        return int(data["samples"] * data["seq_len"])  # type: ignore[index]
    except (KeyError, TypeError):
        return None
