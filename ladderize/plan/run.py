"""The command ``ladderize plan`` from its options to its document: read, choose, predict, write."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import yaml

from ladderize.checkpoint.config import check_config
from ladderize.checkpoint.opening import open_checkpoint, read_config
from ladderize.checkpoint.quantised import plain_config, quantisation_of
from ladderize.checkpoint.reading import resolve_json
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, human_bytes
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import SensitivityDocument, read_sensitivity
from ladderize.errors import UsageError, UserError
from ladderize.families.registry import find_family
from ladderize.files.documents import check_writable, write_json
from ladderize.files.records import Record
from ladderize.files.regular import names_a_file, resolved
from ladderize.files.temporaries import replacement
from ladderize.layout import Layout, LayoutError, fitting_ranks
from ladderize.plan.choice import LAYER_KINDS, LayerTables, PlanChoice, choose_layout, kind_seconds
from ladderize.plan.hardware import DeviceSpec, known_engines, own_links, read_device
from ladderize.plan.options import BOUND_NAMES, PlanGoal, PlanModel, PlanOptions
from ladderize.plan.passes import WIDTHS, Serving, pass_parts
from ladderize.plan.rows import PlannedRow, fits, memory_need, planned_rows
from ladderize.plan.verdict import PlanVerdict, judge
from ladderize.runtime.bench.options import layout_names, named_layout
from ladderize.runtime.collectives.links import Interconnect, read_interconnect
from ladderize.runtime.shards import check_runnable, dense_config, read_shape

if TYPE_CHECKING:
    from ladderize.plan.measure import LayoutMeasurer

SERVED = "vllm"  # the engine that people serve with
CHECKPOINT_ROW, CHOSEN_ROW = "checkpoint", "chosen"  # the rows that are no names of --layout
LONG_PROMPT = 4096  # tokens, from which attention that is not fused takes much of a prefill


@dataclass(frozen=True)
class PlanResult(Record):
    """The content of plan.json without its schema; docs/files.md describes it.

    model: the model that was asked for.
    dtype, is_fp8: in which it computes; its projections multiply 8-bit floats.
    links: the links that messages choose among, at the largest number of ranks; none for one rank.
    engine: the engine whose code is assumed.
    verdicts: the answers, one for each number of ranks at each batch size.
    doubts: reasons why figures may be off, a sentence each.
    choice: the chosen layout, if one was asked for.
    """

    LEFT_OUT: ClassVar = ("choice",)

    model: PlanModel
    dtype: str
    is_fp8: bool
    options: PlanOptions
    device: DeviceSpec
    links: list[Interconnect]
    engine: str
    rows: list[PlannedRow]
    verdicts: list[PlanVerdict]
    doubts: list[str]
    choice: PlanChoice | None = None

    def groups(self) -> list[list[PlannedRow]]:
        """Return the rows of each number of ranks at each batch size, the dense model first."""
        return [
            [row for row in self.rows if (row.tp_size, row.batch_size) == (ranks, batch)]
            for ranks in self.options.tp_sizes
            for batch in self.options.batch_sizes
        ]


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
    served, layout = _serving(choice, options)
    groups = [
        replace(served, ranks=ranks, links=_links(choice, options, served, ranks), batch_size=batch)
        for ranks in options.tp_sizes
        for batch in options.batch_sizes
    ]
    layouts = {ranks: _row_layouts(choice, layout, served, ranks) for ranks in options.tp_sizes}
    chosen, measurer = None, None
    if goal is not None:
        chosen, measurer = _choose(choice, layout, goal, groups[0], out, console)
        layouts[groups[0].ranks] = {CHOSEN_ROW: chosen.chosen.as_layout, **layouts[groups[0].ranks]}
    tables = [planned_rows(group, layouts[group.ranks]) for group in groups]
    verdicts = [
        judge(
            rows,
            about=(CHOSEN_ROW, CHECKPOINT_ROW),
            least_ranks=None if rows[0].fits is not False else least_ranks(group),
        )
        for group, rows in zip(groups, tables, strict=True)
    ]
    shown = [group for group, rows in zip(groups, tables, strict=True) if rows[0].fits is not False]
    doubts = [*_doubts(shown)]
    links = [*max(groups, key=lambda group: group.ranks).links]
    result = PlanResult(
        choice, served.dtype, served.is_fp8, options, served.device, links, served.engine.name,
        [row for rows in tables for row in rows], verdicts, doubts, chosen,
    )  # fmt: skip
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
        raise UsageError("--recipe-out writes a choice; give --sensitivity and --max-ppl-increase")
    if goal is not None and (len(options.tp_sizes) > 1 or len(options.batch_sizes) > 1 or options.tp_sizes[0] == 1):
        raise UsageError(
            "a layout is chosen for one group and one workload: give one --tp-size above 1, and one --batch-size"
        )
    if out is not None and recipe_out is not None and resolved(out) == resolved(recipe_out):
        raise UsageError("--out and --recipe-out are one file; name two")
    inputs = [
        choice.shape,
        options.hardware,
        options.link,
        options.outer_link,
        None if goal is None else goal.sensitivity,
    ]
    for path, option in ((out, "--out"), (recipe_out, "--recipe-out")):
        if path is not None:
            check_writable(path, option, inputs=inputs)


# ---- the model and the hardware ----


def _serving(choice: PlanModel, options: PlanOptions) -> tuple[Serving, Layout]:
    """Return the model on the first group with the first batch, without links, and the model's own layout.

    Only the config is read. Raises UsageError, UserError or LayoutError.
    """
    folder = None
    if choice.model is not None:
        folder = resolve_json(choice.model, choice.revision)[0]
        config = read_config(folder)
    else:
        config = read_shape(choice.name, "--shape")
        if config.get("model_type") is None or find_family(config) is not None:
            config = dense_config(config)
    device, engines = read_device(options.hardware), known_engines()
    quantisation, config = quantisation_of(config, folder), plain_config(config)
    check_config(config)
    layout = Layout.from_config(config)
    layout.check_model(config)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16") if folder is not None else "bfloat16"
    dtype = stored.removeprefix("torch.") if choice.dtype == "auto" else choice.dtype
    if choice.dtype == "auto" and dtype == "bfloat16" and dtype not in device.matmul_tflop_s:
        dtype = "float16"  # as vLLM does on cards that have no bfloat16
    if dtype not in WIDTHS:
        raise UserError(f"{choice.name}: weights of {dtype} cannot be run; give --dtype {' or '.join(WIDTHS)}")
    if quantisation is not None and not quantisation.is_fp8:
        raise UserError(
            f"{choice.name}: how long products take is known of floats and of FP8, but its weights are others"
            f" ({quantisation.words}); plan the model that it was made of"
        )
    # that of published timings is nobody's to serve with
    assumed = SERVED if device.engine == "published" and not device.calibrated else device.engine
    name = options.engine or assumed
    if name not in engines:
        raise UsageError(f"--engine {name} is not one of {', '.join(engines)}")
    engine = engines[name]
    device = replace(device, relative_error=math.hypot(device.relative_error, engine.relative_error))
    where = (device, engine, (), options.tp_sizes[0])
    served = (options.batch_sizes[0], options.prompt_len, options.output_len)
    return Serving(config, dtype, quantisation is not None, *where, *served), layout


def _links(choice: PlanModel, options: PlanOptions, serving: Serving, ranks: int) -> tuple[Interconnect, ...]:
    """Return the links that messages of ``ranks`` ranks choose among: the one that is named, of --link or of the file
    that --hardware names, else the device's own.

    Raises UsageError or UserError where none is known, and where the ranks are more than a machine's and nothing joins
    machines.
    """
    if ranks == 1:
        return ()
    device = serving.device
    named = options.link or (options.hardware if names_a_file(options.hardware) else None)
    links = own_links(device, serving.engine)
    if named is not None:
        links = (read_interconnect(named, "--link" if options.link else "--hardware"),)
    if not links:
        raise UsageError(
            f"nothing is known of the links of {device.name} with --engine {serving.engine.name}: give --link"
            " ALPHA_US,BETA_GB_S, such as 20,100, or a file as examples/hardware/my-card.yaml"
        )
    groups = None if options.outer_link is None else choice.sync_tp_size
    machine = max(options.tp_sizes) // groups if groups else device.machine
    if options.outer_link is not None and max(options.tp_sizes) <= machine:
        raise UsageError(f"--outer-link joins machines of {machine} ranks: give a --tp-size that is a multiple of it")
    if options.outer_link is not None and ranks > machine:
        outer = read_interconnect(options.outer_link, "--outer-link")
        return tuple(link.joined_by(outer, machine) for link in links)
    timed = [link.rows[-1].ranks for link in links if link.rows]
    if timed and ranks > max(machine, *timed):
        raise UsageError(
            f"{ranks} {device.name} are no machine: it has {machine} at most. Give --outer-link, what joins machines,"
            " such as nccl_two_nodes_ib_ndr or 50,25"
        )
    return links


def _row_layouts(choice: PlanModel, layout: Layout, serving: Serving, ranks: int) -> dict[str, Layout]:
    """Return the layouts of the rows beside dense: the checkpoint's own, then those of --layout; bounds have the dense
    one.

    Without --layout these are the usual ones that the ranks can run. Raises UsageError for unknown names, UserError or
    LayoutError for layouts that ``ranks`` cannot run.
    """
    layouts = {} if layout.is_dense else {CHECKPOINT_ROW: layout}
    usual = usual_layouts(layout.num_layers) if ranks > 1 else []
    for name in usual if choice.layout is None else layout_names(choice.layout):
        named = "dense" if name in BOUND_NAMES else name
        layouts[name] = named_layout(named, layout.num_layers, choice.sync_tp_size or ranks)
    if choice.layout is None:
        layouts = {name: row for name, row in layouts.items() if name == CHECKPOINT_ROW or runs(serving, row, ranks)}
    for row in (Layout.dense(layout.num_layers), *layouts.values()):
        check_runnable(serving.config, row, ranks, in_groups=True)
    return layouts


def usual_layouts(num_layers: int) -> list[str]:
    """Return the names of the rows that are shown without --layout.

    Those on a share of the layers are what a short adaptation was measured to make good: the upper half, and for spd
    the 70 % of the SPD paper. Of spd any layers are as fast.
    """
    upper, most = f"{num_layers // 2}:{num_layers}", f"{num_layers * 3 // 10}:{num_layers}"
    return [f"ladder={upper}", f"delayed={upper}", f"spd={most}", "ladder", "delayed", "spd", "no-comm"]


def runs(serving: Serving, layout: Layout, ranks: int) -> bool:
    """Return True if so many ranks can run the model with this layout, and its family has such layouts."""
    try:
        check_runnable(serving.config, layout, ranks, in_groups=True)
        layout.check_model(serving.config)
    except LayoutError:
        return False
    return True


def least_ranks(serving: Serving) -> int | None:
    """Return the fewest ranks whose memory holds the dense model with this batch; None where none do."""
    dense = Layout.dense(serving.config["num_hidden_layers"])
    for ranks in fitting_ranks(serving.config):
        if fits(serving.device, memory_need(replace(serving, ranks=ranks), dense)):
            return ranks
    return None


def _doubts(groups: Sequence[Serving]) -> Iterator[str]:
    """Yield the reasons why the figures of these groups may be off."""
    if any(group.prompt_len >= LONG_PROMPT and group.engine.score_passes for group in groups):
        yield (
            f"the engine {groups[0].engine.name} writes all attention scores of a prompt to memory, which takes long at"
            f" {groups[0].prompt_len} tokens; --engine vllm has a fused attention"
        )
    beyond: dict[str, dict[str, None]] = {}
    for group in groups:
        for parts in pass_parts(group).values():
            link = group.fastest(parts.message_bytes)
            reaches = beyond.setdefault(link.name, {})
            if link.derived:
                reaches[f"{group.ranks} ranks ({link.derived})"] = None
            if not link.in_range(parts.message_bytes):
                reaches[human_bytes(parts.message_bytes)] = None
    for name, reaches in beyond.items():
        if reaches:
            yield f"{name} was not timed at {', '.join(reaches)}: its part of the bands is wide"


# ---- the choice ----


def layer_nats(document: SensitivityDocument) -> np.ndarray:
    """Return the cost of each kind of each layer [L, kinds], inf where it was not measured.

    A cost below 0 is noise and counts as 0.
    """
    nats = np.full((document.num_layers, len(LAYER_KINDS)), np.inf)
    nats[:, 0] = 0.0
    for cost in document.costs:
        if cost.layer or "+" not in cost.kind:  # no MLP enters the first, so that is spd
            nats[cost.layer, LAYER_KINDS.index(cost.kind)] = max(cost.nats, 0.0)
    return nats


def _choose(
    choice: PlanModel, layout: Layout, goal: PlanGoal, serving: Serving, out: Path | None, console: Console
) -> "tuple[PlanChoice, LayoutMeasurer | None]":
    """Return the layout that meets the goal best on this group, and the measurer, if layouts were measured.

    layout: the model's own.
    out: the file of the plan. Measurements are kept beside it until the measurer is tidied.

    Raises UserError for costs of another model or of a number of virtual ranks that the group cannot run, and where
    nothing meets the goal.
    """
    costs = read_sensitivity(goal.sensitivity)
    _check_costs(choice, layout, goal, costs, serving.ranks)
    parts = pass_parts(serving, costs.sync_tp_size)
    constant, seconds = kind_seconds(parts, serving.passes, layout.num_layers)
    tables = LayerTables(seconds, layer_nats(costs), constant, costs.sync_tp_size)
    measurer, measure = None, None
    if goal.verify is not None:
        from ladderize.plan.measure import LayoutMeasurer

        measurer = LayoutMeasurer(choice, costs, kept_beside=out or goal.sensitivity, console=console)
        measure = measurer.measure
    budget = goal.max_nats(costs.dense_nll)
    chosen = choose_layout(tables, budget, measure, goal.verify or 0, console=console)
    return replace(chosen, costs_file=str(goal.sensitivity), aligned=costs.aligned), measurer


def _check_costs(choice: PlanModel, layout: Layout, goal: PlanGoal, costs: SensitivityDocument, ranks: int) -> None:
    path, size = goal.sensitivity, costs.sync_tp_size
    if not layout.is_dense:
        raise UserError(
            f"{choice.name} is not dense ({layout}); a layout is chosen for the dense model that it was made of"
        )
    if costs.mode != "layers":
        raise UserError(f"{path} does not tell what a layer alone costs; measure that with --mode layers")
    if costs.num_layers != layout.num_layers:
        raise UserError(f"{path} is of a model of {costs.num_layers} layers, but this one has {layout.num_layers}")
    if choice.model is not None:  # the weights are downloaded if they are a hub's and not here
        if fingerprint(open_checkpoint(choice.model, choice.revision, sound="any")) != costs.fingerprint:
            raise UserError(f"{path} was measured on another model (their fingerprints differ); measure this one")
    elif goal.verify is not None:
        raise UserError("--verify measures a checkpoint, and --shape has no weights; name the checkpoint instead")
    if size is not None and size % ranks and ranks % size:
        raise UserError(
            f"{path} has delayed or dropped sync points of {size} virtual ranks, of which --tp-size {ranks} is neither"
            f" a divisor nor a multiple; measure it with --sync-tp-size {ranks}, or plan for other ranks"
        )


def write_plan_recipe(path: Path, choice: PlanChoice) -> None:
    """Write ``--recipe-out``, whole or not at all: YAML that ``convert`` takes, with its origin in comments."""
    chosen, recipe = choice.chosen, Recipe.from_layout(choice.chosen.as_layout).to_dict()
    origin = [
        f"Chosen by `ladderize plan`, by the costs of {choice.costs_file}.",
        f"{chosen.layout}. {chosen.speedup:.3f}x of the dense layout's speed, predicted.",
        f"Perplexity: {chosen.cost_words}.",
    ]
    if choice.aligned is not None:
        origin.append("These costs are of aligned models: align what is made of this, `adapt --method align`.")
    comments = ["# " + "".join(c if c.isprintable() else "?" for c in line) for line in origin]
    with replacement(resolved(path, "--recipe-out ")) as file:
        file.write("\n".join([*comments, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)]))
