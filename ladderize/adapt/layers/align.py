"""``ladderize adapt --method align``: solve a converted model's projections anew, layer by layer.

Calibration windows pass through the dense and the converted model side by side.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.layers.align_cost import TOKENS_AT_ONCE, layer_bytes, states_bytes, warn_of_few
from ladderize.adapt.layers.align_layer import LayerAlignment, Side, Streams
from ladderize.adapt.layers.align_options import AlignOptions, AlignSettings, default_tokens, layers_to_align
from ladderize.adapt.layers.align_reports import GROUPS, LayerReport, ProjectionReport
from ladderize.adapt.layers.head_grouping import permuted_weights
from ladderize.adapt.layers.layer_files import BlockFolder, LayerFiles, StudentBlocks
from ladderize.adapt.layers.rewrite import LayerJob, LayerMethod, RewrittenLayers, rewrite
from ladderize.adapt.layers.windows import Windows, training_windows
from ladderize.adapt.methods import ALIGN
from ladderize.blocks import Blocks, stored_dtype
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console, code_span, human_bytes
from ladderize.convert.heads import HEAD_MAP, read_head_map
from ladderize.layout import Layout, format_ranges
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks

LayerWeights = Callable[[int], Mapping[str, Tensor]]


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
        """Return the error of each sub-module's reads and writes, before and after."""
        return [{"layer": str(one.layer), **{name: _errors(one, name) for name in GROUPS}} for one in self.layers]

    def done(self) -> str:
        layers = format_ranges([report.layer for report in self.layers])
        return (
            f"**Alignment.** The projections of layers {layers} were solved anew by least squares, towards"
            f" {code_span(self.teacher)} (`align`)."
        )


def _errors(report: LayerReport, name: str) -> str:
    errors = report.errors(name)
    if errors is None:
        return ""
    before, after = errors
    kept = all(entry.ridge is None for entry in report.of_group(name))
    return f"{before:.1%}, kept" if kept else f"{before:.1%} to {after:.1%}"


def align_checkpoint(
    model: str | Path,
    out: str | Path,
    teacher_name: str | Path,
    options: AlignOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
    console: Console = SILENT,
) -> Alignment | None:
    """Align ``model`` with the dense ``teacher_name`` that it was converted from, and write the result to ``out``.

    Returns the document of alignment.json; None on other ranks than 0. Several processes (accelerate launch, torchrun)
    share the windows; rank 0 writes. A killed run resumes.
    Raises UserError.
    """
    how: dict[str, Any] = {"overwrite": overwrite, "verify": verify, "revision": revision, "console": console}
    return rewrite(Aligning(), model, out, teacher_name, options, **how)


class Aligning(LayerMethod[AlignOptions, Alignment]):
    """Alignment: least squares, without gradients."""

    name, key, kind, reports = ALIGN, "alignment", Alignment, ("layers", LayerReport)
    advice = "align on more data, or on data like those that the model is for"
    needs_source = True

    def layers(self, layout: Layout, ranges: str | None) -> tuple[int, ...]:
        """Return the layers to solve; without ``ranges`` all whose input differs from the dense model's."""
        return layers_to_align(layout, ranges)

    def windows(self, teacher: Checkpoint, options: AlignOptions) -> Windows:
        return training_windows(teacher, options, options.seed, options.tokens or default_tokens(teacher.config))

    def files(self, work: BlockFolder) -> LayerFiles:
        return work.aligned

    def work(self, job: LayerJob[AlignOptions]) -> None:
        teacher = job.teacher
        orders = heads_of(job.own.checkpoint)
        stored = Blocks(teacher.checkpoint, getattr(torch, stored_dtype(teacher.checkpoint)), teacher.device)
        align(
            teacher,
            job.own,
            partial(permuted_weights, stored, orders),
            job.student,
            job.windows,
            job.options.settings(),
            job.files,
            job.ranks,
            job.console,
            about=job.about,
            max_memory=job.options.max_memory,
        )


def heads_of(checkpoint: Checkpoint) -> dict[int, tuple[int, ...]]:
    """Return the head order of each layer that is stored in another order than the dense model's."""
    path = checkpoint.folder / HEAD_MAP
    return read_head_map(path).orders if path.is_file() else {}


