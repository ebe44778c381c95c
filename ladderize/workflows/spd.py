"""``ladderize spd``: sensitivity, classes, head grouping, distillation, conversion, and what each step won, in one command.

The paper's recipe (arXiv 2502.20727, section 4): blocks with S <= tau1 are dropped as they are; those up to tau2 are distilled; those
above have their heads grouped first. With the criterion ``error`` heads are grouped for every block that is distilled: it costs nothing
at inference.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from ladderize.adapt.blockwise import (
    BlockwiseOptions,
    announce,
    compute_dtype,
    heldout_perplexities,
    loaded,
    perplexity_rows,
    training_record,
    training_windows,
    work_folder,
)
from ladderize.adapt.distill import Student, distill
from ladderize.adapt.head_grouping import group_heads
from ladderize.adapt.work import WorkFolder
from ladderize.blocks import Blocks, open_checkpoint, stored_dtype
from ladderize.console import Console, UserError, to_json
from ladderize.convert import output
from ladderize.convert.checkpoint import read_json
from ladderize.convert.heads import HeadMap, permute_heads, read_head_map
from ladderize.convert.llama import kv_head_count
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.recipe import Recipe
from ladderize.convert.selection import CLASSES, IN_SENSITIVE, Selection
from ladderize.eval.results import write_json
from ladderize.eval.sensitivity import TAU2, SensitivityOptions, measure_sensitivity
from ladderize.layout import Layout, format_ranges

GROUPINGS = ("error", "paper", "none")
__all__ = ["GROUPINGS", "SpdOptions", "block_rows", "perplexity_rows", "run_spd"]


@dataclass(frozen=True)
class SpdOptions:
    """See ``ladderize spd --help``. training: data, windows and training; calibration_samples: of them for sensitivity and grouping."""

    sync_tp_size: int
    training: BlockwiseOptions
    spd_fraction: float | None = 0.7
    max_ppl_increase: float | None = None
    calibration_samples: int = 128
    tau1: float | None = None
    tau2: float = TAU2
    head_grouping: str = "error"
    revision: str | None = None


def run_spd(model: str, out: str, options: SpdOptions, *, console: Console, overwrite: bool = False, verify: bool = True) -> dict[str, Any]:
    """From the dense ``model`` to the SPD checkpoint ``out``; returns the document of spd.json.

    Every step is kept in a work folder beside OUT until OUT is there, so a killed run goes on. Of several processes (accelerate launch,
    torchrun) rank 0 measures and groups, and all distil.
    """
    training = options.training
    state = PartialState(cpu=training.device == "cpu")
    device = state.device
    checkpoint = open_checkpoint(model, options.revision)
    output.check_target(Path(out), checkpoint.folder, overwrite=overwrite)
    Layout.from_layers(Layout.from_config(checkpoint.config).num_layers, spd=[0], sync_tp_size=options.sync_tp_size).check_model(
        checkpoint.config
    )
    windows = training_windows(checkpoint, training)
    dtype = compute_dtype(checkpoint, training.dtype)
    folder = work_folder(out, training)
    steps = Steps(model, options, folder, console)
    with state.main_process_first():
        if state.is_main_process:
            steps.measure(str(device))
    recipe, selection = steps.select(checkpoint.config)
    layout = recipe.layout(Layout.from_config(checkpoint.config))
    teacher = Blocks(checkpoint, dtype, device)
    with state.main_process_first():
        head_map = steps.group(teacher, selection)
    stored = Blocks(checkpoint, getattr(torch, stored_dtype(checkpoint)), device)
    student = Student(layout, tuple(to_distil(selection)), lambda layer: permuted(stored, layer, head_map))
    with state.main_process_first():
        work = WorkFolder(folder / "blocks", {
            "method": "spd", "model": selection.sensitivity.fingerprint, "layout": str(layout),
            "head_map": head_map.to_dict()["layers"] if head_map else None, **training_record(windows, training, dtype),
        })  # fmt: skip
    if student.layers:
        announce(teacher, student, windows, training, folder, console)
        distill(teacher, student, windows, training.distill, work, console, rank=state.process_index, ranks=state.num_processes)
    state.wait_for_everyone()
    if not state.is_main_process:
        return {}
    document = {
        "model": model, "out": out, "layout": str(layout), **layout.to_config(),
        "spd_selection": selection.to_dict(),
        "perplexity": perplexities(teacher, layout, head_map, work, student, windows.heldout),
        "blocks": block_table(selection, head_map, work, student),
        **training_record(windows, training, dtype),
    }  # fmt: skip
    record = (
        {"distillation": {"layers": format_ranges(student.layers), **training_record(windows, training, dtype)}} if student.layers else {}
    )
    extra = {"sensitivity.json": steps.sensitivity.read_text(), "spd.json": to_json(document) + "\n"}
    convert_checkpoint(
        model, out, steps.recipe(), revision=options.revision, overwrite=overwrite, verify=verify, head_map=head_map,
        replace=work.tensors(student.layers), record=record, extra_files=extra, console=console,
    )  # fmt: skip
    work.remove()
    steps.remove()
    return document


@dataclass(frozen=True)
class Steps:
    """The steps before the training, each with its file in the work folder."""

    model: str
    options: SpdOptions
    folder: Path
    console: Console

    @property
    def sensitivity(self) -> Path:
        return self.folder / "sensitivity.json"

    @property
    def head_map(self) -> Path:
        return self.folder / "head_map.json"

    def measure(self, device: str) -> None:
        """Fill sensitivity.json, from where a killed run left it."""
        training = self.options.training
        options = SensitivityOptions(
            data=training.data, sync_tp_size=self.options.sync_tp_size, samples=self.options.calibration_samples, seq_len=training.seq_len,
            seed=training.distill.seed, tau1=self.options.tau1, tau2=self.options.tau2, dtype=training.dtype, device=device,
            revision=self.options.revision,
        )  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        previous = read_json(self.sensitivity) if self.sensitivity.is_file() else None
        measure_sensitivity(
            self.model, options, console=self.console, previous=previous, save=lambda document: write_json(self.sensitivity, document)
        )

    def recipe(self) -> Recipe:
        return Recipe(
            spd="auto", sync_tp_size=self.options.sync_tp_size, sensitivity=str(self.sensitivity),
            spd_fraction=self.options.spd_fraction, max_ppl_increase=self.options.max_ppl_increase,
        )  # fmt: skip

    def select(self, config: Mapping[str, Any]) -> tuple[Recipe, Selection]:
        """Which blocks to drop."""
        recipe, selection = self.recipe().resolve(Layout.from_config(config))
        assert selection is not None
        return recipe, selection

    def group(self, teacher: Blocks, selection: Selection) -> HeadMap | None:
        """The head map of the blocks that get one, read if it was computed before."""
        layers = to_group(selection, self.options.head_grouping)
        if not layers:
            return None
        if self.head_map.is_file():
            head_map = read_head_map(self.head_map)
            if sorted(head_map.orders) != layers or head_map.sync_tp_size != self.options.sync_tp_size:
                raise UserError(f"{self.head_map} is of a run with other options; delete {self.folder}, or choose another --work-dir")
            return head_map
        training = self.options.training
        drawn = training_windows(teacher.checkpoint, training).train[: self.options.calibration_samples]
        with self.console.progress("grouping heads", max(layers) + 1) as advance:
            head_map = group_heads(
                teacher, layers, self.options.sync_tp_size, drawn.numpy(), criterion=self.options.head_grouping,
                seed=training.distill.seed, advance=advance,
            )  # fmt: skip
        write_json(self.head_map, head_map.to_dict())
        return head_map

    def remove(self) -> None:
        for path in (self.sensitivity, self.head_map):
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


def to_distil(selection: Selection) -> list[int]:
    """The dropped blocks that are not in-sensitive."""
    return [row["block"] for row in selection.rows if row["dropped"] and row["class"] != IN_SENSITIVE]


def to_group(selection: Selection, grouping: str) -> list[int]:
    """Blocks whose heads are grouped: all that are distilled; with the paper's criterion the extremely sensitive ones, as there."""
    if grouping == "none":
        return []
    extreme = CLASSES[-1]
    return [
        row["block"] for row in selection.rows if row["block"] in to_distil(selection) and (grouping != "paper" or row["class"] == extreme)
    ]


