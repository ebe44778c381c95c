"""Before a sweep: whether its tasks have the questions that it takes to show that a model is within the margin."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ladderize.eval.comparison import POINT
from ladderize.eval.options import EvalOptions
from ladderize.eval.paired import samples_needed
from ladderize.eval.tasks import open_tasks

CHANGED = 0.1  # of the answers, that a model gives otherwise than the dense one: a guess, before any is measured


@dataclass(frozen=True)
class Questions:
    """Of one task, or of a group of lm-eval. count: those that are asked; generated: of these, where the answer is
    generated; all: that there are."""

    count: int
    generated: int
    all: int


def count_questions(options: EvalOptions) -> list[Questions]:
    """Of every task that has accuracies. Raises UserError for a task that is not there."""
    found = []
    for leaves in open_tasks(options)[1].values():
        parts = [
            (min(len(task.eval_docs), options.limit or len(task.eval_docs)), len(task.eval_docs), task.OUTPUT_TYPE)
            for task in leaves.values()
            if task.OUTPUT_TYPE != "loglikelihood_rolling"  # a text's perplexity
        ]
        generated = sum(count for count, _, kind in parts if kind == "generate_until")
        if parts:
            found.append(Questions(sum(count for count, *_ in parts), generated, sum(every for _, every, _ in parts)))
    return found


def questions_needed(tasks: Sequence[Questions], margin: float) -> int:
    """Questions, shared by the tasks as they are here, with which a model that lost nothing is shown to be within
    ``margin`` points of the mean over tasks with a chance of 80 %, if ``CHANGED`` of its answers are others."""
    weights = [1 / len(tasks) / task.count for task in tasks for _ in range(task.count)]
    stderr = math.sqrt(CHANGED * sum(weight**2 for weight in weights))
    return samples_needed(len(weights), weights, stderr, margin * POINT)


def margin_words(tasks: Sequence[Questions], margin: float) -> str:
    """What the user should know before hours of measuring."""
    needed, asked, every = (
        questions_needed(tasks, margin),
        *(sum(getattr(task, of) for task in tasks) for of in ("count", "all")),
    )
    words = (
        f"to show that a model which lost nothing is within {margin:g} point{'s' * (margin != 1)} takes about"
        f" {needed:,} questions, if {CHANGED:.0%} of its answers change (a guess); these tasks ask {asked:,}"
    )
    if asked >= needed:
        return words
    more = f"; raise limit (they have {every:,})" if every > asked else ""
    return f"{words}: too few{more}, add tasks, or allow a larger margin"
