"""The making of commands from the dataclasses of their options: typer's signature, the help, and the given values."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from ladderize.choices import OPTION, Option, check_value, described, flag, near_names, parameter_name
from ladderize.commands import parser
from ladderize.errors import UsageError, UserError

NOT_IN_FILES = {"config", "help"}


def config_values(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take values for options that the command line does not give from the file. Raises UserError for a file that does
    not fit."""
    if path is None or ctx.resilient_parsing:
        return path
    from ladderize.files.parsing import read_yaml

    document = read_yaml(path, option="--config ")
    if not isinstance(document, dict):
        raise UserError(f"--config {path} holds no options; write lines such as 'seed: 7'")
    given = given_parameters(ctx.command, ctx.info_name, document, f"--config {path}")
    ctx.default_map = {parameter.name: value for parameter, value in given}
    return path


def file_keys(made: Any) -> dict[str, Any]:
    """Return the parameters of typer's command by their keys in a --config file: their options' names with
    underscores."""
    keys = {}
    for parameter in made.params:
        longest = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.name
        key = str(longest).lstrip("-").replace("-", "_")
        if key not in NOT_IN_FILES:
            keys[key] = parameter
    return keys


def given_parameters(made: Any, name: str | None, document: Mapping[Any, Any], where: str) -> Iterator[tuple[Any, Any]]:
    """Yield each option of a file as typer's parameter, with its value in the command line's form.

    Raises UserError, which begins with ``where``, for an unknown key and for a value of another kind.

    name: of the command.
    """
    parameters = file_keys(made)
    for key, value in document.items():
        wanted = str(key).replace("-", "_")
        if wanted not in parameters:
            raise UserError(
                f"{where}: {name} has no option {key!r}{near_names(wanted, parameters)}; see ladderize {name} -h"
            )
        if value is not None:
            yield parameters[wanted], _as_given(parameters[wanted], value, f"{where}: {key}")


def _as_given(parameter: Any, value: Any, where: str) -> Any:
    """Return a value of the file in the command line's form: text, which the option's own type then reads.

    Raises UserError for a value of another kind.
    """
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict | list) or item is None for item in items):
        raise UserError(f"{where} is {value!r}; write one value, or a list of them")
    if getattr(parameter, "is_flag", False) != isinstance(value, bool):
        kind = "a switch: write true or false" if getattr(parameter, "is_flag", False) else "no switch: give a value"
        raise UserError(f"{where} is {value!r}, but it is {kind}")
    if isinstance(value, bool):
        return value
    texts = [str(int(item) if isinstance(item, float) and item.is_integer() else item) for item in items]
    return texts if getattr(parameter, "multiple", False) or parameter.nargs == -1 else ",".join(texts)


# panels of the help
MODELS, LAYOUT, DATA, METHOD = "Model", "Layout", "Data", "Method"
OPTIMISATION, MEASUREMENT, VALIDATION = "Optimisation", "Measurement", "Validation and checkpoints"
MEMORY, OUTPUT, ADVANCED = "Memory and devices", "Output", "Advanced"

METAVARS = {int: "N", float: "X", bool: ""}
CONFIG = Option("Read options from this YAML file. The command line wins over it.", "FILE")

# typer's error for a bad command line, whose module differs between versions
BadCommandLine: Any = typer.BadParameter.__base__
Filled = TypeVar("Filled")


class GivenOptions:
    """The options of a command as they were given.

    params: every option and argument by its name; None: it was not given and has no default.
    names: those that the user gave, in the command's order, also where the value is the default.
    """

    def __init__(self, context: typer.Context) -> None:
        # a repeatable option that was not given is an empty list or tuple, depending on typer's version
        self.params: dict[str, Any] = {
            name: None if value in ([], ()) else value for name, value in context.params.items()
        }
        sources = {own.name: context.get_parameter_source(own.name) for own in context.command.params if own.name}
        self.names = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]

    def fill(self, kind: type[Filled], **more: Any) -> Filled:
        """Return a dataclass of options, each field from the option of its name.

        An option that is None was not given, so the field's own default holds.

        more: values of fields, which win over options.
        """
        values = {}
        for field in fields(kind):  # type: ignore[arg-type]
            value = self.params.get(parameter_name(field))
            if field.name not in more and value is not None:
                values[field.name] = _field_value(field, value)
        return kind(**values, **more)

    def refuse(self, idle: Collection[str], why: str, instead: Mapping[str, str] | None = None) -> None:
        """Raise UsageError if one of ``idle`` was given.

        why: the reason why it has no effect.
        instead: by option, a text that follows the reason.
        """
        for name in self.names:
            if name in idle:
                raise UsageError(f"{flag(name)} has no effect {why}{(instead or {}).get(name, '')}")


def names_of(kind: type) -> set[str]:
    """Return the names of the options that fill this dataclass."""
    return {parameter_name(field) for field in fields(kind)}


