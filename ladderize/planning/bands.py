"""How far a predicted figure may be off, from how far compute, messages and contention may. Imports no torch.

A figure is computed for the parts of a pass as they are, and again for each of ``band_cases``. A ratio of two times so
has a narrower band than either: what is wrong of both cancels.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ladderize.planning.hardware import DeviceSpec
from ladderize.planning.passes import PassParts
from ladderize.runtime.collectives.links import Interconnect

_COMPUTE = ("attention", "mlp", "attention_apart", "mlp_apart", "parallel", "rest")
_MESSAGES = ("message", "vocabulary")
CONTENTION_ERROR = 0.08  # one standard deviation; what fits of single layouts disagree by
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
        cases += [_scaled(parts, _MESSAGES, 1 + sign * interconnect.relative_error) for sign in (1, -1)]
        cases += [_contended(parts, sign * CONTENTION_ERROR) for sign in (1, -1)]
    return cases


def relative_band(values: Sequence[float]) -> float:
    """Half the width of the 95 % band of a figure, relative to it; 0 of what is 0.

    values: of the figure in each of ``band_cases``. The errors are taken to be independent.
    """
    if values[0] == 0:
        return 0.0
    deviations = [(more - less) / 2 for more, less in zip(values[1::2], values[2::2], strict=True)]
    return TWO_SIGMA * math.hypot(*deviations) / abs(values[0])


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
