"""What ``ladderize calibrate`` writes: a device and a link for ``plan`` and ``bench``, and all that they rest on."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ladderize.console import Console
from ladderize.files.records import Record
from ladderize.planning.calibration.fit import FittedFigure, Residual
from ladderize.planning.calibration.observations import Observation
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
from ladderize.planning.hardware import DeviceSpec
from ladderize.runtime.bench.environment import Environment
from ladderize.runtime.collectives.links import Interconnect


@dataclass(frozen=True)
class TimedGroup(Record):
    """A group of ranks that was timed. weight_bytes: of its smallest model, one rank's part."""

    ranks: int
    backend: str
    environment: Environment
    weight_bytes: int


@dataclass(frozen=True)
class RankTimings(Record):
    """What one group has timed. samples_ms: of each observation, every round; empty where the median alone is kept."""

    group: TimedGroup
    observations: list[Observation]
    samples_ms: list[list[float]]


@dataclass(frozen=True)
class CalibrationDocument(Record):
    """The file. ``--hardware`` reads ``device`` of it, ``--link`` reads ``link``, which is None where one rank was
    timed.

    figures: what was fitted; residuals: of each observation, in their order; mean_error and worst_error: of these.
    options: of a run that timed; timings: of one that read timings which were there.
    """

    device: DeviceSpec
    link: Interconnect | None
    figures: list[FittedFigure]
    mean_error: float
    worst_error: float
    notes: list[str]
    residuals: list[Residual]
    observations: list[Observation]
    options: CalibrateOptions | None = None
    timings: TimingsOptions | None = None
    groups: list[TimedGroup] = field(default_factory=list)
    samples_ms: list[list[float]] = field(default_factory=list)


FIGURE_NAMES = {
    "memory_bandwidth_gb_s": "memory bandwidth",
    "bandwidth_share": "share of the memory bandwidth",
    "matmul_tflop_s": "products",
    "matmul_share": "share of the matmul peak",
    "kernel_us": "start of a kernel",
    "launch_us": "the host's start of an operation",
    "thin_us": "extra of a product of few rows",
    "thin_share": "extra share of a product of few rows",
    "serial_share": "serial share of arithmetic and memory",
    "alpha_us": "latency of an all-reduce",
    "alpha_per_rank_us": "latency for each more rank",
    "bus_gb_s": "bus bandwidth of an all-reduce",
    "contention": "contention",
}


def show_calibration(document: CalibrationDocument, console: Console) -> None:
    """Figures, residuals by what was timed, and what to know before the file is used."""
    console.table([_figure_row(figure) for figure in document.figures], right=["value", "standard error"])
    console.result("")
    console.table(list(_residual_rows(document)), right=["timings", "mean error", "worst"])
    console.result("")
    console.prose(
        f"{len(document.residuals)} timings; what was fitted to has a mean error of {document.mean_error:.1%}, the"
        f" worst {document.worst_error:.1%}"
    )
    for figure in document.figures:
        if figure.is_uncertain:
            console.prose(
                f"{_named(figure)} is uncertain by more than its size: these timings hardly depend on it, and"
                " predictions of times like these do not either"
            )
    for note in document.notes:
        console.prose(note)


def _figure_row(figure: FittedFigure) -> dict[str, Any]:
    return {
        "figure": _named(figure),
        "value": f"{figure.value:.3g}",
        "standard error": f"{figure.standard_error:.2g}",
        "unit": figure.unit,
    }


def _named(figure: FittedFigure) -> str:
    kind = figure.name.partition("[")[0].partition(".")[0]
    dtype = figure.name.partition(".")[2]
    ranks = figure.name.partition("[")[2].rstrip("]")
    return FIGURE_NAMES.get(kind, kind) + (f" in {dtype}" if dtype else "") + (f", {ranks} ranks" if ranks else "")


def _residual_rows(document: CalibrationDocument) -> Iterator[dict[str, Any]]:
    groups: dict[str, list[float]] = {}
    for residual in document.residuals:
        groups.setdefault(residual.group, []).append(residual.relative_error)
    for name, errors in groups.items():
        yield {
            "what": name,
            "timings": len(errors),
            "mean error": f"{sum(map(abs, errors)) / len(errors):.1%}",
            "worst": f"{max(errors, key=abs):+.1%}",
        }
