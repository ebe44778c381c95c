"""``ladderize plan`` from its options to its document: read, predict, choose, write, show."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.checkpoint.llama import check_model
from ladderize.checkpoint.reading import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.point_sensitivity import read_point_sensitivity
from ladderize.errors import UsageError, UserError
from ladderize.figure import check_plot
from ladderize.files.documents import check_writable, write_json
from ladderize.files.regular import names_a_file
from ladderize.files.work import work_folder
from ladderize.layout import Layout
from ladderize.planning.hardware import DeviceSpec, EngineFacts, known_engines, read_device
from ladderize.planning.passes import Workload, point_seconds
from ladderize.planning.planner.choose import read_target
from ladderize.planning.planner.document import PlanChoice
from ladderize.planning.planner.plan import PlanCosts, plan_layout, read_plan_costs
from ladderize.planning.planner.recipe import write_plan_recipe
from ladderize.planning.plans.document import PlannedRow, PlanResult
from ladderize.planning.plans.models import ModelToPlan, read_model, row_variants
from ladderize.planning.plans.options import PlanGoal, PlanModel, PlanOptions
from ladderize.planning.plans.rows import PlannedGroup, RowMaker, group_link
from ladderize.planning.plans.show import show_choice, show_plan
from ladderize.runtime.collectives.links import Interconnect, read_interconnect

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


def plan(
    choice: PlanModel,
    options: PlanOptions,
    goal: PlanGoal | None = None,
    *,
    out: Path | None = None,
    recipe_out: Path | None = None,
    plot: Path | None = None,
    console: Console = SILENT,
) -> PlanResult:
    """Predict how fast layouts of a model are on hardware that need not be there, and choose one.

    goal: what to choose by, for one group and one workload; None: nothing is chosen. out: a JSON file. Of a choice:
    recipe_out, a recipe for ``convert``; plot draws ``plot``.png and ``plot``.svg, all layouts that were chosen from.

    Raises UsageError, UserError or LayoutError for what cannot be predicted: unknown names, sizes that the ranks do not
    divide, a link without figures for so many ranks; and where nothing meets the goal.
    """
    _check_outputs(options, goal, out, recipe_out, plot)
    model = read_model(choice, options)
    device = read_device(options.hardware)
    engine = chosen_engine(options, device)
    interconnect = chosen_link(options)
    workloads = [Workload(batch, options.prompt_len, options.output_len) for batch in options.batch_sizes]
    groups = [PlannedGroup(ranks, device, engine, interconnect if ranks > 1 else None) for ranks in options.tp_sizes]
    for group in groups:  # what is wrong with them is found before minutes of measuring
        row_variants(model, choice, group.ranks, choosing=goal is not None)
    found, tidy = None, None
    if goal is not None:
        found, tidy = choose_layout(model, choice, goal, groups[0], workloads[0], out=out, console=console)
    layout = found.chosen.as_layout if found is not None else None
    result = PlanResult(
        model=choice,
        options=options,
        device=device,
        link=interconnect,
        links=[group_link(group, model, workloads) for group in groups if group.ranks > 1],
        engine=engine,
        rows=[row for group in groups for row in _rows(model, choice, group, workloads, layout)],
        choice=found,
    )
    if out is not None:
        write_json(out, result.to_dict())
    if found is not None and recipe_out is not None:
        write_plan_recipe(recipe_out, found)
    console.document(result.to_dict())
    show_plan(result, console)
    if found is not None:
        show_choice(result, found, console)
        if plot is not None:
            from ladderize.planning.planner.front_plot import draw_front

            console.note(f"wrote {' and '.join(map(str, draw_front(found, plot)))}")
    if tidy is not None:
        tidy()
    return result


def _check_outputs(
    options: PlanOptions, goal: PlanGoal | None, out: Path | None, recipe_out: Path | None, plot: Path | None
) -> None:
    if goal is None and (recipe_out is not None or plot is not None):
        name = "--recipe-out" if recipe_out is not None else "--plot"
        raise UsageError(f"{name} has no effect where no layout is chosen; give --max-ppl-increase or --min-speedup")
    if goal is not None and (len(options.tp_sizes) > 1 or len(options.batch_sizes) > 1 or options.tp_sizes[0] == 1):
        raise UsageError(
            "a layout is chosen for one group and one workload: give one --tp-size above 1, and one --batch-size"
        )
    if goal is not None:
        read_target(goal.max_ppl_increase, goal.min_speedup)
    if out is not None:
        check_writable(out)
    if recipe_out is not None:
        check_writable(recipe_out, "--recipe-out")
    if plot is not None:
        check_plot(plot)


def _rows(
    model: ModelToPlan, choice: PlanModel, group: PlannedGroup, workloads: list[Workload], chosen: Layout | None
) -> Iterator[PlannedRow]:
    found = row_variants(model, choice, group.ranks, choosing=chosen is not None, chosen=chosen)
    for workload in workloads:
        maker = RowMaker(model, group, workload)
        yield from (maker.row(variant) for variant in found)


def chosen_engine(options: PlanOptions, device: DeviceSpec) -> EngineFacts:
    """Of --engine, else the one that the device's figures were fitted with; raises UsageError for a name of none."""
    engines = known_engines()
    name = options.engine or device.engine
    if name not in engines:
        raise UsageError(f"--engine {name} is not one of {', '.join(engines)}")
    return engines[name]


def chosen_link(options: PlanOptions) -> Interconnect | None:
    """Of --link, else of a file that --hardware names, which `ladderize calibrate` wrote; None for one rank.

    Raises UsageError where no link is named.
    """
    if max(options.tp_sizes) == 1:
        return None
    if options.link is not None:
        return read_interconnect(options.link)
    if names_a_file(options.hardware):
        try:
            return read_interconnect(options.hardware)
        except UserError as error:
            advice = ", or" if "; " in str(error) else "; correct the file, or"
            raise UserError(f"{error}{advice} give --link") from None
    raise UsageError(
        f"{max(options.tp_sizes)} ranks send messages: give --link, a name that `ladderize plan --list` shows,"
        " ALPHA_US,BETA_GB_S, or a file"
    )
