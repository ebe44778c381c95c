"""``ladderize adapt --method align``: solve a converted model's projections anew, layer by layer, by least squares."""

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
)
from ladderize.adapt.layers.layer_files import LayerJob
from ladderize.adapt.layers.options import AlignOptions, widest_input
from ladderize.adapt.layers.ridge import ProjectionReport
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks
from ladderize.console import Console, human_bytes
from ladderize.files.records import Record
from ladderize.layout import Layout

RIDGES = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # tried for every projection on held-out windows, strongest first
RANDOM_SHARE = 0.25  # windows of random tokens for each window of the data (docs/adapt.md)
GROUPS = {
    "attention reads": READS_ATTENTION,
    "attention writes": WRITES_ATTENTION,
    "MLP reads": READS_MLP,
    "MLP writes": WRITES_MLP,
}
# how often the windows pass through a layer: both models' together while they are one; each in pieces; and once more
# for each of the four groups that are solved
COMMON, APART, SOLVED = 1, 3, 7


@dataclass(frozen=True)
class LayerReport(Record):
    """The result for one layer, its projections in the order in which they were solved."""

    layer: int
    projections: list[ProjectionReport]
    seconds: float

    def row(self) -> dict[str, str]:
        return {"layer": str(self.layer), **{group: self._errors(names) for group, names in GROUPS.items()}}

    def _errors(self, names: Collection[str]) -> str:
        members = [entry for entry in self.projections if entry.projection in names]
        before = sum(entry.error_before for entry in members) / len(members)
        after = sum(entry.error_after for entry in members) / len(members)
        is_kept = all(entry.ridge is None for entry in members)
        return f"{before:.1%}, kept" if is_kept else f"{before:.1%} to {after:.1%}"


def align(job: LayerJob, options: AlignOptions, ridges: Sequence[float] = RIDGES) -> None:
    """Solve the projections of every layer of the job that its files do not hold yet, in order. All ranks call it; each
    has a share of the windows. Raises UserError where the states are NaN or infinite, or do not fit in memory."""
    teacher, ranks, console, files = job.teacher, job.ranks, job.console, job.files
    windows = with_random(job.windows, teacher.config, options.seed)
    done = job.finished()
    if done:
        console.note(f"layers up to {done[-1]} are already aligned")
    if len(done) == len(job.layers):
        return
    streams = Streams(teacher, windows, ranks, readers_of(job.layout))
    count, tokens = len(job.windows.train), job.windows.train.numel()
    console.note(
        f"aligning {len(job.layers) - len(done)} layers on {tokens:,} tokens ({count} windows of"
        f" {tokens // count}), {len(job.windows.heldout)} windows held out, on {ranks.words};"
        f" {human_bytes(streams.bytes)} of states {located(streams.device)}"
    )
    warn_of_few(tokens, teacher.config, console)
    passes = layer_passes(job.layout, {*job.layers} - {*done})[: job.layers[-1] + 1]
    with console.progress("aligning, passes over the windows", sum(passes)) as advance:
        for weights, report in aligned_layers(job, streams, ridges, done):
            if report.projections and ranks.is_main and files is not None:
                files.save(report.layer, weights, report)
            advance(passes[report.layer], detail=f"{report.layer + 1} of {len(passes)} layers")


def layer_passes(layout: Layout, solved: Collection[int]) -> list[int]:
    """Return how often the windows pass through each layer."""
    first = next(iter(layout.converted_layers), layout.num_layers)
    passes = [COMMON] * first + [APART] * (layout.num_layers - first)
    return [SOLVED if layer in solved else count for layer, count in enumerate(passes)]


def warn_of_few(tokens: int, config: Mapping[str, Any], console: Console) -> None:
    if tokens < widest_input(config):
        console.warn(
            f"{tokens:,} tokens are fewer than the {widest_input(config):,} inputs of the widest projection: where"
            " they say nothing the weights stay as they are; more data align better"
        )


def with_random(windows: Windows, config: Mapping[str, Any], seed: int = 0) -> Windows:
    """Return the windows with added windows of random tokens. Weights solved on text of one kind alone go astray
    wherever another kind reads them; random tokens say a little about everything, and need no data."""
    generator = torch.Generator().manual_seed(seed)

    def extended(ids: Tensor) -> Tensor:
        count = math.ceil(RANDOM_SHARE * len(ids))
        random = torch.randint(int(config["vocab_size"]), (count, ids.shape[1]), generator=generator)
        return torch.cat([ids, random.to(ids.dtype)])

    return Windows(extended(windows.train), extended(windows.heldout))


def aligned_layers(
    job: LayerJob, streams: Streams, ridges: Sequence[float] = RIDGES, done: Collection[int] = ()
) -> Iterator[tuple[dict[str, Tensor], LayerReport]]:
    """Yield the stored weights of the model's layers in order, up to the last of the job's, which are solved anew, with
    a report: no projections where nothing was solved. Layers that are ``done`` lie in the job's files."""
    streams.embed(job.teacher, job.converted)
    for index in range(job.layers[-1] + 1):
        begin, solve = time.perf_counter(), index in job.layers and index not in done
        weights = job.files.weights(index) if job.files is not None and index in done else job.weights(index)
        dense_weights = job.dense_weights(index)
        made, reports = aligned_layer(streams, index, job.layout, weights, dense_weights, ridges, solve=solve)
        yield made, LayerReport(index, reports, time.perf_counter() - begin)


def aligned_layer(
    streams: Streams,
    index: int,
    layout: Layout,
    weights: Mapping[str, Tensor],
    dense_weights: Mapping[str, Tensor],
    ridges: Sequence[float] = RIDGES,
    *,
    solve: bool,
    leave: bool = True,
) -> tuple[dict[str, Tensor], list[ProjectionReport]]:
    """Return a layer's weights as they will be stored, and what was solved; the streams have passed it. ``solve`` and
    ``leave`` are those of ``LayerAlignment.run``."""
    teacher = streams.blocks
    dense = Side(teacher, index, Layout.dense(layout.num_layers), computed(dense_weights, teacher))
    side = Side(teacher, index, layout, computed(weights, teacher))
    stored = {name: tensor.dtype for name, tensor in weights.items()}
    reports = LayerAlignment(dense, side, streams, ridges, stored).run(solve=solve, leave=leave)
    # Unsolved projections keep their stored bits.
    solved = {report.projection for report in reports if report.ridge is not None}
    current, made = side.layer.state_dict(), dict(weights)
    for name, dtype in stored.items():
        if name.rpartition(".")[0] in solved:
            made[name] = current[name].to(dtype)
    return made, reports


def computed(weights: Mapping[str, Tensor], blocks: Blocks) -> dict[str, Tensor]:
    """Return copies of the weights on the computing device, in a dtype no narrower than the stored one: a narrower one
    would round the solution twice."""
    return {
        name: tensor.to(blocks.device, torch.promote_types(tensor.dtype, blocks.dtype), copy=True)
        for name, tensor in weights.items()
    }
