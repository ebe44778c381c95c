"""The answer that a report begins with, in prose. It claims what 95 % intervals show, and no more."""

from collections.abc import Iterator
from dataclasses import dataclass

from ladderize.eval.table import margin_text
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, Setting, Timing, listing, points_text, speedup_text
from ladderize.runtime.bench.document import ENOUGH_ROUNDS, few_rounds


@dataclass(frozen=True)
class Answer:
    """The answer of a report.

    headline: one sentence or two.
    best: the model that is recommended.
    setting: the setting in which its speed-up holds.
    """

    headline: str
    sentences: list[str]
    best: ReportModel | None
    setting: Setting | None


def find_answer(content: ReportContent) -> Answer:
    """Return the answer: the fastest layout that is shown to be within the margin, else the one nearest to dense."""
    margin = margin_text(content.margin)
    others = [one for one in content.models if one is not content.reference]
    shown = [one for one in others if one.verdict == "shown"]
    nearest = None if shown else _nearest(others)
    best, timing = _fastest(shown or ([nearest] if nearest is not None else others), content)
    is_faster = timing is not None and timing.is_faster
    recommended = best if shown and (is_faster or timing is None) else None
    sentences = [_numbers(best, timing)] if best is not None and timing is not None else []
    if shown and best is not None:
        headline = f"{best.title} is at most {margin} less accurate than dense"
        if timing is None:
            headline += ", as the 95 % interval shows. Its speed was not measured."
        elif is_faster:
            headline += f" and {timing.whole.value:.2f}\u00d7 as fast: both are shown by 95 % intervals."
        else:
            headline += ", but no layout within that is shown to be faster in any setting that was timed."
    elif any(one.difference is not None for one in others):
        headline = f"No layout is shown to be within {margin} of dense."
    else:
        headline = "The accuracy was not measured: `ladderize eval DENSE MODEL... --tasks A,B` does."
    if nearest is not None:
        headline += f" The nearest to dense is {nearest.title}: {nearest.scores}."
    gain = recommended.difference if recommended is not None else None
    if recommended is not None and recommended.was_trained and gain is not None and gain.value > 0:
        sentences.append(
            f"That {recommended.name} is better than dense may come of the text it was trained on: train the dense"
            " model on it too, and compare the two."
        )
    for _, sweep in content.found.sweeps:
        if not sweep.complete:
            sentences.append(f"The sweep is not complete. `{sweep.command}` goes on with it.")
    if not all(bench.complete for _, bench in content.found.benches):
        sentences.append("A benchmark was interrupted: its rows are those measured so far.")
    if few := few_rounds(min((bench.options.repeat for _, bench in content.found.benches), default=ENOUGH_ROUNDS)):
        sentences.append(f"Speeds: {few}.")
    return Answer(
        headline, [*_incomplete(content), *sentences], recommended, timing.setting if timing is not None else None
    )


def _incomplete(content: ReportContent) -> Iterator[str]:
    """Yield sentences on models that were evaluated on less than others were."""
    tasks = list(dict.fromkeys(task for model in content.models for task in model.tasks))
    lacking: dict[str, list[str]] = {}
    for model in content.models:
        missing = [task for task in tasks if task not in model.tasks]
        if missing and model.not_promoted is None:
            lacking.setdefault("any task" if missing == tasks else listing(missing), []).append(model.name)
    for lacked, names in lacking.items():
        yield f"Not evaluated on {lacked}: {listing(names)}. Points are over the tasks that dense has in common."


def _fastest(models: list[ReportModel], content: ReportContent) -> tuple[ReportModel | None, Timing | None]:
    """Return the fastest model and its time; None for what is not there.

    A model that is shown to be faster goes before others, and an earlier setting before a later one. Of equally fast
    models the most accurate is taken.
    """
    for needs_proof in (True, False):
        for setting in content.real_settings:
            timed = [(one, timing) for one in models if (timing := one.timing(setting)) is not None]
            known = [pair for pair in timed if pair[1].is_faster or not needs_proof]
            if known:
                return max(known, key=lambda pair: (pair[1].whole.value, pair[0].accuracy or 0.0))
    return (models[0] if models else None), None


def _nearest(others: list[ReportModel]) -> ReportModel | None:
    """Return the layout nearest to dense by the divergence, else by the perplexity, else by the tasks.

    Only layouts that are shown to be faster count, where there are any.
    """
    converted = [one for one in others if one.family != "dense"]
    known = [one for one in converted if any(timing.is_faster for timing in one.timings)] or converted
    for name, sign in (("divergence", 1), ("perplexity_growth", 1), ("difference", -1)):
        measured = [(sign * value.value, one) for one in known if (value := getattr(one, name)) is not None]
        if measured:
            return min(measured, key=lambda pair: pair[0])[1]
    return None


def _numbers(best: ReportModel, timing: Timing) -> str:
    """Return a sentence on accuracy and speed of the headline's model."""
    accuracy = f"{points_text(best.difference)} points from dense; " if best.difference is not None else ""
    interval = "" if timing.whole.low is not None else ", no interval: too few rounds"
    is_emulated = timing.setting.kind == "emulated"
    note = " This speed-up is emulated, not measured on a whole group." if is_emulated else ""
    return f"{best.name}: {accuracy}end to end {speedup_text(timing.whole)}{interval}, {timing.setting.words}.{note}"