def command(
    *kinds: type, panels: Mapping[str, str], configurable: bool = True, left_out: str = ""
) -> Callable[[Callable[[GivenOptions], None]], Any]:
    """Return a decorator that makes a function a command with the options of these dataclasses.

    Where several have an option of one name, the first describes it.

    panels: titles of the help, each with its options in their order.
    configurable: add --config.
    left_out: options that only Python has.
    """

    def decorate(function: Callable[[GivenOptions], None]) -> Any:
        left = {parameter_name(field): (kind, field) for kind in reversed(kinds) for field in described(kind)}
        left = {name: known for name, known in left.items() if name not in left_out.split()}
        arguments = [name for name, (_, field) in left.items() if field.metadata[OPTION].positional]
        placed = [(name, "") for name in arguments]
        placed += [(name, panel) for panel, names in panels.items() for name in names.split()]
        parameters = [_parameter(*left.pop(name), panel) for name, panel in placed]
        if left:
            raise TypeError(f"no panel of {function.__name__} has {', '.join(left)}")
        if configurable:
            parameters.append(_built("config", CONFIG, Path | None, None, ADVANCED, config_values))

        def run(context: typer.Context, **_: Any) -> None:
            function(GivenOptions(context))

        context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = Signature([context, *parameters])  # type: ignore[attr-defined]
        return run

    return decorate


def add(app: typer.Typer, panel: str, function: Any, name: str | None = None) -> None:
    """Add a function that ``command`` made, or one of options, to the command line."""
    if not hasattr(function, "__signature__"):
        function = parser.typed(function, False)
    app.command(name, rich_help_panel=panel)(function)


@functools.cache
def _made_of(function: Any) -> Any:
    """Return typer's command of a function."""
    app = typer.Typer()
    add(app, "", function)
    return typer.main.get_command(app)


def option_words(function: Any, name: str, options: Mapping[str, Any], where: str) -> list[str]:
    """Return options of a file as words of a command line. Raises UserError, which begins with ``where``."""
    words: list[str] = []
    for parameter, value in given_parameters(_made_of(function), name, options, where):
        option = max(parameter.opts, key=len)
        if isinstance(value, bool):
            words += [option] if value else []
        else:
            words += [word for item in (value if isinstance(value, list) else [value]) for word in (option, item)]
    return words


def parsed(function: Any, words: Sequence[str]) -> GivenOptions:
    """Parse the words that follow a command's name; nothing is run. Raises UsageError."""
    try:
        return GivenOptions(_made_of(function).make_context(None, list(words)))
    except BadCommandLine as error:
        raise UsageError(usage_message(error)) from None


def run_words(function: Any, words: Sequence[str]) -> None:
    """Run a command in this process.

    words: the command's name, and the words after it on a command line.
    """
    with _made_of(function).make_context(words[0], list(words[1:])) as context:
        context.command.invoke(context)


def usage_message(error: Any) -> str:
    """Return typer's message about a bad command line."""
    return str(error.format_message()).replace("Value error, ", "").rstrip(".")


def _parameter(kind: type, field: Field, panel: str) -> Parameter:
    """Return typer's parameter of an option or argument.

    Its default is None where the field's default is computed later, or the command line has another kind of value.
    """
    known: Option = field.metadata[OPTION]
    hint = known.kind or (str if known.parse else get_type_hints(kind)[field.name])
    if get_origin(hint) is tuple:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
    default: Any = field.default
    if hint is bool:
        default = False
    elif default is MISSING and field.default_factory is MISSING:
        default = Parameter.empty
    elif known.shown or known.parse or known.kind or default in (None, (), MISSING):
        hint, default = hint | None, None
    return _built(parameter_name(field), known, hint, default, panel)


def _built(name: str, known: Option, hint: Any, default: Any, panel: str, callback: Any = None) -> Parameter:
    plain = next((kind for kind in get_args(hint) if kind is not type(None)), hint)
    if known.positional:
        how: Any = typer.Argument(metavar=known.metavar, help=known.help)
    else:
        how = typer.Option(
            *(known.flags.split() or [flag(name)]),
            metavar=known.metavar or METAVARS.get(plain),
            help=known.help,
            min=None if known.parse else known.min,  # typer sees the text, before it is parsed
            max=known.max,
            show_default=known.shown or True,
            rich_help_panel=panel,
            callback=callback,
            is_eager=callback is not None,
        )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, how])


def _field_value(field: Field, value: Any) -> Any:
    """Return a field's value from the command line's."""
    if isinstance(value, float):
        check_value(field, float, value)
    known: Option | None = field.metadata.get(OPTION)
    if known is not None and known.parse is not None:
        return known.parse(value)
    if known is not None and known.flags.startswith("--no-"):
        return not value
    return tuple(value) if isinstance(value, list) else value
