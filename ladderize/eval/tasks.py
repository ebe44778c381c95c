"""lm-eval's tasks: found and checked before any work, run one at a time, and each kept as soon as it is done.

Beside results.json lies a model's answer to each question. A sample is one line of JSON in the layout of lm-eval's
``--log_samples``, so lm-eval's tools and ``datasets`` read these files too.
"""

import hashlib
import inspect
import itertools
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch.utils.collect_env import get_pretty_env_info

from ladderize.chat_template import chat_template_of
from ladderize.choices import flag
from ladderize.console import Console, strict_json
from ladderize.errors import UserError
from ladderize.eval.harness import encode_joined, share_requests
from ladderize.eval.model import EvalModel
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import ComparisonDocument, EvalResults, ModelResult
from ladderize.eval.task_names import no_such_task
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.regular import inside, resolved
from ladderize.files.temporaries import replacement
from ladderize.ranks.group import Ranks

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

MOST_NAME = 80  # characters of a model's or a task's name in a file's name

# lm-eval describes this machine in its results, and would start pip for that after every task.
_environment = cache(get_pretty_env_info)


@dataclass(frozen=True)
class AskedTasks:
    """The tasks of ``--tasks``, found and opened.

    loaded: name of a task, group or tag -> lm-eval's ``tasks`` and ``groups`` in it, by their names.
    """

    manager: "TaskManager"
    loaded: Mapping[str, Mapping[str, Any]]

    @property
    def leaves(self) -> dict[str, Any]:
        """All tasks by name."""
        return {task: entry for content in self.loaded.values() for task, entry in content["tasks"].items()}


