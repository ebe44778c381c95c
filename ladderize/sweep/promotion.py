"""``promote`` of a sweep.yaml: the best of several models, by accuracy and speed."""

from collections.abc import Sequence
from dataclasses import dataclass

from ladderize.report.models import pareto_front


@dataclass(frozen=True)
class Entrant:
    """A layout before the stage that only the best get.

    accuracy, speed: more is better.
    """

    accuracy: float
    speed: float


def ranking(entrants: Sequence[Entrant]) -> list[Entrant]:
    """Return the entrants, the best first.

    Those on the Pareto front come first, then those on the front of the rest, and so on; on one front the more accurate
    first.
    """
    left, ranked = list(entrants), []
    while left:
        flags = pareto_front([(entrant.speed, entrant.accuracy) for entrant in left])
        front = [entrant for entrant, is_on in zip(left, flags, strict=True) if is_on]
        ranked += sorted(front, key=lambda entrant: -entrant.accuracy)
        left = [entrant for entrant, is_on in zip(left, flags, strict=True) if not is_on]
    return ranked


def promoted(entrants: Sequence[Entrant], dense: Entrant | None, count: int) -> list[bool]:
    """Return True for each of the ``count`` best.

    dense: is ranked but takes no place: a layout that is neither faster nor better than dense comes after the others.
    """
    ranked = ranking([*entrants, *([dense] if dense is not None else [])])
    best = [id(entrant) for entrant in ranked if entrant is not dense][:count]
    return [id(entrant) in best for entrant in entrants]
