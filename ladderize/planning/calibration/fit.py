"""The figures of a device and of a link that make the model's times the observed ones, and how sure they are.

Least squares on the logarithms of time ratios (scipy's trust-region method with bounds), from several starts, so that a
microsecond and a second weigh alike. Standard errors come from the Jacobian at the optimum; a figure that the
observations leave open is refused, not guessed. Imports no torch.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.planning.calibration.observations import Observation, Quantity, expected_seconds, parts_key, parts_seen
from ladderize.planning.hardware import DeviceSpec, known_engines
from ladderize.runtime.collectives.links import ASSUMED_ERROR, Interconnect, InterconnectRow

STARTS = 4
# A figure is open where timings that are right to 1 % leave it uncertain by more than its own size.
TIMING_ERROR, OPEN = 0.01, 1.0
START_FACTOR = 3.0  # how far off a share, a latency or a bandwidth that the search begins with may well be
PART_OF_A_PASS = 2  # how much larger the error of a message may be than that of the pass that it is a part of
LEAST_FREEDOM = 3  # timings more than figures: with fewer, residuals say nothing of how wrong a link is
LEAST_ERROR = 0.02  # of a time: runs of the same program differ by as much


@dataclass(frozen=True)
class _Fitted:
    """A kind of figure that can be fitted. low, high: what is physical. logarithmic: fitted as its logarithm; others
    as they are, of the size ``scale``. advice: what to time where it is left open."""

    low: float
    high: float
    logarithmic: bool
    scale: float
    unit: str
    advice: str


_PREFILL = "the prefill of a long prompt"
_DECODE = "decode steps at batch 1 of a model whose weights are larger than the caches"
_SMALL, _LARGE = "a small all-reduce, or dense decode at batch 1", "a large all-reduce, or a dense prefill"
FITTED = {
    "bandwidth_share": _Fitted(0.02, 1.0, True, 1, "of the peak", _DECODE),
    "memory_bandwidth_gb_s": _Fitted(0.05, 5e4, True, 1, "GB/s", _DECODE),
    "matmul_share": _Fitted(0.02, 1.0, True, 1, "of the peak", _PREFILL),
    "matmul_tflop_s": _Fitted(1e-3, 1e4, True, 1, "TFLOP/s", _PREFILL),
    "kernel_us": _Fitted(0, 2e3, False, 1, "us", "decode steps of two widths, or at two numbers of ranks, at batch 1"),
    "thin_us": _Fitted(0, 2e3, False, 1, "us", "decode steps at a batch of 2 to 256, and at batch 1"),
    "thin_share": _Fitted(
        0, 0.5, False, 0.1, "", "decode steps of wide products and of narrow ones at a batch of 2 to 256"
    ),
    "launch_us": _Fitted(0, 2e3, False, 1, "us", "a prefill of one short prompt"),
    "serial_share": _Fitted(0, 1, False, 0.5, "", "decode steps at a batch of 1, of about 8 and of 64"),
    "contention": _Fitted(0, 0.9, False, 0.5, "", "a layout with overlapped sync points, prefill and decode"),
    "alpha_us": _Fitted(0.05, 1e6, True, 1, "us", _SMALL),
    "bus_gb_s": _Fitted(1e-4, 2e4, True, 1, "GB/s", _LARGE),
    "alpha_per_rank_us": _Fitted(0, 1e4, False, 1, "us", f"{_SMALL}, at three numbers of ranks"),
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
    """device, interconnect: with the fitted figures; their relative errors are those of the residuals. mean_error,
    worst_error: of the residuals, without signs."""

    device: DeviceSpec | None
    interconnect: Interconnect | None
    figures: list[FittedFigure]
    residuals: list[Residual]
    mean_error: float
    worst_error: float


def fit(
    observations: Sequence[Observation],
    start: DeviceSpec | None,
    interconnect: Interconnect | None,
    free: Sequence[str],
    *,
    unfitted: Collection[Quantity] = (),
) -> FitResult:
    """start, interconnect: the figures that are held, and where the free ones begin; interconnect also says which
    numbers of ranks there are rows for.

    free: names of ``FITTED``. ``matmul_tflop_s.bfloat16`` is of one dtype. ``alpha_us`` and ``bus_gb_s`` are fitted for
    every number of ranks by itself (``alpha_us[4]`` for one of them) unless ``alpha_per_rank_us`` is free too: then
    latencies are a line in the ranks, and one bus bandwidth is for all of them. unfitted: quantities that nothing is
    fitted to; their residuals are there, but in no error.

    Raises OpenFigureError for what the observations leave open, and says what to time.
    """
    if not observations:
        raise UserError("there are no timings to fit; time something first")
    model = _Model(observations, start, interconnect, free, unfitted)
    found = model.solve()
    device, link = model.specs(found)
    errors = model.standard_errors(found)
    residuals = [
        Residual(seen.group, seen.seconds, predicted, predicted / seen.seconds - 1)
        for seen, predicted in zip(observations, model.predicted(found), strict=True)
    ]
    fitted = [pair for pair, used in zip(zip(observations, residuals, strict=True), model.used, strict=True) if used]
    sizes = [abs(residual.relative_error) for _, residual in fitted]
    figures = [
        FittedFigure(name, model.value(index, found), float(errors[index]), model.kinds[index].unit)
        for index, name in enumerate(model.names)
    ]
    compute, sent = model.spread(fitted, device)
    if device is not None and model.frees_device:
        own = [figure for figure in figures if figure_kind(figure.name) not in OF_A_LINK]
        device = dataclasses.replace(device, relative_error=compute, uncertain=_uncertain(device.uncertain, own))
    if link is not None and model.frees_link:
        own = [figure for figure in figures if figure_kind(figure.name) in OF_A_LINK]
        link = dataclasses.replace(link, relative_error=sent, uncertain=_uncertain(link.uncertain, own))
    return FitResult(device, link, figures, residuals, sum(sizes) / len(sizes), max(sizes))


def _uncertain(before: Sequence[str], fitted: Sequence[FittedFigure]) -> list[str]:
    """Names of figures that are, where some were before."""
    held = set(before) - {figure.name for figure in fitted}
    return sorted(held | {figure.name for figure in fitted if figure.is_uncertain})


class _Model:
    """Times of the observations as a function of the free figures, each as one number of a vector."""

    def __init__(
        self,
        observations: Sequence[Observation],
        start: DeviceSpec | None,
        interconnect: Interconnect | None,
        free: Sequence[str],
        unfitted: Collection[Quantity],
    ) -> None:
        self.used = np.array([seen.quantity not in unfitted for seen in observations])
        self.observations, self.start, self.interconnect = observations, start, interconnect
        self.engines = known_engines()
        self.keys = [parts_key(seen) for seen in observations]
        self.distinct = dict(zip(self.keys, observations, strict=True))
        self.is_line = "alpha_per_rank_us" in free
        self.names = [name for given in free for name in self._expanded(given)]
        unknown = [name for name in self.names if figure_kind(name) not in FITTED]
        if unknown or len(set(self.names)) < len(self.names):
            raise ValueError(f"free figures {list(free)}: {unknown or 'one stands twice'}")
        self.kinds = [FITTED[figure_kind(name)] for name in self.names]
        self.frees_link = any(figure_kind(name) in OF_A_LINK for name in self.names)
        self.frees_device = frees_device(self.names)
        self.observed = np.log([seen.seconds for seen in observations])

    def _expanded(self, name: str) -> list[str]:
        if name not in ("alpha_us", "bus_gb_s") or self.is_line:
            return [name]
        counts = sorted({seen.ranks for seen in self.observations if seen.communicates})
        return [f"{name}[{count}]" for count in counts]

    # ---- figures as a vector ----

    def begin(self) -> np.ndarray:
        values = []
        for name, kind in zip(self.names, self.kinds, strict=True):
            value = min(max(self._held(name), kind.low), kind.high)
            values.append(math.log(value) if kind.logarithmic else value / kind.scale)
        return np.array(values)

    def _held(self, name: str) -> float:
        """Where the figure starts from."""
        kind, number = figure_kind(name), _number(name)
        if kind in OF_A_LINK:
            assert self.interconnect is not None
            if kind == "contention":
                return self.interconnect.contention
            rows = self.interconnect.rows
            if kind == "alpha_per_rank_us":
                return (rows[-1].alpha_us - rows[0].alpha_us) / max(1, rows[-1].ranks - rows[0].ranks)
            row = min(rows, key=lambda row: abs(row.ranks - (number or row.ranks)))
            return row.alpha_us if kind == "alpha_us" else row.bus_gb_s or 10.0
        assert self.start is not None
        if kind == "matmul_tflop_s":
            return self.start.matmul_tflop_s[name.partition(".")[2]]
        return float(getattr(self.start, kind))

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        low = [math.log(kind.low) if kind.logarithmic else kind.low / kind.scale for kind in self.kinds]
        high = [math.log(kind.high) if kind.logarithmic else kind.high / kind.scale for kind in self.kinds]
        return np.array(low), np.array(high)

    def value(self, index: int, vector: np.ndarray) -> float:
        kind = self.kinds[index]
        return float(math.exp(vector[index]) if kind.logarithmic else vector[index] * kind.scale)

    def specs(self, vector: np.ndarray) -> tuple[DeviceSpec | None, Interconnect | None]:
        """The device and the link with the figures of ``vector``."""
        found = {name: self.value(index, vector) for index, name in enumerate(self.names)}
        device, link = self.start, self.interconnect
        if device is not None:
            plain: dict[str, Any] = {name: value for name, value in found.items() if name in _DEVICE_FIELDS}
            rates = {
                name.partition(".")[2]: value for name, value in found.items() if name.startswith("matmul_tflop_s.")
            }
            device = dataclasses.replace(device, **plain, matmul_tflop_s={**device.matmul_tflop_s, **rates})
        if link is not None and self.frees_link:
            rows = [self._row(row, found) for row in link.rows]
            link = dataclasses.replace(link, rows=rows, contention=found.get("contention", link.contention))
        return device, link

    def _row(self, row: InterconnectRow, found: dict[str, float]) -> InterconnectRow:
        alpha = found.get(f"alpha_us[{row.ranks}]", row.alpha_us)
        if self.is_line:
            alpha = found.get("alpha_us", self._held("alpha_us")) + found["alpha_per_rank_us"] * (row.ranks - 2)
        bus = found.get(f"bus_gb_s[{row.ranks}]", found.get("bus_gb_s", row.bus_gb_s or 0.0))
        return dataclasses.replace(row, alpha_us=alpha, bus_gb_s=bus or None)

    # ---- times ----

    def predicted(self, vector: np.ndarray) -> list[float]:
        device, link = self.specs(vector)
        parts = {
            key: parts_seen(seen, device, None if seen.engine is None else self.engines[seen.engine], link)
            for key, seen in self.distinct.items()
        }
        return [
            expected_seconds(seen, parts[key], link) for key, seen in zip(self.keys, self.observations, strict=True)
        ]

    def misfit(self, vector: np.ndarray) -> np.ndarray:
        """log(predicted / observed) of each observation that figures are fitted to."""
        misfit: np.ndarray = (np.log(self.predicted(vector)) - self.observed)[self.used]
        return misfit

    def solve(self) -> np.ndarray:
        """The best of several optima; raises UserError where a figure is left open."""
        low, high = self.bounds()
        generator = np.random.default_rng(0)
        first = self.begin()
        if not len(first):
            return first
        tries = []
        for number in range(STARTS):
            near = first if number == 0 else first + generator.normal(0, 0.5, len(first))
            inside = np.clip(near, low + 1e-6 * (high - low), high - 1e-6 * (high - low))
            regularised = functools.partial(self._regularised, first)
            tries.append(least_squares(regularised, inside, bounds=(low, high), x_scale="jac", max_nfev=200))
        best = min(tries, key=lambda tried: tried.cost).x
        self._check_identified(best)
        return best

    def _regularised(self, first: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """The misfits, and what holds a figure near its start where the timings hardly tell it from another: a start
        counts as one timing of usual scatter, by which the figure is known within a factor."""
        logarithmic = np.array([kind.logarithmic for kind in self.kinds])
        away = (vector - first)[logarithmic] / math.log(START_FACTOR)
        return np.concatenate((self.misfit(vector), LEAST_ERROR * away))

    def _jacobian(self, vector: np.ndarray) -> np.ndarray:
        """d misfit / d vector by central differences, one-sided at a bound."""
        low, high = self.bounds()
        columns = []
        for index in range(len(vector)):
            steps = np.zeros(len(vector))
            steps[index] = 1e-4
            above, below = np.minimum(vector + steps, high), np.maximum(vector - steps, low)
            columns.append((self.misfit(above) - self.misfit(below)) / (above[index] - below[index]))
        return np.stack(columns, 1)

    def _covariance(self, vector: np.ndarray) -> np.ndarray:
        """(J^T J)^-1; infinite variances where it has none."""
        _, singular, directions = np.linalg.svd(self._jacobian(vector), full_matrices=False)
        inverse = np.where(singular > 1e-9 * max(singular[0], 1e-300), 1 / np.maximum(singular, 1e-300), 1e9)
        spread: np.ndarray = (directions.T * inverse**2) @ directions
        if len(singular) < len(vector):  # fewer observations than figures
            rank = directions.T @ directions
            spread = spread + 1e18 * (np.eye(len(vector)) - rank)
        return spread

    def _check_identified(self, vector: np.ndarray) -> None:
        variances = np.maximum(np.diag(self._covariance(vector)), 0)
        for index in np.argsort(-variances):
            # logarithms and numbers that are scaled are of the order of 1; a figure of hundreds is not open by 1
            size = 1.0 if self.kinds[index].logarithmic else max(1.0, abs(vector[index]))
            if TIMING_ERROR * math.sqrt(variances[index]) > OPEN * size:
                name, kind = self.names[index], self.kinds[index]
                ranks = f" with {_number(name)} ranks" if _number(name) else ""
                raise OpenFigureError(f"the timings leave {name} open; add timings of {kind.advice}{ranks}", name)

    def standard_errors(self, vector: np.ndarray) -> np.ndarray:
        """Of each figure, in its unit, as the scatter of the residuals makes it."""
        if not len(vector):
            return vector
        freedom = max(1, int(self.used.sum()) - len(vector))
        variance = float(np.sum(self.misfit(vector) ** 2)) / freedom
        errors = np.sqrt(np.maximum(np.diag(self._covariance(vector)), 0) * variance)
        sizes = [self.value(index, vector) if kind.logarithmic else kind.scale for index, kind in enumerate(self.kinds)]
        return errors * np.array(sizes)

    def spread(self, pairs: Sequence[tuple[Observation, Residual]], device: DeviceSpec | None) -> tuple[float, float]:
        """One standard deviation of times of compute, and of messages, from the residuals; both at most 1.

        Of times of whole passes a message is only a part: it is taken to be ``PART_OF_A_PASS`` times as uncertain as
        they are, and as the compute in them is; and as one that was not timed where there are hardly more timings than
        figures. device: as it was fitted, or held.
        """
        silent = [r.relative_error for seen, r in pairs if not seen.communicates]
        passes = [r.relative_error for seen, r in pairs if seen.quantity != "all_reduce"]
        alone = [r.relative_error for seen, r in pairs if seen.quantity == "all_reduce"]
        sent = [r.relative_error for seen, r in pairs if seen.communicates and seen.quantity != "all_reduce"]
        # figures that were fitted to the same timings make residuals smaller than errors
        larger = math.sqrt(len(pairs) / max(1, len(pairs) - len(self.names)))
        compute = min(1.0, larger * _deviation(silent or passes))
        message = max(_deviation(alone), PART_OF_A_PASS * _deviation(sent)) * larger
        if len(pairs) - len(self.names) < LEAST_FREEDOM:
            message = max(message, ASSUMED_ERROR)
        if not alone:
            known = compute if self.frees_device or device is None else device.relative_error
            message = max(message, PART_OF_A_PASS * known)
        return compute, min(1.0, message)


_DEVICE_FIELDS = (
    "bandwidth_share",
    "memory_bandwidth_gb_s",
    "matmul_share",
    "kernel_us",
    "thin_us",
    "thin_share",
    "serial_share",
    "launch_us",
)


def _deviation(errors: Sequence[float]) -> float:
    return max(LEAST_ERROR, math.sqrt(sum(error**2 for error in errors) / len(errors))) if errors else LEAST_ERROR


def figure_kind(name: str) -> str:
    """The name in ``FITTED`` of ``alpha_us[4]`` or ``matmul_tflop_s.bfloat16``."""
    return name.partition("[")[0].partition(".")[0]


def frees_device(free: Sequence[str]) -> bool:
    """Whether a figure of a device is among these."""
    return any(figure_kind(name) not in OF_A_LINK for name in free)


def _number(name: str) -> int | None:
    return int(name.partition("[")[2][:-1]) if "[" in name else None
