"""The options of commands: each command has one frozen dataclass, whose fields describe themselves.

The command line (commands/parser.py), files of --config, the entries of a sweep and Python all fill it here, and it
checks itself. Only shared options are described here; those of one package stand beside their dataclass.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ladderize.errors import LadderizeError, UsageError, UserError

Options = TypeVar("Options")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]  # to compute in; auto: as stored
DeviceName = Literal["cpu", "cuda"]
SendingBackend = Literal["auto", "nccl", "symm_mem", "gloo", "shm"]  # how ranks communicate
BackendName = Literal[SendingBackend, "none"]
EngineName = Literal["runtime", "vllm"]  # the engine that ``bench`` times
# the names of shapes in runtime/shapes.json, the Llamas first
SHAPE_NAMES = "1b, 3b, 8b, 70b, 405b, qwen3-32b, qwen2.5-72b, mistral-small, granite-8b or a config.json"

MAX_SEED = 2**32 - 1
OPTION = "option"  # the key of a field's metadata under which its Option is

# the titles of the help under which options stand
MODELS, LAYOUT, DATA, METHOD = "Model", "Layout", "Data", "Method"
OPTIMISATION, MEASUREMENT, VALIDATION = "Optimisation", "Measurement", "Validation and checkpoints"
MEMORY, OUTPUT, ADVANCED = "Memory and devices", "Output", "Advanced"


@dataclass(frozen=True)
class Option:
    """The description of an option, beyond the name, type and default of its dataclass field."""

    help: str
    metavar: str | None = None  # None: N for an integer, X for another number, nothing for a switch, else typer's
    panel: str = ""
    min: float | None = None  # with an integer here, the value must be one
    max: float | None = None
    shown: str | None = None  # the default in words
    # its names; empty: the field's. A switch with a name that begins with --no- sets its field to False
    flags: str = ""
    needs: str = ""  # the field of the same dataclass without which it has no effect
    parse: Callable[[str], Any] | None = None  # makes the value of the text, where the field's type does not say how
    positional: bool = False
    decides: bool = True  # False: the result is the same whatever it is


def option(description: str | Option, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field that is an option of a command.

    description: its help, or the description of a shared option.
    default: a value, or ``...``: it must be given.
    more: further fields of ``Option``.
    """
    described = Option(description, **more) if isinstance(description, str) else replace(description, **more)
    metadata = {OPTION: described}
    return (
        dataclasses.field(metadata=metadata)
        if default is ...
        else dataclasses.field(default=default, metadata=metadata)
    )


def argument(metavar: str, help: str, default: Any = ..., **more: Any) -> Any:
    """Return a dataclass field that is an argument of a command."""
    return option(help, default, metavar=metavar, positional=True, **more)


def described(options: Any) -> list[dataclasses.Field]:
    """Return the fields of a dataclass, or of its instance, that are options."""
    return [field for field in fields(options) if OPTION in field.metadata]


def parameter_name(field: dataclasses.Field) -> str:
    """Return the option's name with underscores, as in files of --config, and as a command's parameter."""
    flags = field.metadata[OPTION].flags if OPTION in field.metadata else ""
    return max(flags.split(), key=len).lstrip("-").replace("-", "_") if flags else field.name


def flag(name: str) -> str:
    """Return the flag of a name: ``seq_len`` -> ``--seq-len``."""
    return f"--{name.replace('_', '-')}"


# ---- filling ----


def options_from(kind: type[Options], values: Mapping[str, Any], where: str = "") -> Options:
    """Return the options that a mapping gives, by their names on the command line or with underscores.

    where: begins the messages, such as the place in a file.
    Raises UserError, or UsageError where no place is named.
    """
    made = field_values(kind, values, where)
    with errors_begin_with(where):
        return make_options(kind, made)


def make_options(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """Return the options with these values of fields. Raises UsageError for one that is missing."""
    for field in described(kind):
        if field.default is MISSING and field.name not in values:
            described_as: Option = field.metadata[OPTION]
            if described_as.positional:
                raise UsageError(f"Missing argument '{described_as.metavar}'")
            raise UsageError(f"Missing option '{flag(parameter_name(field))}'")
    return kind(**values)


def field_values(kind: type, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the values of fields that a mapping gives, checked one by one. None stands for one that is not given."""
    named = {parameter_name(field): field for field in described(kind)}
    hints, made = get_type_hints(kind), {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in named:
            raise UserError(f"{where}: there is no option {key!r}{near_names(name, named)}")
        if value is None:
            continue
        field = named[name]
        with errors_begin_with(where):
            made[field.name] = _field_value(field, hints[field.name], value)
            check_value(field, hints[field.name], made[field.name])
    return made


def _field_value(field: dataclasses.Field, hint: Any, value: Any) -> Any:
    """Return a field's value from what a command line or YAML has: text, numbers, switches, and lists of these."""
    description: Option = field.metadata[OPTION]
    name, kind = flag(parameter_name(field)), without_none(hint)
    if kind is bool:
        if not isinstance(value, bool):
            raise UsageError(f"{name} is {value!r}, but it is a switch: write true or false")
        return value != description.flags.startswith("--no-")
    items = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(item, dict | list | bool) or item is None for item in items):
        raise UsageError(f"{name} is {value!r}; write one value, or a list of them")
    texts = [str(int(item) if isinstance(item, float) and item.is_integer() else item) for item in items]
    if description.parse is not None:
        return description.parse(",".join(texts))
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], text, name) for text in texts)
    return _read(kind, ",".join(texts), name)


