"""``ladderize adapt --method align``: solve a converted model's projections anew, layer by layer, by least squares.

Calibration windows pass through the dense and the converted model side by side.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.layers.align_layer import (
    READS_ATTENTION,
    READS_MLP,
    WRITES_ATTENTION,
    WRITES_MLP,
    LayerAlignment,
    Side,
    Streams,
    states_bytes,
)
from ladderize.adapt.layers.layer_files import LayerFiles, LayerWeights, StudentBlocks
from ladderize.adapt.layers.options import AlignOptions, AlignSettings, widest_input
from ladderize.adapt.layers.rewrite import LayerJob, LayerMethod, RewrittenLayers, rewrite
from ladderize.adapt.layers.ridge import ProjectionReport
from ladderize.adapt.layers.windows import Windows
from ladderize.adapt.methods import ALIGN
from ladderize.blocks import Blocks
from ladderize.console import Console, code_span, human_bytes
from ladderize.files.records import Record
from ladderize.layout import Layout, format_ranges
from ladderize.memory import check_room

GROUPS = {
    "attention reads": READS_ATTENTION,
    "attention writes": WRITES_ATTENTION,
    "MLP reads": READS_MLP,
    "MLP writes": WRITES_MLP,
}


@dataclass(frozen=True)
class LayerReport(Record):
    """The result for one layer, its projections in the order in which they were solved."""

    layer: int
    projections: list[ProjectionReport]
    seconds: float

    def errors(self, group: str) -> str:
        """Return the mean errors of one of ``GROUPS``, before and after."""
        members = [entry for entry in self.projections if entry.projection in GROUPS[group]]
        before, after = (
            sum(getattr(entry, name) for entry in members) / len(members) for name in ("error_before", "error_after")
        )
        return f"{before:.1%}, kept" if all(each.ridge is None for each in members) else f"{before:.1%} to {after:.1%}"


@dataclass(frozen=True)
class Alignment(RewrittenLayers):
    """The content of alignment.json; docs/files.md explains the keys."""

    RESULT = "aligned"
    MEANING = (
        "errors: squared, on held-out tokens, in % of the squared values aimed at; reads: q, k, v; gate, up. writes:"
        " o; down; they aim at the dense model's stream"
    )
    options: AlignSettings
    layers: list[LayerReport]

    def rows(self) -> list[dict[str, str]]:
        return [{"layer": str(each.layer), **{name: each.errors(name) for name in GROUPS}} for each in self.layers]

    def done(self) -> str:
        layers = format_ranges([report.layer for report in self.layers])
        return (
            f"**Alignment.** The projections of layers {layers} were solved anew by least squares, towards"
            f" {code_span(self.teacher)} (`align`)."
        )


def align(job: LayerJob, settings: AlignSettings) -> None:
    """Solve the projections of every layer of ``job.student.layers`` that ``job.files`` does not hold yet, in order.

    All ranks call it; each has a part of the windows.
    Raises UserError where the states are NaN or infinite, or do not fit in memory; finished layers stay in
    ``job.files``.
    """
    teacher, student, files, ranks, console = job.teacher, job.student, job.files, job.ranks, job.console
    windows = with_random(job.windows, teacher.config, settings)
    done = ranks.broadcast([layer for layer in student.layers if files.has(layer)])
    if done:
        console.note(f"layers up to {done[-1]} are already aligned")
    if len(done) == len(student.layers):
        return
    check_states_room(states_bytes(teacher, windows, ranks), "--samples", processes=ranks.local_size)
    count, tokens = len(job.windows.train), job.windows.train.numel()
    console.note(
        f"aligning {len(student.layers) - len(done)} layers on {tokens:,} tokens ({count} windows of"
        f" {tokens // count}), {len(job.windows.heldout)} windows held out, on {ranks.words};"
        f" {human_bytes(states_bytes(teacher, windows, ranks))} of states in memory"
    )
    warn_of_few(tokens, teacher.config, "--samples", console)
    streams = Streams(teacher, windows, ranks)
    layers = aligned_layers(
        teacher, job.converted, job.dense_weights, student, streams, settings, done=done, files=files
    )
    with console.progress("aligning", len(student.layers), done=len(done)) as advance:
        for layer in layers:
            if layer.reports and ranks.is_main:
                files.save(layer.index, layer.weights, LayerReport(layer.index, layer.reports, layer.seconds))
            advance(1 if layer.reports else 0)


ALIGNING = LayerMethod(
    name=ALIGN,
    key="alignment",
    document=Alignment,
    reports=("layers", LayerReport),
    run=align,
    advice="align on more data, or on data like those that the model is for",
    needs_source=True,
)


def align_checkpoint(
    model: str | Path, out: str | Path, teacher_name: str | Path, options: AlignOptions, **how: Any
) -> Alignment | None:
    """Align ``model`` with the dense ``teacher_name`` that it was converted from, and write the result to ``out``.

    how: ``overwrite``, ``verify``, ``revision`` and ``console``.
    Returns the document of alignment.json; None on other ranks than 0. Raises UserError.
    """
    return rewrite(ALIGNING, model, out, teacher_name, options, **how)


def check_states_room(needed: int, option: str, *, processes: int = 1) -> None:
    """Raise UserError unless the states of all windows fit in the host's memory.

    needed: bytes of one process.
    option: the one to lower.
    """
    check_room(needed, torch.device("cpu"), "keeping the states of all windows", f"lower {option}", processes=processes)


def warn_of_few(tokens: int, config: Mapping[str, Any], option: str, console: Console) -> None:
    """Warn where there are fewer tokens than a projection has inputs.

    option: the one that gives more.
    """
    if tokens < widest_input(config):
        console.warn(
            f"{tokens:,} tokens are fewer than the {widest_input(config):,} inputs of the widest projection: where"
            f" they say nothing the weights stay as they are; more {option} or data align better"
        )


def with_random(windows: Windows, config: Mapping[str, Any], settings: AlignSettings) -> Windows:
    """Return the windows with added windows of random tokens: ``settings.random_share`` as many in each part.

    Text of one kind says little about others: weights solved on it alone go astray wherever another kind reads them.
    Random tokens say a little about everything, need no data, and cost next to nothing on the text itself.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    parts = []
    for part in (windows.train, windows.heldout):
        count = math.ceil(settings.random_share * len(part))
        random = torch.randint(int(config["vocab_size"]), (count, part.shape[1]), generator=generator)
        parts.append(torch.cat([part, random.to(part.dtype)]))
    return Windows(*parts)


