"""Which layout to choose for a model on a group: what the planner needs to know, and measures. Imports torch only to
measure."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.checkpoint.fingerprint import fingerprint
from ladderize.checkpoint.model_check import check_model
from ladderize.checkpoint.reading import read_checkpoint
from ladderize.console import Console
from ladderize.convert.point_sensitivity import read_point_sensitivity
from ladderize.errors import UserError
from ladderize.files.work import work_folder
from ladderize.planning.passes import Workload
from ladderize.planning.planner.choose import read_target
from ladderize.planning.planner.document import PlanChoice
from ladderize.planning.planner.plan import PlanCosts, plan_layout, read_plan_costs
from ladderize.planning.plans.models import ModelToPlan
from ladderize.planning.plans.options import PlanGoal, PlanModel
from ladderize.planning.plans.rows import PlannedGroup
from ladderize.planning.prediction import point_seconds

if TYPE_CHECKING:
    from ladderize.planning.planner.measure import LayoutMeasurer


def choose_layout(
    model: ModelToPlan,
    choice: PlanModel,
    goal: PlanGoal,
    group: PlannedGroup,
    workload: Workload,
    *,
    out: Path | None,
    console: Console,
) -> tuple[PlanChoice, Callable[[], None]]:
    """The layout that meets the goal best on this group. out: of the plan, beside which lies what was measured so far;
    the second of what is returned removes that, once the plan is written.

    Raises UserError for costs of another model or of a number of virtual ranks that the group cannot run, and where
    nothing meets the goal; UsageError for a check that cannot be made.
    """
    if not model.layout.is_dense:
        raise UserError(
            f"{model.name} is not dense ({model.layout}); a layout is chosen for the dense model that it was made of"
        )
    costs = read_plan_costs(
        goal.sensitivity,
        goal.sweep,
        num_layers=model.config["num_hidden_layers"],
        fingerprint=None if choice.model is None else _fingerprint(choice.model, choice.revision),
        sync_tp_size=choice.sync_tp_size,
    )
    _check_virtual_ranks(costs, group, goal)
    parts = group.parts(model, workload, costs.sync_tp_size)
    seconds = {phase: point_seconds(one) for phase, one in parts.items()}
    target = read_target(goal.max_ppl_increase, goal.min_speedup)
    if goal.verify is None:
        found = plan_layout(seconds, workload.decode_steps, goal.phase, target, costs, console=console)
        if choice.model is None:
            note = (
                f"a shape has no weights, so it cannot be told whether {found.costs_file} is of the model that is meant"
            )
            found = dataclasses.replace(found, notes=[*found.notes, note])
        return found, lambda: None
    with _measurer(choice, goal, out, console) as measurer:
        found = plan_layout(
            seconds,
            workload.decode_steps,
            goal.phase,
            target,
            costs,
            measurer=measurer,
            limit=goal.verify,
            console=console,
        )
        found = dataclasses.replace(found, aligned=measurer.aligned)
    return found, measurer.tidy


def _fingerprint(model: str, revision: str | None) -> str:
    """Of the weights, which are downloaded if they are a hub's and not here."""
    return fingerprint(read_checkpoint(check_model(model, revision)))


def _check_virtual_ranks(costs: PlanCosts, group: PlannedGroup, goal: PlanGoal) -> None:
    size = costs.sync_tp_size
    if size is not None and size % group.ranks:
        named = goal.sensitivity or goal.sweep
        raise UserError(
            f"{named} has dropped sync points of {size} virtual ranks, which --tp-size {group.ranks} does not divide;"
            f" measure it with --sync-tp-size {group.ranks}, or plan for fewer ranks"
        )


def _measurer(choice: PlanModel, goal: PlanGoal, out: Path | None, console: Console) -> "LayoutMeasurer":
    if choice.model is None:
        raise UserError("--verify measures a checkpoint, and --shape has no weights; name the checkpoint instead")
    assert goal.sensitivity is not None
    sensitivity = read_point_sensitivity(goal.sensitivity)
    if sensitivity.aligned is not None and not goal.align:
        raise UserError(
            f"{goal.sensitivity} has costs of aligned models, and --verify would measure layouts as they are before"
            " alignment; add --align"
        )
    beside = out or goal.sensitivity.with_name(f"{goal.sensitivity.stem}-plan.json")
    folder = work_folder(str(beside), goal.work_dir)
    with console.stage("loading torch and transformers"):
        from ladderize.planning.planner.measure import LayoutMeasurer
        from ladderize.planning.planner.windows import AlignmentCounts
        from ladderize.ranks.threads import set_threads

    set_threads(goal.threads, 1)
    counts = AlignmentCounts(goal.align_samples)
    if goal.align_samples is None and sensitivity.aligned is not None:
        counts = AlignmentCounts(sensitivity.aligned.samples, sensitivity.aligned.heldout)
    return LayoutMeasurer(
        choice.model,
        sensitivity.fingerprint,
        sensitivity.data,
        folder=folder,
        data_file=goal.data,
        held_out_data=goal.held_out_data,
        align=counts if goal.align else None,
        dtype=choice.dtype,
        device=goal.device,
        revision=choice.revision,
        console=console,
    )
