"""``ladderize adapt --method align``: solve a converted model's projections anew, layer by layer, by least squares.

Calibration windows pass through the dense and the converted model side by side.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    located,
    readers_of,
    states_bytes,
)
from ladderize.adapt.layers.layer_files import LayerFiles, LayerJob, LayerWeights, StudentBlocks
from ladderize.adapt.layers.options import widest_input
from ladderize.adapt.layers.ridge import ProjectionReport
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks
from ladderize.console import Console, human_bytes
from ladderize.files.records import Record
from ladderize.layout import Layout

RIDGES = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # tried for every projection on held-out windows, strongest first
RANDOM_SHARE = 0.25  # windows of random tokens for each window of the data (docs/adapt.md)
ERRORS = (
    "errors: squared, on held-out tokens, in % of the squared values aimed at; reads: q, k, v; gate, up. writes: o;"
    " down; they aim at the dense model's stream"
)
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

    def row(self) -> dict[str, str]:
        """Return the errors of each of ``GROUPS`` for people."""
        return {"layer": str(self.layer), **{group: self._errors(group) for group in GROUPS}}

    def _errors(self, group: str) -> str:
        members = [entry for entry in self.projections if entry.projection in GROUPS[group]]
        before, after = (
            sum(getattr(entry, name) for entry in members) / len(members) for name in ("error_before", "error_after")
        )
        return f"{before:.1%}, kept" if all(each.ridge is None for each in members) else f"{before:.1%} to {after:.1%}"


def align(job: LayerJob, seed: int = 0, ridges: Sequence[float] = RIDGES) -> None:
    """Solve the projections of every layer of ``job.student.layers`` that ``job.files`` does not hold yet, in order.

    All ranks call it; each has a part of the windows.

    seed: of the windows of random tokens.
    ridges: tried for each projection on held-out windows, as shares of the mean square of its inputs.
    Raises UserError where the states are NaN or infinite, or do not fit in memory; finished layers stay in
    ``job.files``.
    """
    teacher, student, files, ranks, console = job.teacher, job.student, job.files, job.ranks, job.console
    windows, readers = with_random(job.windows, teacher.config, seed), readers_of(student.layout)
    done = ranks.broadcast([layer for layer in student.layers if files.has(layer)])
    if done:
        console.note(f"layers up to {done[-1]} are already aligned")
    if len(done) == len(student.layers):
        return
    streams = Streams(teacher, windows, ranks, readers)
    states = states_bytes(teacher, windows, ranks, readers)
    count, tokens = len(job.windows.train), job.windows.train.numel()
    console.note(
        f"aligning {len(student.layers) - len(done)} layers on {tokens:,} tokens ({count} windows of"
        f" {tokens // count}), {len(job.windows.heldout)} windows held out, on {ranks.words};"
        f" {human_bytes(states)} of states {located(streams.place)}"
    )
    warn_of_few(tokens, teacher.config, console)
    layers = aligned_layers(teacher, job.converted, job.dense_weights, student, streams, ridges, done=done, files=files)
    passes = layer_passes(student.layout, {*student.layers} - {*done})[: student.layers[-1] + 1]
    with console.progress("aligning, passes over the windows", sum(passes)) as advance:
        for weights, report in layers:
            if report.projections and ranks.is_main:
                files.save(report.layer, weights, report)
            advance(passes[report.layer], detail=f"{report.layer + 1} of {len(passes)} layers")


def layer_passes(layout: Layout, solved: Collection[int]) -> list[int]:
    """Return how often the windows pass through each layer: once while both models are one, else in three steps, and
    once more for each of four groups of projections that are solved."""
    first = layout.converted_layers[0]
    return [7 if layer in solved else 3 if layer >= first else 1 for layer in range(layout.num_layers)]


def warn_of_few(tokens: int, config: Mapping[str, Any], console: Console) -> None:
    if tokens < widest_input(config):
        console.warn(
            f"{tokens:,} tokens are fewer than the {widest_input(config):,} inputs of the widest projection: where"
            " they say nothing the weights stay as they are; more data align better"
        )


def with_random(windows: Windows, config: Mapping[str, Any], seed: int = 0) -> Windows:
    """Return the windows with added windows of random tokens: ``RANDOM_SHARE`` as many in each part.

    Text of one kind says little about others: weights solved on it alone go astray wherever another kind reads them.
    Random tokens say a little about everything, need no data, and cost next to nothing on the text itself.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for part in (windows.train, windows.heldout):
        count = math.ceil(RANDOM_SHARE * len(part))
        random = torch.randint(int(config["vocab_size"]), (count, part.shape[1]), generator=generator)
        parts.append(torch.cat([part, random.to(part.dtype)]))
    return Windows(*parts)


def aligned_layers(
    teacher: Blocks,
    converted: Blocks,
    dense_weights: LayerWeights,
    student: StudentBlocks,
    streams: Streams,
    ridges: Sequence[float] = RIDGES,
    *,
    done: Collection[int] = (),
    files: LayerFiles | None = None,
) -> Iterator[tuple[dict[str, Tensor], LayerReport]]:
    """Yield the student's layers in order, up to the last of ``student.layers``, which are solved anew: the weights as
    they will be stored, and a report, which names no projections where nothing was solved.

    converted: the student's embedding.
    dense_weights: returns the dense model's stored weights of a layer, in the student's order.
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
        stored = {name: tensor.dtype for name, tensor in weights.items()}
        layer = LayerAlignment(dense, side, streams, ridges=ridges, stored=stored)
        reports = layer.run(solve=index in student.layers and index not in done)
        # Unsolved projections keep their stored bits.
        solved = {report.projection for report in reports if report.ridge is not None}
        current = side.layer.state_dict()
        made = {
            name: current[name].to(tensor.dtype) if name.rpartition(".")[0] in solved else tensor
            for name, tensor in weights.items()
        }
        yield made, LayerReport(index, reports, time.perf_counter() - begin)


def computed(weights: Mapping[str, Tensor], blocks: Blocks) -> dict[str, Tensor]:
    """Return copies of the weights on the computing device, in a dtype no narrower than the stored one: a narrower one
    would round the solution twice."""
    return {
        name: tensor.to(blocks.device, torch.promote_types(tensor.dtype, blocks.dtype), copy=True)
        for name, tensor in weights.items()
    }
