"""How sure a predicted figure is: what the errors of device and link make of it. Imports no torch.

A figure is computed for the parts of a pass as they are, and again for each of ``band_cases``. Most of an error of the
device is in both times of a speed-up, whose band is therefore narrower than either's.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ladderize.planning.hardware import DeviceSpec
from ladderize.planning.passes import PassParts
from ladderize.runtime.collectives.links import Interconnect

_COMPUTE = ("attention", "mlp", "attention_apart", "mlp_apart", "parallel", "rest")
_MESSAGES = ("message", "message_start", "vocabulary")
# What one standard deviation of contention is: where it was measured on the link itself, and elsewhere.
CALIBRATED_CONTENTION_ERROR, OTHER_CONTENTION_ERROR = 0.05, 0.1
# What no figure of device and link explains, of any one time: published runs of one program differ by this much.
SCATTER = 0.02
TWO_SIGMA = 2  # of a 95 % band


def band_cases(
    parts: Mapping[str, PassParts], device: DeviceSpec, interconnect: Interconnect | None
) -> list[Mapping[str, PassParts]]:
    """The parts as they are, then pairs: one error more and less by a standard deviation, and all others 0.

    parts: by phase. The errors are of all compute, of all messages, and of contention. interconnect: None where nothing
    is sent.
    """
    cases = [parts, *(_scaled(parts, _COMPUTE, 1 + sign * device.relative_error) for sign in (1, -1))]
    if interconnect is not None:
        contention = CALIBRATED_CONTENTION_ERROR if interconnect.calibrated else OTHER_CONTENTION_ERROR
        cases += [_scaled(parts, _MESSAGES, 1 + sign * interconnect.relative_error) for sign in (1, -1)]
        cases += [_contended(parts, sign * contention) for sign in (1, -1)]
    return cases


def relative_band(values: Sequence[float], *, runs: int = 1) -> float:
    """Half the width of the 95 % band of a figure, relative to it: 0.05 is 5 %.

    values: of the figure in each of ``band_cases``. runs: whose times are in it, 2 of a speed-up. The errors are taken
    to be independent. A figure that none of them changes, such as a speed-up over itself or a time of nothing, has no
    band.
    """
    deviations = [(more - less) / 2 for more, less in zip(values[1::2], values[2::2], strict=True)]
    size = abs(values[0])
    if not size:
        return 0.0
    if max(map(abs, deviations)) <= 1e-12 * size:
        return 0.0
    return TWO_SIGMA * math.hypot(math.sqrt(runs) * SCATTER * size, *deviations) / size


def _scaled(parts: Mapping[str, PassParts], names: tuple[str, ...], factor: float) -> dict[str, PassParts]:
    return {
        phase: dataclasses.replace(one, **{name: factor * getattr(one, name) for name in names})
        for phase, one in parts.items()
    }


def _contended(parts: Mapping[str, PassParts], change: float) -> dict[str, PassParts]:
    return {
        phase: dataclasses.replace(one, contention=min(0.99, max(0.0, one.contention + change)))
        for phase, one in parts.items()
    }
