"""What all commands have in common in their help."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class SwitchesWithoutType:
    """Shows no type for switches in the help: ``--overwrite`` takes no value."""

    params: list[Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _hide_types_of_switches(self.params)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]  # of the class that this is mixed into
        _hide_types_of_switches([option] if option is not None else [])
        return option


class Command(SwitchesWithoutType, TyperCommand):
    """One command."""


class Commands(SwitchesWithoutType, TyperGroup):
    """The command line as a whole."""


def _hide_types_of_switches(parameters: list[Any]) -> None:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
