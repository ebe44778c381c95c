"""What ``ladderize calibrate`` writes: a device and a link for ``plan`` and ``bench``, and all that they rest on."""

from dataclasses import dataclass, field

from ladderize.console import Console
from ladderize.files.records import Record
from ladderize.planning.calibration.fit import FITTED, FitResult, FittedFigure, figure_kind, figure_of
from ladderize.planning.calibration.observations import Observation
from ladderize.planning.calibration.options import CalibrateOptions, TimingsOptions
from ladderize.runtime.bench.document import Environment


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
class CalibrationDocument(FitResult):
    """The file. ``--hardware`` reads ``device`` of it, ``--link`` reads ``link``, which is None where one rank was
    timed. options: of a run that timed; timings: of one that read timings which were there."""

    notes: list[str]
    observations: list[Observation]
    options: CalibrateOptions | None = None
    timings: TimingsOptions | None = None
    groups: list[TimedGroup] = field(default_factory=list)
    samples_ms: list[list[float]] = field(default_factory=list)


def show_calibration(document: CalibrationDocument, console: Console) -> None:
    """Figures, residuals by what was timed, and what to know before the file is used."""
    figures = [
        {
            "figure": _title(figure),
            "value": f"{figure.value:.3g}",
            "standard error": f"{figure.standard_error:.2g}",
            "unit": figure.unit,
        }
        for figure in document.figures
    ]
    console.table(figures, right=["value", "standard error"])
    groups: dict[str, list[float]] = {}
    for residual in document.residuals:
        groups.setdefault(residual.group, []).append(residual.relative_error)
    residuals = [
        {
            "what": name,
            "timings": len(errors),
            "mean error": f"{sum(map(abs, errors)) / len(errors):.1%}",
            "worst": f"{max(errors, key=abs):+.1%}",
        }
        for name, errors in groups.items()
    ]
    console.result("")
    console.table(residuals, right=["timings", "mean error", "worst"])
    console.result("")
    console.prose(
        f"{len(document.residuals)} timings; the fit misses its own by {document.mean_error:.1%} on average, by"
        f" {document.worst_error:.1%} at worst"
    )
    for figure in document.figures:
        if figure.is_uncertain:
            console.prose(
                f"{_title(figure)} is uncertain by more than its size: these timings hardly depend on it, nor do"
                " predictions of the same kind; others are guesses"
            )
    for note in document.notes:
        console.prose(note)


def _title(figure: FittedFigure) -> str:
    dtype, ranks = figure_of(figure.name)
    title = FITTED[figure_kind(figure.name)].title
    return title + (f" in {dtype}" if dtype else "") + (f", {ranks} ranks" if ranks else "")
