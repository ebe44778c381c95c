"""JSON and YAML: read with one sentence about what is wrong, and result files, written whole or not at all."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ladderize.console import SCHEMA_VERSION, to_json
from ladderize.errors import UserError
from ladderize.files.output import replacement, why_unwritable
from ladderize.files.regular import names_a_file, read_bytes, read_text, resolved, split_name

MAX_YAML_BYTES = 4 << 20  # people write these, and the parser takes a second per megabyte
# The words of messages for JSON's types.
JSON_WORDS: dict[type, str] = {
    **{dict: "an object", list: "a list", str: "text", bool: "a truth value"},
    **{int: "a number", float: "a number", type(None): "null"},
}


def parse_json(content: bytes, *, constants: bool = False) -> Any:
    """Return the value of a JSON text; raises ValueError, also for NaN and Infinity without ``constants``."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it holds {constant}, which is not a number")

    try:
        return json.loads(content.decode("utf-8-sig"), parse_constant=None if constants else refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# name, pattern, first characters of the scalars of YAML 1.2: ``16:32`` is text and not 992, ``no`` is Norwegian and not
# false, and dates stay text
SCALARS = (
    ("null", r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", [*"tTfF"]),
    ("int", r"^[-+]?[0-9]{1,18}$", [*"-+0123456789"]),
    ("float", r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$", [*"-+.0123456789"]),
)


def parse_yaml(text: str) -> Any:
    """Return one document; raises ValueError with the reason in one line."""

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {}

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next((key for key in keys if keys.count(key) > 1), None)
            if twice is not None:
                raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
            return super().construct_mapping(node, deep)

    for name, pattern, first in SCALARS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(pattern), first)
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506  (a SafeLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ValueError(f"{error.problem}{position}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # a key that is a list is a TypeError
        raise ValueError(" ".join(str(error).split())) from None


def read_yaml(path: Path, *, option: str = "", advice: str = "") -> Any:
    """Return the document of a file; ``option`` precedes its path in messages, ``advice`` follows "not valid YAML"."""
    text = read_text(path, MAX_YAML_BYTES)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{option}{path} is not valid YAML{advice}: {error}") from None


def check_writable(path: Path, option: str = "--out", *, inputs: Iterable[str | Path | None] = ()) -> None:
    """Raise UserError unless ``path`` can be written, and is none of the files that ``inputs`` name."""
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
    """Return the JSON object in a file; raises UserError, which ends with ``advice``, for any other content."""
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
    """Return the object under ``key`` of the JSON or YAML file that an option names."""
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
