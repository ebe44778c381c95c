"""``ladderize sensitivity``: the cost of changed layers of a dense model, as converted or after alignment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.layers.align import (
    COMMON,
    SOLVED,
    aligned_layer,
    aligned_layers,
    layer_passes,
    warn_of_few,
    with_random,
)
from ladderize.adapt.layers.align_layer import Streams, device_of_states, located, readers_of
from ladderize.adapt.layers.layer_files import LayerJob
from ladderize.adapt.layers.options import SensitivityOptions, default_tokens, layers_to_align
from ladderize.adapt.layers.windows import Windows, split_windows
from ladderize.blocks import Blocks, State, check_finite, complete, read_windows, to_device, window_nlls
from ladderize.checkpoint.config import parameter_count, stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console, human_bytes
from ladderize.convert.sensitivity_file import (
    AlignmentWindows,
    CalibrationData,
    SensitivityDocument,
    layer_changes,
    layer_costs,
)
from ladderize.data.files import file_sha256
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.unfinished import Unfinished, work_folder
from ladderize.layout import BLOCKING, Layout
from ladderize.memory import check_room
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks, join_ranks

TOKENS_PER_PASS = 4096


def usual_batch(windows: np.ndarray) -> int:
    """Return the number of windows per forward pass."""
    return min(max(1, TOKENS_PER_PASS // windows.shape[1]), len(windows))


def first_changed(layout: Layout) -> int:
    """Return the first layer with a sync point that is not blocking; the number of layers where there is none."""
    modes = zip(layout.attention_sync, layout.mlp_sync, strict=True)
    return next((layer for layer, both in enumerate(modes) if both != (BLOCKING, BLOCKING)), layout.num_layers)


class LayoutScores:
    """Scores layouts of a dense model, whose weights are in memory. A layout branches off the dense model's states at
    its first changed layer; these move on from layer to layer, so layouts are scored in the order of these layers. With
    windows ``to_align`` the converted layers of each layout, and no others, are solved before."""

    def __init__(
        self, blocks: Blocks, scored: np.ndarray, ranks: Ranks, to_align: Windows | None = None, readers: int = 1
    ) -> None:
        self.blocks, self.dense = blocks, Layout.dense(blocks.num_layers)
        self.weights = [blocks.weights(layer) for layer in range(blocks.num_layers)]
        self.built: dict[tuple[int, str, str, str, int | None], torch.nn.Module] = {}
        self.ids = torch.from_numpy(scored).split(usual_batch(scored))
        self.states: list[State] = []
        self.device = device_of_states(scored.size * blocks.config["hidden_size"] * blocks.dtype.itemsize, ranks)
        self.layer = 0  # that the states enter
        self.streams = None
        if to_align is not None:
            teacher = aligning(blocks)
            windows = with_random(to_align, blocks.config)
            self.streams = Streams(teacher, windows, Ranks(0, 1, blocks.device), readers)
            self.streams.embed(teacher, teacher)

    def passes(self, layout: Layout) -> int:
        """The layers that windows pass through to score a layout."""
        solving = 0 if self.streams is None else COMMON + SOLVED * len(layout.converted_layers)
        return self.blocks.num_layers - first_changed(layout) + solving

    @torch.no_grad()
    def __call__(self, layout: Layout, advance: Callable[[int], None] = lambda n: None) -> list[float]:
        """Return the summed negative log-likelihood of each window in nats; UserError where it is NaN or infinite."""
        if not self.states:
            self.states = [to_device(self.blocks.embed(ids), self.device) for ids in self.ids]
        first, count = first_changed(layout), self.blocks.num_layers
        while self.layer < first:
            self._move_on()
        layers = [self._layer(layer, layout) for layer in range(first, count)]
        if self.streams is not None:
            for index, aligned in self._aligned(self.streams, first, layout):
                layers[index - first] = aligned
        nlls = []
        for ids, entering in zip(self.ids, self.states, strict=True):
            state = to_device(entering, self.blocks.device)
            for layer in layers:
                state = self.blocks.run(layer, state)
            nlls.append(self.blocks.nll(complete(state), ids))
        advance(self.passes(layout))
        # Copied to the host once, at the end: each copy waits for all the device's work before it.
        nll = torch.cat(nlls).cpu()
        check_finite(float(nll.sum()), f"the log-likelihood of {self.blocks.checkpoint.folder} as {layout}")
        return nll.tolist()

    def _move_on(self) -> None:
        layer = self._layer(self.layer, self.dense)
        for number, state in enumerate(self.states):
            self.states[number] = to_device(self.blocks.run(layer, to_device(state, self.blocks.device)), self.device)
        if self.streams is not None:
            stored = self.blocks.weights(self.layer, as_stored=True)
            aligned_layer(self.streams, self.layer, self.dense, stored, stored, solve=False)
        self.layer += 1

    def _aligned(self, streams: Streams, first: int, layout: Layout) -> Iterator[tuple[int, torch.nn.Module]]:
        """Yield the converted layers of a layout with solved projections; the streams end where they began."""
        entering, converted = streams.states["dense"].clone(), layout.converted_layers
        for index in range(first, max(converted, default=-1) + 1):
            stored, solve = self.blocks.weights(index, as_stored=True), index in converted
            leave = index != converted[-1]
            made, _ = aligned_layer(streams, index, layout, stored, stored, solve=solve, leave=leave)
            if solve:
                loaded = {name: tensor.to(self.blocks.dtype) for name, tensor in made.items()}
                yield index, self.blocks.layer(index, layout, loaded)
        streams.states["dense"].copy_(entering)
        streams.is_common = True

    def _layer(self, index: int, layout: Layout) -> torch.nn.Module:
        key = index, layout.entering(index), layout.attention_sync[index], layout.mlp_sync[index], layout.sync_tp_size
        if key not in self.built:
            self.built[key] = self.blocks.layer(index, layout, self.weights[index])
        return self.built[key]


def aligning(blocks: Blocks) -> Blocks:
    """Return the blocks in a dtype to align in: float16 has too small a range, and adapt does the same."""
    return Blocks(blocks.checkpoint, torch.bfloat16, blocks.device) if blocks.dtype == torch.float16 else blocks


def score_layouts(
    blocks: Blocks,
    layouts: Sequence[Layout],
    scored: np.ndarray,
    to_align: Windows | None,
    file: Path,
    ranks: Ranks,
    console: Console,
) -> np.ndarray:
    """Return the summed negative log-likelihood of each window under each layout, in nats: [windows, layouts]. Ranks
    share the layouts, and all return the same; rank 0 keeps those that are measured in ``file``."""
    nlls: dict[str, list[float]] = ranks.broadcast(read_own(file).get("nll", {}))
    left = {str(layout): layout for layout in layouts if str(layout) not in nlls}
    models = sorted(left.values(), key=first_changed)
    if nlls:
        console.note(f"{len(nlls)} models were measured before")
    weights = parameter_count(blocks.config) * blocks.dtype.itemsize
    purpose, advice = "measuring sensitivity with all weights in memory", "choose a machine with more"
    check_room(weights, blocks.device, purpose, advice, processes=ranks.local_size)
    ranks.barrier()  # Memory that one process loads is not free for another that still checks.
    with console.stage("loading the weights"):
        score = LayoutScores(blocks, scored, ranks, to_align, max(map(readers_of, layouts)))
    console.note(
        f"{len(scored)} windows of {scored.shape[1]} tokens, {len(models):,} models, on {ranks.words};"
        f" {human_bytes(weights)} of weights in memory{' of each' if ranks.size > 1 else ''}"
    )
    if to_align is not None and score.streams is not None:
        console.note(
            f"each changed layer is aligned on {to_align.train.numel():,} tokens ({len(to_align.train)} windows,"
            f" {len(to_align.heldout)} held out), with states {located(score.streams.device)}"
        )
        warn_of_few(to_align.train.numel(), blocks.config, console)
    with console.progress("sensitivity, layers that the windows pass", sum(map(score.passes, models))) as advance:
        for rows in ranks.shared_out(models, lambda layout: (layout, score(layout, advance))):
            nlls.update((str(layout), row) for layout, row in rows)
            advance(sum(score.passes(layout) for layout, _ in rows[1:]))  # rank 0 has counted its first
            if ranks.is_main:
                write_json(file, {"nll": nlls})
    return np.array([nlls[str(layout)] for layout in layouts]).T


class AlignedLayouts:
    """Scores layouts of a dense model as ``ladderize adapt --method align`` leaves them: every layer from the first
    converted one on is solved on ``windows``, the scored windows pass through it, and it is forgotten. A dense layout
    is scored as it is."""

    def __init__(self, blocks: Blocks, windows: Windows) -> None:
        self.blocks, self.windows = blocks, windows
        self.weights = lru_cache(maxsize=1)(partial(blocks.weights, as_stored=True))

    def __call__(self, layout: Layout, scored: Tensor, advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
        """Return the summed negative log-likelihood of each window of ``scored`` ids [windows, tokens] in nats: float64
        [windows]; UserError where it is NaN or infinite."""
        passes = aligned_passes(layout)
        weights = map(self.weights, range(layout.num_layers)) if layout.is_dense else self._aligned(layout)

        def layer_at(index: int) -> torch.nn.Module:
            loaded = {name: tensor.to(self.blocks.dtype) for name, tensor in next(weights).items()}
            advance(passes[index])
            return self.blocks.layer(index, layout, loaded)

        nll = window_nlls(self.blocks, layer_at, scored, batch_size=usual_batch(scored.numpy()))
        check_finite(float(nll.sum()), f"the log-likelihood of {self.blocks.checkpoint.folder} as {layout}")
        return nll.numpy()

    def _aligned(self, layout: Layout) -> Iterator[Mapping[str, Tensor]]:
        teacher, ranks = aligning(self.blocks), Ranks(0, 1, self.blocks.device)
        windows = with_random(self.windows, self.blocks.config)
        streams = Streams(teacher, windows, ranks, readers_of(layout))
        same = teacher, teacher, layout, layers_to_align(layout), self.weights, self.weights
        for made, _ in aligned_layers(LayerJob(*same, windows, ranks), streams):
            yield made


def aligned_passes(layout: Layout) -> list[int]:
    """Return how often ``AlignedLayouts`` passes windows through each layer."""
    return layer_passes(layout, () if layout.is_dense else layers_to_align(layout))


MEASURED = "nll.json"  # in the work folder: the nats of each window, by layout


def write_sensitivity(
    options: SensitivityOptions,
    *,
    drawn: tuple[np.ndarray, str] | None = None,
    ranks: Ranks | None = None,
    console: Console = SILENT,
) -> SensitivityDocument:
    """Measure the cost of changed layers of a dense model, and write the JSON file ``options.out``. Several processes
    (torchrun, accelerate launch) share the changed models; rank 0 writes, and all return the same. A killed run goes
    on. ``drawn`` are ids [windows, seq_len] that were drawn from the data before, and the sha256 of these."""
    ranks = ranks or join_ranks(options.device or default_device())
    if ranks.is_main:
        check_writable(options.out, inputs=[options.data])
        if options.out.exists() and not options.overwrite:
            raise UserError(f"--out {options.out} is there already; name another file, or pass --overwrite")
    checkpoint = open_checkpoint(options.model)
    dense = Layout.from_config(checkpoint.config)
    if not dense.is_dense:
        raise UserError(f"{options.model} is not dense ({dense}); a sensitivity is measured on the dense model")
    changes = layer_changes(options.mode, dense.num_layers, options.sync_tp_size)
    layouts = [*(change.layout for change in changes), dense]
    for layout in layouts:
        layout.check_model(checkpoint.config)
    if drawn is None:
        windows = read_windows(checkpoint, options.data, seq_len=options.seq_len, seed=options.seed)
        drawn = windows, file_sha256(options.data)
    scored, to_align = split_drawn(checkpoint, options, drawn[0], console)
    dtype = stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype
    about: dict[str, Any] = {
        "fingerprint": fingerprint(checkpoint),
        "dtype": dtype,
        "data": CalibrationData(options.data, drawn[1], len(scored), scored.shape[1], options.seed),
        "aligned": to_align and AlignmentWindows(*to_align.sizes),
    }
    blocks = Blocks(checkpoint, getattr(torch, dtype), ranks.device)
    identity = {name: str(value) for name, value in about.items()}
    with ranks.main_first():
        work = Unfinished(
            work_folder(options.out), "sensitivity", identity, pieces=MEASURED, main=ranks.is_main, console=console
        )
    with work:
        nll = score_layouts(blocks, layouts, scored, to_align, work.folder / MEASURED, ranks, console)
        tokens = scored.shape[1] - 1
        document = SensitivityDocument(
            model=options.model,
            layout=str(dense),
            num_layers=dense.num_layers,
            mode=options.mode,
            sync_tp_size=options.sync_tp_size,
            dense_nll=float(nll[:, -1].mean() / tokens),
            costs=layer_costs(changes, nll, tokens, options.mode),
            **about,
        )
        if ranks.is_main:
            write_json(options.out, document.to_dict())
    return document


def split_drawn(
    checkpoint: Checkpoint, options: SensitivityOptions, drawn: np.ndarray, console: Console
) -> tuple[np.ndarray, Windows | None]:
    """Return the windows to score, and with --align those after them to align on. Raises UserError for too few."""
    scored = drawn[: options.samples]
    if len(scored) < 2:
        raise UserError(f"{options.data} gives one window of {drawn.shape[1]} tokens, and intervals need two")
    if len(scored) < options.samples:
        console.note(f"{options.data} gives {len(scored)} windows, fewer than --samples {options.samples}")
    if not options.align:
        return scored, None
    tokens = default_tokens(checkpoint.config, short=True)
    to_align = split_windows(drawn[options.samples :], options.align_samples, None, tokens)
    if to_align is None:
        raise UserError(
            f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens, too few for {options.samples}"
            " to score and others to align on; give more data, or lower --samples, --align-samples or --seq-len"
        )
    return scored, to_align
