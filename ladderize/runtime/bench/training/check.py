"""The check before any timing that every schedule gives the loss and the gradients of the sequential one.

A fast wrong step is worth nothing. The reference is the sequential schedule of the same model, every sum waited for at
once. The tests compare that one with transformers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.training.document import GradientAgreement
from ladderize.runtime.bench.training.steps import ModelStep, OpenStep
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.collectives.observed import Observed
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.spec import ModelSpec
from ladderize.runtime.training.batch import Batch

# The tolerance, relative to the norm of what is compared: for another order of sums in float32, plus so many times the
# effect of rounding on the sequential step of this very model. That effect was 0.2 of a gradient of SmolLM2-135M in
# bfloat16, so no figure for all models would show a fault.
_FLOAT32, _ROUNDINGS = 1e-4, 3
# A tensor whose gradient is tiny beside all others' is compared with this share of their norm instead of its own.
SMALL_TENSOR = 1e-3


class Blocking(Observed):
    """A backend whose all-reduces are waited for at once."""

    def all_reduce_async(self, x: Tensor) -> Handle:
        total = self.inner.all_reduce(x)
        return Handle(lambda: total)


@dataclass(frozen=True)
class Outcome:
    """The loss of a step, this rank's gradients, and the norm of all ranks' gradients."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float


@dataclass(frozen=True)
class StepReference:
    """The outcome that other schedules must give, and the outcome in float32, which shows the effect of rounding."""

    wanted: Outcome
    exact: Outcome

    def loss_rounding(self, spec: ModelSpec) -> float:
        """Return the relative effect of rounding on the loss: at least one rounding, since a mean may be exact by
        chance."""
        least = 0.0 if spec.dtype == "float32" else torch.finfo(spec.torch_dtype).eps
        return max(least, _relative(self.wanted.loss, self.exact.loss))


def outcome_of(step: ModelStep, group: Ranks) -> Outcome:
    """Run ``step`` once and return its outcome. All ranks call it."""
    loss = step.forward()
    step.backward(loss)
    gradients = {name: gradient.detach().clone() for name, gradient in step.gradients().items()}
    step.clear()
    squares = group.gather(sum(_norm(gradient) ** 2 for gradient in gradients.values()))
    return Outcome(float(loss.detach()), gradients, sum(squares) ** 0.5)


def reference_outcome(
    open_step: OpenStep, spec: ModelSpec, collectives: Collectives, batch: Batch, group: Ranks
) -> StepReference:
    """Return the outcome that the schedules of this model must give. All ranks call it."""
    step = open_step(spec, SEQUENTIAL, Blocking(collectives), batch)
    wanted = outcome_of(step, group)
    return StepReference(wanted, wanted if spec.dtype == "float32" else outcome_of(step.in_float32(), group))


def check_step(
    step: ModelStep, reference: StepReference, spec: ModelSpec, schedule: Schedule, rows: int, group: Ranks
) -> GradientAgreement | str:
    """Compare the step's loss and gradients with the reference; return the differences, or a failure in words.

    All ranks call it and return the same.
    """
    outcome, wanted = outcome_of(step, group), reference.wanted
    loss, allowed = _relative(outcome.loss, wanted.loss), _FLOAT32 + _ROUNDINGS * reference.loss_rounding(spec)
    _, worst, tolerance, name = max(group.gather(_worst(outcome, reference)))
    failure = None
    if not math.isfinite(wanted.loss) or not math.isfinite(wanted.norm):
        failure = (
            f"the loss is {wanted.loss:.6g} and the norm of its gradients {wanted.norm:.6g}: check the model's weights,"
            " or compute in float32"
        )
    elif not loss <= allowed:  # also for NaN
        failure = (
            f"the loss is {outcome.loss:.6g}, where the sequential schedule gives {wanted.loss:.6g} (tolerance"
            f" {allowed:.3g}, relative)"
        )
    elif not worst <= tolerance:
        failure = (
            f"the gradient of {name} is {worst:.3g} off that of the sequential schedule, relative, over the tolerance"
            f" of {tolerance:.3g}"
        )
    if failure := next(filter(None, group.gather(failure)), None):
        return f"{step_name(spec, schedule)} in {spec.dtype}, {rows} rows: {failure}"
    return GradientAgreement(spec.name, schedule, rows, outcome.loss, outcome.norm, loss, worst, tolerance)


def step_name(spec: ModelSpec, schedule: Schedule) -> str:
    return f"{spec.name} by the schedule {schedule.name}"


def _worst(outcome: Outcome, reference: StepReference) -> tuple[float, float, float, str]:
    """Return the worst tensor's share of its tolerance, its relative difference, its tolerance and its name.

    NaN counts as infinite, and so does a gradient that only one of the two has.
    """
    wanted, exact = reference.wanted, reference.exact.gradients
    if missing := outcome.gradients.keys() ^ wanted.gradients.keys():
        return math.inf, math.inf, _FLOAT32, min(missing)
    judged = []
    for name, gradient in wanted.gradients.items():
        size = max(_norm(gradient), SMALL_TENSOR * wanted.norm, 1e-30)
        difference = _norm(outcome.gradients[name] - gradient) / size
        tolerance = _FLOAT32 + _ROUNDINGS * _norm(gradient - exact[name]) / size
        difference = math.inf if math.isnan(difference) else difference
        judged.append((difference / tolerance, difference, tolerance, name))
    return max(judged, default=(0.0, 0.0, _FLOAT32, ""))


def _relative(value: float, wanted: float) -> float:
    return abs(value - wanted) / max(abs(wanted), 1e-12)


def _norm(gradient: Tensor) -> float:
    return float(gradient.float().norm())
