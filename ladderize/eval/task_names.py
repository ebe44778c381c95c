"""The names of lm-eval's tasks as its files have them. Imports no lm-eval, which takes many seconds."""

import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ladderize.choices import near_names
from ladderize.errors import UserError

NAMED_TASKS = re.compile(r"^\W*(?:task|group|tag)[\"']?: *[\"']?([\w.-]+)", re.MULTILINE)
# A name may stand in another file, which one with such a line includes, or be written with an escape.
HIDDEN = re.compile(r"^\W*include\b(?!: *[\w-]+(?:\.yaml)?\s*$)|^\W*(?:(?:task|group|tag)\W|-).*\\[xuU]", re.MULTILINE)


def check_task_names(names: Iterable[str], include_path: str | None) -> None:
    """Raise UserError for a name that stands in no file of tasks, so that it certainly names none.

    Only lm-eval knows whether another one does, and what a pattern matches.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include-path {include_path} is not a folder")
    added = "" if include_path is None else _all_files(Path(include_path))
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None or HIDDEN.search(added):
        return
    text = added + _all_files(Path(package.origin).parent / "tasks")
    for name in names:
        is_pattern = not {*name}.isdisjoint("*?[")
        if not is_pattern and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is None:
            raise no_such_task(name, NAMED_TASKS.findall(text))


def _all_files(folder: Path) -> str:
    """Return the content of all files of tasks in a folder, and of the templates without a suffix that they include."""
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    paths = [path for path in files if path.suffix in (".yaml", "") and path.is_file()]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def no_such_task(name: str, tasks: Iterable[str]) -> UserError:
    """Return the error about a name of ``--tasks`` that names none of the known tasks."""
    return UserError(
        f"no task has the name {name!r} or matches it{near_names(name, tasks)}; lm-eval's `lm_eval ls tasks` lists"
        " them, and --include-path adds your own"
    )
