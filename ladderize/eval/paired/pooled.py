"""Several tasks as one number: lm-eval's groups, and all tasks. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ladderize.eval.paired.answers import as_value
from ladderize.eval.paired.document import ALL, POINT, CompareOptions, PooledComparison, Weighting
from ladderize.eval.paired.entry import ComparedModel
from ladderize.eval.paired.statistics import estimate_mean, generator, verdict_of
from ladderize.eval.paired.tasks import CLOSE, Compared


@dataclass(frozen=True)
class _Unit:
    """What counts as one task in the mean over tasks: a task, or a group of lm-eval with a value of its own. weights:
    of each of its tasks, 1 in all."""

    name: str
    weights: Mapping[str, float]
    weighting: Weighting = "tasks"


def pool(reference: ComparedModel, compared: Mapping[str, Compared], options: CompareOptions) -> list[PooledComparison]:
    """Groups first, then all tasks: as the mean over tasks, and over samples where that is another one.

    compared: task -> its main metric; at least one.
    """
    units = list(_units(reference, compared))
    pooled = [
        _pooled(unit.name, unit.weighting, unit.weights, compared, options) for unit in units if len(unit.weights) > 1
    ]
    by_task = {task: weight / len(units) for unit in units for task, weight in unit.weights.items()}
    pooled.append(_pooled(ALL, "tasks", by_task, compared, options))
    by_samples = _by_samples(compared, list(compared))
    if any(abs(by_samples[task] - weight) > CLOSE for task, weight in by_task.items()):
        pooled.append(_pooled(ALL, "samples", by_samples, compared, options))
    return pooled


def _pooled(
    name: str,
    weighting: Weighting,
    weights: Mapping[str, float],
    compared: Mapping[str, Compared],
    options: CompareOptions,
) -> PooledComparison:
    parts = [compared[task] for task in weights]
    strata = [part.stratum for part in parts if part.stratum is not None]
    draws = [part.draws for part in parts if part.draws is not None]
    rng = generator(options.seed, f"{name} {weighting}")
    found = estimate_mean(strata, list(weights.values()), draws, rng)
    samples = sum(part.comparison.samples for part in parts)
    verdict, needed = verdict_of(found, samples, options.margin * POINT)
    return PooledComparison(
        name=name,
        weights=weighting,
        tasks=list(weights),
        samples=samples,
        clusters=sum(part.comparison.clusters for part in parts),
        reference_value=_mean(weights, {task: compared[task].comparison.reference_value for task in weights}),
        value=_mean(weights, {task: compared[task].comparison.value for task in weights}),
        difference=found.mean,
        low=found.low,
        high=found.high,
        verdict=verdict,
        samples_needed=needed,
    )


def _mean(weights: Mapping[str, float], values: Mapping[str, float]) -> float:
    return sum(weight * values[task] for task, weight in weights.items())


def _by_samples(compared: Mapping[str, Compared], tasks: Sequence[str]) -> dict[str, float]:
    total = sum(compared[task].comparison.samples for task in tasks)
    return {task: compared[task].comparison.samples / total for task in tasks}


def _units(reference: ComparedModel, compared: Mapping[str, Compared]) -> Iterator[_Unit]:
    """The tasks and groups that no other group contains, in the order of the results; each task once."""
    groups = _groups(reference.harness)
    inside = {child for children in groups.values() for child in children}
    seen: set[str] = set()
    for name in [*groups, *compared]:
        if name not in inside:
            for unit in _unfolded(reference, name, groups, compared):
                if not seen & unit.weights.keys():
                    seen |= unit.weights.keys()
                    yield unit
    for task in compared:  # of groups that form no unit, and overlap
        if task not in seen:
            yield _Unit(task, {task: 1.0})


def _unfolded(
    reference: ComparedModel, name: str, groups: Mapping[str, list[str]], compared: Mapping[str, Compared]
) -> Iterator[_Unit]:
    """A group as one unit where lm-eval has a value of it, else what it contains."""
    if name not in groups:
        if name in compared:
            yield _Unit(name, {name: 1.0})
        return
    leaves = [leaf for leaf in _leaves(name, groups) if leaf in compared]
    if len(leaves) == len(_leaves(name, groups)) and leaves:
        metric = compared[leaves[0]].comparison
        shown = as_value(reference.object_of_task("results", name).get(f"{metric.metric},{metric.filter}"))
        same = {(compared[leaf].comparison.metric, compared[leaf].comparison.filter) for leaf in leaves}
        # whether lm-eval's group weighs by size is not in its results, but its value is
        by_task = dict.fromkeys(leaves, 1 / len(leaves))
        choices: tuple[tuple[Weighting, dict[str, float]], ...] = (
            ("samples", _by_samples(compared, leaves)),
            ("tasks", by_task),
        )
        for weighting, weights in choices:
            mean = _mean(weights, {leaf: compared[leaf].comparison.reference_value for leaf in leaves})
            if len(same) == 1 and isinstance(shown, float) and abs(shown - mean) <= CLOSE:
                yield _Unit(name, weights, weighting)
                return
    for child in groups[name]:
        yield from _unfolded(reference, child, groups, compared)


def _leaves(name: str, groups: Mapping[str, list[str]]) -> list[str]:
    """The tasks in a group and in the groups in it."""
    if name not in groups:
        return [name]
    return list(dict.fromkeys(leaf for child in groups[name] for leaf in _leaves(child, groups)))


def _groups(harness: Mapping[str, Any]) -> dict[str, list[str]]:
    """Groups that contain something, without those that contain themselves, which only a stranger's file has."""
    known = harness.get("group_subtasks")
    groups = {
        name: [child for child in children if isinstance(child, str)]
        for name, children in (known.items() if isinstance(known, Mapping) else ())
        if isinstance(children, list) and children
    }
    sound: dict[str, list[str]] = {}
    while ready := [
        name for name in groups if name not in sound and all(c in sound or c not in groups for c in groups[name])
    ]:
        sound.update({name: groups[name] for name in ready})
    return {name: groups[name] for name in groups if name in sound}
