"""The command line of a function: typer's parameters are made of the dataclass of its options."""

from collections.abc import Callable
from dataclasses import MISSING, Field
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ladderize.choices import (
    ADVANCED,
    OPTION,
    OUTPUT,
    Option,
    described,
    field_values,
    flag,
    make_options,
    parameter_name,
    without_none,
)
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.files.documents import read_yaml

# typer's error for a bad command line, whose module differs between versions
BadCommandLine: Any = typer.BadParameter.__base__
Command = Callable[[Any, Console], None]  # options, and what prints
METAVARS = {int: "N", float: "X", bool: ""}
CONFIG = Option("Read options from this YAML file. The command line wins over it.", "FILE", ADVANCED)
AS_JSON = Option("Print one JSON document on stdout and nothing else.", panel=OUTPUT, flags="--json")


def add(app: typer.Typer, panel: str, function: Command, name: str = "", *, config: bool = False) -> None:
    """Add a function of options to the command line, under a title of the help.

    config: with an option --config.
    """
    app.command(name or None, rich_help_panel=panel)(typed(function, config))


def typed(function: Command, has_config: bool) -> Callable[..., None]:
    """Return a function with typer's parameters, which calls this function with the options that they give."""
    kind = get_type_hints(function)["options"]
    hints = get_type_hints(kind)

    def run(context: typer.Context, json: bool, config: Path | None = None, **values: Any) -> None:
        line = {name: value for name, value in values.items() if is_typed(context, name)}
        from_file = {} if config is None else read_config(kind, config)
        function(make_options(kind, {**from_file, **field_values(kind, line)}), Console(json))

    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    parameters += [_parameter(field, hints[field.name], has_config) for field in described(kind)]
    parameters.append(_parameter_of("json", AS_JSON, bool, False))
    if has_config:
        parameters.append(_parameter_of("config", CONFIG, Path | None, None))
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def is_typed(context: typer.Context, name: str) -> bool:
    """Return True for an option that stands on the command line."""
    source = context.get_parameter_source(name)
    # a repeatable argument that was not given counts as given
    return source is not None and source.name != "DEFAULT" and context.params[name] not in (None, [], ())


def read_config(kind: type, path: Path) -> dict[str, Any]:
    """Return the values of fields in a file of --config. Raises UserError for a file that does not fit."""
    document = read_yaml(path, option="--config ")
    if not isinstance(document, dict):
        raise UserError(f"--config {path} holds no options; write lines such as 'seed: 7'")
    return field_values(kind, document, f"--config {path}")


def _parameter(field: Field, hint: Any, has_config: bool) -> Parameter:
    """Return typer's parameter of an option or argument.

    has_config: a file may give it, so typer does not ask for it.
    """
    description: Option = field.metadata[OPTION]
    is_required = field.default is MISSING
    default = field.default
    if description.parse is not None:
        hint = str
    elif get_origin(hint) is tuple:
        hint = list[get_args(hint)[0]]  # type: ignore[misc]
    if hint is bool:
        default = False  # also of a switch that begins with --no-
    elif is_required and description.positional and not has_config:
        default = Parameter.empty
    elif description.shown or description.parse or default in (None, (), MISSING):
        hint, default = hint | None, None
    return _parameter_of(parameter_name(field), description, hint, default, is_required)


def _parameter_of(name: str, description: Option, hint: Any, default: Any, is_required: bool = False) -> Parameter:
    if description.positional:
        declared: Any = typer.Argument(metavar=description.metavar, help=description.help)
    else:
        declared = typer.Option(
            *(description.flags.split() or [flag(name)]),
            metavar=description.metavar or METAVARS.get(without_none(hint)),
            # a file of --config may give it, so typer does not ask for it
            help=description.help + (" [dim]\\[required][/dim]" if is_required else ""),
            min=None if description.parse else description.min,  # typer sees the text, before it is parsed
            max=description.max,
            show_default=description.shown or True,
            rich_help_panel=description.panel or None,
        )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, declared])
