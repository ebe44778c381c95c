"""The likelihood of windows under layouts of a dense model, each as ``ladderize adapt --method align`` would leave it.

A layer is solved, the windows that are scored pass through it, and it is forgotten: nothing is written, and one layer
is in memory at a time, whatever the size of the model.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.layers.align import aligned_layers, computed, with_random
from ladderize.adapt.layers.align_cost import TOKENS_AT_ONCE, layer_bytes, states_bytes, warn_of_few
from ladderize.adapt.layers.align_layer import Streams
from ladderize.adapt.layers.align_options import AlignSettings, layers_to_align, short_tokens
from ladderize.adapt.layers.layer_files import StudentBlocks
from ladderize.adapt.layers.layout_scores import usual_batch
from ladderize.adapt.layers.windows import Windows, window_counts
from ladderize.blocks import Blocks, check_finite, stored_dtype, window_nlls
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import Console, human_bytes
from ladderize.convert.sensitivity_file import AlignmentWindows
from ladderize.layout import OVERLAPPED, Layout
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks

HOST = torch.device("cpu")


def windows_to_align_on(
    checkpoint: Checkpoint, others: np.ndarray, samples: int | None, heldout: int | None = None
) -> Windows | None:
    """Return the first of ``others`` to align on; None where they are too few.

    others: ids [windows, tokens] that are not scored.
    samples, heldout: numbers of windows; None: as ``adapt --align`` chooses for such data.
    """
    tokens = short_tokens(checkpoint.config)
    samples, heldout = window_counts(len(others), others.shape[1], samples, heldout, tokens)
    if samples < 1 or samples + heldout > len(others):
        return None
    ids = torch.from_numpy(others)
    return Windows(ids[:samples], ids[samples : samples + heldout])


def describe_alignment(windows: Windows) -> AlignmentWindows:
    """Return the record of these windows for documents."""
    return AlignmentWindows(len(windows.train), len(windows.heldout), windows.train.shape[1])


class AlignedLayouts:
    """Scores layouts of the dense model of ``blocks`` after alignment on ``windows``. A dense layout is scored as it
    is."""

    def __init__(self, blocks: Blocks, windows: Windows, batch_size: int | None) -> None:
        checkpoint = blocks.checkpoint
        self.blocks, self.windows, self.batch_size = blocks, windows, batch_size
        self.settings = AlignSettings()
        self.all_windows = with_random(windows, checkpoint.config, self.settings)
        # float16 has too small a range to align in; adapt does the same
        half = blocks.dtype == torch.float16
        self.teacher = Blocks(checkpoint, torch.bfloat16, blocks.device) if half else blocks
        stored = Blocks(checkpoint, getattr(torch, stored_dtype(checkpoint)), blocks.device)
        self.weights = lru_cache(maxsize=1)(stored.weights)
        self.ranks = Ranks(0, 1, blocks.device)

    def __call__(self, layout: Layout, scored: Tensor, advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
        """Return the summed negative log-likelihood of each window in nats: float64 [windows].

        scored: ids [windows, tokens].
        advance: is called for each aligned layer.
        Raises UserError for a result that is NaN or infinite.
        """
        batch_size = usual_batch(self.batch_size, scored.numpy())
        if layout.is_dense:
            found = window_nlls(self.blocks, lambda index: self._layer(index, layout), scored, batch_size=batch_size)
        else:
            found = self._aligned(layout, scored, batch_size, advance)
        check_finite(float(found.sum()), f"the log-likelihood of {self.blocks.checkpoint.folder} as {layout}")
        return found.numpy()

    def _aligned(self, layout: Layout, scored: Tensor, batch_size: int, advance: Callable[[int], None]) -> Tensor:
        streams = Streams(
            self.teacher,
            self.all_windows,
            self.ranks,
            batch_tokens=TOKENS_AT_ONCE,
            max_memory=sys.maxsize,
            path=Path("states"),
        )
        student = StudentBlocks(layout, layers_to_align(layout, None), self.weights)
        layers = aligned_layers(self.teacher, self.teacher, self.weights, student, streams, self.settings, {})

        def layer_at(index: int) -> torch.nn.Module:
            layer = next(layers)
            advance(1 if layer.reports else 0)
            return self.blocks.layer(index, layout, computed(layer.weights, self.blocks))

        try:
            return window_nlls(self.blocks, layer_at, scored, batch_size=batch_size)
        finally:
            streams.close()

    def _layer(self, index: int, layout: Layout) -> torch.nn.Module:
        return self.blocks.layer(index, layout, computed(self.weights(index), self.blocks))

    def announce(
        self, what: str, layouts: Sequence[Layout], scored: np.ndarray, console: Console, ranks: Ranks | None = None
    ) -> None:
        """Say which layouts are aligned on which data.

        what: the name of ``layouts`` in messages.
        ranks: those that share the layouts.
        Raises UserError where memory is too small.
        """
        ranks = ranks or self.ranks
        blocks, windows = self.blocks, self.windows
        most_ranks = max((layout.sync_tp_size for layout in layouts if layout.sync_tp_size is not None), default=None)
        layer = layer_bytes(self.teacher, most_ranks)
        pairs = 2 if any(OVERLAPPED in layout.mlp_sync for layout in layouts) else 1
        states = states_bytes(self.teacher, self.all_windows, self.ranks)
        states += pairs * scored.size * int(blocks.config["hidden_size"]) * blocks.dtype.itemsize
        on_host = blocks.device.type == HOST.type
        for device, needed in ((blocks.device, layer + on_host * states), (HOST, states)):
            what_for, advice = "aligning layouts", "lower --align-samples or --samples"
            check_room(needed, device, what_for, advice, processes=ranks.local_size)
        console.note(
            f"{what} on {len(scored)} windows of {scored.shape[1]} tokens: {layers_of(layouts):,} layers are aligned on"
            f" {windows.train.numel():,} tokens ({len(windows.train)} windows, {len(windows.heldout)} held out), on"
            f" {ranks.words}; {human_bytes(states)} of states in memory{' of each' if ranks.size > 1 else ''}"
        )
        warn_of_few(windows.train.numel(), blocks.config, "--align-samples", console)


def layers_of(layouts: Sequence[Layout]) -> int:
    """Return the number of aligned layers in all layouts."""
    return sum(len(layers_to_align(layout, None)) for layout in layouts if not layout.is_dense)


def score_aligned(
    aligned: AlignedLayouts,
    layouts: Sequence[Layout],
    scored: np.ndarray,
    *,
    known: Mapping[str, list[float]],
    keep: Callable[[Mapping[str, list[float]]], None],
    what: str,
    ranks: Ranks,
    console: Console,
) -> np.ndarray:
    """Return the summed negative log-likelihood of each window under each layout, in nats: [windows, layouts].

    Layouts with the fewest layers to align come first, so that ranks work on equally long ones side by side. All ranks
    return the same.

    known: rows of windows, by layout, that were measured before.
    keep: is given all rows after each round.
    what: the name of the work in messages.
    Raises UserError where memory is too small, or a result is NaN or infinite.
    """
    nlls = dict(known)
    left = {str(layout): layout for layout in layouts if str(layout) not in nlls}
    models = sorted(left.values(), key=lambda layout: layers_of([layout]))
    if known:
        console.note(f"{len(known)} models were measured before")
    if models:
        aligned.announce(f"{len(models):,} models", models, scored, console, ranks)
    ids = torch.from_numpy(scored)
    with console.progress(what, layers_of(models)) as advance:
        for done in ranks.shared_out(models, lambda layout: (layout, aligned(layout, ids, advance).tolist())):
            nlls.update((str(layout), row) for layout, row in done)
            advance(layers_of([layout for layout, _ in done[1:]]))  # rank 0 has counted its own
            keep(nlls)
    return np.array([nlls[str(layout)] for layout in layouts]).T
