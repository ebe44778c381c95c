"""Alignment of a converted model, layer by layer, with calibration windows through the dense and the converted model
side by side."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.align.layer import LayerAlignment
from ladderize.adapt.align.options import AlignSettings
from ladderize.adapt.align.reports import LayerReport, ProjectionReport
from ladderize.adapt.align.sides import Side
from ladderize.adapt.align.streams import Streams
from ladderize.adapt.blockwise.block_trainer import StudentBlocks
from ladderize.adapt.blockwise.distill import block_key
from ladderize.adapt.blockwise.folder import LayerFiles
from ladderize.adapt.blockwise.windows import Windows
from ladderize.blocks import Blocks
from ladderize.console import Console
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks

TOKENS_AT_ONCE = 8192


def align(
    teacher: Blocks,
    own: Blocks,
    dense_weights: Callable[[int], Mapping[str, Tensor]],
    student: StudentBlocks,
    windows: Windows,
    settings: AlignSettings,
    files: LayerFiles,
    ranks: Ranks,
    console: Console,
    *,
    about: Mapping[str, Any],
    max_memory: int,
) -> None:
    """Solve the projections of every layer of ``student.layers`` that ``files`` does not hold yet, in order. All ranks
    call it; each has a part of the windows.

    own: the student's embedding. dense_weights: the dense model's layers as they are stored, their heads in the
    student's order. about: what the result depends on besides the student. Raises UserError where states are no
    numbers; finished layers stay in ``files``.
    """
    keys = layer_keys(student, about)
    done = ranks.broadcast([layer for layer in student.layers if files.has(layer, partial(keys.__getitem__, layer))])
    # a layer is solved on what the layers before it write
    done = [layer for layer in done if all(before in done for before in student.layers if before < layer)]
    if done:
        console.note(f"layers up to {done[-1]} are already aligned")
    if len(done) == len(student.layers):
        return
    path = files.folder / f"states-{ranks.rank}"
    windows = with_random(windows, teacher.config, settings)
    streams = Streams(teacher, windows, ranks, batch_tokens=TOKENS_AT_ONCE, max_memory=max_memory, path=path)
    try:
        with console.progress("aligning", student.layers[-1] + 1) as advance:
            known = {layer: partial(files.weights, layer) for layer in done}
            for layer in aligned_layers(teacher, own, dense_weights, student, streams, settings, known):
                if layer.reports and ranks.is_main:
                    report = LayerReport(layer.index, layer.reports, layer.seconds)
                    files.save(layer.index, layer.weights, report, keys[layer.index])
                advance(1)
    finally:
        streams.close()


def with_random(windows: Windows, config: Mapping[str, Any], settings: AlignSettings) -> Windows:
    """The windows, and ``settings.random_share`` as many of random tokens in each of the two parts.

    Text of one kind says little about others: solved on it alone, weights go astray wherever another kind reads them.
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
    """weights: as they will be stored. reports: empty where nothing was solved."""

    index: int
    weights: dict[str, Tensor]
    reports: list[ProjectionReport]
    seconds: float


def aligned_layers(
    teacher: Blocks,
    own: Blocks,
    dense_weights: Callable[[int], Mapping[str, Tensor]],
    student: StudentBlocks,
    streams: Streams,
    settings: AlignSettings,
    known: Mapping[int, Callable[[], dict[str, Tensor]]],
) -> Iterator[AlignedLayer]:
    """The student's layers up to the last of ``student.layers``, one after the other, those solved anew that are not
    ``known``."""
    dense_layout = Layout.dense(teacher.num_layers)
    first = min(*student.layers, *student.layout.converted_layers)
    alike = not teacher.ends_differ(own)  # as long as it is true both models have the same streams
    with torch.no_grad():
        for name, model in (("dense", teacher), ("complete", own), ("visible", own)):
            streams.fill(name, partial(_embedded, model, streams))
    for index in range(student.layers[-1] + 1):
        begin = time.perf_counter()
        initial = {name: tensor.cpu() for name, tensor in student.weights(index).items()}
        weights = known[index]() if index in known else initial
        dense = Side(teacher, index, dense_layout, computed(dense_weights(index), teacher))
        side = Side(teacher, index, student.layout, computed(weights, teacher))
        alike = alike and index < first and same_weights(dense, side)
        stored = next(iter(initial.values())).dtype
        layer = LayerAlignment(dense, side, streams, ridges=settings.ridges, stored=stored)
        reports = layer.pass_through() if alike else layer.run(solve=index in student.layers and index not in known)
        yield AlignedLayer(index, solved_weights(side, weights, reports), reports, time.perf_counter() - begin)


def _embedded(model: Blocks, streams: Streams, rows: Tensor) -> Tensor:
    return model.embed(streams.ids[rows]).float()


def same_weights(one: Side, other: Side) -> bool:
    """Whether two layers hold the same numbers, in whichever dtypes."""
    theirs = other.layer.state_dict()
    return all(bool((tensor == theirs[name]).all()) for name, tensor in one.layer.state_dict().items())


def solved_weights(own: Side, initial: Mapping[str, Tensor], reports: Sequence[ProjectionReport]) -> dict[str, Tensor]:
    """A layer's weights as they will be stored: what was not solved as it was, bit by bit."""
    solved = {report.projection for report in reports if report.ridge is not None}
    current = own.layer.state_dict()
    return {
        name: current[name].to(tensor.dtype) if name.rpartition(".")[0] in solved else tensor
        for name, tensor in initial.items()
    }


def computed(weights: Mapping[str, Tensor], blocks: Blocks) -> dict[str, Tensor]:
    """The same on the device that is computed on, always copies of their own: no narrower than they are stored, or
    what is solved would be rounded twice."""
    return {
        name: tensor.to(blocks.device, torch.promote_types(tensor.dtype, blocks.dtype), copy=True)
        for name, tensor in weights.items()
    }


def layer_keys(student: StudentBlocks, about: Mapping[str, Any]) -> dict[int, str]:
    """Of each layer to solve a hash of all that its result depends on besides the models, which the folder is about:
    itself, and every layer before it."""
    keys, digest = {}, hashlib.sha256(json.dumps([student.layout.to_config(), list(student.layers), about]).encode())
    for layer in student.layers:
        digest.update(block_key(student, layer, about).encode())
        keys[layer] = digest.hexdigest()
    return keys
