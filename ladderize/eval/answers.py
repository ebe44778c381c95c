"""Evaluated models with their answers, from results.json of ``ladderize eval`` or the output of ``lm_eval
--log_samples``. Imports no torch."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult
from ladderize.files.documents import read_document, read_json
from ladderize.files.parsing import parse_json
from ladderize.files.regular import inside, read_lines, resolved

HASHES = {"doc_hash": "documents", "target_hash": "targets", "prompt_hash": "prompts"}  # key -> what it is of
MAX_VALUE = 1e100  # the largest value of a metric: sums of squares stay finite
OWN_NAME = "results.json"
DATED = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
RESULTS_KIND = "results.json of ladderize eval, or a results_*.json of lm_eval"


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
    harness: lm-eval's result (results, configs, versions, ...).
    model: ladderize's measurements; None in lm-eval's own output.
    answers: of each task.
    """

    name: str
    where: str
    harness: Mapping[str, Any] = field(default_factory=dict)
    model: EvaluatedModel | None = None
    answers: Mapping[str, Answers] = field(default_factory=dict)

    def of_task(self, part: str, task: str) -> Any:
        """Return the entry of a task in ``part`` of lm-eval's result, such as "versions"; None where there is none."""
        known = self.harness.get(part)
        return known.get(task) if isinstance(known, Mapping) else None

    def object_of_task(self, part: str, task: str) -> Mapping[str, Any]:
        """Return ``of_task`` where it is an object, else an empty one."""
        found = self.of_task(part, task)
        return found if isinstance(found, Mapping) else {}


# ---- answers ----


def collect_answers(samples: Iterable[tuple[str, Any]], source: str) -> Answers:
    """Return the answers of one task.

    samples: as lm-eval logs them, each with its name in messages.
    source: the name of all of them in messages.
    Raises UserError for an invalid sample, two answers to one question, or no samples.
    """
    answers: dict[str, dict[int, ModelAnswer]] = {}
    for where, sample in samples:
        try:
            name, doc_id, answer = _read_sample(sample)
        except ValueError as error:
            raise UserError(f"{where} {error}; evaluate the model again") from None
        if doc_id in answers.setdefault(name, {}):
            raise UserError(f"{source}: there are two answers to doc_id {doc_id}; evaluate the model again")
        answers[name][doc_id] = answer
    if not answers:
        raise UserError(f"{source} holds no samples; evaluate the model again")
    return answers


def _read_sample(sample: Any) -> tuple[str, int, ModelAnswer]:
    """Return filter, doc_id and answer of a sample; raises ValueError with the reason for an invalid one."""
    kinds = {"filter": str, "doc_id": int, **dict.fromkeys(HASHES, str), "metrics": list}
    for name, kind in kinds.items():
        if not isinstance(sample, Mapping) or type(sample.get(name)) is not kind:
            raise ValueError(f"is not a sample of lm-eval: its {name} is not a {kind.__name__}")
    for metric in sample["metrics"]:
        if not isinstance(metric, str) or metric not in sample:
            raise ValueError(f"has no value of its metric {metric!r}")
    values = {metric: finite_number(sample[metric]) for metric in sample["metrics"]}
    return sample["filter"], sample["doc_id"], ModelAnswer(tuple(sample[name] for name in HASHES), values)


def finite_number(value: Any) -> float | None:
    """Return a metric's value as a float, also from numpy; None for anything else."""
    if not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return number if abs(number) <= MAX_VALUE else None  # False for NaN


def read_answers(path: Path) -> Answers:
    """Return the answers of one task in a .jsonl file; raises UserError."""
    return collect_answers(_lines(path), str(path))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number}"
        try:
            yield where, parse_json(line, constants=True)  # lm-eval writes NaN where a metric has none
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON ({error}); evaluate the model again") from None


# ---- models ----


@dataclass(frozen=True)
class StoredResults:
    """A results file whose samples are not read yet.

    names: of its models.
    reads: reads each of them, on demand.
    """

    path: Path
    names: list[str]
    reads: Sequence[Callable[[], AnsweredModel]]

    def places(self, model: str) -> list[int]:
        """Return the numbers of the models with this name: the whole name, or else the last part of a path."""
        whole = [place for place, name in enumerate(self.names) if name == model]
        return whole or [place for place, name in enumerate(self.names) if PurePath(name).name == model]


