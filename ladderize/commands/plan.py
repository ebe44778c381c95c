"""``plan``."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ladderize
from ladderize.choices import AS_JSON, flag, option
from ladderize.commands.builder import LAYOUT, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import LOADING, align_command, command_line, compute_options, retrain_command, show_next
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.files.regular import resolved
from ladderize.plan.options import BOUNDS, PlanGoal, PlanModel, PlanOptions

if TYPE_CHECKING:
    from ladderize.plan.run import PlanResult


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
    show_next(console, *_next_steps(result, arguments.recipe_out))


def _goal(given: GivenOptions) -> PlanGoal | None:
    """Return the goal of a choice; None where no layout is chosen."""
    if {"sensitivity", "max_ppl_increase", "min_speedup"}.isdisjoint(given.names):
        given.refuse(names_of(PlanGoal), "where no layout is chosen; give --max-ppl-increase or --min-speedup")
        return None
    return given.fill(PlanGoal)


def _next_steps(result: "PlanResult", recipe: Path | None) -> list[tuple[str, str]]:
    """Return what to run next: make the chosen layout, or measure the layouts where the hardware is."""
    model, options, choice = result.model, result.options, result.choice
    workload = ["--tp-size", max(options.tp_sizes), "--prompt-len", options.prompt_len]
    workload += ["--output-len", options.output_len, "--batch-size", ",".join(map(str, options.batch_sizes))]
    if choice is not None and model.model is not None:
        target = f"{resolved(model.model).name}-planned"  # in the current folder, also for "." and hub ids
        steps = [("make it", command_line("convert", model.model, target, "--recipe", recipe or "RECIPE.yaml"))]
        made = target
        if choice.aligned is not None:
            steps.append(("align it, as was measured", align_command(target, model.model)))
            made = f"{target}-aligned"
        retrain = retrain_command(made, f"{target}-adapted", model.model, align=choice.aligned is None)
        steps.append(("recover accuracy", retrain))
        return [*steps, ("measure it there", command_line("bench", model.model, made, *workload))]
    steps = []
    if result.rows[0].basis != "calibrated":
        sizes = ",".join(map(str, options.tp_sizes))
        steps.append(("calibrate there", command_line("calibrate", "--tp-size", sizes, "--out", "machine.json")))
    if model.weights == "float":  # bench takes no FP8
        steps.append(("measure it there", command_line("bench", *_bench_words(model), *workload)))
    return steps


def _bench_words(model: PlanModel) -> list[object]:
    """Return the models of ``bench`` that are the rows of a plan. Both have the same default."""
    values: dict[str, object] = {"--dtype": None if model.dtype == "auto" else model.dtype}
    if model.shape is not None:
        values |= {"--sync-tp-size": model.sync_tp_size}
        if model.layout is not None:
            values["--layout"] = ",".join(dict.fromkeys(["dense", *(n for n in model.rows if n not in BOUNDS)]))
            values["--baselines"] = ",".join(name for name in model.rows if name in BOUNDS) or None
    words = [str(word) for name, value in values.items() if value is not None for word in (name, value)]
    return [*(["--random-weights", model.shape] if model.shape is not None else [model.model]), *words]
