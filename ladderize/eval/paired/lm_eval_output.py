"""The output of ``lm_eval --log_samples --output_path DIR``: results_DATE.json, and samples_TASK_DATE.jsonl beside it.
Imports no torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.eval.paired.answers import TaskAnswers, read_answers

OWN_NAME = "results.json"
DATED = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")


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
