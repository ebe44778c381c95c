"""The command ``ladderize plan`` from its options to its document: read, choose, predict, write."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import yaml

from ladderize.checkpoint.config import check_config
from ladderize.checkpoint.opening import check_model, read_checkpoint, read_config
from ladderize.checkpoint.quantised import plain_config, quantisation_of
from ladderize.checkpoint.reading import resolve_json
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import SensitivityDocument, read_sensitivity
from ladderize.errors import UsageError, UserError
from ladderize.families.registry import find_family
from ladderize.files.documents import check_writable, write_json
from ladderize.files.records import Record
from ladderize.files.regular import names_a_file, resolved
from ladderize.files.temporaries import replacement
from ladderize.layout import Layout
from ladderize.plan.choice import (
    LAYER_KINDS,
    LayerTables,
    PlanChoice,
    choose_layout,
    choose_measured_layout,
    kind_seconds,
)
from ladderize.plan.hardware import DeviceSpec, EngineFacts, known_engines, read_device
from ladderize.plan.options import PlanGoal, PlanModel, PlanOptions
from ladderize.plan.passes import WIDTHS, Workload
from ladderize.plan.rows import ModelToPlan, PlannedGroup, PlannedRow, exact_variants, planned_rows, row_variants
from ladderize.runtime.collectives.links import Interconnect, read_interconnect
from ladderize.runtime.shards import dense_config, read_shape

if TYPE_CHECKING:
    from ladderize.plan.measure import LayoutMeasurer


@dataclass(frozen=True)
class PlanResult(Record):
    """The content of plan.json without its schema; docs/files.md describes it.

    model: the model that was asked for.
    dtype: in which it computes.
    link: None where only one rank was asked for.
    choice: the chosen layout, if one was asked for.
    """

    LEFT_OUT: ClassVar = ("choice",)

    model: PlanModel
    dtype: str
    options: PlanOptions
    device: DeviceSpec
    link: Interconnect | None
    engine: EngineFacts
    rows: list[PlannedRow]
    choice: PlanChoice | None = None

    def rows_of(self, ranks: int, batch: int) -> list[PlannedRow]:
        """Return the rows of one group at one batch size, the dense model first."""
        return [row for row in self.rows if (row.tp_size, row.batch_size) == (ranks, batch)]


def plan_layouts(
    choice: PlanModel,
    options: PlanOptions,
    goal: PlanGoal | None = None,
    *,
    out: Path | None = None,
    recipe_out: Path | None = None,
    console: Console = SILENT,
) -> PlanResult:
    """Predict the speed of a model's layouts on hardware that need not be there, and choose one; return the document.

    goal: the goal of a choice, for one group and one workload; None: nothing is chosen.
    out: a JSON file to write.
    recipe_out: a file for the recipe of the choice, for ``convert``.

    Raises UsageError, UserError or LayoutError if something cannot be predicted (unknown names, sizes that the ranks do
    not divide, a link without figures for so many ranks), or if nothing meets the goal.
    """
    _check_outputs(choice, options, goal, out, recipe_out)
    model = read_model(choice)
    device = read_device(options.hardware)
    engine = _chosen_engine(options, device)
    interconnect = _chosen_link(options)
    workloads = [Workload(batch, options.prompt_len, options.output_len) for batch in options.batch_sizes]
    groups = [PlannedGroup(ranks, device, engine, interconnect if ranks > 1 else None) for ranks in options.tp_sizes]
    for group in groups:  # raises for faults before minutes of measuring
        row_variants(model, choice, group.ranks)
    chosen, measurer = None, None
    if goal is not None:
        chosen, measurer = _choose(model, choice, goal, groups[0], workloads[0], out, console)
    rows = []
    for group in groups:
        variants = row_variants(model, choice, group.ranks, chosen.chosen.as_layout if chosen is not None else None)
        for workload in workloads:
            rows += planned_rows(model, group, workload, [*variants, *exact_variants(model, group, workload)])
    asked = replace(choice, weights=model.weights)
    result = PlanResult(asked, model.dtype, options, device, interconnect, engine, rows, chosen)
    if out is not None:
        write_json(out, result.to_dict())
    if chosen is not None and recipe_out is not None:
        write_plan_recipe(recipe_out, chosen)
    if measurer is not None:
        measurer.tidy()
    return result


def _check_outputs(
    choice: PlanModel, options: PlanOptions, goal: PlanGoal | None, out: Path | None, recipe_out: Path | None
) -> None:
    if goal is None and recipe_out is not None:
        raise UsageError("--recipe-out writes a choice; give --max-ppl-increase or --min-speedup")
    if goal is not None and (len(options.tp_sizes) > 1 or len(options.batch_sizes) > 1 or options.tp_sizes[0] == 1):
        raise UsageError(
            "a layout is chosen for one group and one workload: give one --tp-size above 1, and one --batch-size"
        )
    if out is not None and recipe_out is not None and resolved(out) == resolved(recipe_out):
        raise UsageError("--out and --recipe-out are one file; name two")
    inputs: list[str | Path | None] = [choice.shape, options.hardware, options.link]
    inputs += [goal.sensitivity, goal.data] if goal is not None else []
    for path, option in ((out, "--out"), (recipe_out, "--recipe-out")):
        if path is not None:
            check_writable(path, option, inputs=inputs)


# ---- the model and the hardware ----


def read_model(choice: PlanModel) -> ModelToPlan:
    """Return the model, of which only the config is read. Raises UserError or LayoutError."""
    folder = None
    if choice.model is not None:
        folder = resolve_json(choice.model, choice.revision)[0]
        config = read_config(folder)
    else:
        config = read_shape(choice.name, "--shape")
        if config.get("model_type") is None or find_family(config) is not None:
            config = dense_config(config)
    quantisation, config = quantisation_of(config, folder), plain_config(config)
    check_config(config)
    layout = Layout.dense(config["num_hidden_layers"])
    if folder is not None:
        layout = Layout.from_config(config)
        layout.check_model(config)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16") if folder is not None else "bfloat16"
    dtype = stored.removeprefix("torch.") if choice.dtype == "auto" else choice.dtype
    if dtype not in WIDTHS:
        raise UserError(f"{choice.name}: weights of {dtype} cannot be run; give --dtype {' or '.join(WIDTHS)}")
    weights = choice.weights
    if weights == "auto" and quantisation is not None and not quantisation.is_fp8:
        raise UserError(
            f"{choice.name}: how long products take is known of floats and of FP8, but its weights are others"
            f" ({quantisation.words}); give --weights fp8 or --weights float to plan as if they were these"
        )
    if weights == "auto":
        weights = "float" if quantisation is None else "fp8"
    return ModelToPlan(config, layout, dtype, weights)


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
        return read_interconnect(options.hardware)
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
    assert goal.sensitivity is not None
    costs, layers = read_sensitivity(goal.sensitivity), model.config["num_hidden_layers"]
    _check_costs(goal, costs, model, choice, group)
    seconds = kind_seconds(group.parts(model, workload, costs.sync_tp_size), workload.decode_steps, goal.phase, layers)
    tables = LayerTables(seconds[1], layer_nats(costs), seconds[0], costs.sync_tp_size)
    target = goal.target(costs.dense_nll)
    measurer, aligned = None, costs.aligned
    if goal.verify is None:
        chosen = choose_layout(tables, target)
    else:
        from ladderize.plan.measure import LayoutMeasurer
        from ladderize.ranks.threads import set_threads

        set_threads(goal.threads, 1)
        measurer = LayoutMeasurer(choice, goal, costs, kept_beside=out or goal.sensitivity, console=console)
        aligned = measurer.aligned
        chosen = choose_measured_layout(tables, target, measurer.measure, goal.verify, console=console)
    return replace(chosen, phase=goal.phase, costs_file=str(goal.sensitivity), aligned=aligned), measurer


def _check_costs(
    goal: PlanGoal, costs: SensitivityDocument, model: ModelToPlan, choice: PlanModel, group: PlannedGroup
) -> None:
    path, layers, size = goal.sensitivity, model.config["num_hidden_layers"], costs.sync_tp_size
    if not model.layout.is_dense:
        raise UserError(
            f"{choice.name} is not dense ({model.layout}); a layout is chosen for the dense model that it was made of"
        )
    if costs.mode != "layers":
        raise UserError(f"{path} does not tell what a layer alone costs; measure that with --mode layers")
    if costs.num_layers != layers:
        raise UserError(f"{path} is of a model of {costs.num_layers} layers, but this one has {layers}")
    if choice.model is not None:  # the weights are downloaded if they are a hub's and not here
        if fingerprint(read_checkpoint(check_model(choice.model, choice.revision))) != costs.fingerprint:
            raise UserError(f"{path} was measured on another model (their fingerprints differ); measure this one")
    elif goal.verify is not None:
        raise UserError("--verify measures a checkpoint, and --shape has no weights; name the checkpoint instead")
    if size is not None and size % group.ranks:
        raise UserError(
            f"{path} has dropped sync points of {size} virtual ranks, which --tp-size {group.ranks} does not divide;"
            f" measure it with --sync-tp-size {group.ranks}, or plan for fewer ranks"
        )
    if goal.verify is not None and costs.aligned is not None and not goal.align:
        raise UserError(f"{path} has costs of aligned models; add --align, so that --verify aligns too")


def write_plan_recipe(path: Path, choice: PlanChoice) -> None:
    """Write ``--recipe-out``, whole or not at all: YAML that ``convert`` takes, with its origin in comments."""
    chosen, recipe = choice.chosen, Recipe.from_layout(choice.chosen.as_layout).to_dict()
    origin = [
        f"Chosen by `ladderize plan` for {choice.target.words}, by the costs of {choice.costs_file}.",
        f"{chosen.layout}. {choice.phase} {chosen.speedup:.3f}x of the dense layout's speed, predicted.",
        f"Perplexity: {chosen.cost_words} ({choice.statement}).",
    ]
    if choice.aligned is not None:
        origin.append("These costs are of aligned models: align what is made of this, `adapt --method align`.")
    comments = ["# " + "".join(c if c.isprintable() else "?" for c in line) for line in origin]
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.items()}
    with replacement(resolved(path, "--recipe-out ")) as file:
        file.write("\n".join([*comments, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)]))
