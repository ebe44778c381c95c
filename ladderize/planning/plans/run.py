"""``ladderize plan`` from its options to its document: read, predict, choose, write, show."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.checkpoint.opening import check_model, read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.read_sensitivity import read_point_sensitivity
from ladderize.errors import UsageError, UserError
from ladderize.figure import check_plot
from ladderize.files.documents import check_writable, write_json
from ladderize.files.regular import names_a_file, resolved
from ladderize.files.work import work_folder
from ladderize.planning.hardware import DeviceSpec, EngineFacts, known_engines, read_device
from ladderize.planning.passes import Workload, point_seconds
from ladderize.planning.plans.chosen_files import draw_front, write_plan_recipe
from ladderize.planning.plans.costs import read_plan_costs
from ladderize.planning.plans.document import OtherAllReduce, PlanChoice, PlanResult, speedup_band
from ladderize.planning.plans.exact import exact_stacks, no_replicas
from ladderize.planning.plans.layout_choice import plan_layout
from ladderize.planning.plans.options import PlanGoal, PlanModel, PlanOptions
from ladderize.planning.plans.rows import (
    ModelToPlan,
    PlannedGroup,
    RowVariant,
    planned_rows,
    read_model,
    row_variants,
)
from ladderize.planning.plans.show import show_choice, show_plan
from ladderize.runtime.collectives.links import Interconnect, other_all_reduces, read_interconnect

if TYPE_CHECKING:
    from ladderize.planning.plans.measure import LayoutMeasurer


def plan(
    choice: PlanModel,
    options: PlanOptions,
    goal: PlanGoal | None = None,
    *,
    out: Path | None = None,
    recipe_out: Path | None = None,
    plot: Path | None = None,
    explain: bool = False,
    console: Console = SILENT,
) -> PlanResult:
    """Predict how fast layouts of a model are on hardware that need not be there, and choose one.

    goal: what to choose by, for one group and one workload; None: nothing is chosen. out: a JSON file. Of a choice:
    recipe_out, a recipe for ``convert``; plot draws ``plot``.png and ``plot``.svg, all layouts that were chosen from.
    explain: what ``console`` shows has times, and all that the figures rest on.

    Raises UsageError, UserError or LayoutError for what cannot be predicted: unknown names, sizes that the ranks do not
    divide, a link without figures for so many ranks; and where nothing meets the goal.
    """
    _check_outputs(choice, options, goal, out, recipe_out, plot)
    model = read_model(choice, options)
    if model.remark is not None:
        console.note(model.remark)
    device = read_device(options.hardware)
    engine = _chosen_engine(options, device)
    interconnect = _chosen_link(options)
    workloads = [Workload(batch, options.prompt_len, options.output_len) for batch in options.batch_sizes]
    groups = [PlannedGroup(ranks, device, engine, interconnect if ranks > 1 else None) for ranks in options.tp_sizes]
    for group in groups:  # what is wrong with them is found before minutes of measuring
        row_variants(model, choice, group.ranks, choosing=goal is not None)
    found, measurer = None, None
    if goal is not None:
        found, measurer = _choose_layout(model, choice, goal, groups[0], workloads[0], out, console)
    layout = found.chosen.as_layout if found is not None else None
    rows, others, exact = [], [], []
    for group in groups:
        variants = row_variants(model, choice, group.ranks, choosing=layout is not None, chosen=layout)
        rows += [row for workload in workloads for row in planned_rows(model, group, workload, variants)]
        others += [one for workload in workloads for one in _other_all_reduces(model, group, workload, variants)]
        exact += [one for workload in workloads for one in exact_stacks(model, group, workload)]
    result = PlanResult(
        model=replace(choice, weights=model.weights),
        options=options,
        device=device,
        link=interconnect,
        links=[group.taken_link(model, workloads) for group in groups if group.ranks > 1],
        engine=engine,
        rows=rows,
        choice=found,
        others=others,
        remark=model.remark,
        exact=exact,
        no_replicas={
            group.ranks: reason for group in groups if (reason := no_replicas(model, group, workloads)) is not None
        },
    )
    if out is not None:
        write_json(out, result.to_dict())
    if found is not None and recipe_out is not None:
        write_plan_recipe(recipe_out, found)
    console.document(result.to_dict())
    show_plan(result, console, explain=explain)
    if found is not None:
        show_choice(result, found, console)
        if plot is not None:
            console.note(f"wrote {' and '.join(map(str, draw_front(found, plot)))}")
    if measurer is not None:
        measurer.tidy()
    return result


def _check_outputs(
    choice: PlanModel,
    options: PlanOptions,
    goal: PlanGoal | None,
    out: Path | None,
    recipe_out: Path | None,
    plot: Path | None,
) -> None:
    if goal is None and (recipe_out is not None or plot is not None):
        name = "--recipe-out" if recipe_out is not None else "--plot"
        raise UsageError(f"{name} has no effect where no layout is chosen; give --max-ppl-increase or --min-speedup")
    if goal is not None and (len(options.tp_sizes) > 1 or len(options.batch_sizes) > 1 or options.tp_sizes[0] == 1):
        raise UsageError(
            "a layout is chosen for one group and one workload: give one --tp-size above 1, and one --batch-size"
        )
    read: list[str | Path | None] = [choice.shape, options.hardware, options.link]
    read += [goal.sensitivity, goal.data, goal.held_out_data] if goal is not None else []
    if out is not None and recipe_out is not None and resolved(out) == resolved(recipe_out):
        raise UsageError("--out and --recipe-out name one file; name two")
    if out is not None:
        check_writable(out, inputs=read)
    if recipe_out is not None:
        check_writable(recipe_out, "--recipe-out", inputs=read)
    if plot is not None:
        check_plot(plot)


def _chosen_engine(options: PlanOptions, device: DeviceSpec) -> EngineFacts:
    """Of --engine, else the one that the device's figures were fitted with; raises UsageError for a name of none."""
    engines = known_engines()
    name = options.engine or device.engine
    if name not in engines:
        raise UsageError(f"--engine {name} is not one of {', '.join(engines)}")
    return engines[name]


