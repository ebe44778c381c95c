"""The mean accuracy of a model: of the metrics that stand for its tasks. Imports no torch."""

from ladderize.eval.evaluation.table import Measurement, measurements
from ladderize.eval.paired.samples import leaf_tasks
from ladderize.eval.paired.tasks import MAIN_METRICS
from ladderize.eval.results import ModelResult


def by_task(entry: ModelResult) -> dict[str, list[Measurement]]:
    """All metrics of each task."""
    found: dict[str, list[Measurement]] = {}
    for one in measurements(entry):
        if one.task != "perplexity":
            found.setdefault(one.task, []).append(one)
    return found


def main_metric(found: list[Measurement]) -> Measurement:
    """The one of a task's metrics that stands for it."""
    return min(found, key=_rank)


def is_share(one: Measurement) -> bool:
    """Whether a metric is a share of right answers or alike, between 0 and 1."""
    return 0 <= one.value <= 1 and _rank(one) < len(MAIN_METRICS)


def mean_accuracy(entry: ModelResult) -> float | None:
    """Over all tasks that are no groups of others; None where none has a share."""
    leaves = leaf_tasks(entry.harness)
    mains = [main_metric(found) for task, found in by_task(entry).items() if task in leaves]
    values = [one.value for one in mains if is_share(one)]
    return sum(values) / len(values) if values else None


def _rank(one: Measurement) -> int:
    name = one.metric.partition(" ")[0]
    return MAIN_METRICS.index(name) if name in MAIN_METRICS else len(MAIN_METRICS)