def open_tasks(options: EvalOptions) -> AskedTasks:
    """Return the tasks of ``options.tasks``, which has names and patterns. The data of all were opened.

    A task that an earlier name has brought is left out.
    Raises UserError for a task that does not exist or cannot be loaded, or options that do not fit it.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _index(options)
    loaded: dict[str, Mapping[str, Any]] = {}
    asked = AskedTasks(manager, loaded)
    for name in itertools.chain.from_iterable(_names(manager, text) for text in options.tasks):
        content = _load(manager, name)
        tasks = content["tasks"]
        fixed = [task for task, entry in tasks.items() if entry.get_config("num_fewshot") == 0]
        if options.num_fewshot and fixed:
            raise UserError(
                f"--num-fewshot has no effect on {fixed[0]}, which fixes it at 0; leave it out, or leave the task out"
            )
        if content["groups"] or not tasks.keys() <= asked.leaves.keys():
            loaded[name] = content
    return asked


def _names(manager: "TaskManager", asked: str) -> list[str]:
    """Return a name of ``--tasks``, or those that a pattern matches. Raises UserError where there is none."""
    names: list[str] = [asked] if asked in manager.all_tasks else manager.match_tasks([asked])
    if not names:
        raise no_such_task(asked, manager.all_tasks)
    return names


def _load(manager: "TaskManager", name: str) -> Mapping[str, Any]:
    """Return what lm-eval loads for a name. Raises UserError where it cannot."""
    try:
        content: Mapping[str, Any] = manager.load([name])
    except Exception as error:  # a task may run any code to get its data
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the task {name!r} cannot be loaded, most likely because its data set is not here: {reason}"
        ) from error
    return content


def tasks_digest(asked: AskedTasks, file_digest: Callable[[Path], str]) -> str:
    """Return the hash of what decides the questions and their metrics: settings, functions and all rows.

    file_digest: the hash of a file's content.
    """

    def code(value: Any) -> Any:
        """Return what stands for a function: its source, and the Python files beside it, which may help it."""
        if isinstance(value, partial):
            return [value.func, value.args, value.keywords]
        if not callable(value):
            return repr(value)
        is_named = inspect.isroutine(value) or inspect.isclass(value)
        function = value if is_named else type(value)
        try:
            source, folder = inspect.getsource(function), Path(inspect.getfile(function)).parent
        except (TypeError, OSError):  # it is not written in Python
            return function.__qualname__
        return [source, [(path.name, file_digest(path)) for path in sorted(folder.glob("*.py"))]]

    groups = {name: group for content in asked.loaded.values() for name, group in content["groups"].items()}
    described = [[name, group.to_dict(), group.child_names] for name, group in groups.items()]
    digest = hashlib.sha256(json.dumps(described, default=code).encode())
    for task in asked.leaves.values():
        settings = {"class": type(task), **task.config.to_dict(keep_callable=True)}
        digest.update(json.dumps(settings, default=code, sort_keys=True).encode())
        for split, rows in sorted(task.dataset.items()):
            digest.update(repr(split).encode())
            for batch in rows.with_format("arrow").iter(1000):
                digest.update(repr(batch.to_pylist()).encode())
    return digest.hexdigest()


def _index(options: EvalOptions) -> "TaskManager":
    """Return the manager of the tasks that lm-eval finds.

    Its thousands of own tasks take many seconds, and are read only where they can matter: a task or a tag of
    ``include_path`` hides an own one of that name, but a group may hold own tasks.
    """
    from lm_eval.tasks import TaskManager

    if options.include_path is not None:
        own = TaskManager(include_path=options.include_path, include_defaults=False)
        if {*options.tasks} <= {*own.all_subtasks, *own.all_tags}:
            return own
    return TaskManager(include_path=options.include_path)


def run_tasks(model: EvalModel, asked: AskedTasks, output: "Output", ranks: Ranks, console: Console) -> None:
    """Run the tasks of an opened model that ``output`` does not have yet, each saved as soon as it is done.

    ranks: share out the questions.
    """
    options, done, manager = output.options, output.models[model.name].reported.results, asked.manager

    def is_done(name: str) -> bool:
        """Return whether the results have a task, or all tasks of a tag, which they do not name."""
        return name in done or (name in manager.all_tags and done.keys() >= asked.loaded[name]["tasks"].keys())

    todo = [(number, name) for number, name in enumerate(asked.loaded, start=1) if not is_done(name)]
    if not todo:
        return
    harness = model.harness(options)
    if options.apply_chat_template:
        chat_template_of(harness.tokenizer, model.name)
    share_requests(harness, ranks)
    joined = encode_joined(harness)
    for number, task in todo:
        console.note(f"{model.name}: {task} ({number} of {len(asked.loaded)})")
        with console.contained(bars=True):
            result = run_task(harness, task, manager, options)
        if output.writes and result is not None:
            check_numbers(result["samples"], model.name, task)
            output.add_task(model.name, result)
    if pairs := [*itertools.chain.from_iterable(ranks.gather(joined))]:
        context, answer = pairs[0]
        console.warn(
            f"{model.name}: answers that join the last token of their context were encoded alone ({len(pairs)}, such as"
            f" {answer!r} behind {context[-20:]!r})"
        )


def check_numbers(samples: Mapping[str, Sequence[Mapping[str, Any]]], model: str, task: str) -> None:
    """Raise UserError where a log-likelihood is NaN. lm-eval would take the first choice for the likeliest."""
    answers = (answer for own in samples.values() for sample in own for answer in sample["resps"])
    if any(map(_has_nan, answers)):
        raise UserError(f"{model}: log-likelihoods of {task} are NaN; check the model's weights, or compute in float32")


def _has_nan(answer: Any) -> bool:
    if isinstance(answer, list | tuple):
        return any(map(_has_nan, answer))
    return isinstance(answer, float) and math.isnan(answer)


def run_task(harness: Any, task: str, manager: "TaskManager", options: EvalOptions) -> dict[str, Any] | None:
    """Run one task (or group) with lm-eval's ``simple_evaluate``, the seeds set anew; return its result.

    ``samples`` in it has every task's answers. None on ranks that are not the first of their machine.
    """
    from lm_eval import simple_evaluate

    # lm-eval asks git about the current folder, which says nothing of us; git complains where there is no repository.
    with (
        mock.patch("lm_eval.evaluator.get_git_commit_hash", return_value=None),
        mock.patch("torch.utils.collect_env.get_pretty_env_info", _environment),
    ):
        result: dict[str, Any] | None = simple_evaluate(
            model=harness,
            tasks=[task],
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            batch_size=options.batch_size,
            apply_chat_template=options.apply_chat_template,
            log_samples=True,
            random_seed=options.seed,
            numpy_random_seed=options.seed,
            torch_random_seed=options.seed,
            fewshot_random_seed=options.seed,
        )
    return result


# ---- what is kept ----


class Output:
    """The results so far, with their samples. Raises UserError where they cannot be written.

    out: their file.
    names: of all models, in order.
    writes: this process writes it.
    models: the entries so far by name.
    """

    def __init__(self, options: EvalOptions, out: Path, names: list[str], *, writes: bool) -> None:
        self.options, self.names, self.writes = options, names, writes
        self.models: dict[str, ModelResult] = {}
        self.out = resolved(out, "--out ")
        check_writable(self.out, inputs=[options.perplexity])
        self.folder = self.out.with_name(f"{self.out.stem}.samples")
        if self.out == self.folder or self.folder.is_file():
            raise UserError(
                f"--out {self.out}: its samples belong into {self.folder}; name a file whose samples can lie beside it"
            )

    def earlier(self) -> dict[str, ModelResult]:
        """Return the entries that an earlier run with the same options left in ``out``, with all their samples.

        Raises UserError where it had other options, or models that are not named now: their results would be lost.
        """
        try:
            results = EvalResults.from_dict(read_own(self.out), self.out)
        except UserError:
            return {}
        ours, theirs = self.options.to_dict(), results.options.to_dict()
        if different := [flag(name) for name in ours if ours[name] != theirs[name]]:
            raise UserError(f"{self.out} is of an eval with another {' and '.join(different)}; name another --out")
        if missing := [entry.model.model for entry in results.models if entry.model.model not in self.names]:
            raise UserError(f"{self.out} also has {', '.join(missing)}; name all its models, or another --out")
        known = {}
        for entry in results.models:
            paths = [inside(self.out.parent, file) for file in entry.samples.values()]
            if all(path is not None and path.is_file() for path in paths):
                known[entry.model.model] = entry
        return known

    def add_task(self, name: str, result: dict[str, Any]) -> None:
        """Add the results of a task. Its samples are on disk, in whole files, before results.json names them."""
        folder = self.folder / _as_name(name, Path(name).name)
        folder.mkdir(parents=True, exist_ok=True)
        written: dict[str, str] = {}
        for task, samples in result.pop("samples").items():
            path = folder / f"{_as_name(task, task)}.jsonl"
            with replacement(path) as file:
                for sample in samples:
                    file.write(json.dumps(_as_logged(sample), ensure_ascii=False, allow_nan=False) + "\n")
            written[task] = path.relative_to(self.out.parent).as_posix()
        self.models[name] = self.models[name].with_task(result, written)
        self.save()

    def save(self, comparisons: Sequence[ComparisonDocument] = ()) -> EvalResults:
        """Write and return the results so far."""
        known = [self.models[name] for name in self.names if name in self.models]
        results = EvalResults(self.options, known, [*comparisons])
        if self.writes:
            write_json(self.out, results.to_dict())
        return results


def _as_logged(sample: Mapping[str, Any]) -> Any:
    """Return a sample as lm-eval's ``--log_samples`` writes it; NaN and infinity, which JSON lacks, become null."""
    from lm_eval.utils import sanitize_list

    arguments = {
        f"gen_args_{number}": {f"arg_{place}": part for place, part in enumerate(parts)}
        for number, parts in enumerate(sample["arguments"])
    }
    answers = {key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")}
    return strict_json({**sample, "arguments": arguments, **answers, "target": str(sample["target"])})


def _as_name(text: str, shown: str) -> str:
    """Return a part of a file name: ``shown``, with a hash of ``text`` where it is not the whole text."""
    name = re.sub(r"[^\w.-]", "_", shown)[:MOST_NAME].lstrip(".")
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
