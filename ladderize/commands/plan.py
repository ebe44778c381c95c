"""``plan``."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import ladderize
from ladderize.choices import AS_JSON, flag, option
from ladderize.commands.builder import LAYOUT, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import LOADING, command_line, compute_options
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.files.regular import resolved
from ladderize.plan.options import PlanGoal, PlanModel, PlanOptions


@dataclass(frozen=True)
class PlanArguments:
    recipe_out: Path | None = option("Write the chosen layout as a recipe for convert.", metavar="FILE")
    show_list: bool = option("Show the known devices, links, engines and shapes, and stop.", False, flags="--list")
    explain: bool = option("Show times, waits, and what the figures rest on.", False)
    out: Path | None = option("Write everything as JSON.", metavar="FILE")
    as_json: bool = option(AS_JSON, False)


@command(
    PlanArguments,
    PlanModel,
    PlanOptions,
    PlanGoal,
    panels={
        MODELS: "shape dtype weights revision",
        MEMORY: "hardware link tp_size engine",
        LAYOUT: "layout sync_tp_size",
        MEASUREMENT: "batch_size prompt_len output_len",
        "Choose a layout": "sensitivity max_ppl_increase min_speedup phase verify align data device threads",
        OUTPUT: "recipe_out list explain out json",
    },
)
def plan(given: GivenOptions) -> None:
    """Predict how fast layouts are on hardware that need not be there, and choose one."""
    arguments = given.fill(PlanArguments)
    console = Console(arguments.as_json)
    from ladderize.plan.show import show_known, show_plan

    if arguments.show_list:
        show_known(console)
        return
    for name in ("hardware", "tp_size"):
        if name not in given.names:
            raise UsageError(
                f"{flag(name)} is missing: say on what to run, for example --hardware h100-sxm --link nvlink"
                " --tp-size 8"
            )
    choice, options, goal = given.fill(PlanModel), given.fill(PlanOptions), _goal(given)
    if goal is not None and goal.verify is not None:
        with console.stage(LOADING):
            from ladderize.plan import measure  # noqa: F401  # which takes seconds

            goal = dataclasses.replace(goal, device=compute_options(given.params["device"], goal.threads))
    result = ladderize.plan_layouts(
        choice, options, goal, out=arguments.out, recipe_out=arguments.recipe_out, console=console
    )
    console.document(result.to_dict())
    show_plan(result, console, explain=arguments.explain)
    for path in (arguments.out, arguments.recipe_out):
        if path is not None:
            console.note(f"wrote {path}")
    if result.choice is not None and choice.model is not None:
        target = f"{resolved(choice.model).name}-planned"  # in the current folder, also for "." and hub ids
        make = command_line("convert", choice.model, target, "--recipe", arguments.recipe_out or "RECIPE.yaml")
        console.result(f"\nmake it: {make}")


def _goal(given: GivenOptions) -> PlanGoal | None:
    """Return the goal of a choice; None where no layout is chosen."""
    if {"sensitivity", "max_ppl_increase", "min_speedup"}.isdisjoint(given.names):
        given.refuse(names_of(PlanGoal), "where no layout is chosen; give --max-ppl-increase or --min-speedup")
        return None
    return given.fill(PlanGoal)
