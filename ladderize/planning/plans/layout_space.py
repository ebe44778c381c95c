"""All layouts of a model with their times and estimated costs, the exact Pareto front (those that no other is faster
than at no higher cost), and which of these meets a target. Imports no torch.

Times add up over layers, because each wait comes right after the next sub-module: what an all-reduce costs does not
depend on the modes of others. Estimated costs add up over layers and, where neighbours were measured together, over
pairs of them. So a dynamic programme over the layers finds the front: its state is the last layer's option, and of each
state it keeps the labels (time, cost) that no other of the state is better than.

A layer's option is the mode of the MLP sync point that enters it and of its own attention sync point. With these named
by layer, any choice of options is a layout: 6 options a layer, 3 for the first, which no MLP enters.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ladderize.errors import UserError
from ladderize.layout import ATTENTION_MODES, BLOCKING, DROPPED, MLP_MODES, Layout
from ladderize.planning.passes import PointSeconds
from ladderize.planning.plans.document import FrontPoint, LayoutNll, PlannedLayout
from ladderize.planning.plans.options import ChoiceTarget, TimedPhase

# the first is dense
LAYER_OPTIONS = tuple((entering, attention) for entering in MLP_MODES for attention in ATTENTION_MODES)
# Times and costs are added as whole numbers of the most there can be over this, so that sums that are equal compare as
# equal: layers are alike, and rounding would make many labels out of one.
RESOLUTION = 2**40
ROUNDING = 1e-9  # times that differ by no larger part are the same, and costs that differ by less from a bound


@dataclass(frozen=True)
class LayoutSpace:
    """What each option of each layer takes and costs, of a model with ``sync_tp_size`` virtual ranks.

    seconds, nats: [L, 6] in the order of ``LAYER_OPTIONS``; nats is inf where an option is not offered. pairs: what an
    option costs more, in nats, after another in the layer before: [L - 1, 6, 6], first the earlier layer's. constant:
    seconds of every layout besides. Layouts are arrays of options, [..., L].
    """

    seconds: np.ndarray
    nats: np.ndarray
    pairs: np.ndarray
    constant: float = 0.0
    sync_tp_size: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.nats)

    @property
    def dense(self) -> np.ndarray:
        return np.zeros(self.num_layers, np.int8)

    def totals(self, chosen: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and estimated nats of layouts: [...] each."""
        layers, options = np.arange(self.num_layers), np.asarray(chosen, np.intp)
        between = self.pairs[layers[:-1], options[..., :-1], options[..., 1:]].sum(-1)
        seconds = self.constant + self.seconds[layers, options].sum(-1)
        return seconds, self.nats[layers, options].sum(-1) + between

    def speedups(self, chosen: Sequence[int] | np.ndarray) -> np.ndarray:
        """Over the dense layout."""
        return np.asarray(self.totals(self.dense)[0] / self.totals(chosen)[0])

    def layout(self, chosen: Sequence[int] | np.ndarray) -> Layout:
        """The layout of one option for each layer."""
        named = [LAYER_OPTIONS[int(option)] for option in chosen]
        attention = tuple(mode for _, mode in named)
        mlp = (*(entering for entering, _ in named[1:]), BLOCKING)
        return Layout(attention, mlp, self.sync_tp_size if DROPPED in attention else None)

    def described(
        self,
        chosen: Sequence[int] | np.ndarray,
        measured: LayoutNll | None = None,
        held_out: LayoutNll | None = None,
    ) -> PlannedLayout:
        layout, (seconds, nats) = self.layout(chosen), self.totals(chosen)
        return PlannedLayout(
            layout=str(layout),
            **layout.to_config(),
            ms=1000 * float(seconds),
            speedup=float(self.speedups(chosen)),
            estimated_nats=float(nats),
            measured=measured,
            held_out=held_out,
        )

    def front_points(self, front: np.ndarray, nats: Sequence[float] | np.ndarray | None = None) -> list[FrontPoint]:
        """nats: of each layout, where they are not the estimated ones."""
        seconds, estimated = self.totals(front)
        costs = estimated if nats is None else nats
        return [
            FrontPoint.of(self.layout(one), ms=1000 * float(time), speedup=float(self.speedups(one)), nats=float(cost))
            for one, time, cost in zip(front, seconds, costs, strict=True)
        ]

    def front(self) -> np.ndarray:
        """Layouts that no other is both faster and cheaper than, the fastest first; of those that are equal in both,
        one: int8 [P, L]."""
        known = np.where(np.isinf(self.nats), 0.0, self.nats)
        second, nat = _tick(self.seconds), _tick(known) + _tick(self.pairs)
        seconds, nats, pairs = (
            np.rint(values / tick).astype(np.int64)
            for values, tick in ((self.seconds, second), (known, nat), (self.pairs, nat))
        )
        # after some layers, labels [4, n]: time and cost in ticks, the last layer's option, and the parent among the
        # labels of the layer before; at first the option is 0, dense, after which no pair costs anything
        layers = [np.zeros((4, 1), np.int64)]
        for layer in range(self.num_layers):
            (time, cost, last, _), kept = layers[-1], []
            for option in np.flatnonzero(np.isfinite(self.nats[layer])):
                between = pairs[layer - 1, last, option] if layer else 0
                reached = (
                    time + seconds[layer, option],
                    cost + nats[layer, option] + between,
                    np.full(len(time), option),
                    np.arange(len(time)),
                )
                kept.append(_undominated(np.stack(reached)))
            layers.append(np.concatenate(kept, 1))
        labels = _undominated(layers.pop())
        chosen = np.empty((labels.shape[1], self.num_layers), np.int8)
        for layer in reversed(range(self.num_layers)):
            chosen[:, layer] = labels[2]
            labels = layers[layer][:, labels[3]]
        whole = self.totals(chosen)[0]  # without those that are faster than the next by rounding only
        return chosen[np.append(whole[1:] > whole[:-1] * (1 + ROUNDING), True)]


