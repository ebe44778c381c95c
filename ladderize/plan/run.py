"""The command ``ladderize plan`` from its options to its document: read, predict, choose, write, show."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ladderize.checkpoint.opening import check_model, read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import SensitivityDocument, read_sensitivity
from ladderize.errors import UsageError, UserError
from ladderize.files.documents import check_writable, write_json
from ladderize.files.regular import names_a_file, resolved
from ladderize.plan.alternatives import exact_stacks
from ladderize.plan.choice import (
    LAYER_KINDS,
    LayerTables,
    choose_layout,
    choose_measured_layout,
    kind_seconds,
)
from ladderize.plan.document import ExactStack, PlanChoice, PlannedRow, PlanResult
from ladderize.plan.hardware import DeviceSpec, EngineFacts, known_engines, read_device
from ladderize.plan.options import PlanGoal, PlanModel, PlanOptions
from ladderize.plan.passes import Workload
from ladderize.plan.rows import ModelToPlan, PlannedGroup, planned_rows, read_model, row_variants
from ladderize.plan.show import show_choice, show_plan, write_plan_recipe
from ladderize.runtime.collectives.links import Interconnect, read_interconnect

if TYPE_CHECKING:
    from ladderize.plan.measure import LayoutMeasurer


def plan_layouts(
    choice: PlanModel,
    options: PlanOptions,
    goal: PlanGoal | None = None,
    *,
    out: Path | None = None,
    recipe_out: Path | None = None,
    explain: bool = False,
    console: Console = SILENT,
) -> PlanResult:
    """Predict the speed of a model's layouts on hardware that need not be there, and choose one; return the document.

    goal: the goal of a choice, for one group and one workload; None: nothing is chosen.
    out: a JSON file to write.
    recipe_out: a file for the recipe of the choice, for ``convert``.
    explain: ``console`` shows times and sources of the figures, too.

    Raises UsageError, UserError or LayoutError if something cannot be predicted (unknown names, sizes that the ranks do
    not divide, a link without figures for so many ranks), or if nothing meets the goal.
    """
    _check_outputs(choice, options, goal, out, recipe_out)
    model = read_model(choice, options)
    device = read_device(options.hardware)
    engine = _chosen_engine(options, device)
    interconnect = _chosen_link(options)
    workloads = [Workload(batch, options.prompt_len, options.output_len) for batch in options.batch_sizes]
    groups = [PlannedGroup(ranks, device, engine, interconnect if ranks > 1 else None) for ranks in options.tp_sizes]
    for group in groups:  # raises for faults before minutes of measuring
        row_variants(model, choice, group.ranks, choosing=goal is not None)
    chosen, measurer = None, None
    if goal is not None:
        chosen, measurer = _choose(model, choice, goal, groups[0], workloads[0], out, console)
    layout = chosen.chosen.as_layout if chosen is not None else None
    rows: list[PlannedRow] = []
    exact: list[ExactStack] = []
    no_replicas: dict[int, str] = {}
    for group in groups:
        variants = row_variants(model, choice, group.ranks, choosing=layout is not None, chosen=layout)
        vllm = group.vllm_link
        for workload in workloads:
            own = planned_rows(model, group, workload, variants)
            stacks, reason = exact_stacks(model, group, workload)
            if reason:
                no_replicas[group.ranks] = reason
            if vllm is not None:
                there = replace(group, interconnect=vllm)
                bands = {row.model: row.speedup_band for row in planned_rows(model, there, workload, variants)}
                bands |= {one.name: one.speedup_band for one in exact_stacks(model, there, workload)[0]}
                own = [replace(row, speedup_over_vllm=bands[row.model]) for row in own]
                stacks = [replace(one, speedup_over_vllm=bands.get(one.name)) for one in stacks]
            rows += own
            exact += stacks
    result = PlanResult(
        model=replace(choice, weights=model.weights),
        options=options,
        device=device,
        link=interconnect,
        links=[group.group_link(model, workloads) for group in groups if group.ranks > 1],
        engine=engine,
        rows=rows,
        exact=exact,
        vllm_links={group.ranks: group.vllm_link.name for group in groups if group.vllm_link is not None},
        no_replicas=no_replicas,
        choice=chosen,
    )
    if out is not None:
        write_json(out, result.to_dict())
    if chosen is not None and recipe_out is not None:
        write_plan_recipe(recipe_out, chosen)
    console.document(result.to_dict())
    show_plan(result, console, explain=explain)
    if chosen is not None:
        show_choice(result, chosen, console)
    if measurer is not None:
        measurer.tidy()
    return result


def _check_outputs(
    choice: PlanModel, options: PlanOptions, goal: PlanGoal | None, out: Path | None, recipe_out: Path | None
) -> None:
    if goal is None and recipe_out is not None:
        raise UsageError(
            "--recipe-out has no effect where no layout is chosen; give --max-ppl-increase or --min-speedup"
        )
    if goal is not None and (len(options.tp_sizes) > 1 or len(options.batch_sizes) > 1 or options.tp_sizes[0] == 1):
        raise UsageError(
            "a layout is chosen for one group and one workload: give one --tp-size above 1, and one --batch-size"
        )
    read: list[str | Path | None] = [choice.shape, options.hardware, options.link]
    read += [goal.sensitivity, goal.data] if goal is not None else []
    if out is not None and recipe_out is not None and resolved(out) == resolved(recipe_out):
        raise UsageError("--out and --recipe-out name one file; name two")
    if out is not None:
        check_writable(out, inputs=read)
    if recipe_out is not None:
        check_writable(recipe_out, "--recipe-out", inputs=read)


def _chosen_engine(options: PlanOptions, device: DeviceSpec) -> EngineFacts:
    """Return the engine of --engine, else the one of the device's figures. Raises UsageError for an unknown name."""
    engines = known_engines()
    name = options.engine or device.engine
    if name not in engines:
        raise UsageError(f"--engine {name} is not one of {', '.join(engines)}")
    return engines[name]


