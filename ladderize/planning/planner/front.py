"""The exact Pareto front of all layouts: those that no other is faster than at no higher cost. Imports no torch.

Times add up over layers, because each wait comes right after the next sub-module: what an all-reduce costs does not
depend on the modes of others. Estimated costs add up over layers and, where neighbours were measured together, over
pairs of them. So a dynamic programme over the layers finds the front: its state is the last layer's option, and of each
state it keeps the labels (time, cost) that no other of the state is better than.

A layer's option is the mode of the MLP sync point that enters it and of its own attention sync point. With these named
by layer, any choice of options is a layout: 6 options a layer, 3 for the first, which no MLP enters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ladderize.layout import ATTENTION_MODES, BLOCKING, DROPPED, MLP_MODES, Layout

LAYER_OPTIONS = tuple(
    (entering, attention) for entering in MLP_MODES for attention in ATTENTION_MODES
)  # the first is dense
# Times and costs are added as whole numbers of the most there can be over this, so that sums that are equal compare as
# equal: layers are alike, and rounding would make many labels out of one.
RESOLUTION = 2**40
ROUNDING = 1e-9  # times that differ by no larger part are the same


@dataclass(frozen=True)
class OptionCosts:
    """What each option of each layer costs.

    seconds, nats: [L, 6] in the order of ``LAYER_OPTIONS``; nats is inf where an option is not offered. pairs: what an
    option costs more, in nats, after another in the layer before: [L - 1, 6, 6], first the earlier layer's.
    """

    seconds: np.ndarray
    nats: np.ndarray
    pairs: np.ndarray

    @property
    def num_layers(self) -> int:
        return len(self.nats)

    def totals(self, chosen: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and nats of one option for each layer, added up. chosen: [..., L] -> [...] each."""
        layers, options = np.arange(self.num_layers), np.asarray(chosen, np.intp)
        between = self.pairs[layers[:-1], options[..., :-1], options[..., 1:]].sum(-1)
        return self.seconds[layers, options].sum(-1), self.nats[layers, options].sum(-1) + between


@dataclass(frozen=True)
class LayoutFront:
    """Layouts that no other is both faster and cheaper than, the fastest first. seconds, nats: [P], of the layers.
    chosen: int8 [P, L], an index into ``LAYER_OPTIONS`` for each layer."""

    seconds: np.ndarray
    nats: np.ndarray
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class _Labels:
    """After some layers: of each label its time and cost in ticks, the last layer's option, and its parent among the
    labels of the layer before."""

    seconds: np.ndarray
    nats: np.ndarray
    option: np.ndarray
    parent: np.ndarray

    def __getitem__(self, index: np.ndarray) -> "_Labels":
        return _Labels(self.seconds[index], self.nats[index], self.option[index], self.parent[index])


def pareto_layouts(costs: OptionCosts) -> LayoutFront:
    """Every point of the front; of layouts that are equal in both, one."""
    known = np.where(np.isinf(costs.nats), 0.0, costs.nats)
    second = _tick(costs.seconds)
    nat = _tick(known) + _tick(costs.pairs)
    seconds, nats, pairs = (
        np.rint(values / tick).astype(np.int64)
        for values, tick in ((costs.seconds, second), (known, nat), (costs.pairs, nat))
    )
    start = np.zeros(1, np.int64)
    layers = [_Labels(start, start, start, start)]  # of option 0, dense: no pair costs anything after it
    for layer in range(costs.num_layers):
        before, kept = layers[-1], []
        for option in np.flatnonzero(np.isfinite(costs.nats[layer])):
            between = pairs[layer - 1, before.option, option] if layer else 0
            reached = _Labels(
                before.seconds + seconds[layer, option],
                before.nats + nats[layer, option] + between,
                np.full(len(before.seconds), option),
                np.arange(len(before.seconds)),
            )
            kept.append(_undominated(reached))
        layers.append(_joined(kept))
    last = _undominated(layers.pop())
    chosen = np.empty((len(last.seconds), costs.num_layers), np.int8)
    labels = last
    for layer in reversed(range(costs.num_layers)):
        chosen[:, layer] = labels.option
        labels = layers[layer][labels.parent]
    return _exact(costs, chosen)


def _exact(costs: OptionCosts, chosen: np.ndarray) -> LayoutFront:
    """The front of layouts that ascend in time, without those that are faster than the next by rounding only."""
    seconds, nats = costs.totals(chosen)
    kept = np.append(seconds[1:] > seconds[:-1] * (1 + ROUNDING), True)
    return LayoutFront(seconds[kept], nats[kept], chosen[kept])


def _tick(values: np.ndarray) -> float:
    """What values [layers, ...] are counted in."""
    return float(sum(np.abs(layer).max() for layer in values)) / RESOLUTION or 1 / RESOLUTION


def _undominated(labels: _Labels) -> _Labels:
    """Those that no other is at most as slow and at most as dear as, ascending in time."""
    ordered = labels[np.lexsort((labels.nats, labels.seconds))]
    least = np.minimum.accumulate(ordered.nats)
    return ordered[np.concatenate([[True], ordered.nats[1:] < least[:-1]])]


def _joined(parts: Sequence[_Labels]) -> _Labels:
    names = ("seconds", "nats", "option", "parent")
    return _Labels(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def chosen_layout(chosen: Sequence[int] | np.ndarray, sync_tp_size: int | None) -> Layout:
    """The layout of one option for each layer. sync_tp_size: of dropped sync points, where there are any."""
    named = [LAYER_OPTIONS[int(option)] for option in chosen]
    attention = tuple(mode for _, mode in named)
    mlp = (*(entering for entering, _ in named[1:]), BLOCKING)
    return Layout(attention, mlp, sync_tp_size if DROPPED in attention else None)


def chosen_options(layout: Layout) -> list[int]:
    """The option of each layer of a layout; ``chosen_layout`` makes it again."""
    return [
        LAYER_OPTIONS.index((layout.entering(layer), layout.attention_sync[layer]))
        for layer in range(layout.num_layers)
    ]
