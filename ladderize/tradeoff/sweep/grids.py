"""What entries of a sweep.yaml have in common: lists that are grids, paths, the layouts that an entry is for."""

import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ladderize.adapt.data.sources import HUB
from ladderize.errors import UserError
from ladderize.tradeoff.sweep.settings import names

MOST_POINTS = 1000  # of one grid; more is a slip
PATH_KEYS = {"data", "eval_data", "perplexity", "include_path", "head_map"}


def absolute(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same with absolute paths: stages run elsewhere."""

    def path(text: Any) -> Any:
        if isinstance(text, list):
            return [path(item) for item in text]
        if not isinstance(text, str) or text.startswith(HUB):
            return text
        return os.path.normpath(Path.cwd() / Path(text).expanduser())

    return {key: path(value) if key in PATH_KEYS else value for key, value in given.items()}


def grid(given: Mapping[str, Any], where: str, plain: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Every combination of the values that are lists, but those of ``plain``."""
    axes = [
        [(key, item) for item in value] if isinstance(value, list) and key not in plain else [(key, value)]
        for key, value in given.items()
    ]
    if empty := [key for (key, value), axis in zip(given.items(), axes, strict=True) if not axis and value == []]:
        raise UserError(f"{where}: {empty[0]} is an empty list; give a value, or leave it out")
    return map(dict, combinations(axes, where))


def combinations(axes: Collection[Collection[Any]], where: str) -> Iterator[tuple[Any, ...]]:
    """One of each axis; raises UserError for more than anybody means."""
    for number, combination in enumerate(itertools.product(*axes)):
        if number >= MOST_POINTS:
            raise UserError(f"{where} is a grid of more than {MOST_POINTS:,} combinations; give fewer values")
        yield combination


def only(given: dict[str, Any], at: str, known: Collection[str]) -> tuple[str, ...]:
    """The names of layouts that an entry is for."""
    named = names(given.pop("layouts", ()))
    if unknown := [name for name in named if name not in known]:
        raise UserError(
            f"{at}: layouts names {unknown[0]!r}, but no layout has this name;"
            f" {'known are ' + ', '.join(sorted(known)) if known else 'give one a name'}"
        )
    return named