def _read(kind: Any, text: str, name: str) -> Any:
    """Return a text as a value of a type. Raises UsageError."""
    if get_origin(kind) is Literal:
        return text
    try:
        return kind(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise UsageError(f"{name} {text!r} is not {wanted}") from None


def without_none(hint: Any) -> Any:
    """Return the annotation X of X and of X | None."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(hint) else hint


@contextmanager
def errors_begin_with(where: str) -> Iterator[None]:
    """Raise errors of the block as UserErrors that begin with the place in a file, if there is one."""
    try:
        yield
    except LadderizeError as error:
        if not where:
            raise
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


# ---- checking ----


def check_options(options: Any) -> None:
    """Raise UsageError for a field with an unknown word, out of its range, or without effect. None: it was not
    given."""
    hints = get_type_hints(type(options))
    for field in fields(options):
        value = getattr(options, field.name)
        if value is None:
            continue
        check_value(field, hints[field.name], value)
        description: Option | None = field.metadata.get(OPTION)
        if description is None or not description.needs or value == field.default:
            continue
        if getattr(options, description.needs) in (None, False, (), ""):
            raise UsageError(f"{flag(parameter_name(field))} has no effect without {flag(description.needs)}")


def check_value(field: dataclasses.Field, hint: Any, value: Any) -> None:
    """Raise UsageError for a value that is none of the words of its annotation, or out of its option's range."""
    name, kind = flag(parameter_name(field)), without_none(hint)
    if get_origin(kind) is Literal and value not in get_args(kind):
        raise UsageError(f"{name} {value} is not one of {', '.join(get_args(kind))}")
    description: Option | None = field.metadata.get(OPTION)
    if description is None:
        return
    if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{name} must be a finite number of at least 0, not {value:g}")
    least, most = description.min, description.max
    if type(least) is int and (type(value) is not int or value < least):
        raise UsageError(f"{name} must be an integer of at least {least}, not {value!r}")
    if type(least) is float and not value >= least:
        raise UsageError(f"{name} must be at least {least:g}, not {value!r}")
    if most is not None and not value <= most:
        raise UsageError(f"{name} must be at most {most}, not {value!r}")


# ---- what options are used for ----


def identity(options: Any) -> dict[str, Any]:
    """Return the options that decide the result, by field; those that only Python has do."""
    idle = {field.name for field in described(options) if not field.metadata[OPTION].decides}
    return {field.name: getattr(options, field.name) for field in fields(options) if field.name not in idle}


def option_words(options: Any) -> list[str]:
    """Return the arguments and options as a user types them, without defaults."""
    arguments: list[str] = []
    typed: list[str] = []
    for field in described(options):
        description: Option = field.metadata[OPTION]
        name, value = flag(parameter_name(field)), getattr(options, field.name)
        items = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
        if value is None or (value == field.default and not description.positional):
            continue
        if description.positional:
            arguments += items
        elif isinstance(value, bool):
            typed.append(name)
        elif description.parse is not None:
            typed += [name, ",".join(items)]
        else:
            typed += [word for item in items for word in (name, item)]
    return [*arguments, *typed]


def near_names(name: str, choices: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` with the names nearest to an unknown one, as the command line finds those of
    options; empty where there is none."""
    near = difflib.get_close_matches(name, {*choices})
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated text: ``a, b`` -> (a, b)."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def distinct_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated text, each once."""
    return tuple(dict.fromkeys(split_names(text)))


DEVICE = Option("Where to compute.", panel=MEMORY, shown="cuda if there is one")
THREADS = Option("CPU threads of each process.", panel=MEMORY, min=1, shown="cores / processes")
DTYPE = Option("float32, bfloat16, float16, or auto: as stored.", "DTYPE", MEMORY)
BACKEND = Option("How ranks communicate.", panel=MEMORY)
TP_SIZE = Option("Tensor-parallel ranks (processes). Under torchrun: as many as it started.", panel=MEMORY, min=1)
SEQ_LEN = Option("Tokens per window.", panel=DATA, min=2, shown="the rows of ids, else 2048 or the model's limit")
REPLICATE_VOCAB = Option(
    "Keep the whole embedding and LM head on every rank. This saves their all-reduces.", panel=ADVANCED
)
OVERWRITE = Option("Replace OUT if it is a checkpoint.", panel=OUTPUT, decides=False)
NO_VERIFY = Option("Skip loading the output in plain transformers.", panel=OUTPUT, flags="--no-verify", decides=False)
