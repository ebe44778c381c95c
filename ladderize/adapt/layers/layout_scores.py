"""The likelihood of windows under many layouts of one model, with all of its weights in memory once.

Layouts that agree in their first layers compute the same there, so each layer runs once for each distinct beginning of
a layout. One dense pass serves all layouts that differ from the dense model in later layers only. Each of the 3,888
layouts of five layers then costs little more than one layer.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ladderize.blocks import Blocks, State, check_finite, complete
from ladderize.checkpoint.config import parameter_count
from ladderize.console import Console, human_bytes
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks

TOKENS_PER_PASS = 4096
# What a layout does in one layer: the mode of the MLP sync point that enters it, and that of its attention.
LayerStep = tuple[str, str]


class LayoutTree:
    """Layouts with the same number of layers, and the layers in which they part.

    Raises ValueError for layouts of different lengths or sync_tp_size.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = list(layouts)
        self.num_layers = self.layouts[0].num_layers
        ranks = {layout.sync_tp_size for layout in self.layouts if layout.sync_tp_size is not None}
        if len(ranks) > 1 or {layout.num_layers for layout in self.layouts} != {self.num_layers}:
            raise ValueError("these layouts are of several models, or of several sync_tp_size")
        self.sync_tp_size = min(ranks, default=None)

    def parting(self, layer: int, members: Sequence[int]) -> list[tuple[LayerStep, list[int]]]:
        """Return groups of layouts, by their number, that do the same in a layer; the largest group comes last."""
        groups: dict[LayerStep, list[int]] = defaultdict(list)
        for number in members:
            layout = self.layouts[number]
            groups[layout.entering(layer), layout.attention_sync[layer]].append(number)
        return sorted(groups.items(), key=lambda group: len(group[1]))

    @property
    def states(self) -> int:
        """The most states that are held at a time: a walk waits only for groups that are no larger than its own."""
        return len(self.layouts).bit_length() + 1

    def overlaps(self, layer: int) -> bool:
        """Return whether any layout overlaps the MLP sync point of ``layer``."""
        return any(layout.mlp_sync[layer] == OVERLAPPED for layout in self.layouts)


