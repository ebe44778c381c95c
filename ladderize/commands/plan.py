"""``plan``."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import ladderize
from ladderize.choices import AS_JSON, flag, option
from ladderize.commands.builder import LAYOUT, MEASUREMENT, MEMORY, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import LOADING, align_command, command_line, compute_options, retrain_command, show_next
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.files.regular import resolved
from ladderize.plan.document import PlanChoice, PlanResult
from ladderize.plan.options import BOUNDS, PlanGoal, PlanModel, PlanOptions
from ladderize.plan.passes import FP8


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
        MODELS: "shape num_layers dtype weights revision",
        MEMORY: "hardware link tp_size engine",
        LAYOUT: "layout sync_tp_size",
        MEASUREMENT: "batch_size prompt_len output_len",
        "Choose a layout": "sensitivity max_ppl_increase min_speedup phase verify align data device threads",
        OUTPUT: "recipe_out list explain out json",
    },
)
def plan(given: GivenOptions) -> None:
    """Predict how fast layouts are on hardware that need not be there, and choose one."""
    own = given.fill(PlanArguments)
    console = Console(own.as_json)
    if own.show_list:
        given.refuse(given.params.keys() - {"list", "json"}, "with --list")
        from ladderize.plan.show import show_known

        show_known(console)
        return
    choice = given.fill(PlanModel)
    options = _options(given)
    goal = _goal(given)
    if goal is not None and goal.verify is not None:
        with console.stage(LOADING):
            from ladderize.plan import measure  # noqa: F401  # which takes seconds

            goal = dataclasses.replace(goal, device=compute_options(given.params["device"], goal.threads))
    files = {"out": own.out, "recipe_out": own.recipe_out}
    result = ladderize.plan_layouts(choice, options, goal, **files, explain=own.explain, console=console)
    for path in (own.out, own.recipe_out):
        if path is not None:
            console.note(f"wrote {path}")
    if goal is None:
        _show_next(console, choice, options, result)
    elif choice.model is not None:
        assert result.choice is not None
        _show_next_of_choice(console, choice.model, options, own.recipe_out, result.choice)


def _options(given: GivenOptions) -> PlanOptions:
    for name in ("hardware", "tp_size"):
        if name not in given.names:
            raise UsageError(
                f"{flag(name)} is missing: say on what to run, for example --hardware h100-sxm --link nvlink"
                " --tp-size 8"
            )
    return given.fill(PlanOptions)


def _goal(given: GivenOptions) -> PlanGoal | None:
    """Return the goal of a choice; None where no layout is chosen."""
    if {"sensitivity", "max_ppl_increase", "min_speedup"}.isdisjoint(given.names):
        given.refuse(names_of(PlanGoal), "where no layout is chosen; give --max-ppl-increase or --min-speedup")
        return None
    return given.fill(PlanGoal)


def _show_next(console: Console, choice: PlanModel, options: PlanOptions, result: PlanResult) -> None:
    """Show the commands to run where the hardware is."""
    target = ["--random-weights", str(choice.shape)] if choice.model is None else [choice.model]
    own: dict[str, object] = {
        "--num-layers": choice.num_layers,
        "--dtype": None if choice.dtype == "auto" else choice.dtype,
    }
    if choice.model is None:
        own |= _layout_words(choice)
    target += [str(word) for option, value in own.items() if value is not None for word in (option, value)]
    steps = [("measure it there", command_line("bench", *target, *_bench_words(options)))]
    if result.model.weights == FP8:  # which bench does not take
        steps = []
    if result.rows[0].basis != "calibrated":
        sizes = ",".join(map(str, options.tp_sizes))
        steps.insert(0, ("calibrate there", command_line("calibrate", "--tp-size", sizes, "--out", "machine.json")))
    show_next(console, *steps)


def _layout_words(choice: PlanModel) -> dict[str, object]:
    """Return the options of ``bench --random-weights`` for the rows of the plan. Both have the same default."""
    if choice.layout is None:
        return {"--sync-tp-size": choice.sync_tp_size}
    layouts = list(dict.fromkeys(["dense", *(name for name in choice.rows if name not in BOUNDS)]))
    baselines = ",".join(name for name in choice.rows if name in BOUNDS)
    return {"--layout": ",".join(layouts), "--sync-tp-size": choice.sync_tp_size, "--baselines": baselines or None}


def _show_next_of_choice(
    console: Console, model: str, options: PlanOptions, recipe: Path | None, choice: PlanChoice
) -> None:
    """Show the commands that make the chosen model."""
    target = f"{resolved(model).name}-planned"  # in the current folder, also for "." and hub ids
    steps = [("make it", command_line("convert", model, target, "--recipe", recipe or "RECIPE.yaml"))]
    made = target
    if choice.aligned is not None:
        steps.append(("align it, as was measured", align_command(target, model)))
        made = f"{target}-aligned"
    retrain = retrain_command(made, f"{target}-adapted", model, align=choice.aligned is None)
    steps.append(("recover accuracy", retrain))
    show_next(console, *steps, ("measure it there", command_line("bench", model, made, *_bench_words(options))))


def _bench_words(options: PlanOptions) -> list[object]:
    ranks = max(options.tp_sizes)
    words: list[object] = ["--tp-size", ranks, "--prompt-len", options.prompt_len, "--output-len", options.output_len]
    return [*words, "--batch-size", ",".join(map(str, options.batch_sizes))]
