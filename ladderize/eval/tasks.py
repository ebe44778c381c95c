"""lm-eval's tasks: found and checked before any work, and run one at a time on models that ranks share."""

import hashlib
import inspect
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch.utils.collect_env import get_pretty_env_info

from ladderize.chat_template import chat_template_of
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.eval.model import EvalModel
from ladderize.eval.options import EvalOptions, no_such_task
from ladderize.ranks.group import Ranks

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")  # the methods that lm-eval calls

# lm-eval describes this machine in its results, and would start pip for that after every task.
_environment = cache(get_pretty_env_info)


@dataclass(frozen=True)
class AskedTasks:
    """The tasks of ``--tasks``, found and opened."""

    manager: "TaskManager"
    loaded: Mapping[str, Mapping[str, Any]]  # by a task's, group's or tag's name, lm-eval's ``tasks`` and ``groups``

    @property
    def leaves(self) -> dict[str, Any]:
        return {task: entry for content in self.loaded.values() for task, entry in content["tasks"].items()}


def open_tasks(options: EvalOptions) -> AskedTasks:
    """Return the tasks of ``options.tasks``, names and patterns, with their data. One that an earlier name has brought
    is left out."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _index(options)
    loaded: dict[str, Mapping[str, Any]] = {}
    asked = AskedTasks(manager, loaded)
    names = {text: [text] if text in manager.all_tasks else manager.match_tasks([text]) for text in options.tasks}
    for text, matched in names.items():
        if not matched:
            raise no_such_task(text, manager.all_tasks)
    for name in itertools.chain.from_iterable(names.values()):
        try:
            content: Mapping[str, Any] = manager.load([name])
        except Exception as error:  # a task may run any code to get its data
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the task {name!r} cannot be loaded, most likely because its data set is not here: {reason}"
            ) from error
        tasks = content["tasks"]
        fixed = [task for task, entry in tasks.items() if entry.get_config("num_fewshot") == 0]
        if options.num_fewshot and fixed:
            raise UserError(
                f"--num-fewshot has no effect on {fixed[0]}, which fixes it at 0; leave it out, or leave the task out"
            )
        if content["groups"] or not tasks.keys() <= asked.leaves.keys():
            loaded[name] = content
    return asked


def _index(options: EvalOptions) -> "TaskManager":
    """Return the manager of the tasks that lm-eval finds. Its thousands of own tasks take many seconds, and are read
    only where they can matter: a task or a tag of ``include_path`` hides an own one, but a group may hold own tasks."""
    from lm_eval.tasks import TaskManager

    if options.include_path is not None:
        included = TaskManager(include_path=options.include_path, include_defaults=False)
        if {*options.tasks} <= {*included.all_subtasks, *included.all_tags}:
            return included
    return TaskManager(include_path=options.include_path)


def tasks_digest(asked: AskedTasks, file_digest: Callable[[Path], str]) -> str:
    """Return the hash of what decides the questions and their metrics: settings, functions and all rows."""

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


def run_tasks(
    model: EvalModel, asked: AskedTasks, done: Mapping[str, Any], options: EvalOptions, ranks: Ranks, console: Console
) -> Iterator[dict[str, Any]]:
    """Yield lm-eval's result of each task that is not done, as soon as it is run, on the first rank of each machine."""
    name, manager = model.described.model, asked.manager
    todo = {}
    for number, (task, content) in enumerate(asked.loaded.items(), start=1):
        # results do not name a tag, but all its tasks
        if task not in done and not (task in manager.all_tags and done.keys() >= content["tasks"].keys()):
            todo[task] = number
    if not todo:
        return
    harness = model.harness()
    if options.apply_chat_template:
        chat_template_of(harness.tokenizer, name)
    share_requests(harness, ranks)
    joined = encode_joined(harness)
    for task, number in todo.items():
        console.note(f"{name}: {task} ({number} of {len(asked.loaded)})")
        with console.contained(bars=True):
            result = run_task(harness, task, manager, options)
        if result is None:
            continue
        samples = itertools.chain.from_iterable(result["samples"].values())
        if ranks.is_main and any(_has_nan(sample["resps"]) for sample in samples):
            # lm-eval would take the first choice for the likeliest
            raise UserError(
                f"{name}: log-likelihoods of {task} are NaN; check the model's weights, or compute in float32"
            )
        yield result
    pairs = [*itertools.chain.from_iterable(ranks.gather(joined))]
    if pairs:
        context, answer = pairs[0]
        console.warn(
            f"{name}: answers that join the last token of their context were encoded alone ({len(pairs)}, such as"
            f" {answer!r} behind {context[-20:]!r})"
        )


def _has_nan(answer: Any) -> bool:
    if isinstance(answer, list | tuple):
        return any(map(_has_nan, answer))
    return isinstance(answer, float) and math.isnan(answer)


def run_task(harness: Any, task: str, manager: "TaskManager", options: EvalOptions) -> dict[str, Any] | None:
    """Run one task (or group) with lm-eval, the seeds set anew; return its result, with every task's ``samples``. It is
    None on ranks that are not the first of their machine."""
    from lm_eval import simple_evaluate

    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")

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
            **dict.fromkeys(seeds, options.seed),
        )
    return result


# ---- two changes of lm-eval's models: ranks share out the requests, and every answer has tokens to score ----


def share_requests(harness: Any, ranks: Ranks) -> None:
    """Let each rank answer the requests of its documents, and return all answers. lm-eval sees one process on every
    rank: its sampler draws the few-shot examples of all documents in turn, and metrics are over all answers."""

    def answer_all(answer: Callable[..., list[Any]], requests: Sequence[Any], **options: Any) -> list[Any]:
        numbers = [i for i, request in enumerate(requests) if request.doc_id % ranks.size == ranks.rank]
        answers = answer([requests[i] for i in numbers], **options) if numbers else []
        gathered = dict(itertools.chain.from_iterable(ranks.gather([*zip(numbers, answers, strict=True)])))
        return [gathered[i] for i in range(len(requests))]

    for name in REQUESTS if ranks.size > 1 else ():
        setattr(harness, name, partial(answer_all, getattr(harness, name)))


def encode_joined(harness: Any) -> list[tuple[str, str]]:
    """Encode an answer alone where its text joins the context's last token, so that it would have no token, as does
    lm-eval's pull request 4055. Returns a list that gets each such pair."""
    encode_pair, joined = harness._encode_pair, list[tuple[str, str]]()

    def encode(context: str, answer: str) -> tuple[list[int], list[int]]:
        context_ids, answer_ids = encode_pair(context, answer)
        if not answer_ids:
            spaces = context[len(context.rstrip()) :]  # which lm-eval scores with the answer
            answer_ids = harness.tok_encode(spaces + answer, add_special_tokens=False)
            joined.append((context, answer))
        if not answer_ids:
            raise UserError(f"an answer has no token: its text is {answer!r}, behind {context[-40:]!r}; mend the task")
        return context_ids, answer_ids

    harness._encode_pair = encode
    return joined
