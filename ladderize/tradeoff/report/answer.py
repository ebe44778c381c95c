"""The answer that a report begins with: a sentence, and three numbers. It claims what intervals show, and no more."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ladderize.eval.paired.words import margin_text
from ladderize.runtime.bench.rows import ENOUGH_ROUNDS, few_rounds
from ladderize.tradeoff.report.documents import find_documents
from ladderize.tradeoff.report.join import ReportContent, join_documents
from ladderize.tradeoff.report.options import ReportOptions
from ladderize.tradeoff.report.subjects import Setting, Subject, Timing, WithInterval
from ladderize.tradeoff.report.words import (
    control_text,
    estimate_text,
    interval_text,
    named,
    perplexity_text,
    points_text,
    speedup_text,
    verdict_text,
)

MEASURE_ACCURACY = "ladderize eval DENSE MODEL... --tasks A,B --out results.json"
MEASURE_SPEED = "ladderize bench DENSE MODEL... --tp-size N --out bench.json"


@dataclass(frozen=True)
class KeyNumber:
    """One of the three."""

    label: str  # what it is
    value: str
    detail: str  # how sure it is, and where it holds


NO_INTERVAL = "no interval: too few rounds"
UNMEASURED_SPEED = KeyNumber("Its speed-up", "not known", f"no times: {MEASURE_SPEED}")


@dataclass(frozen=True)
class Answer:
    headline: str
    numbers: list[KeyNumber]
    sentences: list[str] = field(default_factory=list)
    best: Subject | None = None  # what is recommended
    setting: Setting | None = None  # where its speed-up holds


def answer_of(folder: Path) -> Answer:
    """Of a sweep's folder; raises UserError for documents that are corrupt or do not belong together."""
    return find_answer(join_documents(find_documents([folder]), ReportOptions()))


def find_answer(content: ReportContent) -> Answer:
    """See the module."""
    others = [one for one in content.models if one is not content.reference and not one.is_control]
    shown = [subject for subject in others if subject.accuracy is not None and subject.accuracy.verdict == "shown"]
    answer = _within_margin(content, shown) if shown else _none_shown(content, others)
    return replace(answer, sentences=[*answer.sentences, *_control_sentences(content, answer), *_unfinished(content)])


def _control_sentences(content: ReportContent, answer: Answer) -> list[str]:
    """Where what is recommended was trained and looks better than dense: whether that is more than the training."""
    best = answer.best
    if best is None or best.difference is None or best.difference.value <= 0 or not best.was_trained:
        return []
    control = next((one for one in content.models if one.is_control and one.model == best.control), None)
    if control is None:
        return [
            f"{best.name} is {_difference_text(best)} from dense. If it was trained on text, that may come of the text:"
            " a control, the dense model with the same training, tells (`control: true` in sweep.yaml)."
        ]
    measured = f": {points_text(best.over_control)} points" if best.over_control is not None else ""
    return [
        f"The control, {control.name}, which is the dense model with the same training, is {_difference_text(control)}"
        f" from dense. Against it {best.name} is {control_text(best.over_control)}{measured}."
    ]


def _unfinished(content: ReportContent) -> list[str]:
    """What is still missing of sweeps and benchmarks."""
    sentences = []
    if content.reference is not None and content.reference.attention_sync and not content.reference.is_dense:
        sentences.append(f"Here “dense” is {named(content.reference)}, the first model: none is dense.")
    for sweep in content.found.sweeps:
        points = [point for point in sweep.document.points if point.not_promoted is None]
        failed = sum(point.failure is not None for point in points)
        evaluated = sum(point.results is not None for point in points)
        if failed:
            sentences.append(f"{failed} of {len(points)} models failed; the table says why.")
        if not sweep.document.complete:
            benches = [stage.status for stage in sweep.document.stages if stage.stage == "bench"]
            timed = f", and {benches.count('done')} of {len(benches)} benchmarks are done" if benches else ""
            sentences.append(
                f"The sweep is not complete: {evaluated} of {len(points)} models are evaluated{timed}."
                f" `{sweep.document.command}` goes on with it."
            )
    if any(not bench.document.complete for bench in content.found.benches):
        sentences.append("A benchmark was interrupted: its rows are those measured so far.")
    if few := few_rounds(
        min((bench.document.options.repeat for bench in content.found.benches), default=ENOUGH_ROUNDS)
    ):
        sentences.append(f"Speeds: {few}.")
    return sentences