@dataclass(frozen=True)
class AlignedLayer:
    """One layer of the aligned model.

    weights: as they will be stored.
    reports: empty where nothing was solved.
    """

    index: int
    weights: dict[str, Tensor]
    reports: list[ProjectionReport]
    seconds: float


def aligned_layers(
    teacher: Blocks,
    converted: Blocks,
    dense_weights: LayerWeights,
    student: StudentBlocks,
    streams: Streams,
    settings: AlignSettings,
    *,
    done: Collection[int] = (),
    files: LayerFiles | None = None,
) -> Iterator[AlignedLayer]:
    """Yield the student's layers in order, up to the last of ``student.layers``, which are solved anew.

    converted: the student's embedding.
    dense_weights: returns the dense model's stored weights of a layer, their heads in the student's order.
    done: layers that were solved before and lie in ``files``.
    """
    dense_layout = Layout.dense(teacher.num_layers)
    streams.embed(teacher, converted)
    for index in range(student.layers[-1] + 1):
        begin = time.perf_counter()
        weights = student.weights(index)
        if files is not None and index in done:
            weights = files.weights(index)
        dense = Side(teacher, index, dense_layout, computed(dense_weights(index), teacher))
        side = Side(teacher, index, student.layout, computed(weights, teacher))
        stored = next(iter(weights.values())).dtype
        layer = LayerAlignment(dense, side, streams, ridges=settings.ridges, stored=stored)
        reports = layer.run(solve=index in student.layers and index not in done)
        # Unsolved projections keep their stored bits.
        solved = {report.projection for report in reports if report.ridge is not None}
        current = side.layer.state_dict()
        made = {
            name: current[name].to(tensor.dtype) if name.rpartition(".")[0] in solved else tensor
            for name, tensor in weights.items()
        }
        yield AlignedLayer(index, made, reports, time.perf_counter() - begin)


def computed(weights: Mapping[str, Tensor], blocks: Blocks) -> dict[str, Tensor]:
    """Return copies of the weights on the computing device, in a dtype no narrower than the stored one: a narrower one
    would round the solution twice."""
    return {
        name: tensor.to(blocks.device, torch.promote_types(tensor.dtype, blocks.dtype), copy=True)
        for name, tensor in weights.items()
    }
