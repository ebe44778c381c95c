"""One evaluated model with its samples, from whatever wrote them: results.json of ``ladderize eval``, or the output of
``lm_eval --log_samples``. Imports no torch.

The samples of a task that passed one filter are a table (pandas), a row for each document by its number (the index,
``doc_id``), in order. Its columns: those of ``HASHES``; ``doc FIELD``, a hash of what the document's field holds;
``value METRIC`` and ``weight METRIC``. The texts are not kept.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import EvalResults, EvaluatedModel, ModelResult
from ladderize.files.documents import read_document, read_json
from ladderize.files.parsing import parse_json
from ladderize.files.regular import inside, read_lines, resolved

if TYPE_CHECKING:
    import pandas

    TaskSamples = Mapping[str, pandas.DataFrame]  # filter -> what passed it

HASHES = {"doc_hash": "documents", "target_hash": "targets", "prompt_hash": "prompts"}  # of a sample, and of what
MAX_DOC_ID = 2**53
MAX_VALUE = 1e100  # value of a metric that is taken: sums of squares stay finite
NO_VALUE = float("nan")
OWN_NAME = "results.json"
DATED = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
WHAT = "results.json of ladderize eval, or a results_*.json of lm_eval"


@dataclass(frozen=True)
class ComparedModel:
    """A model and what it answered. where: names its file in messages. harness: lm-eval's result (results, configs,
    versions, ...). model, options: what ladderize measured, and how; None in lm-eval's own output. samples: of each
    task."""

    name: str
    where: str
    harness: Mapping[str, Any] = field(default_factory=dict)
    model: EvaluatedModel | None = None
    options: EvalOptions | None = None
    samples: "Mapping[str, TaskSamples]" = field(default_factory=dict)

    def of_task(self, part: str, task: str) -> Any:
        """What lm-eval's result has of a task under ``part``, such as "versions"; None where it has nothing."""
        known = self.harness.get(part)
        return known.get(task) if isinstance(known, Mapping) else None

    def object_of_task(self, part: str, task: str) -> Mapping[str, Any]:
        """The same where it is an object."""
        found = self.of_task(part, task)
        return found if isinstance(found, Mapping) else {}


# ---- samples ----


