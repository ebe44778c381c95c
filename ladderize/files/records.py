"""Typed documents: dataclasses that are written as JSON and checked when read."""

import contextlib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ladderize.errors import UserError

OwnRecord = typing.TypeVar("OwnRecord", bound="Record")


class Record:
    """Base of dataclasses that are JSON objects, of plain values, Records, and lists, dicts and unions of these."""

    LEFT_OUT: typing.ClassVar[tuple[str, ...]] = ()  # fields that JSON lacks while they are None, instead of null

    def to_dict(self) -> dict[str, Any]:
        """Return the document as JSON holds it; ``from_dict`` reads it back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return _plain({name: value for name, value in values.items() if value is not None or name not in self.LEFT_OUT})

    @classmethod
    def from_dict(cls: type[OwnRecord], value: object, where: str | Path) -> OwnRecord:
        """Return the record of a document, whose unknown keys are ignored; ``where`` begins the messages."""
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {shown(value)}, but must be an object")
        values, hints = {}, get_type_hints(cls)
        for field in fields(cls):  # type: ignore[arg-type]
            key = field.name
            if key in value:
                values[key] = read_value(hints[key], value[key], f"{where}: {key}")
            elif field.default is MISSING and field.default_factory is MISSING:
                raise UserError(f"{where} has no {key}")
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def read_value(kind: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the annotation ``kind``; one of another type is a UserError that begins with ``where``."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and type(None) in arguments):
        return value
    if origin in (Union, types.UnionType):
        *options, last = [option for option in arguments if option is not type(None)]
        for option in options:
            with contextlib.suppress(UserError):
                return read_value(option, value, where)
        return read_value(last, value, where)
    if origin is Literal:
        if value not in arguments or type(value) is bool:
            raise UserError(f"{where} is {shown(value)}, but must be one of {', '.join(map(str, arguments))}")
        return value
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise UserError(f"{where} is {shown(value)}, but must be a list")
        kinds = arguments
        if origin is list or arguments[-1] is Ellipsis:
            kinds = arguments[:1] * len(value)
        if len(value) != len(kinds):
            raise UserError(f"{where} has {len(value)} entries, but must have {len(kinds)}")
        return origin(read_value(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise UserError(f"{where} is {shown(value)}, but must be an object")
        keys = [_key(arguments[0], key, where) for key in value]
        items = [read_value(arguments[1], item, f"{where}.{key}") for key, item in value.items()]
        return dict(zip(keys, items, strict=True))
    if isinstance(kind, type) and issubclass(kind, Record):
        return kind.from_dict(value, where)
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where} is {shown(value)}, which is out of the range of a float") from None
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise UserError(f"{where} is {shown(value)}, but must be of type {kind.__name__}")
    return value


def _key(kind: Any, key: Any, where: str) -> Any:
    """Return the key of a mapping: text in JSON, also of an integer, and anything in YAML."""
    if kind is int and not str(key).removeprefix("-").isdecimal():
        raise UserError(f"{where} has the key {key!r}, which is not an integer")
    if kind is str and type(key) is not str:
        raise UserError(f"{where} has the key {key!r}, which is not text")
    return int(key) if kind is int else key


def shown(value: object) -> str:
    """Return a value as messages show it, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
