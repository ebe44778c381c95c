"""Reads all JSON: nesting, text and numbers are checked before any value is used."""

import json
import re
from typing import Any

from ladderize.console import is_text

MAX_DEPTH = 100  # of lists and objects in each other; more would exhaust the stack of what reads them
MAX_VALUES = 10_000_000  # counted as often as they are reached: YAML's aliases make many of few
CONTAINERS = (dict, list, tuple, set)
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(content: bytes, *, constants: bool = False) -> Any:
    """The value of a JSON text; raises ValueError, which says what is wrong.

    constants: whether NaN and Infinity, which are no JSON, are taken. Half a surrogate pair, which JSON can write but
    no text can hold, is refused.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"it holds {constant}, which is not a number")

    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
    try:
        value = json.loads(text) if constants else json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        check_nesting(value)
    if SURROGATE.search(content):
        check_characters(value)
    return value


def check_characters(value: Any) -> None:
    """Raise ValueError where a text in ``value`` holds half of a surrogate pair."""
    if not is_text(json.dumps(value, ensure_ascii=False, default=str)):
        raise ValueError("it holds half of a surrogate pair, which is not a character")


def check_nesting(value: Any) -> None:
    """Raise ValueError for lists and objects that are nested too deeply (or endlessly), or that unfold to too much."""
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
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
