"""The words that options take: one list for the command line, for Python and for the type checker.

Here are those that several rooms share; options of one room have theirs beside their dataclass.
"""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ladderize.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]  # to compute in; auto: as stored
DeviceName = Literal["cpu", "cuda"]
BackendName = Literal["auto", "nccl", "symm_mem", "gloo", "shm", "none"]  # how ranks communicate

EngineName = Literal["runtime", "vllm"]  # whose forward pass ``bench`` times


def check_at_least(options: Any, least: int, *names: str) -> None:
    """Raise UsageError for a field of a dataclass of options that is below ``least``; None was not said."""
    for name in names:
        value = getattr(options, name)
        if value is not None and (type(value) is not int or value < least):
            raise UsageError(f"--{name.replace('_', '-')} must be an integer of at least {least}, not {value!r}")


def check_choices(options: Any) -> None:
    """Raise UsageError for a field of a dataclass of options that holds none of the words of its annotation."""
    hints = get_type_hints(type(options))
    for field in fields(options):
        kinds = [hints[field.name], *get_args(hints[field.name])]  # a Literal, or Literal | None
        words = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
        value = getattr(options, field.name)
        if words and value not in words and not (value is None and type(None) in kinds):
            raise UsageError(f"--{field.name.replace('_', '-')} {value} is not one of {', '.join(words)}")
