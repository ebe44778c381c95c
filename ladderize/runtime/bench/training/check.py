"""The check before any timing: does every schedule give the loss and the gradients of the sequential one?

A fast wrong step is worth nothing. The reference is the sequential schedule of the same model, every sum waited for at
once. What that gives itself, the tests compare with transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ladderize.errors import UserError
from ladderize.files.records import Record
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.messages import compare_messages
from ladderize.runtime.bench.training.steps import ModelStep, OpenStep
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.observed import Observed, Recording
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.training.batch import Batch

# The largest difference that another order of sums explains, relative to the norm of what is compared.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
# A tensor whose gradient is tiny beside all others' is compared with this share of their norm instead of its own.
SMALL_TENSOR = 1e-3


@dataclass(frozen=True)
class GradientAgreement(Record):
    """How far a schedule's loss and gradients are off those of the sequential schedule of the same model, whose sums
    block: relative differences, of the tensor that is worst.

    gradient_norm: of all gradients of all ranks together, of this schedule.
    """

    model: str
    schedule: Schedule
    batch_size: int
    loss: float
    gradient_norm: float
    loss_difference: float
    gradient_difference: float
    tolerance: float


class Blocking(Observed):
    """Another backend, each of whose all-reduces is waited for at once."""

    def all_reduce_async(self, x: Tensor) -> Handle:
        total = self.inner.all_reduce(x)
        return Handle(lambda: total)


@dataclass(frozen=True)
class Outcome:
    """Of one step: its loss, this rank's gradients, and the norm of all ranks' gradients."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float


def outcome_of(step: ModelStep, group: Ranks) -> Outcome:
    """Run ``step`` once; all ranks call it."""
    loss = step.forward()
    step.backward(loss)
    gradients = {name: gradient.detach().clone() for name, gradient in step.gradients().items()}
    step.clear()
    squares = group.gather(sum(_norm(gradient) ** 2 for gradient in gradients.values()))
    return Outcome(float(loss.detach()), gradients, sum(squares) ** 0.5)


def reference_outcome(
    open_step: OpenStep, spec: ModelSpec, collectives: Collectives, batch: Batch, group: Ranks
) -> Outcome:
    """What the other schedules of this model must give. Raises UserError where that is not a number."""
    found = outcome_of(open_step(spec, SEQUENTIAL, Blocking(collectives), batch), group)
    if not math.isfinite(found.loss) or not math.isfinite(found.norm):
        raise UserError(
            f"{spec.name} in {spec.dtype}: the loss is {found.loss:.6g} and the norm of its gradients {found.norm:.6g},"
            " so nothing was timed; check its weights, or compute in float32"
        )
    return found


def check_sent(step: ModelStep, recording: Recording, what: str) -> None:
    """Raise UserError, which begins with ``what``, unless the step sends what it should, and waits for all of it.

    recording: the collectives of ``step``. Emulated sums are delays, so that the gradients do not show that one was
    not begun.
    """
    expected = step.messages()
    loss = step.forward()
    compare_messages(f"{what}: a forward pass", recording, expected["forward"])
    step.backward(loss)
    step.clear()
    compare_messages(f"{what}: a backward pass", recording, expected["backward"])


def check_step(
    step: ModelStep, reference: Outcome, spec: ModelSpec, schedule: Schedule, rows: int, group: Ranks
) -> GradientAgreement:
    """Raise UserError unless the step's loss and gradients are the reference's; returns the differences seen.

    All ranks call it and say the same.
    """
    found = outcome_of(step, group)
    tolerance = _TOLERANCE[spec.dtype]
    loss = abs(found.loss - reference.loss) / max(abs(reference.loss), 1e-12)
    worst, name = max(group.gather(_worst(found.gradients, reference.gradients, reference.norm)))
    what = f"{step_name(spec, schedule)} in {spec.dtype}, {rows} rows"
    if not loss <= tolerance:  # also for NaN
        raise UserError(
            f"{what}: the loss is {found.loss:.6g}, where the sequential schedule gives {reference.loss:.6g}"
            f" (tolerance {tolerance:g}, relative): nothing was timed"
        )
    if not worst <= tolerance:
        raise UserError(
            f"{what}: the gradient of {name} is {worst:.3g} off that of the sequential schedule, relative, over the"
            f" tolerance of {tolerance:g}: nothing was timed"
        )
    return GradientAgreement(spec.name, schedule, rows, found.loss, found.norm, loss, worst, tolerance)


def step_name(spec: ModelSpec, schedule: Schedule) -> str:
    return f"{spec.name} by the schedule {schedule.name}"


def _worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], whole: float) -> tuple[float, str]:
    """The largest relative difference of a tensor, and its name. NaN counts as infinite, and so does a gradient that
    only one of the two has."""
    if missing := found.keys() ^ expected.keys():
        return float("inf"), min(missing)
    differences = []
    for name, wanted in expected.items():
        difference = _norm(found[name] - wanted) / max(_norm(wanted), SMALL_TENSOR * whole, 1e-30)
        differences.append((difference if difference == difference else float("inf"), name))
    return max(differences, default=(0.0, ""))


def _norm(gradient: Tensor) -> float:
    return float(gradient.float().norm())
