"""Which point of the front meets what was asked for. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ladderize.errors import UsageError, UserError
from ladderize.layout import Layout
from ladderize.planning.planner.document import ChoiceTarget, FrontPoint, LayoutNll, PlannedLayout, TimedPhase
from ladderize.planning.planner.front import LAYER_OPTIONS, LayoutFront, OptionCosts, chosen_layout, pareto_layouts

SLACK = 1e-9  # of a bound, for sums of floats


class LayerSeconds(Protocol):
    """Seconds of a pass as a sum: a constant and, of each layer, that of its (entering MLP mode, attention mode). Into
    the first layer enters ``blocking``."""

    @property
    def constant(self) -> float: ...

    @property
    def layer(self) -> Mapping[tuple[str, str], float]: ...


@dataclass(frozen=True)
class TimedLayouts:
    """All layouts of a model with what is known of them: seconds and estimated nats of their layers' options, and the
    seconds that are the same for all."""

    costs: OptionCosts
    constant: float
    sync_tp_size: int | None

    @property
    def dense_seconds(self) -> float:
        return self.constant + float(self.costs.seconds[:, 0].sum())

    def front(self) -> LayoutFront:
        return pareto_layouts(self.costs)

    def layout(self, chosen: np.ndarray) -> Layout:
        return chosen_layout(chosen, self.sync_tp_size)

    def speedup(self, layer_seconds: float | np.ndarray) -> np.ndarray:
        """Over the dense layout. layer_seconds: of all layers."""
        return np.asarray(self.dense_seconds / (self.constant + layer_seconds))

    def described(
        self, chosen: np.ndarray, measured: LayoutNll | None = None, held_out: LayoutNll | None = None
    ) -> PlannedLayout:
        seconds, nats = self.costs.totals(chosen)
        return describe(
            self.layout(chosen),
            seconds=self.constant + float(seconds),
            dense_seconds=self.dense_seconds,
            estimated_nats=float(nats),
            measured=measured,
            held_out=held_out,
        )

    def front_points(self, front: LayoutFront) -> list[FrontPoint]:
        return [
            FrontPoint.of(
                self.layout(chosen),
                ms=1000 * (self.constant + seconds),
                speedup=float(self.speedup(seconds)),
                nats=nats,
            )
            for chosen, seconds, nats in zip(front.chosen, front.seconds.tolist(), front.nats.tolist(), strict=True)
        ]


def describe(
    layout: Layout,
    *,
    seconds: float,
    dense_seconds: float,
    estimated_nats: float | None,
    measured: LayoutNll | None = None,
    held_out: LayoutNll | None = None,
) -> PlannedLayout:
    """seconds: of what is to be fast, in this layout and in the dense one."""
    return PlannedLayout(
        layout=str(layout),
        attention_sync=list(layout.attention_sync),
        mlp_sync=list(layout.mlp_sync),
        sync_tp_size=layout.sync_tp_size,
        ms=1000 * seconds,
        speedup=dense_seconds / seconds,
        estimated_nats=estimated_nats,
        measured=measured,
        held_out=held_out,
    )


def option_seconds(
    seconds: Mapping[str, LayerSeconds], decode_steps: int, phase: TimedPhase
) -> tuple[float, np.ndarray]:
    """What is to be fast: the constant, and seconds of a layer [6] in the order of ``LAYER_OPTIONS``.

    seconds: by phase, ``prefill`` and ``decode`` (one step), as far as ``phase`` needs them.
    """
    parts = {"prefill": [("prefill", 1)], "decode": [("decode", 1)]}.get(
        phase, [("prefill", 1), ("decode", decode_steps)]
    )
    constant = sum(times * seconds[name].constant for name, times in parts)
    layer = sum(np.array([times * seconds[name].layer[option] for option in LAYER_OPTIONS]) for name, times in parts)
    return constant, np.asarray(layer)


def layout_seconds(layout: Layout, constant: float, layer: np.ndarray) -> float:
    """Of what is to be fast; constant, layer: of ``option_seconds``."""
    options = [LAYER_OPTIONS.index((layout.entering(index), mode)) for index, mode in enumerate(layout.attention_sync)]
    return constant + float(layer[options].sum())


# ---- what is asked for ----


def read_target(max_ppl_increase: str | None, min_speedup: float | None) -> ChoiceTarget:
    """From ``--max-ppl-increase`` (``2%`` of the dense perplexity, or ``0.1`` in perplexity as ``convert`` has it) and
    ``--min-speedup``; raises UsageError unless one of them is given, and makes sense."""
    if (max_ppl_increase is None) == (min_speedup is None):
        raise UsageError(
            "--max-ppl-increase and --min-speedup both say what is to be met; give one of them"
            if min_speedup is not None
            else "give --max-ppl-increase or --min-speedup, so that there is something to choose by"
        )
    if min_speedup is not None and not (1 < min_speedup < math.inf):
        raise UsageError(f"--min-speedup must be a number above 1, such as 1.2, not {min_speedup:g}")
    if max_ppl_increase is not None:
        _increase(max_ppl_increase)
    return ChoiceTarget(max_ppl_increase=max_ppl_increase, min_speedup=min_speedup)


def _increase(text: str) -> tuple[float, bool]:
    """The number of ``2%`` or ``0.1``, and whether it is a part of the dense perplexity."""
    relative = text.strip().endswith("%")
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(
            f"--max-ppl-increase {text} is not an increase of the perplexity; write 2% (of the dense one) or a number"
            " above 0 such as 0.1 (in perplexity)"
        )
    return (value / 100 if relative else value), relative


def in_nats(target: ChoiceTarget, dense_nll: float) -> ChoiceTarget:
    """The target with its budget in nats per token. dense_nll: of the dense model, in nats per token."""
    if target.max_ppl_increase is None:
        return target
    value, relative = _increase(target.max_ppl_increase)
    return replace(target, max_nats=math.log1p(value if relative else value * math.exp(-dense_nll)))


def choose_point(speedups: np.ndarray, nats: np.ndarray, target: ChoiceTarget) -> int:
    """The index of the fastest layout within the budget, or of the most accurate that is fast enough; of equal ones
    the better in the other.

    speedups, nats: of all that may be chosen [P]. Raises UserError where nothing but a dense layout meets the target.
    """
    faster = speedups > 1 + SLACK
    if not faster.any():
        raise UserError(
            "no layout is faster than the dense one here, so there is nothing to choose; converting is not worth it on"
            " this hardware with this workload"
        )
    if target.max_nats is not None:
        meets = faster & (nats <= target.max_nats + SLACK)
        if not meets.any():
            least = int(np.lexsort((-speedups, np.where(faster, nats, np.inf)))[0])
            raise UserError(
                f"no layout that is faster than the dense one stays within --max-ppl-increase"
                f" {target.max_ppl_increase}; the least increase is {_percent(float(nats[least]))}"
                f" ({speedups[least]:.3f}x), so give at least that"
            )
        return int(np.lexsort((np.where(meets, nats, np.inf), np.where(meets, -speedups, np.inf)))[0])
    assert target.min_speedup is not None
    meets = speedups >= target.min_speedup * (1 - SLACK)
    if not meets.any():
        best = int(np.argmax(speedups))
        raise UserError(
            f"no layout reaches --min-speedup {target.min_speedup:g}; the fastest is {speedups[best]:.3f}x, with an"
            f" increase of the perplexity of {_percent(float(nats[best]))}"
        )
    return int(np.lexsort((np.where(meets, -speedups, np.inf), np.where(meets, nats, np.inf)))[0])


def _percent(nats: float) -> str:
    """An increase of the perplexity, rounded up: what is said is enough."""
    percent = 100 * math.expm1(min(nats, 30.0))
    digits = 10 ** (2 - math.floor(math.log10(percent))) if percent > 0 else 1
    return f"{math.ceil(percent * digits) / digits:g}%"
