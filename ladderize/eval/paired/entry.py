"""One evaluated model with its answers, from whatever wrote them: results.json of ``ladderize eval``, or the output of
``lm_eval --log_samples``. Imports no torch."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.paired.answers import TaskAnswers, collect_answers, read_answers
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult
from ladderize.files.documents import read_document, read_json
from ladderize.files.regular import inside, resolved

OWN_NAME = "results.json"
DATED = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
WHAT = "results.json of ladderize eval, or a results_*.json of lm_eval"


@dataclass(frozen=True)
class ComparedModel:
    """A model and what it answered. where: names its file in messages. harness: lm-eval's result (results, configs,
    versions, ...). model, options: what ladderize measured, and how; None in lm-eval's own output. answers: of each
    task."""

    name: str
    where: str
    harness: Mapping[str, Any] = field(default_factory=dict)
    model: EvaluatedModel | None = None
    options: EvalOptions | None = None
    answers: Mapping[str, TaskAnswers] = field(default_factory=dict)

    def of_task(self, part: str, task: str) -> Any:
        """What lm-eval's result has of a task under ``part``, such as "versions"; None where it has nothing."""
        known = self.harness.get(part)
        return known.get(task) if isinstance(known, Mapping) else None

    def object_of_task(self, part: str, task: str) -> Mapping[str, Any]:
        """The same where it is an object."""
        found = self.of_task(part, task)
        return found if isinstance(found, Mapping) else {}


def make_entry(result: ModelResult, samples: Mapping[str, Iterable[Mapping[str, Any]]], where: str) -> ComparedModel:
    """A model just evaluated. samples: of each task, as lm-eval logs them. where: names the run in messages."""
    answers = {
        task: collect_answers(
            ((f"{where}: {task}, sample {number}", one) for number, one in enumerate(logged)), f"{where}: {task}"
        )
        for task, logged in samples.items()
    }
    return ComparedModel(result.model.model, where, result.harness, result.model, answers=answers)


@dataclass(frozen=True)
class StoredResults:
    """A results file whose samples are not read yet. names: of its models; reads: each of them, on demand."""

    path: Path
    names: list[str]
    reads: list[Callable[[], ComparedModel]]

    def places(self, model: str) -> list[int]:
        """Where the model of this name is: the whole name, or the last part of a path."""
        whole = [place for place, name in enumerate(self.names) if name == model]
        return whole or [place for place, name in enumerate(self.names) if PurePath(name).name == model]


def open_results(path: Path) -> StoredResults:
    """path: results.json of ladderize, a results_*.json of lm-eval, or the folder that holds one. Raises UserError."""
    path = resolved(path)
    path = results_in(path) if path.is_dir() else path
    content = read_json(path, advice=f"it should be a {WHAT}")
    if is_lm_eval_output(content):
        name = model_name(path, content)
        return StoredResults(
            path,
            [name],
            [lambda: ComparedModel(name, str(path), content, answers=read_lm_eval_output(path, content))],
        )
    if "schema_version" not in content or "models" not in content:
        raise UserError(f"{path} is no {WHAT}; name one of these")
    results = EvalResults.from_dict(read_document(path, WHAT), path)
    if not results.models:
        raise UserError(f"{path} holds no model; evaluate one, or name another file")
    return StoredResults(
        path,
        [result.model.model for result in results.models],
        [partial(_read_model, path, result, results.options) for result in results.models],
    )


def read_entry(path: Path, model: str | None = None) -> ComparedModel:
    """The one model of a results file, or that of the name ``model``. Raises UserError."""
    stored = open_results(path)
    places = stored.places(model) if model is not None else list(range(len(stored.names)))
    if len(places) != 1:
        wanted = "one model" if model is None else f"one model {model}"
        raise UserError(f"{stored.path} does not hold {wanted}, but {', '.join(stored.names)}; name one of these")
    return stored.reads[places[0]]()


def _read_model(path: Path, result: ModelResult, options: EvalOptions) -> ComparedModel:
    name = result.model.model
    missing = [task for task in leaf_tasks(result.harness) if task not in result.samples]
    if missing:
        raise UserError(
            f"{path} keeps no samples of {missing[0]} for {name}, as files of earlier versions of ladderize;"
            " evaluate the model again"
        )
    answers = {task: read_answers(_samples_file(path, task, file)) for task, file in result.samples.items()}
    return ComparedModel(name, f"{path} ({name})", result.harness, result.model, options, answers)


def leaf_tasks(harness: Mapping[str, Any]) -> list[str]:
    """The tasks of lm-eval's result that have samples: groups have none."""
    groups, results = harness.get("group_subtasks") or {}, harness.get("results") or {}
    for name, part in (("group_subtasks", groups), ("results", results)):
        if not isinstance(part, Mapping):
            raise UserError(f"{name} of an evaluated model is no object; name the results of an evaluation")
    return [task for task in results if not groups.get(task)]


def _samples_file(path: Path, task: str, file: str) -> Path:
    """The file of samples that results.json names, which may come from a stranger: it lies in the same folder."""
    found = inside(path.parent, file)
    if found is None:
        raise UserError(f"{path} names samples of {task} outside of its folder ({file}); do not trust it")
    if not found.is_file():
        raise UserError(f"{path} names samples of {task} that are not there ({found}); copy them beside it")
    return found


# ---- the output of lm_eval --log_samples --output_path DIR: results_DATE.json, and samples_TASK_DATE.jsonl ----


def results_in(folder: Path) -> Path:
    """The results file of a folder: our results.json, or the newest of lm-eval, also one level down, where lm-eval has
    a folder for each model. Raises UserError where there is none, or those of several models."""
    if (folder / OWN_NAME).is_file():
        return folder / OWN_NAME
    found = [path for pattern in ("*.json", "*/*.json") for path in folder.glob(pattern) if DATED.search(path.name)]
    if not found:
        raise UserError(f"{folder} holds no results of an evaluation; name a results.json, or a folder with one")
    parents = sorted({path.parent for path in found})
    if len(parents) > 1:
        raise UserError(
            f"{folder} holds the results of several models; name one of {', '.join(parent.name for parent in parents)}"
        )
    return max(found, key=lambda path: _date(path) or "")


def is_lm_eval_output(content: Mapping[str, Any]) -> bool:
    """Whether a JSON document is a results file of lm-eval rather than one of ours."""
    return "schema_version" not in content and all(
        isinstance(content.get(part), Mapping) for part in ("results", "configs", "versions")
    )


def model_name(path: Path, content: Mapping[str, Any]) -> str:
    """What lm-eval calls the model; its folder where it calls it nothing."""
    name = content.get("model_name")
    return name if isinstance(name, str) and name else path.parent.name


def read_lm_eval_output(path: Path, content: Mapping[str, Any]) -> Mapping[str, TaskAnswers]:
    """The model's answers to each task. Raises UserError where samples are missing."""
    date = _date(path)
    answers: dict[str, TaskAnswers] = {}
    for task in content["configs"]:
        file = path.parent / f"samples_{task}_{date}.jsonl"
        if date is None or "/" in task or not file.is_file():
            raise UserError(
                f"{path} has no samples_{task}_*.jsonl of the same date beside it; evaluate with lm_eval --log_samples"
            )
        answers[task] = read_answers(file)
    return answers


def _date(path: Path) -> str | None:
    found = DATED.search(path.name)
    return found[1] if found else None