def _chosen_link(options: PlanOptions) -> Interconnect | None:
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


def _other_all_reduces(
    model: ModelToPlan, group: PlannedGroup, workload: Workload, variants: Sequence[RowVariant]
) -> Iterator[OtherAllReduce]:
    """The same rows over each other all-reduce that is known of the group's link."""
    for link in other_all_reduces(group.interconnect, group.ranks) if group.interconnect is not None else ():
        other = replace(group, interconnect=link)
        yield OtherAllReduce(
            link=link.name,
            ranks=group.ranks,
            batch_size=workload.batch_size,
            vllm=group.ranks in (link.vllm_ranks or ()),
            extrapolated=bool(other.taken_link(model, [workload]).bytes_outside_range),
            speedups={row.model: speedup_band(row) for row in planned_rows(model, other, workload, variants)},
            exact={one.name: speedup_band(one) for one in exact_stacks(model, other, workload)},
        )


# ---- the choice ----


def _choose_layout(
    model: ModelToPlan,
    choice: PlanModel,
    goal: PlanGoal,
    group: PlannedGroup,
    workload: Workload,
    out: Path | None,
    console: Console,
) -> "tuple[PlanChoice, LayoutMeasurer | None]":
    """The layout that meets the goal best on this group. out: of the plan, beside which lies what was measured so far,
    until the measurer is tidied.

    Raises UserError for costs of another model or of a number of virtual ranks that the group cannot run, and where
    nothing meets the goal; UsageError for a check that cannot be made.
    """
    if model.remark is not None:
        raise UserError(f"no layout is chosen for a family that is not converted. {model.remark}; leave the target out")
    if not model.layout.is_dense:
        raise UserError(
            f"{model.name} is not dense ({model.layout}); a layout is chosen for the dense model that it was made of"
        )
    mark = None
    if choice.model is not None:  # the weights are downloaded if they are a hub's and not here
        mark = fingerprint(read_checkpoint(check_model(choice.model, choice.revision)))
    costs = read_plan_costs(
        goal.sensitivity,
        goal.sweep,
        num_layers=model.config["num_hidden_layers"],
        fingerprint=mark,
        sync_tp_size=choice.sync_tp_size,
    )
    size = costs.sync_tp_size
    if size is not None and size % group.ranks:
        raise UserError(
            f"{goal.sensitivity or goal.sweep} has dropped sync points of {size} virtual ranks, which --tp-size"
            f" {group.ranks} does not divide; measure it with --sync-tp-size {group.ranks}, or plan for fewer ranks"
        )
    seconds = {phase: point_seconds(one) for phase, one in group.parts(model, workload, size).items()}
    what = (seconds, workload.decode_steps, goal.phase, goal.target, costs)
    if goal.verify is not None:
        with _measurer(choice, goal, out, console) as measurer:
            found = plan_layout(*what, measurer=measurer, limit=goal.verify, console=console)
        return replace(found, aligned=measurer.aligned), measurer
    found = plan_layout(*what, console=console)
    if choice.model is None:
        note = f"a shape has no weights, so it cannot be told whether {found.costs_file} is of the model that is meant"
        found = replace(found, notes=[*found.notes, note])
    return found, None


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
    from ladderize.planning.plans.measure import LayoutMeasurer
    from ladderize.ranks.threads import set_threads

    set_threads(goal.threads, 1)
    counts: tuple[int | None, int | None] = (goal.align_samples, None)
    if goal.align_samples is None and sensitivity.aligned is not None:
        counts = (sensitivity.aligned.samples, sensitivity.aligned.heldout)
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