def _tick(values: np.ndarray) -> float:
    """What values [layers, ...] are counted in."""
    return float(sum(np.abs(layer).max() for layer in values)) / RESOLUTION or 1 / RESOLUTION


def _undominated(labels: np.ndarray) -> np.ndarray:
    """Those that no other is at most as slow and at most as dear as, ascending in time."""
    ordered = labels[:, np.lexsort((labels[1], labels[0]))]
    least = np.minimum.accumulate(ordered[1])
    return ordered[:, np.concatenate([[True], ordered[1, 1:] < least[:-1]])]


def chosen_options(layout: Layout) -> list[int]:
    """The option of each layer of a layout; ``LayoutSpace.layout`` makes it again."""
    return [
        LAYER_OPTIONS.index((layout.entering(layer), layout.attention_sync[layer]))
        for layer in range(layout.num_layers)
    ]


def option_seconds(
    seconds: Mapping[str, PointSeconds], decode_steps: int, phase: TimedPhase
) -> tuple[float, np.ndarray]:
    """What is to be fast: the constant, and seconds of a layer [6] in the order of ``LAYER_OPTIONS``.

    seconds: by phase, ``prefill`` and ``decode`` (one step), as far as ``phase`` needs them.
    """
    times = {"prefill": 1, "decode": decode_steps} if phase == "end_to_end" else {phase: 1}
    constant = sum(count * seconds[name].constant for name, count in times.items())
    layer = [sum(count * seconds[name].layer[one] for name, count in times.items()) for one in LAYER_OPTIONS]
    return constant, np.array(layer)


def choose_point(speedups: np.ndarray, nats: np.ndarray, target: ChoiceTarget) -> int:
    """The index of the fastest layout within the budget, or of the most accurate that is fast enough; of equal ones
    the better in the other.

    speedups, nats: of all that may be chosen [P]. Raises UserError where nothing but a dense layout meets the target.
    """
    faster = speedups > 1 + ROUNDING
    if not faster.any():
        raise UserError(
            "no layout is faster than the dense one here, so there is nothing to choose; converting is not worth it on"
            " this hardware with this workload"
        )
    if target.max_nats is not None:
        meets, order = faster & (nats <= target.max_nats + ROUNDING), (nats, -speedups)
        if not meets.any():
            least = int(np.lexsort((-speedups, np.where(faster, nats, np.inf)))[0])
            raise UserError(
                f"no layout that is faster than the dense one stays within --max-ppl-increase"
                f" {target.max_ppl_increase}; the least increase is {_percent(float(nats[least]))}"
                f" ({speedups[least]:.3f}x), so give at least that"
            )
    else:
        assert target.min_speedup is not None
        meets, order = speedups >= target.min_speedup * (1 - ROUNDING), (-speedups, nats)
        if not meets.any():
            best = int(np.argmax(speedups))
            raise UserError(
                f"no layout reaches --min-speedup {target.min_speedup:g}; the fastest is {speedups[best]:.3f}x, with an"
                f" increase of the perplexity of {_percent(float(nats[best]))}"
            )
    return int(np.lexsort([np.where(meets, values, np.inf) for values in order])[0])


def _percent(nats: float) -> str:
    """An increase of the perplexity, rounded up: what is said is enough."""
    percent = 100 * math.expm1(min(nats, 30.0))
    digits = 10 ** (2 - math.floor(math.log10(percent))) if percent > 0 else 1
    return f"{math.ceil(percent * digits) / digits:g}%"
