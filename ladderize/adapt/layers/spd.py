"""``ladderize spd``: sensitivity, head grouping, repair and conversion in one command, with the gain of each step.

The paper's recipe (arXiv 2502.20727, section 4) with two changes: every dropped block is repaired, also insensitive
ones, and by default by alignment (least squares) instead of distillation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ladderize.adapt.data_files import data_files
from ladderize.adapt.layers.align import LayerReport, align
from ladderize.adapt.layers.block_trainer import BlockReport
from ladderize.adapt.layers.distill import distill
from ladderize.adapt.layers.head_grouping import freedom, group_heads, permuted_weights
from ladderize.adapt.layers.layer_files import LayerFolder, StudentBlocks
from ladderize.adapt.layers.measures import Contender, heldout_measures, loaded
from ladderize.adapt.layers.options import AlignSettings, DistillSettings, SpdOptions, default_tokens, layers_to_align
from ladderize.adapt.layers.rewrite import CheckpointRun, LayerJob, WindowData, measured_note
from ladderize.adapt.layers.sensitivity import measure_sensitivity
from ladderize.adapt.layers.windows import Windows, training_windows
from ladderize.blocks import Blocks, compute_dtype, open_checkpoint, stored_dtype
from ladderize.checkpoint.config import kv_head_count
from ladderize.checkpoint.tensors import fingerprint
from ladderize.choices import Dtype
from ladderize.console import SILENT, Console
from ladderize.convert.heads import HEAD_MAP, GroupingReport, HeadMap, read_head_map
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import LayerCost, ascending, read_sensitivity
from ladderize.errors import UserError
from ladderize.eval.options import SensitivityOptions
from ladderize.eval.results import Perplexity
from ladderize.files.documents import write_json
from ladderize.files.records import Record
from ladderize.layout import Layout, check_split, format_ranges
from ladderize.ranks.group import Ranks, join_ranks

SPD_FILE = "spd.json"
SENSITIVITY = "sensitivity.json"  # in the work folder, and in OUT
# Advice where a step made the model worse.
ADVICE_AFTER = {
    "head grouping": "--head-grouping none",
    "alignment": "more --samples",
    "distillation": "a lower --lr, or more --samples",
}


@dataclass(frozen=True)
class SpdBlock(Record):
    """A block, its sensitivity, and the steps that it got; None where it got none."""

    block: int
    sensitivity: float
    dropped: bool
    grouping: GroupingReport | None
    alignment: LayerReport | None
    distillation: BlockReport | None


@dataclass(frozen=True)
class SpdDocument(Record):
    """The content of spd.json: the steps that each block got and why, with their figures; docs/files.md explains the
    keys."""

    model: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    repair: str
    perplexity: dict[str, Perplexity]
    divergence: dict[str, float]
    blocks: list[SpdBlock]
    data: WindowData
    options: DistillSettings
    dtype: str


def spd(
    model: str | Path,
    out: str | Path,
    options: SpdOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    console: Console = SILENT,
) -> SpdDocument | None:
    """Make the SPD checkpoint ``out`` of the dense ``model``.

    Returns the document of spd.json; None on other ranks than 0. A work folder keeps every step until OUT is written,
    so a killed run resumes. Several processes (accelerate launch, torchrun) share the work, and rank 0 writes.
    Raises UserError.
    """
    model, out = str(model), str(out)
    data_files(options.data)  # raises UserError where they are missing
    ranks = join_ranks(options.device)
    checkpoint = open_checkpoint(model, options.revision)
    dense = Layout.from_config(checkpoint.config)
    if not dense.is_dense:
        raise UserError(
            f"{model} is not dense ({dense}); only a dense model has sync points to drop by their sensitivity"
        )
    check_split(checkpoint.config, options.sync_tp_size, name="--sync-tp-size")
    run = CheckpointRun(out, SPD_FILE, (checkpoint,), ranks, console, overwrite=overwrite)
    with console.stage("reading the data"):
        windows = training_windows(checkpoint, options)
    calibration = windows.train[: options.calibration_samples].numpy()
    dtype = compute_dtype(options.dtype, stored_dtype(checkpoint))
    teacher = Blocks(checkpoint, dtype, ranks.device)
    stored = Blocks(checkpoint, getattr(torch, stored_dtype(checkpoint)), ranks.device)
    data, settings = WindowData.of(windows, options), options.settings()
    about: dict[str, Any] = {
        "data": data.to_dict(),
        "options": settings.to_dict(),
        "dtype": str(dtype).removeprefix("torch."),
    }
    names = ("sync_tp_size", "spd_fraction", "repair", "head_grouping")
    asked = {name: getattr(options, name) for name in names}
    identity = {"method": "spd", "model": fingerprint(checkpoint), "calibration": len(calibration), **asked, **about}
    opened = run.open_work(identity)
    if opened is None:
        return run.written(SpdDocument)
    with opened as work:
        measure(model, options, calibration, data, about["dtype"], work, ranks, console)
        costs = read_sensitivity(work.folder / SENSITIVITY).costs
        dropped = least_sensitive(costs, options.spd_fraction)
        layout = Layout.from_layers(dense.num_layers, spd=dropped, sync_tp_size=options.sync_tp_size)
        head_map = group(teacher, dropped, options, calibration, work, ranks, console)
        orders = {} if head_map is None else head_map.orders
        grouped = partial(permuted_weights, stored, orders)
        aligns = options.repair == "align"
        layers = layers_to_align(layout) if aligns else tuple(dropped)
        count = max(1, default_tokens(teacher.config) // windows.train.shape[1]) if aligns else len(windows.train)
        learnt = Windows(windows.train[:count], windows.heldout)
        student = StudentBlocks(layout, layers, grouped)
        job = LayerJob(teacher, teacher, student, grouped, learnt, work.files, ranks, console)
        if aligns:
            align(job, AlignSettings(seed=options.seed))
        else:
            distill(job, settings)
        ranks.barrier()

        def repaired(layer: int) -> Mapping[str, torch.Tensor]:
            return loaded(work.files, layer, teacher) if layer in layers else permuted_weights(teacher, orders, layer)

        steps = {"dense": Contender(teacher, dense), "sync points dropped": Contender(teacher, layout)}
        if head_map is not None:
            steps["+ head grouping"] = Contender(teacher, layout, partial(permuted_weights, teacher, orders))
        steps["+ alignment" if aligns else "+ distillation"] = Contender(teacher, layout, repaired)
        with console.stage("measuring held-out perplexities"):
            measured = heldout_measures(steps, windows.heldout, ranks)
        if not ranks.is_main:
            return None
        if (worse := made_worse(measured.perplexity)) is not None:
            console.warn(worse)
        document = SpdDocument(
            model=model,
            out=out,
            layout=str(layout),
            repair=options.repair,
            perplexity=measured.perplexity,
            divergence=measured.divergence,
            blocks=[
                SpdBlock(
                    cost.layer,
                    cost.sensitivity,
                    cost.layer in dropped,
                    grouping=head_map.report.get(cost.layer) if head_map is not None else None,
                    alignment=work.files.report(LayerReport, cost.layer) if aligns and cost.layer in layers else None,
                    distillation=work.files.report(BlockReport, cost.layer)
                    if not aligns and cost.layer in layers
                    else None,
                )
                for cost in costs
            ],
            data=data,
            options=settings,
            dtype=about["dtype"],
            **layout.to_config(),
        )
        done = {"layers": format_ranges(layers), **({"data": about["data"]} if aligns else about)}
        changes = Changes(
            head_map=head_map,
            replace=work.files.tensors(layers),
            record={"alignment" if aligns else "distillation": done},
            extra_files={SENSITIVITY: (work.folder / SENSITIVITY).read_text()},
            note=measured_note(measured.perplexity, data),
        )
        run.write(work, model, Recipe.from_layout(layout), document, changes, revision=options.revision, verify=verify)
    return document


def measure(
    model: str,
    options: SpdOptions,
    calibration: np.ndarray,
    data: WindowData,
    dtype: str,
    work: LayerFolder,
    ranks: Ranks,
    console: Console,
) -> None:
    """Measure the backward sweep and write sensitivity.json, unless it is there."""
    path = work.folder / SENSITIVITY
    if ranks.broadcast(path.is_file()):
        return
    sweep = SensitivityOptions(
        data=options.data,
        mode="sweep",
        sync_tp_size=options.sync_tp_size,
        samples=len(calibration),
        seed=options.seed,
        dtype=cast(Dtype, dtype),
        device=str(ranks.device),
        revision=options.revision,
    )
    document = measure_sensitivity(model, sweep, windows=calibration, sha256=data.sha256, console=console, ranks=ranks)
    if ranks.is_main:
        write_json(path, document.to_dict())
    ranks.barrier()


def least_sensitive(costs: Sequence[LayerCost], fraction: float) -> list[int]:
    """Return the layers to drop, ascending: the least sensitive ``fraction`` of all, at least one."""
    return sorted(cost.layer for cost in ascending(costs)[: max(1, round(fraction * len(costs)))])


def group(
    teacher: Blocks,
    layers: Sequence[int],
    options: SpdOptions,
    calibration: np.ndarray,
    work: LayerFolder,
    ranks: Ranks,
    console: Console,
) -> HeadMap | None:
    """Return the head map of the dropped blocks; None where heads stay.

    The ranks share the blocks. A map that is there already is read.
    """
    if options.head_grouping == "none":
        return None
    kv_heads = kv_head_count(teacher.config)
    if kv_heads % options.sync_tp_size:
        console.note(f"heads stay in their order: {options.sync_tp_size} ranks share {kv_heads} KV heads")
        return None
    path = work.folder / HEAD_MAP
    if not ranks.broadcast(path.is_file()):
        mine = layers[ranks.rank :: ranks.size]
        console.note(f"grouping the heads of {len(layers)} blocks: {freedom(kv_heads, options.sync_tp_size)}")
        with console.progress("grouping heads", max(mine, default=-1) + 1) as advance:
            part = group_heads(
                teacher,
                mine,
                options.sync_tp_size,
                calibration,
                criterion=options.head_grouping,
                seed=options.seed,
                advance=advance,
            )
        for other in ranks.gather(part):
            part.orders.update(other.orders)
            part.report.update(other.report)
        if ranks.is_main:
            write_json(path, part.to_dict())
        ranks.barrier()
    return read_head_map(path)


def made_worse(measured: Mapping[str, Perplexity]) -> str | None:
    """Return a warning where a step raised the held-out perplexity by as much as is shown; else None."""
    steps = list(measured.items())[1:]
    for (before, start), (name, end) in pairwise(steps):
        if not round(end.perplexity, 4) <= round(start.perplexity, 4):  # NaN is no improvement
            step = name.removeprefix("+ ")
            return (
                f"{step} raised the held-out perplexity from {start.perplexity:.4f} ({before}) to {end.perplexity:.4f};"
                f" try {ADVICE_AFTER[step]}"
            )
    return None
