"""``ladderize sensitivity``: the cost of changed layers of a dense model, as converted or after alignment."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.layers.align import (
    SOLVED,
    LayerAlignment,
    Streams,
    device_of_states,
    located,
    readers_of,
    warn_of_few,
    with_random,
)
from ladderize.adapt.layers.options import SensitivityOptions, default_tokens, layers_to_align
from ladderize.adapt.layers.windows import Windows, split_windows
from ladderize.blocks import Blocks, State, check_finite, complete, read_windows, to_device, window_nlls
from ladderize.checkpoint.config import parameter_count, stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
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


def usual_batch(windows: np.ndarray | Tensor) -> int:
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
        self.ids = torch.from_numpy(scored).split(usual_batch(scored))
        self.device = device_of_states(scored.size * blocks.config["hidden_size"] * blocks.dtype.itemsize, ranks)
        self.states: list[State] = [to_device(blocks.embed(ids), self.device) for ids in self.ids]
        self.layer = 0  # that the states enter
        self.streams = open_streams(blocks, to_align, readers) if to_align is not None else None

    def passes(self, layout: Layout) -> int:
        """The layers that windows pass through to score a layout."""
        solving = 0 if self.streams is None else 1 + SOLVED * len(layout.converted_layers)
        return self.blocks.num_layers - first_changed(layout) + solving

    @torch.no_grad()
    def __call__(self, layout: Layout) -> list[float]:
        """Return the summed negative log-likelihood of each window in nats; UserError where it is NaN or infinite."""
        blocks, first = self.blocks, first_changed(layout)
        while self.layer < first:
            layer = blocks.layer(self.layer, self.dense, self.weights[self.layer])
            for number, state in enumerate(self.states):
                self.states[number] = to_device(blocks.run(layer, to_device(state, blocks.device)), self.device)
            if self.streams is not None:
                stored = blocks.weights(self.layer, as_stored=True)
                LayerAlignment(self.streams, self.layer, self.dense, stored, stored).run(solve=False)
            self.layer += 1
        aligned = {} if self.streams is None else self._aligned(self.streams, first, layout)
        layers = [
            blocks.layer(index, layout, aligned.get(index, self.weights[index]))
            for index in range(first, blocks.num_layers)
        ]
        nlls = []
        for ids, entering in zip(self.ids, self.states, strict=True):
            state = to_device(entering, blocks.device)
            for layer in layers:
                state = blocks.run(layer, state)
            nlls.append(blocks.nll(complete(state), ids))
        # Copied to the host once, at the end: each copy waits for all the device's work before it.
        nll = torch.cat(nlls).cpu()
        check_finite(float(nll.sum()), f"the log-likelihood of {blocks.checkpoint.folder} as {layout}")
        return nll.tolist()

    def _aligned(self, streams: Streams, first: int, layout: Layout) -> dict[int, dict[str, Tensor]]:
        """Return the weights of converted layers with solved projections; the streams end where they began."""
        entering, converted, aligned = streams.states["dense"].clone(), layout.converted_layers, {}
        for index in range(first, max(converted, default=-1) + 1):
            stored, solve = self.blocks.weights(index, as_stored=True), index in converted
            layer = LayerAlignment(streams, index, layout, stored, stored)
            made, _ = layer.run(solve=solve, leave=index != converted[-1])
            if solve:
                aligned[index] = {name: tensor.to(self.blocks.dtype) for name, tensor in made.items()}
        streams.states["dense"].copy_(entering)
        streams.is_common = True
        return aligned


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
        for rows in ranks.shared_out(models, lambda layout: (layout, score(layout))):
            nlls.update((str(layout), row) for layout, row in rows)
            advance(sum(score.passes(layout) for layout, _ in rows))
            if ranks.is_main:
                write_json(file, {"nll": nlls})
    return np.array([nlls[str(layout)] for layout in layouts]).T


class LayerwiseScores:
    """Scores layouts of a dense model, one layer in memory at a time: as they are, or with ``windows`` as ``ladderize
    adapt --method align`` leaves them, every layer from the first converted one on solved on these."""

    def __init__(self, blocks: Blocks, windows: Windows | None) -> None:
        self.blocks, self.windows = blocks, windows

    def passes(self, layout: Layout) -> int:
        """Return how often windows pass through a layer to score a layout."""
        return layout.num_layers + (SOLVED - 1) * len(self._solved(layout))

    def _solved(self, layout: Layout) -> tuple[int, ...]:
        return () if self.windows is None or layout.is_dense else layers_to_align(layout)

    def __call__(self, layout: Layout, scored: Tensor, advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
        """Return the summed negative log-likelihood of each window of ``scored`` ids [windows, tokens] in nats: float64
        [windows]; UserError where it is NaN or infinite."""
        blocks, solved, streams = self.blocks, self._solved(layout), None
        if self.windows is not None and solved:
            streams = open_streams(blocks, self.windows, readers_of(layout))

        def layer_at(index: int) -> torch.nn.Module:
            weights = blocks.weights(index, as_stored=True)
            if streams is not None:
                weights, _ = LayerAlignment(streams, index, layout, weights, weights).run(solve=index in solved)
            advance(SOLVED if index in solved else 1)
            return blocks.layer(index, layout, {name: tensor.to(blocks.dtype) for name, tensor in weights.items()})

        nll = window_nlls(blocks, layer_at, scored, batch_size=usual_batch(scored))
        check_finite(float(nll.sum()), f"the log-likelihood of {blocks.checkpoint.folder} as {layout}")
        return nll.numpy()


def open_streams(blocks: Blocks, windows: Windows, readers: int) -> Streams:
    """Return the streams of one process to align a dense model's layouts in, in bfloat16 where the model is computed in
    float16, whose range is too small: adapt does the same."""
    if blocks.dtype == torch.float16:
        blocks = Blocks(blocks.checkpoint, torch.bfloat16, blocks.device)
    streams = Streams(blocks, with_random(windows, blocks.config), Ranks(0, 1, blocks.device), readers)
    streams.embed(blocks, blocks)
    return streams


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
    # the windows to score, and with --align those after them to align on
    scored, to_align, there = drawn[0][: options.samples], None, f"{options.data} gives {len(drawn[0])} windows"
    if len(scored) < 2:
        raise UserError(f"{options.data} gives one window of {drawn[0].shape[1]} tokens, and intervals need two")
    if len(scored) < options.samples:
        console.note(f"{there}, fewer than --samples {options.samples}")
    if options.align:
        tokens = default_tokens(checkpoint.config, short=True)
        to_align = split_windows(drawn[0][options.samples :], options.align_samples, None, tokens)
        if to_align is None:
            raise UserError(
                f"{there} of {scored.shape[1]} tokens, too few for {options.samples} to score and others to align on;"
                " give more data, or lower --samples, --align-samples or --seq-len"
            )
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
