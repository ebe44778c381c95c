"""Evaluated models with their answers, from results.json of ``ladderize eval``, and what two of them were asked
differently. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, EvaluatedModel, HarnessResult
from ladderize.files.documents import read_document
from ladderize.files.parsing import parse_json
from ladderize.files.regular import inside, read_lines, resolved

HASHES = ("doc_hash", "target_hash", "prompt_hash")
MAX_VALUE = 1e100  # the largest value of a metric: sums of squares stay finite
ADVICE = "evaluate both models alike, best in one `ladderize eval`"


@dataclass(frozen=True)
class ModelAnswer:
    """A model's answer to one question.

    hashes: in the order of ``HASHES``.
    values: metric -> its value; None where it is no finite number.
    """

    hashes: tuple[str, ...]
    values: Mapping[str, float | None]


Answers = Mapping[str, Mapping[int, ModelAnswer]]  # filter -> doc_id -> answer


@dataclass(frozen=True)
class AnsweredModel:
    """A model and its answers.

    where: names its file in messages.
    harness: lm-eval's result.
    answers: of each task.
    """

    where: str
    model: EvaluatedModel
    harness: HarnessResult
    answers: Mapping[str, Answers]


Pair = tuple[AnsweredModel, AnsweredModel]  # the reference and the other model


def read_models(path: Path, model: str | None = None) -> Iterator[AnsweredModel]:
    """Yield the models of results.json. Raises UserError for any other file.

    model: the name of the only one to read.
    """
    path = resolved(path)
    results = EvalResults.from_dict(read_document(path, "results.json of ladderize eval"), path)
    for entry in results.models:
        name, harness, answers = entry.model.model, entry.parts(), {}
        if model not in (None, name):
            continue
        if missing := [task for task in harness.leaves if task not in entry.samples]:
            raise UserError(f"{path} keeps no samples of {missing[0]} for {name}; evaluate the model again")
        for task, file in entry.samples.items():  # the path may come from a stranger, so it must lie in the same folder
            samples = inside(path.parent, file)
            if samples is None:
                raise UserError(f"{path} names samples of {task} outside of its folder ({file}); do not trust it")
            answers[task] = read_answers(samples)
        yield AnsweredModel(f"{path} ({name})", entry.model, harness, answers)


# ---- samples ----


def read_answers(path: Path) -> Answers:
    """Return the answers of one task in a .jsonl file of samples, as lm-eval logs them.

    Raises UserError for an invalid sample, two answers to one question, or no samples.
    """
    if not path.is_file():
        raise UserError(f"{path} is not there, and the results name it; copy it beside them")
    answers: dict[str, dict[int, ModelAnswer]] = {}
    for number, line in enumerate(read_lines(path), start=1):
        try:
            name, doc_id, answer = _read_sample(parse_json(line))
            if doc_id in answers.setdefault(name, {}):
                raise ValueError(f"there are two answers to doc_id {doc_id}")
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; evaluate the model again") from None
        answers[name][doc_id] = answer
    if not answers:
        raise UserError(f"{path} holds no samples; evaluate the model again")
    return answers


def _read_sample(sample: Any) -> tuple[str, int, ModelAnswer]:
    """Return filter, doc_id and answer of a sample; raises ValueError with the reason for an invalid one."""
    types = {"filter": str, "doc_id": int, **dict.fromkeys(HASHES, str), "metrics": list}
    for name, expected in types.items():
        if not isinstance(sample, Mapping) or type(sample.get(name)) is not expected:
            raise ValueError(f"no sample of lm-eval: its {name} is not a {expected.__name__}")
    for metric in sample["metrics"]:
        if not isinstance(metric, str) or metric not in sample:
            raise ValueError(f"it has no value of its metric {metric!r}")
    values = {metric: finite_number(sample[metric]) for metric in sample["metrics"]}
    return sample["filter"], sample["doc_id"], ModelAnswer(tuple(sample[name] for name in HASHES), values)


def finite_number(value: Any) -> float | None:
    """Return a metric's value as a float; None for anything else."""
    if not isinstance(value, int | float) or not abs(value) <= MAX_VALUE:  # also NaN
        return None
    return float(value)


# ---- were both asked the same? ----


def _settings(one: AnsweredModel, task: str) -> dict[str, Any]:
    """Return what must be the same of both models for a task, beside its questions."""
    config = one.harness.configs.get(task, {})
    asked = {key: config.get(key) for key in ("output_type", "generation_kwargs", "repeats")}
    return {"version": one.harness.versions.get(task), "filters": sorted(one.answers[task]), **asked}


def check_same_questions(both: Pair, task: str) -> None:
    """Raise UserError unless both answered the same documents of a task, with the same prompts and settings."""
    settings = [_settings(one, task) for one in both]
    for what, value in settings[0].items():
        if value != settings[1][what]:
            shown = [f"{str(each[what])[:40]} in {one.where}" for each, one in zip(settings, both, strict=True)]
            raise UserError(f"not the same {what} of {task}: {', '.join(shown)}; {ADVICE}")
    for name, ours in both[0].answers[task].items():
        hashes = [{doc: answer.hashes for doc, answer in one.answers[task][name].items()} for one in both]
        changed = [doc for doc in hashes[0].keys() | hashes[1].keys() if hashes[0].get(doc) != hashes[1].get(doc)]
        if changed:
            raise UserError(
                f"not the same questions of {task}: documents, targets or prompts of {len(changed):,} of {len(ours):,}"
                f" differ between {both[0].where} and {both[1].where} (such as doc_id {min(changed)}); --limit,"
                f" few-shot examples and the chat template must be the same, too; {ADVICE}"
            )


def evaluation_remarks(both: Pair) -> list[str]:
    """Return other differences in how the models were computed, which may also cause a difference."""
    ours, theirs = both[0].model, both[1].model
    return [
        f"the reference was evaluated with {key} {getattr(ours, key)}, the other model with {getattr(theirs, key)}"
        for key in ("dtype", "backend")
        if getattr(ours, key) != getattr(theirs, key)
    ]
