"""The figures of a device and of a link that make the model's times the observed ones, and how sure they are.

Least squares on the logarithms of time ratios (scipy's trust-region method with bounds), from several starts, so that a
microsecond and a second weigh alike. Standard errors come from the Jacobian at the optimum; a figure that the
observations leave open is refused, not guessed. Imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from planning_observations import Observation, expected_seconds
from scipy.optimize import least_squares

from ladderize.errors import UserError
from ladderize.plan.hardware import DeviceSpec
from ladderize.runtime.collectives.links import Interconnect, InterconnectRow

STARTS = 4
# A figure is open where timings that are right to 1 % leave it uncertain by more than its own size.
TIMING_ERROR, OPEN = 0.01, 1.0
START_FACTOR = 3.0  # how far off a share, a latency or a bandwidth that the search begins with may well be
LEAST_ERROR = 0.02  # of a time: runs of the same program differ by as much


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure that can be fitted.

    low, high: what is physical.
    scale: the size of one that is fitted as it is; None: it is fitted as its logarithm.
    """

    unit: str
    low: float
    high: float
    scale: float | None

    def coordinate(self, value: float) -> float:
        """Return the number that the fit has for it."""
        return math.log(value) if self.scale is None else value / self.scale

    def value(self, coordinate: float) -> float:
        return math.exp(coordinate) if self.scale is None else coordinate * self.scale


FITTED = {
    "bandwidth_share": FigureKind("of the peak", 0.02, 1.0, None),
    "matmul_share": FigureKind("of the peak", 0.02, 1.0, None),
    "kernel_us": FigureKind("us", 0, 2e3, 1),
    "thin_us": FigureKind("us", 0, 2e3, 1),
    "thin_share": FigureKind("", 0, 0.5, 0.1),
    "launch_us": FigureKind("us", 0, 2e3, 1),
    "contention": FigureKind("", 0, 0.9, 0.5),
    "alpha_us": FigureKind("us", 0.05, 1e6, None),
    "bus_gb_s": FigureKind("GB/s", 1e-4, 2e4, None),
    "alpha_per_rank_us": FigureKind("us", 0, 1e4, 1),
}
OF_A_LINK = ("alpha_us", "bus_gb_s", "alpha_per_rank_us", "contention")


class OpenFigureError(UserError):
    """The timings leave ``figure`` open."""

    def __init__(self, message: str, figure: str) -> None:
        super().__init__(message)
        self.figure = figure


@dataclass(frozen=True)
class FittedFigure:
    """A figure of the device or the link; ``alpha_us[4]`` is of 4 ranks.

    standard_error: in the same unit.
    """

    name: str
    value: float
    standard_error: float
    unit: str


@dataclass(frozen=True)
class FitResult:
    """The device and the link with the fitted figures."""

    device: DeviceSpec
    link: Interconnect | None
    figures: list[FittedFigure]


def fit(
    observations: Sequence[Observation], device: DeviceSpec, link: Interconnect | None, free: Sequence[str]
) -> FitResult:
    """Return the fit of the free figures to all observations.

    device, link: the figures that are held, and where the free ones begin; link also says which numbers of ranks
    there are rows for.
    free: names of ``FITTED``. ``alpha_us`` and ``bus_gb_s`` are fitted for every number of ranks by itself
    (``alpha_us[4]`` for one of them) unless ``alpha_per_rank_us`` is free too: then latencies are a line in the ranks,
    and one bus bandwidth is for all of them.

    Raises OpenFigureError for what the observations leave open.
    """
    model = _Model(observations, device, link, free)
    vector, errors = model.solve()
    figures = [
        FittedFigure(name, kind.value(at), float(error), kind.unit)
        for name, kind, at, error in zip(model.names, model.kinds, vector.tolist(), errors, strict=True)
    ]
    return FitResult(*model.specs(vector), figures)


def figure_kind(name: str) -> str:
    """Return the name in ``FITTED`` of ``alpha_us[4]``."""
    return name.partition("[")[0]


def ranks_of(name: str) -> int | None:
    """Return 4 for ``alpha_us[4]``."""
    return int(name.partition("[")[2][:-1]) if "[" in name else None


