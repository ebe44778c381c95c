"""Result files: written whole or not at all, each time there are new results."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ladderize.console import SCHEMA_VERSION, to_json
from ladderize.errors import UserError
from ladderize.files.parsing import JSON_WORDS, parse_json, read_yaml
from ladderize.files.regular import names_a_file, read_bytes, resolved, split_name
from ladderize.files.temporaries import replacement, why_unwritable


def check_writable(path: Path, option: str = "--out", *, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise UserError unless ``path`` can be written, before hours of work instead of after.

    inputs: values of options that are read; ``path`` must be none of them, since it would replace it.
    """
    path = resolved(path, f"{option} ")
    if path.exists() and not path.is_file():
        raise UserError(f"{option} {path} is not a regular file; name another")
    files = (str(split_name(str(name))[0]) for name in inputs if name is not None)
    if any(names_a_file(file) and resolved(file) == path for file in files):
        raise UserError(f"{option} {path} is a file that the command reads, and would be replaced; name another")
    parent = path.parent
    if not parent.is_dir():
        raise UserError(f"{option} {path}: the folder {parent} does not exist")
    reason = why_unwritable(parent)
    if reason is not None:
        raise UserError(f"{option} {path} cannot be written: {reason}")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a result document atomically, with schema and version first."""
    with replacement(resolved(path)) as file:
        file.write(to_json(value) + "\n")


def read_document(path: Path, kind: str) -> dict[str, Any]:
    """Return a result file of ladderize, such as a "rank assignment"; raises UserError unless it has our schema."""
    document = read_json(path, advice=f"it should be a {kind}")
    version = document.get("schema_version")
    if version is None:
        raise UserError(f"{path} is no result file of ladderize, which has a schema_version; it should be a {kind}")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema_version {version!r}, but a {kind} that this ladderize reads has {SCHEMA_VERSION}"
        )
    return document


def read_json(path: Path, *, advice: str = "download it again") -> dict[str, Any]:
    """Return the JSON object in a file; raises UserError, which ends with ``advice``, for any other content, and for
    NaN and Infinity."""
    content = read_bytes(path)
    try:
        value = parse_json(content)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); {advice}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {JSON_WORDS[type(value)]} where an object is expected; {advice}")
    return value


def read_own(path: Path) -> dict[str, Any]:
    """Return a JSON object that an earlier run of ours left; {} where there is none, or an incomplete one."""
    try:
        value = parse_json(read_bytes(path), constants=True)
    except (OSError, ValueError, UserError):
        value = None
    return value if isinstance(value, dict) else {}


def read_section(path: Path, key: str, option: str) -> Mapping[str, Any]:
    """Return the object under ``key`` of the JSON or YAML file that an option names; raises UserError where there is
    none."""
    path = resolved(path, f"{option} ")
    document: Any
    if path.suffix == ".json":  # which is YAML, but for tabs
        document = read_json(path, advice=f"name a file with a {key}")
    else:
        document = read_yaml(path, option=f"{option} ")
    document = document if isinstance(document, Mapping) else {}
    section = document.get(key)
    if not isinstance(section, Mapping):
        keys = ", ".join(str(name) for name, value in document.items() if value) or "no keys"
        raise UserError(f"{option} {path} has no {key}, but {keys}; name a file with a {key}")
    return section
