"""The reading of JSON and YAML: what is wrong with a file is said in one sentence."""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ladderize.errors import UserError
from ladderize.files.regular import read_text

MAX_YAML_BYTES = 4 << 20  # people write these, and the parser takes a second per megabyte
# The words of messages for JSON's types.
JSON_WORDS: dict[type, str] = {
    **{dict: "an object", list: "a list", str: "text", bool: "a truth value"},
    **{int: "a number", float: "a number", type(None): "null"},
}


def parse_json(content: bytes, *, constants: bool = False) -> Any:
    """Return the value of a JSON text; raises ValueError with the reason.

    constants: accept NaN and Infinity, which are not JSON.
    """

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
    """Return the document of a file; raises UserError for invalid YAML.

    option: precedes the path in the message.
    advice: follows "not valid YAML".
    """
    text = read_text(path, MAX_YAML_BYTES)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{option}{path} is not valid YAML{advice}: {error}") from None
