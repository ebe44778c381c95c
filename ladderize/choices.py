"""The words that options take, and the description of an option, once for the command line, Python and the type
checker.

Only shared options are here; those of one package are described beside their dataclass.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ladderize.errors import UsageError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]  # to compute in; auto: as stored
DeviceName = Literal["cpu", "cuda"]
SendingBackend = Literal["auto", "nccl", "symm_mem", "gloo", "shm"]  # how ranks communicate
BackendName = Literal[SendingBackend, "none"]
EngineName = Literal["runtime", "vllm"]  # the engine that ``bench`` times
# the names of shapes in runtime/shapes.json, the Llamas first
SHAPE_NAMES = "1b, 3b, 8b, 70b, 405b, qwen3-32b, qwen2.5-72b, mistral-small, granite-8b or a config.json"

MAX_SEED = 2**32 - 1
OPTION = "option"  # the key of a field's metadata under which its Option is


@dataclass(frozen=True)
class Option:
    """The description of an option, beyond the name, type and default of its dataclass field.

    ``check_options`` and the command line check values by it; commands/builder.py makes the help from it.
    """

    help: str
    metavar: str | None = None  # None: N for an integer, X for another number, nothing for a switch, else typer's
    min: float | None = None  # with an integer here, the value must be one
    max: float | None = None
    shown: str | None = None  # the default in words; such an option is None where it is not given
    # its names; empty: the field's. A switch with a name that begins with --no- sets its field to False
    flags: str = ""
    needs: str = ""  # the field of the same dataclass without which it has no effect
    kind: Any = None  # its type on the command line, where that is not the field's
    parse: Callable[[str], Any] | None = None  # converts the command line's value to the field's
    positional: bool = False


def option(what: str | Option, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field that is an option of a command.

    what: its help, or the description of a shared option.
    default: a value, a function that makes one, or ``...``: it must be given.
    more: further fields of ``Option``.
    """
    known = Option(what, **more) if isinstance(what, str) else replace(what, **more)
    given = {} if default is ... else {"default_factory" if callable(default) else "default": default}
    return dataclasses.field(**given, metadata={OPTION: known})


def argument(metavar: str, help: str, default: Any = ...) -> Any:
    """Return a dataclass field that is an argument of a command."""
    return option(help, default, metavar=metavar, positional=True)


def described(options: Any) -> list[dataclasses.Field]:
    """Return the fields of a dataclass, or of its instance, that are options."""
    return [field for field in fields(options) if OPTION in field.metadata]


def parameter_name(field: dataclasses.Field) -> str:
    """Return the option's name with underscores, as in messages, in files of --config, and as a command's parameter."""
    flags = field.metadata[OPTION].flags if OPTION in field.metadata else ""
    return max(flags.split(), key=len).lstrip("-").replace("-", "_") if flags else field.name


def flag(name: str) -> str:
    """Return the flag of a name: ``seq_len`` -> ``--seq-len``."""
    return f"--{name.replace('_', '-')}"


def check_number(field: dataclasses.Field, value: Any) -> None:
    """Raise UsageError for a number that is infinite, NaN or negative."""
    if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{flag(parameter_name(field))} must be a finite number of at least 0, not {value:g}")


def check_options(options: Any) -> None:
    """Raise UsageError for a field with an unknown word, out of its range, or without effect. None: it was not
    given."""
    check_choices(options)
    for field in described(options):
        known: Option = field.metadata[OPTION]
        value, name = getattr(options, field.name), flag(parameter_name(field))
        if value is None:
            continue
        check_number(field, value)
        if type(known.min) is int and (type(value) is not int or value < known.min):
            raise UsageError(f"{name} must be an integer of at least {known.min}, not {value!r}")
        if type(known.min) is float and not value >= known.min:
            raise UsageError(f"{name} must be at least {known.min:g}, not {value!r}")
        if known.max is not None and not value <= known.max:
            raise UsageError(f"{name} must be at most {known.max}, not {value!r}")
        if known.needs and value != field.default and getattr(options, known.needs) in (None, False, (), ""):
            raise UsageError(f"{name} has no effect without {flag(known.needs)}")


def check_choices(options: Any) -> None:
    """Raise UsageError for a field that holds none of the words of its annotation."""
    hints = get_type_hints(type(options))
    for field in fields(options):
        kinds = [hints[field.name], *get_args(hints[field.name])]  # a Literal, or Literal | None
        words = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
        value = getattr(options, field.name)
        if words and value not in words and not (value is None and type(None) in kinds):
            raise UsageError(f"{flag(field.name)} {value} is not one of {', '.join(words)}")


def near_names(name: str, choices: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` with the names nearest to an unknown one, as the command line finds those of
    options; empty where there is none."""
    near = difflib.get_close_matches(name, {*choices})
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated text: ``a, b`` -> (a, b)."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def distinct_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated text, each once."""
    return tuple(dict.fromkeys(split_names(text)))


AS_JSON = Option("Print one JSON document on stdout and nothing else.", flags="--json")
REVISION = Option("Branch, tag or commit of a model from the hub.")
DEVICE = Option("Where to compute.", kind=DeviceName, shown="cuda if there is one")
THREADS = Option("CPU threads of each process.", min=1, shown="cores / processes")
DTYPE = Option("float32, bfloat16, float16, or auto: as stored.", "DTYPE")
BACKEND = Option("How ranks communicate.")
TP_SIZE = Option("Tensor-parallel ranks (processes). Under torchrun: as many as it started.", min=1)
SEQ_LEN = Option("Tokens per window.", min=2, shown="the rows of ids, else 2048 or the model's limit")
REPLICATE_VOCAB = Option("Keep the whole embedding and LM head on every rank. This saves their all-reduces.")
OVERWRITE = Option("Replace OUT if it is a checkpoint.")
NO_VERIFY = Option("Skip loading the output in plain transformers.", flags="--no-verify")
SEED_OF_ROUNDS = Option("Seed of prompts and of the order in each round.", min=0, max=MAX_SEED)
