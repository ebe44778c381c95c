"""``plan``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ladderize
from ladderize.choices import AS_JSON, option
from ladderize.commands.builder import LAYOUT, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import LOADING, command_line
from ladderize.console import Console
from ladderize.files.regular import resolved
from ladderize.plan.options import PlanGoal, PlanModel, PlanOptions

if TYPE_CHECKING:
    from ladderize.plan.run import PlanResult


@dataclass(frozen=True)
class PlanArguments:
    recipe_out: Path | None = option("Write the chosen layout as a recipe for convert.", metavar="FILE")
    out: Path | None = option("Write everything as JSON.", metavar="FILE")
    as_json: bool = option(AS_JSON, False)


@command(
    PlanArguments,
    PlanModel,
    PlanOptions,
    PlanGoal,
    panels={
        MODELS: "shape dtype revision",
        MEMORY: "hardware link outer_link tp_size engine",
        LAYOUT: "layout sync_tp_size",
        MEASUREMENT: "batch_size prompt_len output_len",
        "Choose a layout": "sensitivity max_ppl_increase verify",
        OUTPUT: "recipe_out out json",
    },
)
def plan(given: GivenOptions) -> None:
    """Predict how fast layouts are on hardware that need not be there, and choose one."""
    arguments = given.fill(PlanArguments)
    console = Console(arguments.as_json)
    from ladderize.plan.show import show_plan

    choice, options = given.fill(PlanModel), given.fill(PlanOptions)
    goal = None if names_of(PlanGoal).isdisjoint(given.names) else given.fill(PlanGoal)
    if goal is not None and goal.verify is not None:
        with console.stage(LOADING):
            from ladderize.plan import measure  # noqa: F401  # which takes seconds
    result = ladderize.plan_layouts(
        choice, options, goal, out=arguments.out, recipe_out=arguments.recipe_out, console=console
    )
    console.document(result.to_dict())
    show_plan(result, console)
    for path in (arguments.out, arguments.recipe_out):
        if path is not None:
            console.note(f"wrote {path}")
    if result.choice is None and (command := next_command(result)) is not None:
        console.result(f"next: {command}")
    if result.choice is not None and choice.model is not None:
        made = f"{resolved(choice.model).name}-planned"  # in the current folder, also for "." and hub ids
        make = command_line("convert", choice.model, made, "--recipe", arguments.recipe_out or "RECIPE.yaml")
        console.result(f"\nmake it: {make}")
        if result.choice.aligned is not None:
            how = ("--method", "align", "--distill-from", choice.model, "--data", "DATA")
            console.result(f"align it, as was measured: {command_line('adapt', made, f'{made}-aligned', *how)}")


def next_command(result: "PlanResult") -> str | None:
    """Return the command that makes the layout of the most favourable verdict; None where all are against one."""
    from ladderize.plan.run import CHECKPOINT_ROW

    favourable = [verdict for verdict in result.verdicts if verdict.layout not in (None, CHECKPOINT_ROW)]
    if not favourable:
        return None
    verdict = min(favourable, key=lambda verdict: ("yes", "perhaps").index(verdict.worth))
    kinds, _, ranges = str(verdict.layout).partition("=")
    options = [text for kind in kinds.split("+") for text in (f"--{kind}", ranges or "all")]
    if kinds != "ladder":
        options += ["--sync-tp-size", str(result.model.sync_tp_size or verdict.tp_size)]
    return command_line("convert", result.model.model or "MODEL", "OUT", *options)