class _Model:
    """Times of the observations as a function of the free figures, each as one number of a vector."""

    def __init__(
        self,
        observations: Sequence[Observation],
        device: DeviceSpec,
        link: Interconnect | None,
        free: Sequence[str],
    ) -> None:
        self.observations, self.device, self.link = observations, device, link
        self.observed = np.log([seen.seconds for seen in observations])
        self.is_line = "alpha_per_rank_us" in free
        counts = sorted({seen.ranks for seen in observations if seen.communicates})
        by_ranks = () if self.is_line else ("alpha_us", "bus_gb_s")
        self.names = [
            name for given in free for name in ([f"{given}[{n}]" for n in counts] if given in by_ranks else [given])
        ]
        unknown = [name for name in self.names if figure_kind(name) not in FITTED]
        if unknown or len(set(self.names)) < len(self.names):
            raise ValueError(f"free figures {list(free)}: {unknown or 'one stands twice'}")
        self.kinds = [FITTED[figure_kind(name)] for name in self.names]
        self.logarithmic = np.array([kind.scale is None for kind in self.kinds], bool)
        held = [
            min(max(self._held(name), kind.low), kind.high) for name, kind in zip(self.names, self.kinds, strict=True)
        ]
        self.start, self.low, self.high = (
            np.array([kind.coordinate(value) for kind, value in zip(self.kinds, values, strict=True)])
            for values in (held, [kind.low for kind in self.kinds], [kind.high for kind in self.kinds])
        )

    def _held(self, name: str) -> float:
        """Where the figure starts from."""
        kind, ranks = figure_kind(name), ranks_of(name)
        if kind not in OF_A_LINK:
            return float(getattr(self.device, kind))
        assert self.link is not None
        rows = self.link.rows
        if kind == "contention":
            return self.link.contention
        if kind == "alpha_per_rank_us":
            return (rows[-1].alpha_us - rows[0].alpha_us) / max(1, rows[-1].ranks - rows[0].ranks)
        row = min(rows, key=lambda row: abs(row.ranks - (ranks or row.ranks)))
        return row.alpha_us if kind == "alpha_us" else row.bus_gb_s or 10.0

    def specs(self, vector: np.ndarray) -> tuple[DeviceSpec, Interconnect | None]:
        """The device and the link with the figures of ``vector``."""
        found = {name: kind.value(at) for name, kind, at in zip(self.names, self.kinds, vector.tolist(), strict=True)}
        plain: dict[str, Any] = {own.name: found[own.name] for own in fields(DeviceSpec) if own.name in found}
        device = replace(self.device, **plain)
        if self.link is None:
            return device, None
        rows = [self._row(row, found) for row in self.link.rows]
        return device, replace(self.link, rows=rows, contention=found.get("contention", self.link.contention))

    def _row(self, row: InterconnectRow, found: dict[str, float]) -> InterconnectRow:
        alpha = found.get(f"alpha_us[{row.ranks}]", row.alpha_us)
        if self.is_line:
            alpha = found.get("alpha_us", self._held("alpha_us")) + found["alpha_per_rank_us"] * (row.ranks - 2)
        bus = found.get(f"bus_gb_s[{row.ranks}]", found.get("bus_gb_s", row.bus_gb_s or 0.0))
        return replace(row, alpha_us=alpha, bus_gb_s=bus or None)

    def misfit(self, vector: np.ndarray) -> np.ndarray:
        """log(predicted / observed) of each observation; then what holds a figure near its start where the timings
        hardly tell it from another: a start counts as one timing of usual scatter, by which the figure is known within
        a factor."""
        away = (vector - self.start)[self.logarithmic] / math.log(START_FACTOR)
        predicted = expected_seconds(self.observations, *self.specs(vector))
        return np.concatenate((np.log(predicted) - self.observed, LEAST_ERROR * away))

    def solve(self) -> tuple[np.ndarray, np.ndarray]:
        """The best of several optima, and the standard error of each figure, in its unit, as the scatter of the
        residuals makes it; raises OpenFigureError where a figure is left open."""
        if not self.names:
            return self.start, self.start
        generator, tries = np.random.default_rng(0), []
        margin = 1e-6 * (self.high - self.low)
        for number in range(STARTS):
            near = self.start + (generator.normal(0, 0.5, len(self.start)) if number else 0)
            inside = np.clip(near, self.low + margin, self.high - margin)
            tries.append(least_squares(self.misfit, inside, bounds=(self.low, self.high), x_scale="jac", max_nfev=200))
        best = min(tries, key=lambda tried: tried.cost)
        count = len(self.observations)
        variances = np.maximum(np.diag(_covariance(best.jac[:count])), 0)
        self._check_identified(best.x, variances)
        scatter = float(np.sum(best.fun[:count] ** 2)) / max(1, count - len(best.x))
        sizes = [
            kind.value(at) if kind.scale is None else kind.scale for kind, at in zip(self.kinds, best.x, strict=True)
        ]
        return best.x, np.sqrt(variances * scatter) * np.array(sizes)

    def _check_identified(self, vector: np.ndarray, variances: np.ndarray) -> None:
        for index in np.argsort(-variances):
            # logarithms and numbers that are scaled are of the order of 1; a figure of hundreds is not open by 1
            size = 1.0 if self.logarithmic[index] else max(1.0, abs(vector[index]))
            if TIMING_ERROR * math.sqrt(variances[index]) > OPEN * size:
                raise OpenFigureError(f"the timings leave {self.names[index]} open", self.names[index])


def _covariance(jacobian: np.ndarray) -> np.ndarray:
    """(J^T J)^-1 of J [observations, figures]; vast variances where it has none."""
    _, singular, directions = np.linalg.svd(jacobian)
    singular = np.append(singular, np.zeros(len(directions) - len(singular)))  # fewer observations than figures
    known = singular > 1e-9 * singular[0]
    inverse = np.where(known, 1 / np.where(known, singular, 1.0), 1e9)
    spread: np.ndarray = (directions.T * inverse**2) @ directions
    return spread
