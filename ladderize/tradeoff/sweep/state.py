"""sweep.json of a plan and of how far it is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ladderize.files.documents import read_own
from ladderize.tradeoff.sweep.plan import PlannedPoint, SweepPlan
from ladderize.tradeoff.sweep.stages import BENCH_JSON, SENSITIVITY_JSON, Stage
from ladderize.workflows.sweep_document import StageState, SweepDocument, SweepPoint

StateOf = Callable[[Stage], StageState]
LOST = ("failed", "skipped")


def document_of(
    plan: SweepPlan, state: StateOf, root: Path, *, model: str, command: str, margin: float, complete: bool
) -> SweepDocument:
    """model: the dense one. command: what a user typed. complete: whether the sweep is over, and all was measured."""

    def made(stages: list[Stage], file: str) -> list[str]:
        return [f"{stage.output}/{file}" for stage in stages if state(stage).status == "done"]

    by_key = {stage.key: state(stage) for stage in plan.sensitivities}
    points = [_point(point, state, by_key, root) for point in plan.points]
    stages = [stage for point in points for stage in point.stages] + [state(stage) for stage in plan.benches]
    return SweepDocument(
        model=model,
        command=command,
        complete=complete and all(stage.status == "done" for stage in (*stages, *by_key.values())),
        margin=margin,
        points=points,
        stages=[state(stage) for stage in (*plan.sensitivities, *plan.benches)],
        sensitivities=made(plan.sensitivities, SENSITIVITY_JSON),
        benches=made(plan.benches, BENCH_JSON),
    )


def _point(point: PlannedPoint, state: StateOf, sensitivities: Mapping[str, StageState], root: Path) -> SweepPoint:
    def when_done(stage: Stage | None, path: str | None) -> str | None:
        return path if stage is not None and state(stage).status == "done" else None

    stages = [state(stage) for stage in point.stages]
    if point.layout is None:
        lost = any(sensitivities[key].status in LOST for key in point.awaits)
        message = "the stage sensitivity that it needs failed" if lost else point.problem
        status = "skipped" if lost else "failed" if point.problem is not None else "waiting"
        stages = [StageState("convert", "", "", status, message=message)]  # type: ignore[arg-type]
    modes: Mapping[str, Any] = {"attention_sync": [], "mlp_sync": [], "sync_tp_size": None}
    made_by = point.adapting or point.converting
    adaptation = when_done(point.adapting, point.adaptation)
    return SweepPoint(
        name=point.name,
        layout=str(point.layout) if point.layout is not None else point.text,
        **(point.layout.to_config() if point.layout is not None else modes),
        adapted=point.adapted,
        tokens=trained_tokens(root / adaptation) if adaptation is not None else point.tokens,
        model=point.model if made_by is None else when_done(made_by, point.model),
        results=when_done(point.evaluating, point.results),
        adaptation=adaptation,
        stages=stages,
        timed=point.timed if point.converting is None else when_done(point.converting, point.timed),
    )


def trained_tokens(folder: Path) -> int | None:
    """What a retrained checkpoint or adapter says it was trained on: tokens read, or of blocks those of its windows."""
    tokens = read_own(folder / "adaptation.json").get("tokens")
    data = read_own(folder / "distillation.json").get("data")
    if isinstance(data, dict) and isinstance(data.get("samples"), int) and isinstance(data.get("seq_len"), int):
        tokens = data["samples"] * data["seq_len"]
    return tokens if isinstance(tokens, int) else None