def faster(timing: Timing) -> bool:
    """Whether the interval shows a speed-up; without one, nothing does."""
    return timing.whole.low is not None and timing.whole.low > 1


TimedSubject = tuple[Subject, Timing]


def _fastest(subjects: list[Subject], content: ReportContent) -> list[TimedSubject]:
    """In each setting, where any was timed, the fastest of those shown to be faster than dense, where there are
    such; of one layout the most accurate."""

    def order(pair: TimedSubject) -> tuple[bool, float, float]:
        subject, timing = pair
        return faster(timing), timing.whole.value, subject.accuracy.value if subject.accuracy is not None else 0.0

    timed = [
        [(subject, timing) for subject in subjects if (timing := subject.timing(setting)) is not None]
        for setting in content.real_settings
    ]
    return [max(pairs, key=order) for pairs in timed if pairs]


def _within_margin(content: ReportContent, shown: list[Subject]) -> Answer:
    margin = margin_text(content.margin)
    paying = [pair for pair in _fastest(shown, content) if faster(pair[1])]
    if paying:
        best, timing = paying[0]
        headline = (
            f"{named(best)} is {timing.whole.value:.2f}\u00d7 as fast as dense and at most"
            f" {margin} less accurate: both are shown by 95 % intervals."
        )
        if timing.setting.kind == "predicted":
            headline = (
                f"{named(best)} is predicted to be {timing.whole.value:.2f}\u00d7 as fast as dense, and shown by"
                f" the 95 % interval to be at most {margin} less accurate."
            )
        numbers = [_accuracy_number(best, content), _speed_number(timing), _pays_number([best], content)]
        return Answer(headline, numbers, _kind_sentences(content, best, timing.setting), best, timing.setting)
    best = max(shown, key=lambda s: max((t.whole.value for t in s.timings), default=0.0))
    if not content.real_settings or not best.timings:
        headline = (
            f"{named(best)} is at most {margin} less accurate than dense: shown by the 95 %"
            " interval. Its speed was not measured."
        )
        numbers = [_accuracy_number(best, content), UNMEASURED_SPEED, _pays_number([best], content)]
        return Answer(headline, numbers, [f"`{MEASURE_SPEED}` measures the speed."], best)
    headline = (
        f"No layout that is shown to be within {margin} of dense is also shown to be faster than dense in any setting"
        f" that was timed. The best candidate is {named(best)}, shown to be within it."
    )
    timing = max(best.timings, key=lambda timing: timing.whole.value)
    numbers = [_accuracy_number(best, content), _speed_number(timing), _pays_number(shown, content)]
    return Answer(headline, numbers, setting=timing.setting)


def _none_shown(content: ReportContent, others: list[Subject]) -> Answer:
    """Nothing is shown to be within the margin, or no task was evaluated: the best candidate, by what was measured."""
    margin = margin_text(content.margin)
    compared = [subject for subject in others if subject.difference is not None]
    if compared:
        headline = f"No layout is shown to be within {margin} of dense."
    elif content.reference is not None and content.reference.accuracy is not None:
        headline = "The accuracy of no converted model was measured."
    else:
        headline = "The accuracy was not measured."
    candidate = _best_candidate(others)
    if candidate is None:
        headline += " So this report cannot say which layout to use."
        first = KeyNumber(f"Best layout within {margin} of dense", "not known", "no task was evaluated")
        fastest = _first_fastest(others, content)
    else:
        best, measured = candidate
        headline += f" The best candidate by {measured} is {named(best)}: {_distance_text(best)}."
        shown = verdict_text(best.accuracy, content.margin) if best.accuracy is not None else "not evaluated on tasks"
        first = KeyNumber(f"Best candidate, by {measured}", best.layout_words, shown)
        fastest = _first_fastest([best], content)
    speed, setting = UNMEASURED_SPEED, None
    if fastest is not None:
        subject, timing = fastest
        what = ("Highest speed-up", subject.name) if candidate is None else ("Its speed-up, end to end",)
        speed, setting = _speed_number(timing, *what), timing.setting
    sentences = _what_would_show(candidate[0] if candidate is not None else None, compared)
    return Answer(headline, [first, speed, _pays_number(others, content)], sentences, setting=setting)


