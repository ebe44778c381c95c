"""What ``ladderize calibrate`` writes: a device and a link for ``plan`` and ``bench``, and all that they rest on."""

from dataclasses import dataclass, field

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
