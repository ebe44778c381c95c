"""The likelihood of windows under layouts of a dense model: as converted, or as ``ladderize adapt --method align``
would leave each.

As converted, the weights are in memory once, and each layout branches off one dense pass. Aligned, every layout has
weights of its own: a layer is solved, the windows that are scored pass through it, and it is forgotten.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.layers.align import LayerReport, aligned_layers, layer_passes, warn_of_few, with_random
from ladderize.adapt.layers.align_layer import Streams, located, place_of_states, readers_of, states_bytes
from ladderize.adapt.layers.layer_files import StudentBlocks
from ladderize.adapt.layers.options import layers_to_align
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, State, check_finite, complete, window_nlls
from ladderize.checkpoint.config import parameter_count
from ladderize.console import Console, human_bytes
from ladderize.layout import BLOCKING, Layout
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks

TOKENS_PER_PASS = 4096


def usual_batch(windows: np.ndarray) -> int:
    """Return the number of windows per forward pass."""
    return min(max(1, TOKENS_PER_PASS // windows.shape[1]), len(windows))


# ---- as converted ----


class ConvertedLayouts:
    """Scores layouts of the dense model of ``blocks``, whose weights it holds in memory."""

    def __init__(self, blocks: Blocks, layouts: Sequence[Layout]) -> None:
        self.blocks, self.layouts = blocks, list(layouts)
        self.weights = [blocks.weights(index) for index in range(blocks.num_layers)]
        self.dense = Layout.dense(blocks.num_layers)
        self.built: dict[tuple[int, str, str, str, int | None], torch.nn.Module] = {}

    @property
    def passes(self) -> int:
        """The number of layers that a window passes through."""
        return self.blocks.num_layers + sum(self.blocks.num_layers - first_changed(layout) for layout in self.layouts)

    @torch.no_grad()
    def __call__(self, ids: Tensor, advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
        """Return the summed negative log-likelihoods of ids [batch, tokens] in nats: float64 [batch, layouts].

        A layout branches off one dense pass at its first layer with a mode that is not blocking.

        advance: is called with the windows' passes through layers.
        """
        state: State = self.blocks.embed(ids)
        nlls = [torch.empty(0)] * len(self.layouts)
        for index in range(self.blocks.num_layers + 1):
            for number, layout in enumerate(self.layouts):
                if first_changed(layout) == index:
                    branch = state
                    for later in range(index, self.blocks.num_layers):
                        branch = self.blocks.run(self._layer(later, layout), branch)
                    nlls[number] = self.blocks.nll(complete(branch), ids)
                    advance((self.blocks.num_layers - index) * len(ids))
            if index < self.blocks.num_layers:
                state = self.blocks.run(self._layer(index, self.dense), state)
                advance(len(ids))
        # Copied to the host once, at the end: each copy waits for all the device's work before it.
        return torch.stack(nlls, 1).cpu().numpy()

    def _layer(self, index: int, layout: Layout) -> torch.nn.Module:
        key = index, layout.entering(index), layout.attention_sync[index], layout.mlp_sync[index], layout.sync_tp_size
        if key not in self.built:
            self.built[key] = self.blocks.layer(index, layout, self.weights[index])
        return self.built[key]


def first_changed(layout: Layout) -> int:
    """Return the first layer with a sync point that is not blocking; the number of layers where there is none."""
    modes = zip(layout.attention_sync, layout.mlp_sync, strict=True)
    return next((layer for layer, both in enumerate(modes) if both != (BLOCKING, BLOCKING)), layout.num_layers)


def score_layouts(
    blocks: Blocks,
    layouts: Sequence[Layout],
    windows: np.ndarray,
    ranks: Ranks,
    console: Console,
) -> np.ndarray:
    """Return the summed negative log-likelihood of each window under each layout, in nats: [windows, layouts].

    All ranks return the same.

    windows: ids [windows, tokens], which the ranks share.
    Raises UserError where memory is too small, or a result is NaN or infinite.
    """
    batch_size = min(usual_batch(windows), math.ceil(len(windows) / ranks.size))
    weights = parameter_count(blocks.config) * blocks.dtype.itemsize
    what, advice = "measuring sensitivity with all weights in memory", "choose a machine with more"
    check_room(weights, blocks.device, what, advice, processes=ranks.local_size)
    ranks.barrier()  # Memory that one process loads is not free for another that still checks.
    with console.stage("loading the weights"):
        score = ConvertedLayouts(blocks, layouts)
    console.note(
        f"{len(windows)} windows of {windows.shape[1]} tokens, {len(layouts):,} models, on {ranks.words};"
        f" {human_bytes(weights)} of weights in memory{' of each' if ranks.size > 1 else ''}"
    )
    table = np.empty((len(windows), len(layouts)))
    with console.progress("sensitivity", len(windows) * score.passes) as advance:
        batches = np.split(np.arange(len(windows)), range(batch_size, len(windows), batch_size))
        for scored in ranks.shared_out(batches, lambda rows: (rows, score(torch.from_numpy(windows[rows]), advance))):
            for rows, values in scored:
                check_finite(float(values.sum()), f"the log-likelihood under {blocks.checkpoint.folder}")
                table[rows] = values
            advance(score.passes * sum(len(rows) for rows, _ in scored[1:]))  # rank 0 has counted its own
    return table


# ---- after alignment ----


class AlignedLayouts:
    """Scores layouts of the dense model of ``blocks`` after alignment on ``windows``. A dense layout is scored as it
    is."""

    def __init__(self, blocks: Blocks, windows: Windows) -> None:
        checkpoint = blocks.checkpoint
        self.blocks, self.windows = blocks, windows
        self.all_windows = with_random(windows, checkpoint.config)
        # float16 has too small a range to align in; adapt does the same
        half = blocks.dtype == torch.float16
        self.teacher = Blocks(checkpoint, torch.bfloat16, blocks.device) if half else blocks
        self.weights = lru_cache(maxsize=1)(partial(blocks.weights, as_stored=True))
        self.ranks = Ranks(0, 1, blocks.device)

    def __call__(self, layout: Layout, scored: Tensor, advance: Callable[[int], None] = lambda n: None) -> np.ndarray:
        """Return the summed negative log-likelihood of each window in nats: float64 [windows].

        scored: ids [windows, tokens].
        advance: is called with the ``layer_passes`` of each layer.
        Raises UserError for a result that is NaN or infinite.
        """
        made: Iterator[tuple[dict[str, Tensor], LayerReport]] | None = None
        if not layout.is_dense:
            streams = Streams(self.teacher, self.all_windows, self.ranks, readers_of(layout))
            student = StudentBlocks(layout, layers_to_align(layout), self.weights)
            made = aligned_layers(self.teacher, self.teacher, self.weights, student, streams)
            passes = layer_passes(layout, student.layers)

        def layer_at(index: int) -> torch.nn.Module:
            weights: Mapping[str, Tensor] = self.weights(index)
            if made is not None:
                weights, _ = next(made)
                advance(passes[index])
            loaded = {name: tensor.to(self.blocks.dtype) for name, tensor in weights.items()}
            return self.blocks.layer(index, layout, loaded)

        nll = window_nlls(self.blocks, layer_at, scored, batch_size=usual_batch(scored.numpy()))
        check_finite(float(nll.sum()), f"the log-likelihood of {self.blocks.checkpoint.folder} as {layout}")
        return nll.numpy()


def passes_of(layouts: Sequence[Layout]) -> int:
    """Return the sum of ``layer_passes`` of all layouts; a dense one has none."""
    return sum(sum(layer_passes(layout, layers_to_align(layout))) for layout in layouts if not layout.is_dense)


def score_aligned(
    aligned: AlignedLayouts,
    layouts: Sequence[Layout],
    scored: np.ndarray,
    *,
    known: Mapping[str, list[float]],
    keep: Callable[[Mapping[str, list[float]]], None],
    ranks: Ranks,
    console: Console,
) -> np.ndarray:
    """Return the summed negative log-likelihood of each window under each layout, in nats: [windows, layouts].

    Layouts with the least work come first, so that ranks work on equally long ones side by side. All ranks return the
    same.

    known: rows of windows, by layout, that were measured before.
    keep: is given all rows after each round.
    Raises UserError where memory is too small, or a result is NaN or infinite.
    """
    nlls, windows = dict(known), aligned.windows
    left = {str(layout): layout for layout in layouts if str(layout) not in nlls}
    models = sorted(left.values(), key=lambda layout: passes_of([layout]))
    if known:
        console.note(f"{len(known)} models were measured before")
    readers = max(map(readers_of, models), default=1)
    states = states_bytes(aligned.teacher, aligned.all_windows, aligned.ranks, readers)
    place = place_of_states(states, ranks)
    console.note(
        f"{len(models):,} models on {len(scored)} windows of {scored.shape[1]} tokens; changed ones are aligned on"
        f" {windows.train.numel():,} tokens ({len(windows.train)} windows, {len(windows.heldout)} held out), on"
        f" {ranks.words}; {human_bytes(states)} of states {located(place)}{' of each' if ranks.size > 1 else ''}"
    )
    warn_of_few(windows.train.numel(), aligned.blocks.config, console)
    ids = torch.from_numpy(scored)
    with console.progress("sensitivity, passes over the windows", passes_of(models)) as advance:
        for done in ranks.shared_out(models, lambda layout: (layout, aligned(layout, ids, advance).tolist())):
            nlls.update((str(layout), row) for layout, row in done)
            advance(passes_of([layout for layout, _ in done[1:]]))  # rank 0 has counted its own
            keep(nlls)
    return np.array([nlls[str(layout)] for layout in layouts]).T
