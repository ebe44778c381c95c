"""``--config FILE`` and ``--print-config``: a command's options as YAML, by the names that they have on the command
line."""

import difflib
import json
from pathlib import Path
from typing import Any

import typer

from ladderize.errors import UserError

NOT_IN_FILES = {"config", "print_config", "help", "h"}


def config_values(ctx: typer.Context, path: Path | None) -> Path | None:
    """Take the file's values for what the command line does not say; raises UserError for a file that does not fit."""
    if path is None or ctx.resilient_parsing:
        return path
    from ladderize.files.yaml12 import read_yaml

    document = read_yaml(path, what="--config ")
    if not isinstance(document, dict):
        raise UserError(f"--config {path} holds no options; write lines such as 'seed: 7'")
    parameters = file_keys(ctx)
    values = {}
    for key, value in document.items():
        name = str(key).replace("-", "_")
        if name not in parameters:
            near = difflib.get_close_matches(name, parameters, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see ladderize {ctx.info_name} -h"
            raise UserError(f"--config {path}: {ctx.info_name} has no option {key!r}; {hint}")
        if value is not None:
            parameter = parameters[name]
            values[parameter.name] = _as_given(parameter, value, f"--config {path}: {key}")
    ctx.default_map = values
    return path


def config_text(ctx: typer.Context) -> str:
    """The YAML that makes the same run: what was given, and as comments the defaults of everything else."""
    given = given_names(ctx)
    lines = [f"# ladderize {ctx.info_name} --config FILE"]
    for key, parameter in file_keys(ctx).items():
        value = ctx.params.get(parameter.name)
        if isinstance(value, list | tuple):
            plain: Any = [str(item) for item in value]
        else:
            plain = value if value is None or isinstance(value, bool | int | float) else str(value)
        # JSON's text in quotes is YAML's too, and never mistaken for a number, a range or a switch
        text = json.dumps(plain, ensure_ascii=False) if plain not in (None, []) else ""
        lines.append(f"{'' if parameter.name in given else '# '}{key}: {text}".rstrip())
    return "\n".join(lines) + "\n"


def given_names(ctx: typer.Context) -> list[str]:
    """The parameters that the user gave, in the command's order, also where the value is the default."""
    names = [parameter.name for parameter in ctx.command.params if parameter.name is not None]
    return [name for name in names if (source := ctx.get_parameter_source(name)) and source.name != "DEFAULT"]


def file_keys(ctx: typer.Context) -> dict[str, Any]:
    """What a file may say: the command's parameters by the names of their options, with underscores."""
    keys = {}
    for parameter in ctx.command.params:
        longest = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.name
        key = str(longest).lstrip("-").replace("-", "_")
        if key not in NOT_IN_FILES:
            keys[key] = parameter
    return keys


def _as_given(parameter: Any, value: Any, where: str) -> Any:
    """A value of the file as the command line would have it: text, which the option's own type then reads."""
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
