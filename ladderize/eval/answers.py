"""Evaluated models with their answers, from results.json of ``ladderize eval`` or the output of ``lm_eval
--log_samples``, and what two of them were asked differently. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, EvaluatedModel, HarnessResult, ModelResult
from ladderize.files.documents import read_document, read_json
from ladderize.files.parsing import parse_json
from ladderize.files.regular import inside, read_lines, resolved

HASHES = ("doc_hash", "target_hash", "prompt_hash")
MAX_VALUE = 1e100  # the largest value of a metric: sums of squares stay finite
RESULTS_NAME = "results.json"
DATED = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")  # lm-eval's
ADVICE = "evaluate both models alike, best in one `ladderize eval`"
RESULTS_KIND = "results.json of ladderize eval, or a results_*.json of lm_eval"
LM_EVAL_ADVICE = f"it should be a {RESULTS_KIND}"


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
    model: ladderize's measurements; None in lm-eval's own output.
    answers: of each task.
    """

    name: str
    where: str
    harness: HarnessResult
    model: EvaluatedModel | None = None
    answers: Mapping[str, Answers] = field(default_factory=dict)


Pair = tuple[AnsweredModel, AnsweredModel]  # the reference and the other model


def read_models(path: Path) -> Iterator[AnsweredModel]:
    """Yield the models of results.json, of the one in a folder, or of a results_*.json of lm-eval.

    Raises UserError for anything else.
    """
    path = resolved(path)
    path = path / RESULTS_NAME if path.is_dir() else path
    if not path.is_file() and path.name == RESULTS_NAME:
        raise UserError(f"{path.parent} holds no {RESULTS_NAME}; name a {RESULTS_KIND}")
    if (date := DATED.search(path.name)) and "schema_version" not in read_json(path, advice=LM_EVAL_ADVICE):
        yield _read_lm_eval_output(path, date[1])
        return
    results = EvalResults.from_dict(read_document(path, RESULTS_KIND), path)
    if not results.models:
        raise UserError(f"{path} holds no model; evaluate one, or name another file")
    for entry in results.models:
        yield _read_model(path, entry)


def read_answered(path: Path, model: str) -> AnsweredModel:
    """Return the model of this name in results.json. Raises UserError where there is none, or several."""
    results = EvalResults.from_dict(read_document(path, RESULTS_KIND), path)
    entries = [entry for entry in results.models if entry.model.model == model]
    if len(entries) != 1:
        names = ", ".join(entry.model.model for entry in results.models)
        raise UserError(f"{path} does not hold one model {model}, but {names}")
    return _read_model(path, entries[0])


def _read_model(path: Path, entry: ModelResult) -> AnsweredModel:
    name, harness, answers = entry.model.model, entry.parts(), {}
    if missing := [task for task in harness.leaves if task not in entry.samples]:
        raise UserError(f"{path} keeps no samples of {missing[0]} for {name}; evaluate the model again")
    for task, file in entry.samples.items():  # the path may come from a stranger, so it must lie in the same folder
        samples = inside(path.parent, file)
        if samples is None:
            raise UserError(f"{path} names samples of {task} outside of its folder ({file}); do not trust it")
        answers[task] = read_answers(samples)
    return AnsweredModel(name, f"{path} ({name})", harness, entry.model, answers)


def _read_lm_eval_output(path: Path, date: str) -> AnsweredModel:
    """Return the model of a file that ``lm_eval --output_path DIR --log_samples`` wrote, with the samples beside it."""
    content = read_json(path, advice=LM_EVAL_ADVICE)
    harness = HarnessResult.from_dict(content, path)
    answers = {}
    for task in harness.configs:
        samples = inside(path.parent, f"samples_{task}_{date}.jsonl")
        if samples is None or not samples.is_file():
            raise UserError(f"{path} has no samples_{task}_{date}.jsonl beside it; evaluate with lm_eval --log_samples")
        answers[task] = read_answers(samples)
    return AnsweredModel(str(content.get("model_name") or path.parent.name), str(path), harness, answers=answers)


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
            # lm-eval writes NaN where a metric has none
            name, doc_id, answer = _read_sample(parse_json(line, constants=True))
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


def check_same(what: str, both: Pair, ours: Any, theirs: Any) -> None:
    """Raise UserError, which shows both values, where a setting differs."""
    if ours != theirs:
        shown = [f"{str(value)[:40]} in {one.where}" for value, one in zip((ours, theirs), both, strict=True)]
        raise UserError(f"not the same {what}: {', '.join(shown)}; {ADVICE}")


def settings_of(one: AnsweredModel, task: str) -> dict[str, Any]:
    """Return what must be the same of both models for a task, beside its questions."""
    config, answers = one.harness.configs.get(task, {}), one.answers[task]
    keys = ("output_type", "generation_kwargs", "repeats")
    counts = {name: len(answers[name]) for name in sorted(answers)}
    return {
        f"version of {task}": one.harness.versions.get(task),
        **{f"{key} of {task}": config.get(key) for key in keys},
        f"filters of {task}": list(counts),
        f"number of samples of {task} (--limit)": max(counts.values()),
    }


def check_same_questions(both: Pair, task: str) -> None:
    """Raise UserError unless both answered the same documents of a task, with the same prompts and settings."""
    theirs = settings_of(both[1], task)
    for what, value in settings_of(both[0], task).items():
        check_same(what, both, value, theirs[what])
    for name, ours in both[0].answers[task].items():
        hashes = [{doc: answer.hashes for doc, answer in one.answers[task][name].items()} for one in both]
        changed = [doc for doc in hashes[0].keys() | hashes[1].keys() if hashes[0].get(doc) != hashes[1].get(doc)]
        if changed:
            raise UserError(
                f"not the same questions of {task}: documents, targets or prompts of {len(changed):,} of {len(ours):,}"
                f" differ between {both[0].where} and {both[1].where} (such as doc_id {min(changed)}); few-shot"
                f" examples and the chat template must be the same, too; {ADVICE}"
            )


def evaluation_remarks(both: Pair) -> list[str]:
    """Return other differences in how the models were computed, which may also cause a difference."""
    ours, theirs = (one.model for one in both)
    if ours is None or theirs is None:
        return []
    pairs = {key: (getattr(ours, key), getattr(theirs, key)) for key in ("dtype", "backend", "tp_size")}
    pairs["device"] = (ours.device.partition(":")[0], theirs.device.partition(":")[0])
    return [
        f"the reference was evaluated with {key} {one}, the other model with {key} {other}"
        for key, (one, other) in pairs.items()
        if one != other
    ]
