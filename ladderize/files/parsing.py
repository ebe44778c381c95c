"""The reading of JSON and YAML. Content that no honest file has is refused before any value is used."""

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ladderize.errors import UserError
from ladderize.files.regular import read_text

MAX_DEPTH = 100  # of nested lists and objects; more would exhaust the stack of their reader
MAX_VALUES = 10_000_000  # counted each time they are reached: YAML's aliases make many of few
CONTAINERS = (dict, list, tuple, set)
# The words of messages for JSON's types.
JSON_WORDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def parse_json(content: bytes, *, constants: bool = False) -> Any:
    """Return the value of a JSON text; raises ValueError with the reason.

    constants: accept NaN and Infinity, which are not JSON.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it holds {constant}, which is not a number")

    def finite(number: str) -> float:
        value = float(number)
        return value if math.isfinite(value) else refuse(number)

    try:
        text = content.decode("utf-8-sig")
        return json.loads(text) if constants else json.loads(text, parse_constant=refuse, parse_float=finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_nesting(value: Any) -> None:
    """Raise ValueError for YAML that is nested too deeply or endlessly, or whose aliases make too many values."""
    seen, level = 0, [value] if isinstance(value, CONTAINERS) else []
    for _ in range(MAX_DEPTH):
        seen += sum(map(len, level))
        if seen > MAX_VALUES:
            raise ValueError(f"it unfolds to more than {MAX_VALUES:,} values")
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, CONTAINERS)
        ]
        if not level:
            return
    raise ValueError("it is nested too deeply")


# ---- YAML, with the scalars of YAML 1.2: ``16:32`` is text and not 992, ``no`` is Norwegian and not false, dates stay
# text ----

MAX_YAML_BYTES = 4 << 20  # people write these, and the parser takes a second per megabyte


class YamlLoader(yaml.SafeLoader):
    """A YAML loader that refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return mapping


_PREFIX = "tag:yaml.org,2002:"
_REPLACED = {f"{_PREFIX}{name}" for name in ("bool", "int", "float", "timestamp", "merge")}
YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
YamlLoader.add_implicit_resolver(f"{_PREFIX}bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
YamlLoader.add_implicit_resolver(f"{_PREFIX}int", re.compile(r"^[-+]?[0-9]{1,18}$"), list("-+0123456789"))
YamlLoader.add_implicit_resolver(
    f"{_PREFIX}float", re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"), list("-+.0123456789")
)
YamlLoader.add_constructor(f"{_PREFIX}int", lambda loader, node: int(node.value))
YamlLoader.add_constructor(f"{_PREFIX}float", lambda loader, node: float(node.value))


def parse_yaml(text: str) -> Any:
    """Return one document; raises ValueError with the reason in one line."""
    try:
        value = yaml.load(text, Loader=YamlLoader)  # noqa: S506  (a SafeLoader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        where = error.problem_mark
        place = f" (line {where.line + 1}, column {where.column + 1})" if where is not None else ""
        raise ValueError(f"{error.problem}{place}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # a key that is a list is a TypeError
        raise ValueError(" ".join(str(error).split())) from None
    check_nesting(value)
    return value


def read_yaml(path: Path, *, what: str = "", advice: str = "") -> Any:
    """Return the document of a file; raises UserError for invalid YAML.

    what: precedes the path in the message.
    advice: follows "not valid YAML".
    """
    text = read_text(path, MAX_YAML_BYTES)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{what}{path} is not valid YAML{advice}: {error}") from None