def open_results(path: Path) -> StoredResults:
    """Return results.json of ladderize, a results_*.json of lm-eval, or the one in a folder; raises UserError for
    anything else."""
    path = resolved(path)
    path = _results_in(path) if path.is_dir() else path
    content = read_json(path, advice=f"it should be a {RESULTS_KIND}")
    if "schema_version" not in content and all(
        isinstance(content.get(part), Mapping) for part in ("results", "configs", "versions")
    ):
        name = content.get("model_name")
        name = name if isinstance(name, str) and name else path.parent.name
        return StoredResults(path, [name], [partial(_read_lm_eval_output, path, name, content)])
    if "schema_version" not in content or "models" not in content:
        raise UserError(f"{path} is no {RESULTS_KIND}; name one of these")
    results = EvalResults.from_dict(read_document(path, RESULTS_KIND), path)
    if not results.models:
        raise UserError(f"{path} holds no model; evaluate one, or name another file")
    reads = [partial(_read_model, path, result) for result in results.models]
    return StoredResults(path, [result.model.model for result in results.models], reads)


def read_answered(path: Path, model: str) -> AnsweredModel:
    """Return the only model of this name in a results file. Raises UserError where there is none, or several."""
    stored = open_results(path)
    places = stored.places(model)
    if len(places) != 1:
        raise UserError(f"{stored.path} does not hold one model {model}, but {', '.join(stored.names)}")
    return stored.reads[places[0]]()


def _read_model(path: Path, result: ModelResult) -> AnsweredModel:
    name, answers = result.model.model, {}
    if missing := [task for task in leaf_tasks(result.harness) if task not in result.samples]:
        raise UserError(f"{path} keeps no samples of {missing[0]} for {name}; evaluate the model again")
    for task, file in result.samples.items():  # the path may come from a stranger, so it must lie in the same folder
        samples = inside(path.parent, file)
        if samples is None:
            raise UserError(f"{path} names samples of {task} outside of its folder ({file}); do not trust it")
        if not samples.is_file():
            raise UserError(f"{path} names samples of {task} that are not there ({samples}); copy them beside it")
        answers[task] = read_answers(samples)
    return AnsweredModel(name, f"{path} ({name})", result.harness, result.model, answers)


def leaf_tasks(harness: Mapping[str, Any]) -> list[str]:
    """Return the tasks with samples in lm-eval's result: groups have none. Raises UserError for a malformed result."""
    groups, results = harness.get("group_subtasks") or {}, harness.get("results") or {}
    for name, part in (("group_subtasks", groups), ("results", results)):
        if not isinstance(part, Mapping):
            raise UserError(f"{name} of an evaluated model is no object; name the results of an evaluation")
    return [task for task in results if not groups.get(task)]


# ---- the output of lm_eval --log_samples --output_path DIR: results_DATE.json, and samples_TASK_DATE.jsonl ----


def _results_in(folder: Path) -> Path:
    """Return the results file of a folder: our results.json, or the newest of lm-eval, also one level down.

    lm-eval makes a folder for each model.
    Raises UserError where there is none, or results of several models.
    """
    if (folder / OWN_NAME).is_file():
        return folder / OWN_NAME
    dates = {
        path: date[1]
        for pattern in ("*.json", "*/*.json")
        for path in folder.glob(pattern)
        if (date := DATED.search(path.name))
    }
    if not dates:
        raise UserError(f"{folder} holds no results of an evaluation; name a results.json, or a folder with one")
    parents = sorted({path.parent for path in dates})
    if len(parents) > 1:
        raise UserError(
            f"{folder} holds the results of several models; name one of {', '.join(parent.name for parent in parents)}"
        )
    return max(dates, key=dates.__getitem__)


def _read_lm_eval_output(path: Path, name: str, content: Mapping[str, Any]) -> AnsweredModel:
    """Return the model of an lm-eval output; raises UserError where samples are missing."""
    date = DATED.search(path.name)
    answers = {}
    for task in content["configs"]:
        file = path.parent / f"samples_{task}_{date[1] if date else ''}.jsonl"
        if date is None or "/" in task or not file.is_file():
            raise UserError(
                f"{path} has no samples_{task}_*.jsonl of the same date beside it; evaluate with lm_eval --log_samples"
            )
        answers[task] = read_answers(file)
    return AnsweredModel(name, str(path), content, answers=answers)
