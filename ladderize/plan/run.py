"""The command ``ladderize plan`` from its options to its document: read, choose, predict, write."""

import itertools
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
from ladderize.files.output import replacement
from ladderize.files.records import Record
from ladderize.files.regular import names_a_file, resolved
from ladderize.layout import Layout, LayoutError
from ladderize.plan.choice import KINDS, LayerTables, choose_layout, kind_seconds
from ladderize.plan.hardware import DeviceSpec, known_engines, own_links, read_device
from ladderize.plan.options import BOUND_NAMES, PlanOptions
from ladderize.plan.passes import WIDTHS, Serving, pass_parts
from ladderize.plan.rows import (
    CHECKPOINT_ROW,
    CHOSEN_ROW,
    PlanChoice,
    PlannedRow,
    PlanVerdict,
    judge,
    planned_rows,
)
from ladderize.runtime.bench.options import layout_names, named_layout
from ladderize.runtime.collectives.links import Interconnect, read_interconnect
from ladderize.runtime.shards import check_runnable, dense_config, read_shape

if TYPE_CHECKING:
    from ladderize.plan.measure import LayoutMeasurer

SERVED = "vllm"  # the engine that people serve with
LONG_PROMPT = 4096  # tokens, from which attention that is not fused takes much of a prefill


@dataclass(frozen=True)
class PlanResult(Record):
    """The content of plan.json without its schema; docs/files.md describes it."""

    LEFT_OUT: ClassVar = ("choice",)

    dtype: str  # in which it computes
    is_fp8: bool  # projections multiply 8-bit floats
    options: PlanOptions
    device: DeviceSpec
    links: list[Interconnect]  # that messages choose among, at the largest number of ranks; none for one rank
    speeds: str  # the engine whose code is assumed
    rows: list[PlannedRow]
    verdicts: list[PlanVerdict]  # one for each number of ranks at each batch size
    doubts: list[str]  # reasons why figures may be off, a sentence each
    choice: PlanChoice | None = None  # if a layout was asked for

    def groups(self) -> list[list[PlannedRow]]:
        """Return the rows of each number of ranks at each batch size, the dense model first."""
        return [[*rows] for _, rows in itertools.groupby(self.rows, key=lambda row: (row.tp_size, row.batch_size))]


def plan_layouts(options: PlanOptions, *, console: Console = SILENT) -> PlanResult:
    """Predict the speed of a model's layouts on hardware that need not be there, and choose one."""
    out, recipe_out = options.out, options.recipe_out
    if out is not None and recipe_out is not None and resolved(out) == resolved(recipe_out):
        raise UsageError("--out and --recipe-out are one file; name two")
    inputs = [options.shape, options.hardware, options.link, options.outer_link, options.sensitivity]
    for flag, path in {"--out": out, "--recipe-out": recipe_out}.items():
        if path is not None:
            check_writable(path, flag, inputs=inputs)
    served, layout = _serving(options)
    layouts = {ranks: _row_layouts(options, layout, served, ranks) for ranks in options.tp_sizes}
    groups = [
        replace(served, ranks=ranks, links=_links(options, served, ranks), batch_size=batch)
        for ranks in options.tp_sizes
        for batch in options.batch_sizes
    ]
    choice, measurer = None, None
    if options.sensitivity is not None:
        choice, measurer = _choose(options, options.sensitivity, layout, groups[0], console)
        layouts = {groups[0].ranks: {CHOSEN_ROW: choice.chosen.as_layout, **layouts[groups[0].ranks]}}
    tables = [planned_rows(group, layouts[group.ranks]) for group in groups]
    verdicts = [judge(table, group) for table, group in zip(tables, groups, strict=True)]
    rows = [*itertools.chain.from_iterable(tables)]
    fitting = [group for table, group in zip(tables, groups, strict=True) if table[0].fits is not False]
    links, doubts = [*max(groups, key=lambda group: group.ranks).links], [*_doubts(fitting)]
    about = (served.dtype, served.is_fp8, options, served.device, links, served.engine.name)
    result = PlanResult(*about, rows, verdicts, doubts, choice)
    if out is not None:
        write_json(out, result.to_dict())
    if choice is not None and recipe_out is not None:
        _write_recipe(recipe_out, choice)
    if measurer is not None:
        measurer.kept.unlink(missing_ok=True)
    return result


