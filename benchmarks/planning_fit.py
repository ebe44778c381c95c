"""The figures of a device and of a link that make the model's times the observed ones, and how sure they are.

Least squares on the logarithms of time ratios (scipy's trust-region method with bounds), from several starts, so that a
microsecond and a second weigh alike. Standard errors come from the Jacobian at the optimum; a figure that the
observations leave open is refused, not guessed. Imports no torch.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from planning_observations import Observation, Quantity, expected_seconds
from scipy.optimize import least_squares

from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.plan.hardware import DeviceSpec
from ladderize.runtime.collectives.links import ASSUMED_ERROR, Interconnect, InterconnectRow

STARTS = 4
# A figure is open where timings that are right to 1 % leave it uncertain by more than its own size.
TIMING_ERROR, OPEN = 0.01, 1.0
START_FACTOR = 3.0  # how far off a share, a latency or a bandwidth that the search begins with may well be
PART_OF_A_PASS = 2  # how much larger the error of a message may be than that of the pass that it is a part of
LEAST_FREEDOM = 3  # timings more than figures: with fewer, residuals say nothing of how wrong a link is
LEAST_ERROR = 0.02  # of a time: runs of the same program differ by as much


@dataclass(frozen=True)
class FigureKind:
    """A kind of figure that can be fitted. low, high: what is physical. scale: the size of one that is fitted as it is;
    None: it is fitted as its logarithm. advice: what to time where it is left open."""

    title: str
    unit: str
    low: float
    high: float
    scale: float | None
    advice: str

    def coordinate(self, value: float) -> float:
        """The number that the fit has for it."""
        return math.log(value) if self.scale is None else value / self.scale

    def value(self, coordinate: float) -> float:
        return math.exp(coordinate) if self.scale is None else coordinate * self.scale


_PREFILL = "the prefill of a long prompt"
_DECODE = "decode steps at batch 1 of a model whose weights are larger than the caches"
_WIDTHS = "decode steps of two widths, or at two numbers of ranks, at batch 1"
_THIN = "decode steps at a batch of 2 to 256, and at batch 1"
_NARROW = "decode steps of wide products and of narrow ones at a batch of 2 to 256"
_SMALL, _LARGE = "a small all-reduce, or dense decode at batch 1", "a large all-reduce, or a dense prefill"
_OVERLAP = "a layout with overlapped sync points, prefill and decode"
FITTED = {
    "bandwidth_share": FigureKind("share of the memory bandwidth", "of the peak", 0.02, 1.0, None, _DECODE),
    "memory_bandwidth_gb_s": FigureKind("memory bandwidth", "GB/s", 0.05, 5e4, None, _DECODE),
    "matmul_share": FigureKind("share of the matmul peak", "of the peak", 0.02, 1.0, None, _PREFILL),
    "matmul_tflop_s": FigureKind("products", "TFLOP/s", 1e-3, 1e4, None, _PREFILL),
    "kernel_us": FigureKind("start of a kernel", "us", 0, 2e3, 1, _WIDTHS),
    "thin_us": FigureKind("extra of a product of few rows", "us", 0, 2e3, 1, _THIN),
    "thin_share": FigureKind("extra share of a product of few rows", "", 0, 0.5, 0.1, _NARROW),
    "launch_us": FigureKind("the host's start of an operation", "us", 0, 2e3, 1, "a prefill of one short prompt"),
    "serial_share": FigureKind(
        "serial share of arithmetic and memory", "", 0, 1, 0.5, "decode steps at a batch of 1, of about 8 and of 64"
    ),
    "contention": FigureKind("contention", "", 0, 0.9, 0.5, _OVERLAP),
    "alpha_us": FigureKind("latency of an all-reduce", "us", 0.05, 1e6, None, _SMALL),
    "bus_gb_s": FigureKind("bus bandwidth of an all-reduce", "GB/s", 1e-4, 2e4, None, _LARGE),
    "alpha_per_rank_us": FigureKind(
        "latency for each more rank", "us", 0, 1e4, 1, f"{_SMALL}, at three numbers of ranks"
    ),
}
OF_A_LINK = ("alpha_us", "bus_gb_s", "alpha_per_rank_us", "contention")


class OpenFigureError(UserError):
    """The timings leave ``figure`` open."""

    def __init__(self, message: str, figure: str) -> None:
        super().__init__(message)
        self.figure = figure


@dataclass(frozen=True)
class FittedFigure(Record):
    """name: of a field of the device or the link; ``alpha_us[4]`` is of 4 ranks. standard_error: in the same unit."""

    name: str
    value: float
    standard_error: float
    unit: str

    @property
    def is_uncertain(self) -> bool:
        """By more than its size."""
        return self.standard_error > abs(self.value)


@dataclass(frozen=True)
class Residual(Record):
    """How far the fitted model is off one observation: relative_error = predicted / observed - 1."""

    group: str
    observed_seconds: float
    predicted_seconds: float
    relative_error: float


@dataclass(frozen=True)
class FitResult(Record):
    """device, link: with the fitted figures; their relative errors are those of the residuals, of which there is one
    for each observation. mean_error, worst_error: of those that were fitted to, without signs."""

    device: DeviceSpec
    link: Interconnect | None
    figures: list[FittedFigure]
    residuals: list[Residual]
    mean_error: float
    worst_error: float


def fit(
    observations: Sequence[Observation],
    device: DeviceSpec,
    link: Interconnect | None,
    free: Sequence[str],
    *,
    unfitted: Collection[Quantity] = (),
) -> FitResult:
    """device, link: the figures that are held, and where the free ones begin; link also says which numbers of ranks
    there are rows for.

    free: names of ``FITTED``. ``matmul_tflop_s.bfloat16`` is of one dtype. ``alpha_us`` and ``bus_gb_s`` are fitted for
    every number of ranks by itself (``alpha_us[4]`` for one of them) unless ``alpha_per_rank_us`` is free too: then
    latencies are a line in the ranks, and one bus bandwidth is for all of them. unfitted: quantities that nothing is
    fitted to; their residuals are there, but in no error.

    Raises OpenFigureError for what the observations leave open, and says what to time.
    """
    if not observations:
        raise UserError("there are no timings to fit; time something first")
    model = _Model([seen for seen in observations if seen.quantity not in unfitted], device, link, free)
    vector, errors = model.solve()
    device, link = model.specs(vector)
    residuals = [
        Residual(seen.group, seen.seconds, predicted, predicted / seen.seconds - 1)
        for seen, predicted in zip(observations, expected_seconds(observations, device, link), strict=True)
    ]
    pairs = [pair for pair in zip(observations, residuals, strict=True) if pair[0].quantity not in unfitted]
    figures = [
        FittedFigure(name, kind.value(at), float(error), kind.unit)
        for name, kind, at, error in zip(model.names, model.kinds, vector.tolist(), errors, strict=True)
    ]
    compute, sent = _spread(pairs, len(figures), None if frees_device(model.names) else device.relative_error)
    of_link = [figure for figure in figures if figure_kind(figure.name) in OF_A_LINK]
    of_device = [figure for figure in figures if figure not in of_link]
    if of_device:
        device = replace(device, relative_error=compute)
    if link is not None and of_link:
        link = replace(link, relative_error=sent)
    sizes = [abs(residual.relative_error) for _, residual in pairs]
    return FitResult(device, link, figures, residuals, sum(sizes) / len(sizes), max(sizes))


def figure_kind(name: str) -> str:
    """The name in ``FITTED`` of ``alpha_us[4]`` or ``matmul_tflop_s.bfloat16``."""
    return name.partition("[")[0].partition(".")[0]


def figure_of(name: str) -> tuple[str, int | None]:
    """``matmul_tflop_s.bfloat16`` -> its dtype and None; ``alpha_us[4]`` -> no dtype and 4 ranks."""
    return name.partition(".")[2], int(name.partition("[")[2][:-1]) if "[" in name else None


def frees_device(free: Sequence[str]) -> bool:
    """Whether a figure of a device is among these."""
    return any(figure_kind(name) not in OF_A_LINK for name in free)


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
        kind, (dtype, ranks) = figure_kind(name), figure_of(name)
        if kind == "matmul_tflop_s":
            return self.device.matmul_tflop_s[dtype]
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
        rates = {figure_of(name)[0]: value for name, value in found.items() if name.startswith("matmul_tflop_s.")}
        device = replace(self.device, **plain, matmul_tflop_s={**self.device.matmul_tflop_s, **rates})
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
                name, (_, ranks) = self.names[index], figure_of(self.names[index])
                advice = self.kinds[index].advice + (f" with {ranks} ranks" if ranks else "")
                raise OpenFigureError(f"the timings leave {name} open; add timings of {advice}", name)


def _covariance(jacobian: np.ndarray) -> np.ndarray:
    """(J^T J)^-1 of J [observations, figures]; vast variances where it has none."""
    _, singular, directions = np.linalg.svd(jacobian)
    singular = np.append(singular, np.zeros(len(directions) - len(singular)))  # fewer observations than figures
    known = singular > 1e-9 * singular[0]
    inverse = np.where(known, 1 / np.where(known, singular, 1.0), 1e9)
    spread: np.ndarray = (directions.T * inverse**2) @ directions
    return spread


def _spread(
    pairs: Sequence[tuple[Observation, Residual]], figures: int, held_error: float | None
) -> tuple[float, float]:
    """One standard deviation of times of compute, and of messages, from the residuals; both at most 1.

    Of times of whole passes a message is only a part: it is taken to be ``PART_OF_A_PASS`` times as uncertain as they
    are, and as the compute in them is; and as one that was not timed where there are hardly more timings than figures.
    held_error: of the device; None where figures of it were fitted.
    """
    silent = [one.relative_error for seen, one in pairs if not seen.communicates]
    passes = [one.relative_error for seen, one in pairs if seen.quantity != "all_reduce"]
    alone = [one.relative_error for seen, one in pairs if seen.quantity == "all_reduce"]
    sent = [one.relative_error for seen, one in pairs if seen.communicates and seen.quantity != "all_reduce"]
    # figures that were fitted to the same timings make residuals smaller than errors
    larger = math.sqrt(len(pairs) / max(1, len(pairs) - figures))
    compute = min(1.0, larger * _deviation(silent or passes))
    message = max(_deviation(alone), PART_OF_A_PASS * _deviation(sent)) * larger
    if len(pairs) - figures < LEAST_FREEDOM:
        message = max(message, ASSUMED_ERROR)
    if not alone:
        message = max(message, PART_OF_A_PASS * (compute if held_error is None else held_error))
    return compute, min(1.0, message)


def _deviation(errors: Sequence[float]) -> float:
    return max(LEAST_ERROR, math.sqrt(sum(error**2 for error in errors) / len(errors))) if errors else LEAST_ERROR
