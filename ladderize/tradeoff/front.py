"""The Pareto front: models that no other is both faster and better than. Imports no torch."""

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each (speed-up, score) is on the front: more of both is better.

    A point is off it if another is at least as good in both and better in one. Equal points are on it together.
    """
    order = sorted(range(len(points)), key=lambda index: (-points[index][0], -points[index][1]))
    on = [False] * len(points)
    best = float("-inf")
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and points[order[end]][0] == points[order[begin]][0]:
            end += 1
        highest = points[order[begin]][1]  # of those that are equally fast
        for index in order[begin:end]:
            on[index] = points[index][1] == highest and highest > best
        best = max(best, highest)
        begin = end
    return on