def _best_candidate(others: list[Subject]) -> tuple[Subject, str] | None:
    """The layout nearest to dense, and by what: the divergence of its predictions where any was measured, else the
    perplexity, else the tasks' estimates; of those that are shown to be faster, where any is. None: nothing was
    measured."""
    converted = [one for one in others if not one.is_dense]
    known = [one for one in converted if any(map(faster, one.timings))] or converted
    measures: dict[str, Callable[[Subject], WithInterval | None]] = {
        "divergence": lambda one: one.divergence,
        "perplexity": lambda one: one.perplexity,
        "the tasks' estimates": lambda one: None if one.difference is None else one.difference.scaled(-1),
    }
    for name, measure in measures.items():
        if found := [(value.value, one) for one in known if (value := measure(one)) is not None]:
            return min(found, key=lambda pair: pair[0])[1], name
    return None


def _distance_text(best: Subject) -> str:
    """How far a candidate is from dense: all that was measured."""
    parts = [f"KL {estimate_text(best.divergence, 4)} nats per token"] if best.divergence is not None else []
    parts += [f"perplexity {perplexity_text(best.perplexity)}"] if best.perplexity is not None else []
    return ", ".join(parts + ([_difference_text(best)] if best.difference is not None else []))


def _what_would_show(best: Subject | None, compared: list[Subject]) -> list[str]:
    """What to do so that the tasks show something. compared: on tasks, with the reference."""
    if not compared:
        return [f"`{MEASURE_ACCURACY}` measures it; give results.json to this report."]
    known = best if best in compared else max(compared, key=lambda one: one.difference.value if one.difference else 0.0)
    assert known is not None
    assert known.accuracy is not None
    sentences = []
    if known.accuracy.needed:
        sentences.append(
            f"About {known.accuracy.needed:,} samples would be needed to show it of a model that is as good as dense,"
            " more of one that is not."
        )
    if not known.accuracy.paired:
        sentences.append(
            "The results hold no samples, so these intervals are unpaired and show less than they could: evaluate"
            " again with this version of ladderize, which keeps the samples."
        )
    return sentences


def _first_fastest(others: list[Subject], content: ReportContent) -> TimedSubject | None:
    """In the first setting where something is faster than dense; else in the first."""
    found = _fastest(others, content)
    return next((pair for pair in found if faster(pair[1])), found[0] if found else None)


def _accuracy_number(subject: Subject, content: ReportContent) -> KeyNumber:
    assert subject.accuracy is not None
    label = f"Best layout within {margin_text(content.margin)} of dense"
    return KeyNumber(
        label, subject.layout_words, f"{_difference_text(subject)}: {verdict_text(subject.accuracy, content.margin)}"
    )


def _difference_text(subject: Subject) -> str:
    if subject.difference is None:
        return "not compared"
    return f"{points_text(subject.difference)} points of mean accuracy"


def _speed_number(timing: Timing, label: str = "Its speed-up, end to end", what: str = "") -> KeyNumber:
    """The detail: whose it is, the interval, and where it holds."""
    interval = f"95 % interval {interval_text(timing.whole)}" if interval_text(timing.whole) else NO_INTERVAL
    if timing.whole.low is not None and not faster(timing):
        interval += ": not shown to be faster"
    parts = [part for part in (what, interval, timing.setting.words) if part]
    return KeyNumber(label, f"{timing.whole.value:.2f}\u00d7", "; ".join(parts))


def _pays_number(subjects: list[Subject], content: ReportContent) -> KeyNumber:
    """Settings in which one of the subjects is shown to be faster than dense."""
    label = "Settings in which a speed-up is shown"
    fastest = _fastest(subjects, content)
    if not fastest:
        return KeyNumber(label, "not known", "not timed" if content.real_settings else "no times were measured")
    others = [
        f"{timing.setting.words}: {speedup_text(timing.whole)}{f', {NO_INTERVAL}' if timing.whole.low is None else ''}"
        for _, timing in fastest
        if not faster(timing)
    ]
    listed = others[:3] + ([f"and {len(others) - 3} more below"] if len(others) > 3 else [])
    detail = f"not in {'; '.join(listed)}" if listed else "the interval is above 1 wherever it was timed"
    return KeyNumber(label, f"{len(fastest) - len(others)} of {len(fastest)}", detail)


def _kind_sentences(content: ReportContent, best: Subject, chosen: Setting) -> list[str]:
    """Where the speed-up that is shown is not measured, what the measured settings say of the same model."""
    if chosen.kind == "measured":
        return []
    measured = [setting for setting in content.real_settings if setting.kind == "measured"][:1]
    return [f"This speed-up is {chosen.kind}, not measured on a whole group."] + [
        f"Of {best.name}, {setting.words}: {speedup_text(timing.whole)}."
        for setting in measured
        if (timing := best.timing(setting)) is not None
    ]