class Suffixes:
    """The likelihood of a batch of windows under each of ``layouts``.

    weights: of the layers, where they were read before.
    """

    def __init__(
        self, blocks: Blocks, layouts: Sequence[Layout], weights: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        self.blocks, self.tree = blocks, LayoutTree(layouts)
        self.weights = weights if weights is not None else [blocks.weights(i) for i in range(blocks.num_layers)]
        self.built: dict[tuple[int, str], torch.nn.Module] = {}

    def layer(self, index: int, attention: str = BLOCKING) -> torch.nn.Module:
        """Return a layer with this mode of its attention sync point.

        Where a layout overlaps its MLP sync point, the layer returns its stream with and without its MLP's output, so
        that one run serves both modes.
        """
        if (index, attention) not in self.built:
            modes, layers = [BLOCKING] * self.blocks.num_layers, self.blocks.num_layers
            modes[index] = attention
            after = [OVERLAPPED if i == index and self.tree.overlaps(i) else BLOCKING for i in range(layers)]
            ranks = self.tree.sync_tp_size if attention == DROPPED else None
            layout = Layout(tuple(modes), tuple(after), ranks)
            self.built[index, attention] = self.blocks.layer(index, layout, self.weights[index])
        return self.built[index, attention]

    def __call__(self, ids: Tensor) -> np.ndarray:
        """Return the summed negative log-likelihoods of ids [batch, tokens] in nats: float64 [batch, layouts]."""
        with torch.no_grad():
            state = self.blocks.embed(ids)
        # Copied to the host once, at the end: each copy waits for all the device's work before it.
        groups = [*self._walk(0, state, list(range(len(self.tree.layouts))), ids)]
        nlls = torch.stack([nll for _, nll in groups]).cpu().numpy()
        table = np.empty((len(ids), len(self.tree.layouts)))
        for (members, _), nll in zip(groups, nlls, strict=True):
            table[:, members] = nll[:, None]
        return table

    @torch.no_grad()
    def _walk(self, first: int, state: State, members: list[int], ids: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Yield groups of equal layouts, and the summed negative log-likelihood [batch] of each on the device.

        state: the one that enters layer ``first``.
        members: layouts, by their number, that agree before layer ``first``.
        """
        for layer in range(first, self.blocks.num_layers):
            *others, (step, members) = self.tree.parting(layer, members)
            for other, apart in others:
                yield from self._walk(layer + 1, self._run(layer, other, state), apart, ids)
            state = self._run(layer, step, state)
        yield members, self.blocks.nll(complete(state), ids)

    def _run(self, layer: int, step: LayerStep, state: State) -> State:
        entering, attention = step
        return self.blocks.run(self.layer(layer, attention), state if entering == OVERLAPPED else complete(state))


def suffix_memory(blocks: Blocks, tree: LayoutTree, tokens: int) -> tuple[int, int]:
    """Return the bytes of the weights, and of a pass over ``tokens`` tokens: the held states and one layer's work."""
    hidden, intermediate = int(blocks.config["hidden_size"]), int(blocks.config["intermediate_size"])
    pair = 2 if any(map(tree.overlaps, range(tree.num_layers))) else 1  # with and without what is in flight
    states = pair * tree.states * hidden
    layer = 4 * hidden * (tree.sync_tp_size or 1) + 3 * intermediate
    return parameter_count(blocks.config) * blocks.dtype.itemsize, tokens * (states + layer) * blocks.dtype.itemsize


# ---- the table ----


def usual_batch(batch_size: int | None, windows: np.ndarray) -> int:
    """Return the number of windows per forward pass: as asked for, or 4096 tokens' worth, and no more than there
    are."""
    return min(batch_size or max(1, TOKENS_PER_PASS // windows.shape[1]), len(windows))


def check_table_memory(
    blocks: Blocks,
    tree: LayoutTree,
    batch_size: int,
    seq_len: int,
    what: str,
    *,
    loaded: bool = False,
    processes: int = 1,
) -> None:
    """Raise UserError unless the weights and a pass over ``batch_size`` windows of ``seq_len`` tokens fit in memory.

    what: the name of the work in messages.
    loaded: the weights are in memory already.
    processes: those of this machine that share its memory.
    """
    weights, work = suffix_memory(blocks, tree, batch_size * seq_len)
    check_room(
        work if loaded else weights + work,
        blocks.device,
        f"{what} with {batch_size:,} windows of {seq_len:,} tokens at a time",
        "lower --batch-size or --seq-len" if batch_size > 1 else "choose a machine with more",
        processes=processes,
    )


def score_layouts(
    blocks: Blocks,
    layouts: Sequence[Layout],
    windows: np.ndarray,
    *,
    batch_size: int | None,
    what: str,
    ranks: Ranks,
    console: Console,
) -> np.ndarray:
    """Return the summed negative log-likelihood of each window under each layout, in nats: [windows, layouts].

    All ranks return the same.

    windows: ids [windows, tokens], which the ranks share.
    what: the name of the work in messages.
    Raises UserError where memory is too small, or a result is NaN or infinite.
    """
    batch_size = min(usual_batch(batch_size, windows), math.ceil(len(windows) / ranks.size))
    tree = LayoutTree(layouts)
    check_table_memory(blocks, tree, batch_size, windows.shape[1], what, processes=ranks.local_size)
    ranks.barrier()  # Memory that one process loads is not free for another that still checks.
    with console.stage("loading the weights"):
        suffixes = Suffixes(blocks, layouts)
    weights, states = suffix_memory(blocks, tree, batch_size * windows.shape[1])
    console.note(
        f"{len(windows)} windows of {windows.shape[1]} tokens, {len(layouts):,} models, on {ranks.words};"
        f" {human_bytes(weights)} of weights and {human_bytes(states)} of states in memory"
        + (" of each" if ranks.size > 1 else "")
    )
    table = np.empty((len(windows), len(layouts)))
    with console.progress(what, len(windows)) as advance:
        batches = np.split(np.arange(len(windows)), range(batch_size, len(windows), batch_size))
        for scored in ranks.shared_out(batches, lambda rows: (rows, suffixes(torch.from_numpy(windows[rows])))):
            for rows, values in scored:
                check_finite(float(values.sum()), f"the log-likelihood under {blocks.checkpoint.folder}")
                table[rows] = values
                advance(len(rows))
    return table