def align(
    teacher: Blocks,
    own: Blocks,
    dense_weights: LayerWeights,
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
    """Solve the projections of every layer of ``student.layers`` that ``files`` does not hold yet, in order.

    All ranks call it; each has a part of the windows.

    own: the student's embedding.
    dense_weights: returns the dense model's stored weights of a layer, their heads in the student's order.
    about: everything that the result depends on besides the student.
    max_memory: bytes of states; more lie on disk.
    Raises UserError where states are NaN or infinite, or a layer does not fit in memory; finished layers stay in
    ``files``.
    """
    every = with_random(windows, teacher.config, settings)
    keys = layer_keys(student, about)
    done = ranks.broadcast([layer for layer in student.layers if files.has(layer, partial(keys.__getitem__, layer))])
    # A layer is solved on the outputs of the layers before it.
    done = [layer for layer in done if all(before in done for before in student.layers if before < layer)]
    if done:
        console.note(f"layers up to {done[-1]} are already aligned")
    left = student.layers[len(done) :]
    if not left:
        return
    _announce(teacher, student, left, windows, states_bytes(teacher, every, ranks), max_memory, ranks, console)
    path = files.folder / f"states-{ranks.rank}"
    streams = Streams(teacher, every, ranks, batch_tokens=TOKENS_AT_ONCE, max_memory=max_memory, path=path)
    try:
        known = {layer: partial(files.weights, layer) for layer in done}
        layers = aligned_layers(teacher, own, dense_weights, student, streams, settings, known)
        # Solving takes several times as long as passing through, so each has its own progress and time estimate.
        with console.progress("passing the windows through the layers before", left[0]) as advance:
            for _ in islice(layers, left[0]):
                advance(1)
        with console.progress("aligning", len(student.layers), done=len(done)) as advance:
            for layer in layers:
                if layer.reports and ranks.is_main:
                    report = LayerReport(layer.index, layer.reports, layer.seconds)
                    files.save(layer.index, layer.weights, report, keys[layer.index])
                advance(1 if layer.reports else 0)
    finally:
        streams.close()


def _announce(
    teacher: Blocks,
    student: StudentBlocks,
    left: Sequence[int],
    windows: Windows,
    states: int,
    max_memory: int,
    ranks: Ranks,
    console: Console,
) -> None:
    """Say which layers are solved on which data.

    left: the unfinished layers.
    states: bytes of states per process.
    Raises UserError where a layer does not fit in memory.
    """
    tokens, layer = windows.train.numel(), layer_bytes(teacher, student.layout.sync_tp_size)
    needed = f"aligning one layer ({human_bytes(layer)} with its products)"
    check_room(layer, teacher.device, needed, "choose a machine with more", processes=ranks.local_size)
    place = "in memory" if states <= max_memory else f"on disk (beyond {human_bytes(max_memory)})"
    console.note(
        f"aligning {len(left)} layers on {tokens:,} tokens ({len(windows.train)} windows of {windows.train.shape[1]}),"
        f" {len(windows.heldout)} windows held out, on {ranks.words}; {human_bytes(states)} of states {place}"
    )
    warn_of_few(tokens, teacher.config, "--samples", console)


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
    own: Blocks,
    dense_weights: LayerWeights,
    student: StudentBlocks,
    streams: Streams,
    settings: AlignSettings,
    known: Mapping[int, Callable[[], dict[str, Tensor]]],
) -> Iterator[AlignedLayer]:
    """Yield the student's layers in order, up to the last of ``student.layers``.

    Those of ``student.layers`` that are not ``known`` are solved anew.
    """
    dense_layout = Layout.dense(teacher.num_layers)
    first = min(*student.layers, *student.layout.converted_layers)
    alike = not teacher.ends_differ(own)  # while this is true both models have the same streams
    streams.embed(teacher, own)
    for index in range(student.layers[-1] + 1):
        begin = time.perf_counter()
        initial = {name: tensor.cpu() for name, tensor in student.weights(index).items()}
        weights = known[index]() if index in known else initial
        dense = Side(teacher, index, dense_layout, computed(dense_weights(index), teacher))
        side = Side(teacher, index, student.layout, computed(weights, teacher))
        current, theirs = side.layer.state_dict(), dense.layer.state_dict()
        alike = alike and index < first and all(bool((current[name] == theirs[name]).all()) for name in theirs)
        stored = next(iter(initial.values())).dtype
        layer, reports = LayerAlignment(dense, side, streams, ridges=settings.ridges, stored=stored), []
        if alike:
            layer.pass_through()
        else:
            reports = layer.run(solve=index in student.layers and index not in known)
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


def layer_keys(student: StudentBlocks, about: Mapping[str, Any]) -> dict[int, str]:
    """Return for each layer to solve a hash of everything that its result depends on, except the models.

    A layer depends on itself and on every layer before it. The models are not hashed: the work folder belongs to one
    pair.
    """
    keys, digest = {}, hashlib.sha256(json.dumps([student.layout.to_config(), list(student.layers), about]).encode())
    for layer in student.layers:
        digest.update(student.key(layer, about).encode())
        keys[layer] = digest.hexdigest()
    return keys