def permuted(blocks: Blocks, layer: int, head_map: HeadMap | None) -> dict[str, Tensor]:
    """A layer's weights in the head map's order."""
    weights = blocks.weights(layer)
    if head_map is None or layer not in head_map.orders:
        return weights
    return permute_heads(weights, head_map.orders[layer], blocks.config["num_attention_heads"], kv_head_count(blocks.config))


def perplexities(
    blocks: Blocks, layout: Layout, head_map: HeadMap | None, work: WorkFolder, student: Student, heldout: Tensor
) -> dict[str, Any]:
    """Held-out perplexity of the dense model and after each step."""
    dense = Layout.dense(layout.num_layers)
    variants = {
        "dense": lambda layer: blocks.layer(layer, dense),
        "sync points dropped": lambda layer: blocks.layer(layer, layout),
        "+ head grouping": lambda layer: blocks.layer(layer, layout, permuted(blocks, layer, head_map)),
        "+ distillation": lambda layer: blocks.layer(
            layer, layout, loaded(work, layer, blocks) if layer in student.layers else permuted(blocks, layer, head_map)
        ),
    }
    if head_map is None:
        del variants["+ head grouping"]
    if not student.layers:
        del variants["+ distillation"]
    return heldout_perplexities(blocks, variants, heldout)


def block_table(selection: Selection, head_map: HeadMap | None, work: WorkFolder, student: Student) -> list[dict[str, Any]]:
    """What each block got and why, with the figures of each step."""
    table = []
    for row in selection.rows:
        block = row["block"]
        table.append({
            **row,
            "grouping": head_map.report.get(block) if head_map is not None else None,
            "distillation": work.report(block) if block in student.layers else None,
        })  # fmt: skip
    return table


def block_rows(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """What each block got, for people."""
    rows = []
    for row in document["blocks"]:
        grouping, distillation = row["grouping"], row["distillation"]
        rows.append({
            "block": str(row["block"]),
            "S": f"{row['sensitivity']:+.4f}",
            "class": row["class"],
            "attention sync": "dropped" if row["dropped"] else "kept",
            "heads grouped: error": f"{grouping['error_before']:.2e} to {grouping['error_after']:.2e}" if grouping else "",
            "distilled: share lost": (
                f"{distillation['share_lost_before']:.1%} to {distillation['share_lost_after']:.1%}" if distillation else ""
            ),
        })  # fmt: skip
    return rows
