"""lm-eval's tasks: found and checked before any work, and run one at a time."""

import difflib
import logging
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch.utils.collect_env import get_pretty_env_info

from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# lm-eval describes this machine in its results, and would start pip for that after every task.
_environment = cache(get_pretty_env_info)


def open_tasks(options: EvalOptions, processes: int = 1) -> "TaskManager":
    """Return lm-eval's task manager. Every task of ``options.tasks`` was found and its data opened.

    processes: the number of those that share each task.
    Raises UserError for a task that does not exist or cannot be loaded, or options that do not fit it.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise UserError(f"--include-path {options.include_path} is not a folder")
    manager = _index(options)
    for task in options.tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=3)
            hint = (
                f"similar names: {', '.join(near)}"
                if near
                else "lm-eval's `lm_eval ls tasks` lists them, --include-path adds your own"
            )
            raise UserError(f"there is no task {task!r}; {hint}")
    for task in options.tasks:
        try:
            loaded = manager.load([task])["tasks"]
        except Exception as error:  # a task may run any code to get its data
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"the task {task!r} cannot be loaded, most likely because its data set is not here: {reason}"
            ) from error
        fixed = [name for name, entry in loaded.items() if entry.get_config("num_fewshot") == 0]
        if options.num_fewshot and fixed:
            raise UserError(
                f"--num-fewshot has no effect on {fixed[0]}, which fixes it at 0; leave it out, or leave the task out"
            )
        for name, entry in loaded.items() if processes > 1 else ():
            count = min(len(entry.eval_docs), options.limit or len(entry.eval_docs))
            if count < processes:  # lm-eval fails on a process that has none
                raise UserError(
                    f"the task {name!r} has {count} samples, fewer than the {processes} processes that share them;"
                    " start fewer processes" + (", or raise --limit" if options.limit else "")
                )
    return manager


def _index(options: EvalOptions) -> "TaskManager":
    """Return the manager of the tasks that lm-eval finds.

    Its thousands of own tasks take many seconds, and are read only where they can matter: a task or a tag of
    ``include_path`` hides an own one of that name, but a group may hold own tasks.
    """
    from lm_eval.tasks import TaskManager

    if options.include_path is not None:
        own = TaskManager(include_path=options.include_path, include_defaults=False)
        if not options.include_default_tasks or {*options.tasks} <= {*own.all_subtasks, *own.all_tags}:
            return own
    return TaskManager(include_path=options.include_path)


def run_task(harness: Any, task: str, manager: "TaskManager", options: EvalOptions) -> dict[str, Any] | None:
    """Run one task (or group) with lm-eval's ``simple_evaluate``, the seeds set anew; return its result.

    ``samples`` in it has every task's answers, for each filter in the order of the questions. None on other ranks than
    0.
    """
    from lm_eval import simple_evaluate

    # lm-eval asks git about the current folder, which says nothing of us; git complains where there is no repository.
    with (
        mock.patch("lm_eval.evaluator.get_git_commit_hash", return_value=None),
        mock.patch("torch.utils.collect_env.get_pretty_env_info", _environment),
    ):
        result = simple_evaluate(
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
    if result is None:
        return None
    found: dict[str, Any] = dict(result)
    for samples in found["samples"].values():  # they come rank by rank
        filters = list(dict.fromkeys(sample["filter"] for sample in samples))
        samples.sort(key=lambda sample, filters=filters: (filters.index(sample["filter"]), sample["doc_id"]))
    return found