def _serving(options: PlanOptions) -> tuple[Serving, Layout]:
    """Return the model on the first group with the first batch, without links, and its own layout, from its config."""
    device, engines = read_device(options.hardware), known_engines()
    folder = None if options.model is None else resolve_json(options.model)[0]
    config = read_config(folder) if folder is not None else read_shape(options.name, "--shape")
    if folder is None and (config.get("model_type") is None or find_family(config) is not None):
        config = dense_config(config)
    quantisation, config = quantisation_of(config, folder), plain_config(config)
    check_config(config)
    layout = Layout.from_config(config)
    layout.check_model(config)
    dtype: str = options.dtype
    if dtype == "auto":
        stored = config.get("dtype") or config.get("torch_dtype") if folder is not None else None
        dtype = str(stored or "bfloat16").removeprefix("torch.")
        if dtype == "bfloat16" and dtype not in device.matmul_tflop_s:
            dtype = "float16"  # as vLLM does on cards that have no bfloat16
    if dtype not in WIDTHS:
        raise UserError(f"{options.name}: weights of {dtype} cannot be run; give --dtype {' or '.join(WIDTHS)}")
    if quantisation is not None and not quantisation.is_fp8:
        raise UserError(
            f"{options.name}: how long products take is known of floats and of FP8, but its weights are others"
            f" ({quantisation.words}); plan the model that it was made of"
        )
    # that of published timings is nobody's to serve with
    assumed = SERVED if device.speeds == "published" and not device.calibrated else device.speeds
    speeds = options.speeds or assumed
    if speeds not in engines:
        raise UsageError(f"--speeds {speeds} is not one of {', '.join(engines)}")
    engine = engines[speeds]
    device = replace(device, relative_error=math.hypot(device.relative_error, engine.relative_error))
    sizes = (options.tp_sizes[0], options.batch_sizes[0], options.prompt_len, options.output_len)
    return Serving(config, dtype, quantisation is not None, device, engine, (), *sizes), layout


def _links(options: PlanOptions, serving: Serving, ranks: int) -> tuple[Interconnect, ...]:
    """Return the links that messages choose among: that of --link or of --hardware's file, else the device's own."""
    if ranks == 1:
        return ()
    device, most = serving.device, max(options.tp_sizes)
    if options.link is not None:
        links: tuple[Interconnect, ...] = (read_interconnect(options.link),)
    elif names_a_file(options.hardware):
        links = (read_interconnect(options.hardware, "--hardware"),)
    else:
        links = own_links(device, serving.engine)
    if not links:
        raise UsageError(
            f"nothing is known of the links of {device.name} with --speeds {serving.engine.name}: give --link"
            " ALPHA_US,BETA_GB_S, such as 20,100, or a file as examples/hardware/my-card.yaml"
        )
    machine = device.machine
    if options.outer_link is not None:
        machine = most // options.sync_tp_size if options.sync_tp_size else machine
        if most <= machine:
            raise UsageError(
                f"--outer-link joins machines of {machine} ranks: give a --tp-size that is a multiple of it"
            )
        if ranks > machine:
            outer = read_interconnect(options.outer_link, "--outer-link")
            return tuple(link.joined_by(outer, machine) for link in links)
    timed = [link.rows[-1].ranks for link in links if link.rows]
    if timed and ranks > max(machine, *timed):
        raise UsageError(
            f"{ranks} {device.name} are no machine: it has {machine} at most. Give --outer-link, what joins machines,"
            " such as nccl_two_nodes_ib_ndr or 50,25"
        )
    return links


def _row_layouts(options: PlanOptions, layout: Layout, serving: Serving, ranks: int) -> dict[str, Layout]:
    """Return the layouts of the rows beside dense: the checkpoint's own, then those of --layout, or else the usual ones
    that the ranks and the family can run; bounds have the dense one."""
    layers = layout.num_layers
    names = _usual_layouts(layers, ranks) if options.layout is None else layout_names(options.layout)
    layouts = {} if layout.is_dense else {CHECKPOINT_ROW: layout}
    for row in (Layout.dense(layers), *layouts.values()):
        check_runnable(serving.config, row, ranks, in_groups=True)
    for name in names:
        row = named_layout("dense" if name in BOUND_NAMES else name, layers, options.sync_tp_size or ranks)
        try:
            check_runnable(serving.config, row, ranks, in_groups=True)
            row.check_model(serving.config)
            layouts[name] = row
        except LayoutError:
            if options.layout is not None:
                raise
    return layouts


def _usual_layouts(num_layers: int, ranks: int) -> list[str]:
    """Return the names of the rows that are shown without --layout: those on a share of the layers are what a short
    adaptation was measured to make good, the upper half, and for spd the 70 % of the SPD paper."""
    if ranks == 1:
        return []
    upper, most = f"{num_layers // 2}:{num_layers}", f"{num_layers * 3 // 10}:{num_layers}"
    return [f"ladder={upper}", f"delayed={upper}", f"spd={most}", "ladder", "delayed", "spd", "no-comm"]


