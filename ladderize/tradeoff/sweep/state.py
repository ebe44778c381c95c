"""sweep.json of a plan and of how far it is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ladderize.adapt.methods import ALIGN, FULL, LORA, Method
from ladderize.files.documents import read_own
from ladderize.tradeoff.sweep.builder import summed
from ladderize.tradeoff.sweep.points import PlannedPoint, SweepPlan
from ladderize.tradeoff.sweep.stages import ADAPTER_FOLDER, BENCH_JSON, MODEL_FOLDER, SENSITIVITY_JSON, Stage
from ladderize.workflows.sweep_document import StageState, SweepDocument, SweepPoint

StateOf = Callable[[Stage], StageState]
LOST, OVER = ("failed", "skipped"), ("done", "not promoted")


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
        complete=complete and all(stage.status in OVER for stage in (*stages, *by_key.values())),
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
    elif point.held is not None:
        stages.append(StageState("adapt", "", "", point.held.status, message=point.held.message))
    modes: Mapping[str, Any] = {"attention_sync": [], "mlp_sync": [], "sync_tp_size": None}
    made_by = point.adapting[-1] if point.adapting else point.converting
    adapted = bool(point.adapting) and point.held is None and state(point.adapting[-1]).status == "done"
    return SweepPoint(
        name=point.name,
        layout=str(point.layout) if point.layout is not None else point.text,
        **(point.layout.to_config() if point.layout is not None else modes),
        adapted=point.adapted,
        tokens=_tokens(point, root) if adapted else point.tokens,
        model=point.model if made_by is None else when_done(made_by, point.model),
        results=when_done(point.evaluating, point.results),
        adaptation=point.adaptation if adapted else None,
        stages=stages,
        timed=point.timed if point.converting is None else when_done(point.converting, point.timed),
        control=point.control,
    )


def _tokens(point: PlannedPoint, root: Path) -> int | None:
    """That all of its stages of adaptation say that they read."""
    stages = zip(point.adapting, point.asked, strict=True)
    return summed(trained_tokens(root / stage.output, asked.method) for stage, asked in stages)


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
