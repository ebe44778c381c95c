"""The likelihood of windows under many layouts of one model, with all of its weights in memory once.

Layouts that agree in their first layers compute the same there: each layer is run once for each different beginning of
a layout. One dense pass then serves all that differ from the dense model in later layers only, and of the 3,888 layouts
of five layers each costs one layer and a little.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ladderize.blocks import Blocks, State, complete
from ladderize.checkpoint.llama import parameter_count
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout

LayerStep = tuple[
    str, str
]  # what a layout does in a layer: the mode of the MLP sync point that enters it, its attention's


class LayoutTree:
    """Layouts of as many layers each, and where their ways part."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = list(layouts)
        self.num_layers = self.layouts[0].num_layers
        ranks = {layout.sync_tp_size for layout in self.layouts if layout.sync_tp_size is not None}
        if len(ranks) > 1 or {layout.num_layers for layout in self.layouts} != {self.num_layers}:
            raise ValueError("these layouts are of several models, or of several sync_tp_size")
        self.sync_tp_size = min(ranks, default=None)

    def parting(self, layer: int, members: Sequence[int]) -> list[tuple[LayerStep, list[int]]]:
        """What layouts, by their number, do in a layer; those of the largest group last."""
        groups: dict[LayerStep, list[int]] = defaultdict(list)
        for number in members:
            layout = self.layouts[number]
            groups[layout.entering(layer), layout.attention_sync[layer]].append(number)
        return sorted(groups.items(), key=lambda group: len(group[1]))

    @property
    def layer_runs(self) -> int:
        """How many times some layer is run for one batch."""
        return sum(self.runs_by_mode.values())

    @cached_property
    def runs_by_mode(self) -> Counter[str]:
        """The same, by the mode of the layer's attention sync point."""
        runs: Counter[str] = Counter()
        waiting = [(0, list(range(len(self.layouts))))]
        while waiting:
            layer, members = waiting.pop()
            groups = self.parting(layer, members)
            runs.update(attention for (_, attention), _ in groups)
            if layer + 1 < self.num_layers:
                waiting += [(layer + 1, group) for _, group in groups]
        return runs

    @property
    def states(self) -> int:
        """The most states that are held at a time: a walk waits only for groups that are no larger than its own."""
        return len(self.layouts).bit_length() + 1

    def overlaps(self, layer: int) -> bool:
        """Whether any layout overlaps the MLP sync point of ``layer``."""
        return any(layout.mlp_sync[layer] == OVERLAPPED for layout in self.layouts)


class Suffixes:
    """The likelihood of a batch of windows under each of ``layouts``. weights: of the layers, where they were read."""

    def __init__(
        self, blocks: Blocks, layouts: Sequence[Layout], weights: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        self.blocks, self.tree = blocks, LayoutTree(layouts)
        self.weights = weights if weights is not None else [blocks.weights(i) for i in range(blocks.num_layers)]
        self.built: dict[tuple[int, str], torch.nn.Module] = {}

    def layer(self, index: int, attention: str = BLOCKING) -> torch.nn.Module:
        """A layer with this mode of its attention sync point. It hands on its stream with and without its MLP's output
        where a layout overlaps the MLP sync point, so that one run serves both modes."""
        if (index, attention) not in self.built:
            modes, layers = [BLOCKING] * self.blocks.num_layers, self.blocks.num_layers
            modes[index] = attention
            after = [OVERLAPPED if i == index and self.tree.overlaps(i) else BLOCKING for i in range(layers)]
            ranks = self.tree.sync_tp_size if attention == DROPPED else None
            layout = Layout(tuple(modes), tuple(after), ranks)
            self.built[index, attention] = self.blocks.layer(index, layout, self.weights[index])
        return self.built[index, attention]

    def __call__(self, ids: Tensor) -> np.ndarray:
        """ids: [batch, tokens] -> summed negative log-likelihoods in nats, float64 [batch, layouts]."""
        count = len(self.tree.layouts)
        table = torch.empty(len(ids), count, dtype=torch.float64, device=self.blocks.device)
        with torch.no_grad():
            self._walk(0, self.blocks.embed(ids), list(range(count)), ids, table)
        return table.cpu().numpy()

    def _walk(self, first: int, state: State, members: list[int], ids: Tensor, table: Tensor) -> None:
        """Fill the columns of layouts that agree before layer ``first``, which ``state`` enters."""
        for layer in range(first, self.blocks.num_layers):
            *others, (step, members) = self.tree.parting(layer, members)
            for other, apart in others:
                self._walk(layer + 1, self._run(layer, other, state), apart, ids, table)
            state = self._run(layer, step, state)
        nll = self.blocks.nll(complete(state), ids)
        for number in members:
            table[:, number] = nll  # one tensor for all: small ones between large ones would leave memory in pieces

    def _run(self, layer: int, step: LayerStep, state: State) -> State:
        entering, attention = step
        return self.blocks.run(self.layer(layer, attention), state if entering == OVERLAPPED else complete(state))


def suffix_memory(blocks: Blocks, tree: LayoutTree, tokens: int) -> tuple[int, int]:
    """Bytes of the weights, and of a pass over ``tokens`` tokens: the states that are held, and one layer's work."""
    hidden, intermediate = int(blocks.config["hidden_size"]), int(blocks.config["intermediate_size"])
    pair = 2 if any(map(tree.overlaps, range(tree.num_layers))) else 1  # with and without what is in flight
    states = pair * tree.states * hidden
    layer = 4 * hidden * (tree.sync_tp_size or 1) + 3 * intermediate
    return parameter_count(blocks.config) * blocks.dtype.itemsize, tokens * (states + layer) * blocks.dtype.itemsize
