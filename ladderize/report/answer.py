"""The answer that a report begins with, in prose. It claims what 95 % intervals show, and no more."""

from dataclasses import dataclass

from ladderize.eval.table import margin_text
from ladderize.report.join import ReportContent
from ladderize.report.models import ReportModel, Setting, listing, points_text, speedup_text
from ladderize.runtime.bench.document import ENOUGH_ROUNDS, BenchDocument, few_rounds
from ladderize.sweep_document import SweepDocument


@dataclass(frozen=True)
class Answer:
    """best: the model that is recommended. setting: of its speed-up."""

    headline: str
    sentences: list[str]
    best: ReportModel | None
    setting: Setting | None


def find_answer(content: ReportContent) -> Answer:
    """Return the answer: the fastest layout that is shown to be within the margin, else the one nearest to dense."""
    margin, others = margin_text(content.margin), content.models[1:]
    shown = [model for model in others if model.verdict == "shown"]
    nearest = None if shown else _nearest(others)
    best, setting = _fastest(shown or ([nearest] if nearest is not None else others), content.settings)
    timing = best.timings[setting] if best is not None and setting is not None else None
    recommended = best if shown and (timing is None or timing.is_faster) else None
    sentences = _not_evaluated(content.models)
    if best is not None and setting is not None and timing is not None:
        accuracy = f"{points_text(best.difference)} points from dense; " if best.difference else ""
        speedup = speedup_text(timing.speedup()) + ", no interval: too few rounds" * (not timing.has_interval)
        note = " This speed-up is emulated, not measured on a whole group." * (setting.kind == "emulated")
        sentences.append(f"{best.name}: {accuracy}end to end {speedup}, {setting.title}.{note}")
    if best is not None and shown:
        headline = f"{best.title} is at most {margin} less accurate than dense"
        if timing is None:
            headline += ", as the 95 % interval shows. Its speed was not measured."
        elif timing.is_faster:
            headline += f" and {timing.speedup().value:.2f}\u00d7 as fast: both are shown by 95 % intervals."
        else:
            headline += ", but no layout within that is shown to be faster in any setting that was timed."
    elif any(model.difference for model in others):
        headline = f"No layout is shown to be within {margin} of dense."
    else:
        headline = "The accuracy was not measured: `ladderize eval DENSE MODEL... --tasks A,B` does."
    if nearest is not None:
        headline += f" The nearest to dense is {nearest.title}: {nearest.scores}."
    gain = recommended.difference if recommended is not None and recommended.was_trained else None
    if recommended is not None and gain is not None and gain.value > 0:
        sentences.append(
            f"That {recommended.name} is better than dense may come of the text it was trained on: train the dense"
            " model on it too, and compare the two."
        )
    sweeps = [sweep for _, sweep in content.documents.of(SweepDocument) if not sweep.complete]
    sentences += [f"The sweep is not complete. `{sweep.command}` goes on with it." for sweep in sweeps]
    benches = [bench for _, bench in content.documents.of(BenchDocument)]
    if not all(bench.complete for bench in benches):
        sentences.append("A benchmark was interrupted: its rows are those measured so far.")
    if warning := few_rounds(min((bench.options.repeat for bench in benches), default=ENOUGH_ROUNDS)):
        sentences.append(f"Speeds: {warning}.")
    return Answer(headline, sentences, recommended, setting)


def _not_evaluated(models: list[ReportModel]) -> list[str]:
    """Return sentences on models that were evaluated on less than others were."""
    tasks = list(dict.fromkeys(task for model in models for task in model.tasks))
    lacking: dict[str, list[str]] = {}
    for model in models:
        missing = [task for task in tasks if task not in model.tasks]
        if missing and model.not_promoted is None:
            lacking.setdefault("any task" if missing == tasks else listing(missing), []).append(model.name)
    common = "Points are over the tasks that dense has in common."
    return [f"Not evaluated on {missing}: {listing(names)}. {common}" for missing, names in lacking.items()]


def _fastest(models: list[ReportModel], settings: list[Setting]) -> tuple[ReportModel | None, Setting | None]:
    """Return the fastest model and the setting of its time; None for what is not there.

    Models that are shown to be faster go before others, then earlier settings. Of equally fast ones it is the most
    accurate.
    """
    for needs_proof in (True, False):
        for setting in settings:
            timed = [model for model in models if setting in model.timings]
            ranked = [model for model in timed if model.timings[setting].is_faster or not needs_proof]
            if ranked:
                speeds = {model.name: model.timings[setting].speedup().value for model in ranked}
                return max(ranked, key=lambda model: (speeds[model.name], model.accuracy or 0.0)), setting
    return (models[0] if models else None), None


def _nearest(others: list[ReportModel]) -> ReportModel | None:
    """Return the layout nearest to dense by the divergence, else by the perplexity, else by the tasks.

    Only layouts that are shown to be faster count, where there are any.
    """
    converted = [model for model in others if model.family != "dense"]
    faster = [model for model in converted if any(timing.is_faster for timing in model.timings.values())]
    for name, sign in (("divergence", 1), ("perplexity_growth", 1), ("difference", -1)):
        measured = [model for model in faster or converted if getattr(model, name) is not None]
        if measured:
            return min(measured, key=lambda model: sign * getattr(model, name).value)
    return None
