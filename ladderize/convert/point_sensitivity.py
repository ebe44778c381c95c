"""What changes of single sync points cost, in nats per token: the file of ``ladderize sensitivity --mode points``.
Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ladderize.convert.sensitivity_file import INTERVAL, SensitivityRun, interval_ends, window_resamples
from ladderize.files.records import Record
from ladderize.layout import ATTENTION_MODES, BLOCKING, DROPPED, MLP_MODES, OVERLAPPED, Layout, format_ranges

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, order=True)
class PointChange(Record):
    """Layers of a dense model whose sync points are changed: one, or two neighbours. entering: the mode of the MLP sync
    point that enters each of them (none enters layer 0). attention: the mode of their own attention sync point. before:
    these two modes of the first of two neighbours, where they are not those of the second."""

    layers: tuple[int, ...]
    entering: str
    attention: str
    before: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def steps(self) -> list[tuple[str, str]]:
        """Of each of the layers the mode that enters it and that of its attention."""
        entering = [self.entering if layer else BLOCKING for layer in self.layers]
        steps = [(mode, self.attention) for mode in entering]
        return [(self.before[0], self.before[1]), *steps[1:]] if self.before else steps

    def layout(self, num_layers: int, sync_tp_size: int | None) -> Layout:
        """The dense layout with this change. sync_tp_size: of dropped sync points; others have none."""
        attention, mlp = [BLOCKING] * num_layers, [BLOCKING] * num_layers
        for layer, (entering, mode) in zip(self.layers, self.steps, strict=True):
            attention[layer] = mode
            if layer:
                mlp[layer - 1] = entering
        return Layout(tuple(attention), tuple(mlp), sync_tp_size if DROPPED in attention else None)

    @property
    def kind(self) -> str:
        """What the layers become, by the name that a layout has for it; of single sync points these are said."""
        return " then ".join(
            dict.fromkeys(map(_kind, [self.before, self.steps[-1]] if self.before else self.steps[-1:]))
        )

    def __str__(self) -> str:
        return f"layers {format_ranges(self.layers)}: {self.kind}"


def _kind(step: Sequence[str]) -> str:
    entering, attention = step
    if entering == BLOCKING:
        return f"attention {attention}"
    if attention == BLOCKING:
        return f"entering MLP {entering}"
    return "ladder" if attention == OVERLAPPED else "both"


@dataclass(frozen=True, order=True)
class PointCost(PointChange):
    """What a change costs: the increase of the mean negative log-likelihood, in nats per token, between the ends of its
    bootstrap interval; and the perplexity with it."""

    nats: float
    low: float
    high: float
    perplexity: float


@dataclass(frozen=True)
class PointSensitivity(SensitivityRun):
    """interval: the part of bootstrap resamples between low and high. dense_nll: nats per token. nll: [windows, costs +
    1], summed over each window, in nats: of the models of ``costs`` in their order, then the dense one."""

    complete: bool
    num_layers: int
    pairs: bool
    interval: float
    dense_nll: float
    costs: list[PointCost]
    nll: list[list[float]]


def point_changes(num_layers: int, *, dropped: bool, pairs: bool) -> list[PointChange]:
    """All changes of one layer, 2 or 5 of each, then of two neighbours if ``pairs``: whatever the one and the other
    become. dropped: those with dropped sync points are among them."""
    modes = [mode for mode in ATTENTION_MODES if dropped or mode != DROPPED]
    every = [(entering, attention) for attention in modes for entering in MLP_MODES][1:]  # the first changes nothing

    def possible(layer: int) -> list[tuple[str, str]]:
        return every if layer else [step for step in every if step[0] == BLOCKING]  # no MLP before layer 0

    changes = [PointChange((layer,), *step) for layer in range(num_layers) for step in possible(layer)]
    for layer in range(num_layers - 1 if pairs else 0):
        for step in possible(layer + 1):
            for before in possible(layer):
                change = PointChange((layer, layer + 1), *step)
                alike = change.steps[0] == before
                changes.append(change if alike else replace(change, before=before))
    return changes


def point_costs(changes: Sequence[PointChange], table: "np.ndarray", tokens: int) -> tuple[float, list[PointCost]]:
    """The dense model's nats per token, and the cost of each change with its bootstrap interval over windows.

    table: [windows, changes + 1] in nats, summed over a window's ``tokens`` scored tokens; the dense model is last.
    """
    increases = (table[:, :-1] - table[:, -1:]) / tokens
    ends = interval_ends(window_resamples(increases))
    dense = float(table[:, -1].mean() / tokens)
    return dense, [
        PointCost(**vars(change), nats=nats, low=low, high=high, perplexity=math.exp(dense + nats))
        for change, nats, low, high in zip(changes, increases.mean(0).tolist(), *ends, strict=True)
    ]


def point_document(
    run: SensitivityRun, changes: Sequence[PointChange], nll: list[list[float]], *, num_layers: int, pairs: bool
) -> PointSensitivity:
    """What a whole table says of the changes. nll: as in the document."""
    import numpy as np

    dense_nll, costs = point_costs(changes, np.array(nll), run.data.seq_len - 1)
    return PointSensitivity(
        **vars(run),
        complete=True,
        num_layers=num_layers,
        pairs=pairs,
        interval=INTERVAL,
        dense_nll=dense_nll,
        costs=costs,
        nll=nll,
    )