def collect_samples(samples: Iterable[tuple[str, Any]], source: str) -> "TaskSamples":
    """The samples of one task, as lm-eval logs them, by filter. samples: with the words that name each in a message.
    source: names all of them. Raises UserError."""
    import pandas

    rows = []
    for where, sample in samples:
        if not isinstance(sample, Mapping):
            raise UserError(f"{where} is not a sample of lm-eval (an object); name the results of an evaluation")
        try:
            rows.append(_row(sample))
        except ValueError as error:
            raise UserError(f"{where} {error}; evaluate the model again") from None
    if not rows:
        raise UserError(f"{source} holds no samples; evaluate the model again")
    by_filter = pandas.DataFrame(rows).set_index("doc_id").groupby("filter", sort=False)
    tables = {str(name): part.sort_index() for name, part in by_filter}  # whichever order lm-eval's processes had
    for part in tables.values():
        if not part.index.is_unique:
            doc_id = part.index[part.index.duplicated()][0]
            raise UserError(f"{source}: there are two answers to doc_id {doc_id}; evaluate the model again")
    return tables


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ValueError, which says what is wrong with a sample."""
    row = {"filter": _part(sample, "filter", str), "doc_id": _part(sample, "doc_id", int)}
    if abs(row["doc_id"]) > MAX_DOC_ID:
        raise ValueError(f"has the doc_id {row['doc_id']}, which counts no document")
    row |= {name: _part(sample, name, str) for name in HASHES}
    document = sample.get("doc")
    for key, text in document.items() if isinstance(document, Mapping) else ():
        if isinstance(text, str | int) and text != "":
            row[f"doc {key}"] = str(hash(str(text)))  # of numbers as such -1 and -2 would be one
    for metric in _part(sample, "metrics", list):
        if not isinstance(metric, str) or metric not in sample:
            raise ValueError(f"has no value of its metric {metric!r}")
        row[f"value {metric}"], row[f"weight {metric}"] = _weighted(sample[metric])
    return row


def _part(sample: Mapping[str, Any], name: str, kind: type) -> Any:
    value = sample.get(name)
    if type(value) is not kind:
        raise ValueError(f"is not a sample of lm-eval: its {name} is not a {kind.__name__}")
    return value


def _weighted(value: Any) -> tuple[float, float]:
    """A metric's value of one sample and its weight: of a number 1; of a sum and its weight, of which lm-eval makes a
    weighted mean, these; else the value is NaN."""
    if isinstance(value, list | tuple) and len(value) == 2:
        total, weight = map(finite_number, value)
        return (total, weight) if total is not None and weight is not None and weight > 0 else (NO_VALUE, 1.0)
    number = finite_number(value)
    return (NO_VALUE if number is None else number, 1.0)


def finite_number(value: Any) -> float | None:
    """A value that a metric can have, also of numpy; None for anything else."""
    if not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return number if abs(number) <= MAX_VALUE else None  # which NaN is not


def read_samples_file(path: Path) -> "TaskSamples":
    """The samples of one task in a .jsonl file; raises UserError."""
    return collect_samples(_lines(path), str(path))


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path}, line {number}"
        try:
            yield where, parse_json(line, constants=True)  # lm-eval writes NaN where a metric has none
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON ({error}); evaluate the model again") from None


# ---- models ----


def make_entry(result: ModelResult, samples: Mapping[str, Iterable[Mapping[str, Any]]], where: str) -> ComparedModel:
    """A model just evaluated. samples: of each task, as lm-eval logs them. where: names the run in messages."""
    tables = {
        task: collect_samples(
            ((f"{where}: {task}, sample {number}", one) for number, one in enumerate(logged)), f"{where}: {task}"
        )
        for task, logged in samples.items()
    }
    return ComparedModel(result.model.model, where, result.harness, result.model, samples=tables)


@dataclass(frozen=True)
class StoredResults:
    """A results file whose samples are not read yet. names: of its models; reads: each of them, on demand."""

    path: Path
    names: list[str]
    reads: Sequence[Callable[[], ComparedModel]]

    def places(self, model: str) -> list[int]:
        """Where the model of this name is: the whole name, or the last part of a path."""
        whole = [place for place, name in enumerate(self.names) if name == model]
        return whole or [place for place, name in enumerate(self.names) if PurePath(name).name == model]


def open_results(path: Path) -> StoredResults:
    """path: results.json of ladderize, a results_*.json of lm-eval, or the folder that holds one. Raises UserError."""
    path = resolved(path)
    path = _results_in(path) if path.is_dir() else path
    content = read_json(path, advice=f"it should be a {WHAT}")
    if "schema_version" not in content and all(
        isinstance(content.get(part), Mapping) for part in ("results", "configs", "versions")
    ):
        name = content.get("model_name")
        name = name if isinstance(name, str) and name else path.parent.name
        return StoredResults(path, [name], [partial(_read_lm_eval_output, path, name, content)])
    if "schema_version" not in content or "models" not in content:
        raise UserError(f"{path} is no {WHAT}; name one of these")
    results = EvalResults.from_dict(read_document(path, WHAT), path)
    if not results.models:
        raise UserError(f"{path} holds no model; evaluate one, or name another file")
    reads = [partial(_read_model, path, result, results.options) for result in results.models]
    return StoredResults(path, [result.model.model for result in results.models], reads)


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
    samples = {}
    for task, file in result.samples.items():  # which may come from a stranger: it lies in the same folder
        found = inside(path.parent, file)
        if found is None:
            raise UserError(f"{path} names samples of {task} outside of its folder ({file}); do not trust it")
        if not found.is_file():
            raise UserError(f"{path} names samples of {task} that are not there ({found}); copy them beside it")
        samples[task] = read_samples_file(found)
    return ComparedModel(name, f"{path} ({name})", result.harness, result.model, options, samples)


def leaf_tasks(harness: Mapping[str, Any]) -> list[str]:
    """The tasks of lm-eval's result that have samples: groups have none."""
    groups, results = harness.get("group_subtasks") or {}, harness.get("results") or {}
    for name, part in (("group_subtasks", groups), ("results", results)):
        if not isinstance(part, Mapping):
            raise UserError(f"{name} of an evaluated model is no object; name the results of an evaluation")
    return [task for task in results if not groups.get(task)]


# ---- the output of lm_eval --log_samples --output_path DIR: results_DATE.json, and samples_TASK_DATE.jsonl ----


def _results_in(folder: Path) -> Path:
    """The results file of a folder: our results.json, or the newest of lm-eval, also one level down, where lm-eval has
    a folder for each model. Raises UserError where there is none, or those of several models."""
    if (folder / OWN_NAME).is_file():
        return folder / OWN_NAME
    dates = {
        path: found[1]
        for pattern in ("*.json", "*/*.json")
        for path in folder.glob(pattern)
        if (found := DATED.search(path.name))
    }
    if not dates:
        raise UserError(f"{folder} holds no results of an evaluation; name a results.json, or a folder with one")
    parents = sorted({path.parent for path in dates})
    if len(parents) > 1:
        raise UserError(
            f"{folder} holds the results of several models; name one of {', '.join(parent.name for parent in parents)}"
        )
    return max(dates, key=dates.__getitem__)


def _read_lm_eval_output(path: Path, name: str, content: Mapping[str, Any]) -> ComparedModel:
    """Raises UserError where samples are missing."""
    date = DATED.search(path.name)
    samples = {}
    for task in content["configs"]:
        file = path.parent / f"samples_{task}_{date[1] if date else ''}.jsonl"
        if date is None or "/" in task or not file.is_file():
            raise UserError(
                f"{path} has no samples_{task}_*.jsonl of the same date beside it; evaluate with lm_eval --log_samples"
            )
        samples[task] = read_samples_file(file)
    return ComparedModel(name, str(path), content, samples=samples)
