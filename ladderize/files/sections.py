"""Files of several parts, of which a command reads one: what a run measured (JSON), or what somebody wrote by hand
(YAML)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.files.documents import read_json
from ladderize.files.regular import resolved
from ladderize.files.yaml12 import read_yaml


def names_a_file(text: str) -> bool:
    """Whether ``text``, which may be a name of something else, is that of a file."""
    try:
        return resolved(text).is_file()
    except (UserError, OSError):
        return False


def read_section(path: Path, key: str, option: str) -> Mapping[str, Any]:
    """The object under ``key``; raises UserError for a file that has none. option: which names the file."""
    path = resolved(path, f"{option} ")
    if path.suffix.lower() in (".yaml", ".yml"):
        document = read_yaml(path, what=f"{option} ")
    else:
        document = read_json(path, advice="it should be a file of ladderize calibrate, or YAML named .yaml")
    section = document.get(key) if isinstance(document, Mapping) else None
    if not isinstance(section, Mapping):
        has = ", ".join(map(str, document)) if isinstance(document, Mapping) and document else "no keys"
        raise UserError(f"{option} {path} has no {key}, but {has}; name a file with a {key}")
    return section