def _doubts(groups: Sequence[Serving]) -> Iterator[str]:
    """Yield the reasons why the figures of these groups may be off."""
    if any(group.prompt_len >= LONG_PROMPT and group.engine.score_passes for group in groups):
        yield (
            f"the engine {groups[0].engine.name} writes all attention scores of a prompt to memory, which takes long at"
            f" {groups[0].prompt_len} tokens; --speeds vllm has a fused attention"
        )
    untimed: dict[str, dict[str, None]] = {}  # by link, in order
    for group in groups:
        for times in pass_parts(group).values():
            link = group.fastest(times.message_bytes)
            if link.derived:
                untimed.setdefault(link.name, {})[f"{group.ranks} ranks ({link.derived})"] = None
            if not link.in_range(times.message_bytes):
                untimed.setdefault(link.name, {})[human_bytes(times.message_bytes)] = None
    for name, reaches in untimed.items():
        yield f"{name} was not timed at {', '.join(reaches)}: its part of the bands is wide"


def _choose(
    options: PlanOptions, sensitivity: Path, layout: Layout, serving: Serving, console: Console
) -> "tuple[PlanChoice, LayoutMeasurer | None]":
    """Return the fastest layout within the budget on this group, and the measurer, if layouts were measured."""
    costs = read_sensitivity(sensitivity)
    _check_costs(options, layout, costs, serving.ranks)
    nats = np.full((layout.num_layers, len(KINDS)), np.inf)  # where none was measured
    nats[:, 0] = 0.0
    for cost in costs.costs:
        if cost.layer or "+" not in cost.kind:  # no MLP enters the first, so that is spd
            nats[cost.layer, KINDS.index(cost.kind)] = max(cost.nats, 0.0)  # below 0 is noise
    times = pass_parts(serving, costs.sync_tp_size)
    constant, seconds = kind_seconds(times, serving.passes, layout.num_layers)
    tables = LayerTables(seconds, nats, constant, costs.sync_tp_size)
    budget, measurer, limit = options.max_nats(costs.dense_nll), None, options.verify or 0
    if limit:
        from ladderize.plan.measure import LayoutMeasurer

        measurer = LayoutMeasurer(options, costs, options.out or sensitivity, console)
    choice = choose_layout(tables, budget, measurer.measure if measurer else None, limit, console=console)
    return replace(choice, costs_file=str(sensitivity), aligned=costs.aligned), measurer


def _check_costs(options: PlanOptions, layout: Layout, costs: SensitivityDocument, ranks: int) -> None:
    path, size = options.sensitivity, costs.sync_tp_size
    if not layout.is_dense:
        raise UserError(
            f"{options.name} is not dense ({layout}); a layout is chosen for the dense model that it was made of"
        )
    if costs.mode != "layers":
        raise UserError(f"{path} does not tell what a layer alone costs; measure that with --mode layers")
    if costs.num_layers != layout.num_layers:
        raise UserError(f"{path} is of a model of {costs.num_layers} layers, but this one has {layout.num_layers}")
    if options.model is not None:  # the weights are downloaded if they are a hub's and not here
        if fingerprint(open_checkpoint(options.model, sound="any")) != costs.fingerprint:
            raise UserError(f"{path} was measured on another model (their fingerprints differ); measure this one")
    elif options.verify is not None:
        raise UserError("--verify measures a checkpoint, and --shape has no weights; name the checkpoint instead")
    if size is not None and size % ranks and ranks % size:
        raise UserError(
            f"{path} has delayed or dropped sync points of {size} virtual ranks, of which --tp-size {ranks} is neither"
            f" a divisor nor a multiple; measure it with --sync-tp-size {ranks}, or plan for other ranks"
        )


def _write_recipe(path: Path, choice: PlanChoice) -> None:
    """Write ``--recipe-out``, whole or not at all: YAML that ``convert`` takes, with its origin in comments."""
    chosen, recipe = choice.chosen, Recipe.from_layout(choice.chosen.as_layout).to_dict()
    file_name = "".join(letter if letter.isprintable() else "?" for letter in choice.costs_file)
    comments = [
        f"# Chosen by `ladderize plan`, by the costs of {file_name}.",
        f"# {chosen.layout}. {chosen.speedup:.3f}x of the dense layout's speed, predicted.",
        f"# Perplexity: {chosen.cost_sentence}.",
    ]
    if choice.aligned is not None:
        comments.append("# These costs are of aligned models: align what is made of this, `adapt --method align`.")
    with replacement(resolved(path, "--recipe-out ")) as file:
        file.write("\n".join([*comments, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)]))
