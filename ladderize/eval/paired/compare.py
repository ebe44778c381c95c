"""Two models that answered the same questions, compared in pairs. Imports no torch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladderize.errors import UserError
from ladderize.eval.paired.comparable import (
    ADVICE,
    PERPLEXITY,
    check_same,
    check_same_samples,
    check_settings,
    common_tasks,
    evaluation_remarks,
)
from ladderize.eval.paired.document import (
    ALL,
    CONFIDENCE,
    POINT,
    CompareOptions,
    ComparisonDocument,
    Comparisons,
    PerplexityComparison,
    PooledComparison,
    PredictionComparison,
    Weighting,
)
from ladderize.eval.paired.samples import ComparedModel, open_results
from ladderize.eval.paired.statistics import (
    Stratum,
    estimate_mean,
    generator,
    resampled_means,
    scaled_difference,
    verdict_of,
)
from ladderize.eval.paired.tasks import CLOSE, Compared, check_cluster_field, compare_task, is_close
from ladderize.eval.results import Perplexity


@dataclass(frozen=True)
class _Unit:
    """What is pooled: a task, a group of lm-eval with a value of its own, or all. weights: of each task, 1 in all."""

    name: str
    weights: Mapping[str, float]
    weighting: Weighting = "tasks"

    def mean(self, compared: Mapping[str, Compared], field: str) -> float:
        return sum(weight * getattr(compared[task].comparison, field) for task, weight in self.weights.items())


def pool(reference: ComparedModel, compared: Mapping[str, Compared], options: CompareOptions) -> list[PooledComparison]:
    """Groups first, then all tasks: as the mean over tasks, and over samples where that is another one.

    compared: task -> its main metric; at least one.
    """
    units = list(_units(reference, compared))
    by_task = {task: weight / len(units) for unit in units for task, weight in unit.weights.items()}
    pooled = [unit for unit in units if len(unit.weights) > 1] + [_Unit(ALL, by_task)]
    by_samples = _by_samples(compared, list(compared))
    if any(abs(by_samples[task] - weight) > CLOSE for task, weight in by_task.items()):
        pooled.append(_Unit(ALL, by_samples, "samples"))
    return [_pooled(unit, compared, options) for unit in pooled]


def _pooled(unit: _Unit, compared: Mapping[str, Compared], options: CompareOptions) -> PooledComparison:
    parts = [compared[task] for task in unit.weights]
    strata = [part.stratum for part in parts if part.stratum is not None]
    draws = [part.draws for part in parts if part.draws is not None]
    rng = generator(options.seed, f"{unit.name} {unit.weighting}")
    found = estimate_mean(strata, list(unit.weights.values()), draws, rng)
    samples = sum(part.comparison.samples for part in parts)
    verdict, needed = verdict_of(found, samples, options.margin * POINT)
    return PooledComparison(
        name=unit.name,
        weights=unit.weighting,
        tasks=list(unit.weights),
        samples=samples,
        clusters=sum(part.comparison.clusters for part in parts),
        reference_value=unit.mean(compared, "reference_value"),
        value=unit.mean(compared, "value"),
        difference=found.mean,
        low=found.low,
        high=found.high,
        verdict=verdict,
        samples_needed=needed,
    )


def _by_samples(compared: Mapping[str, Compared], tasks: Sequence[str]) -> dict[str, float]:
    total = sum(compared[task].comparison.samples for task in tasks)
    return {task: compared[task].comparison.samples / total for task in tasks}


def _units(reference: ComparedModel, compared: Mapping[str, Compared]) -> Iterator[_Unit]:
    """The tasks and groups that no other group contains, in the order of the results; each task once."""
    groups = _groups(reference.harness)
    inside = {child for children in groups.values() for child in children}
    seen: set[str] = set()
    for name in [*groups, *compared]:
        for unit in _unfolded(reference, name, groups, compared) if name not in inside else ():
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
    leaves = _leaves(name, groups)
    metrics = {(found.comparison.metric, found.comparison.filter) for leaf in leaves if (found := compared.get(leaf))}
    if len(metrics) == 1 and all(leaf in compared for leaf in leaves):
        shown = reference.object_of_task("results", name).get(",".join(*metrics))
        # whether lm-eval's group weighs by size is not in its results, but its value is
        by_samples = _Unit(name, _by_samples(compared, leaves), "samples")
        for unit in (by_samples, _Unit(name, dict.fromkeys(leaves, 1 / len(leaves)))):
            if is_close(shown, unit.mean(compared, "reference_value")):
                yield unit
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
    left = dict(groups)  # without what leads to nothing but tasks, again and again
    while ready := [name for name, children in left.items() if not left.keys() & set(children)]:
        left = {name: children for name, children in left.items() if name not in ready}
    return {name: children for name, children in groups.items() if name not in left}


MAX_TOKENS = 2**40  # of a window
MAX_NATS = 700.0  # per token: a perplexity above exp(700) is none


def compare_perplexity(reference: ComparedModel, other: ComparedModel, options: CompareOptions) -> PerplexityComparison:
    """Perplexity of two models, window by window. Raises UserError where these are not the same windows."""
    ours, tokens = _windows(reference)
    theirs, same_tokens = _windows(other)
    for key, what in (("data_sha256", "file"), ("seq_len", "--seq-len"), ("ids_sha256", "token ids")):
        asked = (getattr(_measured(entry), key) for entry in (reference, other))
        check_same(f"{what} of --perplexity", reference, other, *asked)
    if not np.array_equal(tokens, same_tokens):
        raise UserError(
            f"not the same windows of --perplexity: {len(tokens):,} with {int(tokens.sum()):,} tokens in"
            f" {reference.where}, {len(same_tokens):,} with {int(same_tokens.sum()):,} in {other.where}; {ADVICE}"
        )
    found = scaled_difference(
        "perplexity", -ours, -theirs, tokens, options.resamples, generator(options.seed, "perplexity")
    )
    values = [math.exp(float(nll.sum() / tokens.sum())) for nll in (ours, theirs)]
    return PerplexityComparison(
        windows=len(tokens),
        tokens=int(tokens.sum()),
        reference_value=values[0],
        value=values[1],
        stderr=paired_stderr(ours, theirs, tokens),
        **vars(found),
    )


def paired_stderr(reference: "np.ndarray", other: "np.ndarray", tokens: "np.ndarray") -> float | None:
    """Standard error of the difference of two perplexities by the delta method: each window's contributions to both
    stay together. reference, other: nats of each window [W]; None for a single window."""
    count, total = len(tokens), tokens.sum()
    if count < 2:
        return None
    ours, theirs = (math.exp(nll.sum() / total) * (nll - nll.sum() / total * tokens) for nll in (reference, other))
    return math.sqrt(count / (count - 1) * float(((theirs - ours) ** 2).sum())) / float(total)


def compare_predictions(
    reference: ComparedModel, other: ComparedModel, options: CompareOptions
) -> PredictionComparison | None:
    """The mean KL divergence that ``eval`` measured, with an interval; None where it measured none against this
    reference."""
    measured = other.model.predictions if other.model is not None else None
    if measured is None or other.model is None or measured.reference != reference.name:
        return None
    _, tokens = _windows(other)
    sums = np.asarray(measured.window_kl, dtype=float)
    if len(sums) != len(tokens) or not (np.abs(sums) <= MAX_NATS * tokens).all():
        raise UserError(f"{other.where} has sums of KL that do not fit its windows; evaluate the model again")
    stratum = Stratum(sums, tokens)
    rng = generator(options.seed, "predictions")
    found = estimate_mean([stratum], [1.0], [resampled_means(stratum, options.resamples, rng)], rng)
    return PredictionComparison(
        windows=len(tokens),
        tokens=measured.tokens,
        mean_kl=measured.mean_kl,
        low=None if found.low is None else max(0.0, found.low),
        high=found.high,
        p99_kl=measured.p99_kl,
        same_top_share=measured.same_top_share,
    )


def _measured(entry: ComparedModel) -> Perplexity:
    assert entry.model is not None
    assert entry.model.perplexity is not None  # whoever calls has seen it
    return entry.model.perplexity


def _windows(entry: ComparedModel) -> tuple["np.ndarray", "np.ndarray"]:
    """Nats and scored tokens of each window."""
    measured = _measured(entry)
    if not measured.window_nll or not measured.window_tokens:
        raise UserError(
            f"{entry.where} keeps no windows of its perplexity, as files of earlier versions of ladderize; evaluate the"
            " model again"
        )
    fits = len(measured.window_nll) == len(measured.window_tokens) and all(
        0 < count <= MAX_TOKENS and 0 <= nats <= MAX_NATS * count
        for nats, count in zip(measured.window_nll, measured.window_tokens, strict=True)
    )
    if not fits:
        raise UserError(f"{entry.where} has windows of perplexity that do not fit together; evaluate the model again")
    return np.asarray(measured.window_nll, dtype=float), np.asarray(measured.window_tokens, dtype=float)


def compare_results(reference: ComparedModel, other: ComparedModel, options: CompareOptions) -> ComparisonDocument:
    """The difference of ``other`` to ``reference`` in all that both were asked. Raises UserError, which says what
    differs, unless they were asked the same under the same settings."""
    both, only_one = common_tasks(reference, other, common=options.common)
    tasks = [task for task in both if task != PERPLEXITY]
    check_settings(reference, other, tasks)
    check_cluster_field(options.cluster_by, reference)
    left_out = [f"{task}: only one of the models has it" for task in only_one]
    compared: list[Compared] = []
    for task in tasks:
        check_same_samples(reference, other, task)
        found, not_compared = compare_task(reference, other, task, options)
        compared += found
        left_out += not_compared
    metrics = {one.comparison.metric for one in compared}
    if tasks and (unknown := [metric for metric in options.metrics or () if metric not in metrics]):
        raise UserError(f"--metric {unknown[0]} is none that could be compared; leave it out to see which there are")
    main = {one.comparison.task: one for one in compared if one.comparison.main}
    if main:
        left_out += [
            f"{task}: not in the pooled values, since no metric of it is between 0 and 1"
            for task in tasks
            if task not in main
        ]
    return ComparisonDocument(
        reference=reference.name,
        other=other.name,
        margin=options.margin,
        level=CONFIDENCE,
        resamples=options.resamples,
        seed=options.seed,
        cluster_by=options.cluster_by,
        tasks=[one.comparison for one in compared],
        pooled=pool(reference, main, options) if main else [],
        perplexity=compare_perplexity(reference, other, options) if PERPLEXITY in both else None,
        predictions=compare_predictions(reference, other, options) if PERPLEXITY in both else None,
        left_out=left_out,
        remarks=evaluation_remarks(reference, other),
    )


# ---- stored evaluations, each model against the first ----


def compare(
    files: Iterable[str | Path], options: CompareOptions | None = None, *, models: Sequence[str] = ()
) -> Comparisons:
    """Compare the models of stored evaluations in pairs: each with the first one of the first file.

    files: results.json of ``ladderize eval``, results_*.json of ``lm_eval --log_samples``, or folders with one. models:
    of the files that hold several take these alone, by their names or the last parts of these. Raises UserError, for
    models that were not asked the same with what differs.
    """
    stored = [open_results(Path(file)) for file in files]
    for model in models:
        if not any(results.places(model) for results in stored):
            known = ", ".join(dict.fromkeys(name for results in stored for name in results.names))
            raise UserError(f"--model {model} is in no file; there are {known}")
    chosen = [
        read()
        for results in stored
        for place, read in enumerate(results.reads)
        if not models or len(results.names) == 1 or any(place in results.places(model) for model in models)
    ]
    if len(chosen) < 2:
        held = ", ".join(entry.name for entry in chosen) or "no model"
        raise UserError(f"there are no two models to compare, but only {held}; name another file")
    return Comparisons([compare_results(chosen[0], other, options or CompareOptions()) for other in chosen[1:]])
