"""What all commands have in common in their help."""

from typing import Any

from typer.core import TyperCommand, TyperGroup


class SwitchesWithoutType:
    """Shows no type for switches in the help: ``--overwrite`` takes no value."""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]  # of the class that this is mixed into
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters


class Command(SwitchesWithoutType, TyperCommand):
    """One command."""


class Commands(SwitchesWithoutType, TyperGroup):
    """The command line as a whole."""