def _chosen_link(options: PlanOptions) -> Interconnect | None:
    """Return the link of --link, else of a file that --hardware names; None for one rank.

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


# ---- the choice ----


def layer_nats(document: SensitivityDocument) -> np.ndarray:
    """Return the cost of each kind of each layer [L, kinds], inf where it was not measured.

    A cost below 0 is noise and counts as 0.
    """
    nats = np.full((document.num_layers, len(LAYER_KINDS)), np.inf)
    nats[:, 0] = 0.0
    for cost in document.costs:
        if cost.layer or cost.kind != LAYER_KINDS[-1]:  # no MLP enters the first, so that is spd
            nats[cost.layer, LAYER_KINDS.index(cost.kind)] = max(cost.nats, 0.0)
    return nats


def _choose(
    model: ModelToPlan,
    choice: PlanModel,
    goal: PlanGoal,
    group: PlannedGroup,
    workload: Workload,
    out: Path | None,
    console: Console,
) -> "tuple[PlanChoice, LayoutMeasurer | None]":
    """Return the layout that meets the goal best on this group, and the measurer, if layouts were measured.

    out: the file of the plan. Measurements are kept beside it until the measurer is tidied.

    Raises UserError for costs of another model or of a number of virtual ranks that the group cannot run, and where
    nothing meets the goal.
    """
    if not model.layout.is_dense:
        raise UserError(
            f"{model.name} is not dense ({model.layout}); a layout is chosen for the dense model that it was made of"
        )
    if choice.model is None and goal.verify is not None:
        raise UserError("--verify measures a checkpoint, and --shape has no weights; name the checkpoint instead")
    assert goal.sensitivity is not None
    costs, layers = read_sensitivity(goal.sensitivity), model.config["num_hidden_layers"]
    _check_costs(goal.sensitivity, costs, model, choice, group)
    seconds = kind_seconds(group.parts(model, workload, costs.sync_tp_size), workload.decode_steps, goal.phase, layers)
    tables = LayerTables(seconds[1], layer_nats(costs), seconds[0], costs.sync_tp_size)
    target = goal.target.in_nats(costs.dense_nll)
    measurer, check, aligned = None, None, costs.aligned
    if goal.verify is None:
        chosen = choose_layout(tables, target)
    else:
        if costs.aligned is not None and not goal.align:
            raise UserError(
                f"{goal.sensitivity} has costs of aligned models, and --verify would measure layouts as they are before"
                " alignment; add --align"
            )
        from ladderize.plan.measure import LayoutMeasurer
        from ladderize.ranks.threads import set_threads

        set_threads(goal.threads, 1)
        measurer = LayoutMeasurer(
            choice.name,
            costs.fingerprint,
            costs.data,
            kept_beside=out or goal.sensitivity,
            data_file=goal.data,
            align=goal.align,
            align_counts=costs.aligned,
            dtype=choice.dtype,
            device=goal.device,
            revision=choice.revision,
            console=console,
        )
        aligned = measurer.aligned
        chosen, check = choose_measured_layout(tables, target, measurer, goal.verify, console=console)
    notes = []
    if choice.model is None:
        notes.append(
            f"a shape has no weights, so {goal.sensitivity} may be of another model than the one that is meant"
        )
    if costs.sync_tp_size is None:
        notes.append(f"{goal.sensitivity} has no costs of dropped sync points, so none is dropped")
    found = PlanChoice(
        target=target,
        phase=goal.phase,
        costs_file=str(goal.sensitivity),
        dense_ms=chosen.ms * chosen.speedup,
        dense_perplexity=costs.dense_perplexity,
        chosen=chosen,
        notes=notes,
        verification=check,
        aligned=aligned,
    )
    return found, measurer


def _check_costs(
    path: Path, costs: SensitivityDocument, model: ModelToPlan, choice: PlanModel, group: PlannedGroup
) -> None:
    layers, size = model.config["num_hidden_layers"], costs.sync_tp_size
    if costs.mode != "layers":
        raise UserError(
            f"{path} has the mode {costs.mode}, which does not tell what a layer alone costs; measure that with"
            " `ladderize sensitivity --mode layers`"
        )
    if costs.num_layers != layers:
        raise UserError(
            f"{path} is of a model of {costs.num_layers} layers, but this one has {layers}; measure this model"
        )
    if choice.model is not None:  # the weights are downloaded if they are a hub's and not here
        mark = fingerprint(read_checkpoint(check_model(choice.model, choice.revision)))
        if mark != costs.fingerprint:
            raise UserError(f"{path} was measured on another model (their fingerprints differ); measure this one")
    if choice.sync_tp_size not in (None, size):
        measured = "has no dropped sync points" if size is None else f"was measured with sync_tp_size {size}"
        raise UserError(
            f"{path} {measured}, so it does not apply to --sync-tp-size {choice.sync_tp_size}; measure it again with"
            " that"
        )
    if size is not None and size % group.ranks:
        raise UserError(
            f"{path} has dropped sync points of {size} virtual ranks, which --tp-size {group.ranks} does not divide;"
            f" measure it with --sync-tp-size {group.ranks}, or plan for fewer ranks"
        )
