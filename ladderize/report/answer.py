"""The answer that a report begins with, in prose. It claims what 95 % intervals show, and no more."""

from dataclasses import dataclass

from ladderize.eval.words import margin_text
from ladderize.report.join import ReportContent
from ladderize.report.subjects import Setting, Subject, Timing, perplexity_text, points_text, speedup_text
from ladderize.runtime.bench.document import ENOUGH_ROUNDS, few_rounds

MEASURE_ACCURACY = "ladderize eval DENSE MODEL... --tasks A,B --out results.json"
MEASURE_SPEED = "ladderize bench DENSE MODEL... --tp-size N --out bench.json"


@dataclass(frozen=True)
class Answer:
    """The answer of a report.

    headline: one sentence or two.
    best: the model that is recommended.
    setting: the setting in which its speed-up holds.
    """

    headline: str
    sentences: list[str]
    best: Subject | None = None
    setting: Setting | None = None


def find_answer(content: ReportContent) -> Answer:
    """Return the answer: the fastest layout that is shown to be within the margin, else the one nearest to dense."""
    margin = margin_text(content.margin)
    others = [one for one in content.models if one is not content.reference and not one.is_control]
    shown = [one for one in others if one.verdict(content.margin) == "shown"]
    compared = [one for one in others if one.difference is not None]
    nearest, distance = (None, "") if shown else _nearest(others)
    fastest = _fastest(shown or ([nearest] if nearest is not None else others), content)
    best, timing = fastest[0] if fastest else (shown[0] if shown else nearest, None)
    is_faster = timing is not None and timing.is_faster
    advice = []
    if best is not None and shown:
        headline = f"{best.title} is at most {margin} less accurate than dense"
        if timing is None:
            headline += ", as the 95 % interval shows. Its speed was not measured."
        elif not is_faster:
            headline += ", but no layout within that is shown to be faster in any setting that was timed."
        elif timing.setting.kind == "predicted":
            headline += f", as the 95 % interval shows, and predicted to be {timing.whole.value:.2f}\u00d7 as fast."
        else:
            headline += f" and {timing.whole.value:.2f}\u00d7 as fast: both are shown by 95 % intervals."
    else:
        headline = (
            f"No layout is shown to be within {margin} of dense." if compared else "The accuracy was not measured."
        )
        headline += f" The nearest to it is {nearest.title}: {distance}." if nearest is not None else ""
        needed = max((one.samples_needed(content.margin) or 0 for one in compared), default=0)
        if needed:
            advice.append(f"About {needed:,} samples would show it of a model that is as good as dense.")
        if not compared:
            advice.append(f"`{MEASURE_ACCURACY}` measures it; give results.json to this report.")
    if timing is None:
        advice.append(f"`{MEASURE_SPEED}` measures the speed.")
    details = _details(best, timing, fastest) if best is not None and timing is not None else []
    recommended = best if shown and (is_faster or timing is None) else None
    setting = timing.setting if timing is not None else None
    return Answer(headline, [*details, *advice, *_doubts(content, recommended)], recommended, setting)


def _fastest(subjects: list[Subject], content: ReportContent) -> list[tuple[Subject, Timing]]:
    """Return the fastest model of each setting, settings with a shown speed-up first.

    A model that is shown to be faster goes before others. Of equally fast ones the most accurate is taken.
    """
    found = []
    for setting in content.real_settings:
        timed = [(one, timing) for one in subjects if (timing := one.timing(setting)) is not None]
        if timed:
            found.append(max(timed, key=lambda pair: (pair[1].is_faster, pair[1].whole.value, pair[0].accuracy or 0.0)))
    return sorted(found, key=lambda pair: not pair[1].is_faster)


def _nearest(others: list[Subject]) -> tuple[Subject | None, str]:
    """Return the layout nearest to dense, and words for its distance in all that was measured.

    Distance is the divergence, else the perplexity, else the tasks. Only layouts that are shown to be faster count,
    where there are any.
    """
    converted = [one for one in others if one.family != "dense"]
    known = [one for one in converted if any(timing.is_faster for timing in one.timings)] or converted
    for name in ("divergence", "perplexity", "difference"):
        measured = [(value.value, one) for one in known if (value := getattr(one, name)) is not None]
        if measured:
            best = (max if name == "difference" else min)(measured, key=lambda pair: pair[0])[1]
            parts = [f"KL {best.divergence.text(4)} nats per token"] if best.divergence is not None else []
            parts += [f"perplexity {perplexity_text(best.perplexity)}"] if best.perplexity is not None else []
            parts += [f"{points_text(best.difference)} points"] if best.difference is not None else []
            return best, ", ".join(parts)
    return None, ""


def _details(best: Subject, timing: Timing, fastest: list[tuple[Subject, Timing]]) -> list[str]:
    """Return sentences on the accuracy and the speed of the headline's model, and on the settings with a shown
    speed-up."""
    accuracy = f"{points_text(best.difference)} points from dense; " if best.difference is not None else ""
    interval = "" if timing.whole.low is not None else ", no interval: too few rounds"
    kind = timing.setting.kind
    note = f" This speed-up is {kind}, not measured on a whole group." if kind != "measured" else ""
    slow = [f"{one.setting.words}: {speedup_text(one.whole)}" for _, one in fastest if not one.is_faster]
    where = f" Not in {'; '.join(slow[:3])}{' and more below' * (len(slow) > 3)}." if slow else ""
    return [
        f"{best.name}: {accuracy}end to end {speedup_text(timing.whole)}{interval}, {timing.setting.words}.{note}",
        f"A speed-up is shown in {len(fastest) - len(slow)} of {len(fastest)} settings.{where}",
    ]


def _doubts(content: ReportContent, best: Subject | None = None) -> list[str]:
    """Return sentences on missing data, and on the gain that training alone gives the dense model."""
    sentences = []
    if best is not None and best.was_trained and best.difference is not None and best.difference.value > 0:
        control = next((one for one in content.models if one.is_control and one.model == best.control), None)
        if control is None or best.over_control is None or control.difference is None:
            sentences.append(
                f"That {best.name} is better than dense may come of the text it was trained on: the dense model after"
                " the same training, a control, tells (`control: true` in sweep.yaml)."
            )
        else:
            sentences.append(
                f"The dense model after the same training, {control.name}, is {points_text(control.difference)} points"
                f" from dense; {best.name} is {points_text(best.over_control)} points from that."
            )
    if content.reference is not None and content.reference.family != "dense":
        sentences.append(f"Here dense is {content.reference.title}, the first model: none is dense.")
    for sweep in content.found.sweeps:
        points = [point for point in sweep.document.points if point.not_promoted is None]
        if failed := sum(point.failure is not None for point in points):
            sentences.append(f"{failed} of {len(points)} models failed; the table says why.")
        if not sweep.document.complete:
            evaluated = sum(point.results is not None for point in points)
            sentences.append(
                f"The sweep is not complete: {evaluated} of {len(points)} models are evaluated."
                f" `{sweep.document.command}` goes on with it."
            )
    if any(not bench.document.complete for bench in content.found.benches):
        sentences.append("A benchmark was interrupted: its rows are those measured so far.")
    rounds = min((bench.document.options.repeat for bench in content.found.benches), default=ENOUGH_ROUNDS)
    return sentences + ([f"Speeds: {few}."] if (few := few_rounds(rounds)) else [])
