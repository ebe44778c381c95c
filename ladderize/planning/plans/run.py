"""``ladderize plan`` from its options to its document: read, predict, choose, write, show."""

from collections.abc import Iterator
from pathlib import Path

from ladderize.console import SILENT, Console
from ladderize.errors import UsageError, UserError
from ladderize.figure import check_plot
from ladderize.files.documents import check_writable, write_json
from ladderize.files.sections import names_a_file
from ladderize.layout import Layout
from ladderize.planning.hardware import DeviceSpec, EngineFacts, known_engines, read_device
from ladderize.planning.passes import Workload
from ladderize.planning.planner.choose import read_target
from ladderize.planning.planner.recipe import write_plan_recipe
from ladderize.planning.plans.choose import choose_layout
from ladderize.planning.plans.document import PlannedRow, PlanResult
from ladderize.planning.plans.models import ModelToPlan, read_model, row_variants
from ladderize.planning.plans.options import PlanGoal, PlanModel, PlanOptions
from ladderize.planning.plans.rows import PlannedGroup, RowMaker, group_link
from ladderize.planning.plans.show import show_choice, show_plan
from ladderize.runtime.collectives.links import Interconnect, read_interconnect


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
