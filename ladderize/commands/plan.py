"""``plan``."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

import ladderize
from ladderize.choices import DeviceName, Dtype
from ladderize.commands.config_file import Config, PrintConfig
from ladderize.commands.next_steps import align_command, command, retrain_command, show_next
from ladderize.commands.options import (
    LAYOUT,
    LOADING,
    MEASUREMENT,
    MEMORY,
    MODELS,
    OUTPUT,
    AsJson,
    Revision,
    compute_options,
    given_options,
    names_of,
    options_from,
)
from ladderize.console import Console
from ladderize.errors import UsageError
from ladderize.files.regular import resolved
from ladderize.planning.planner.document import PlanChoice, TimedPhase
from ladderize.planning.plans.options import BOUNDS, PlanGoal, PlanModel, PlanOptions, parse_workload
from ladderize.runtime.bench.options import LAYOUT_NAMES, parse_counts

CHOICE = "Choose a layout"


def plan(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A checkpoint: folder or hub id. Its own layout is a row too."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="A shape instead of a checkpoint: 1b, 3b, 8b, 70b, 405b or a config.json.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    num_layers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --shape: number of layers.",
            show_default="the config's",
            rich_help_panel=MODELS,
        ),
    ] = None,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16, float16, or auto: as stored, bfloat16 for a shape.",
            rich_help_panel=MODELS,
        ),
    ] = PlanModel.dtype,
    revision: Revision = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="The device of one rank: a name that --list shows, or a file of calibrate or of your own.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LINK",
            help="What joins the ranks: a name that --list shows, ALPHA_US,BETA_GB_S (see bench), or a file.",
            show_default="that of --hardware's file",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    tp_size: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Tensor-parallel ranks: one number or several.", rich_help_panel=MEMORY),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Whose code is assumed: a name that --list shows.",
            show_default="the one that the device's figures come from",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=(
                f"Rows of the tables: {', '.join(LAYOUT_NAMES)}, such a name with a range of layers, ladder=16:32, or"
                f" {' and '.join(BOUNDS)}, which are for comparison. dense is always there."
            ),
            show_default="all of them, for all layers",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    sync_tp_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Virtual ranks of spd.",
            show_default="as many as ranks",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Batch sizes.", show_default="1", rich_help_panel=MEASUREMENT),
    ] = None,
    prompt_len: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens per prompt.", rich_help_panel=MEASUREMENT)
    ] = PlanOptions.prompt_len,
    output_len: Annotated[
        int,
        typer.Option(
            metavar="N", min=2, help="Tokens to generate. The prefill makes the first one.", rich_help_panel=MEASUREMENT
        ),
    ] = PlanOptions.output_len,
    workload: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="The same three in one: prompt=1024,output=512,batch=16.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Choose a layout: what sync points cost, of sensitivity --mode points.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Choose a layout: what those of a sweep cost after retraining. Preferred to estimates.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    max_ppl_increase: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="Choose the fastest within this increase: 2% of the dense perplexity, or 0.1 in perplexity.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    min_speedup: Annotated[
        float | None,
        typer.Option(metavar="X", help="Choose the most accurate that is this fast: 1.2.", rich_help_panel=CHOICE),
    ] = None,
    phase: Annotated[
        TimedPhase | None,
        typer.Option(
            metavar="PHASE",
            help="What is to be fast: end_to_end, prefill or decode.",
            show_default="end_to_end",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    verify: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Measure at most N layouts: those near the choice, and the choice on held-out windows.",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    align: Annotated[
        bool,
        typer.Option(
            "--align",
            help="With --verify: measure each layout as `adapt --method align` leaves it.",
            rich_help_panel=CHOICE,
        ),
    ] = False,
    align_samples: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="With --align: windows to align on, none of which is measured on.",
            show_default="the sensitivity's, or 16384 tokens; more for wide models",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="With --verify: where the sensitivity's data lie now.", rich_help_panel=CHOICE
        ),
    ] = None,
    held_out_data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --verify: other data to confirm the choice on.",
            show_default="the rest of the sensitivity's",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --verify: where a killed run keeps what it measured.",
            show_default="beside --out",
            rich_help_panel=CHOICE,
        ),
    ] = None,
    device: Annotated[
        DeviceName | None,
        typer.Option(
            help="With --verify: where to compute.", show_default="cuda if there is one", rich_help_panel=CHOICE
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="With --verify: CPU threads.", show_default="all cores", rich_help_panel=CHOICE
        ),
    ] = None,
    recipe_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the chosen layout as a recipe for convert.", rich_help_panel=OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="STEM", help="Draw STEM.png and STEM.svg: all layouts to choose from.", rich_help_panel=OUTPUT
        ),
    ] = None,
    show_list: Annotated[
        bool,
        typer.Option(
            "--list", help="Show the known devices, links, engines and shapes, and stop.", rich_help_panel=OUTPUT
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write everything as JSON.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: AsJson = False,
    config: Config = None,
    print_config: PrintConfig = False,
) -> None:
    """Predict how fast layouts are on hardware that need not be there, and choose one."""
    console = Console(as_json)
    if show_list:
        if others := [name for name in given_options(ctx) if name not in ("show_list", "as_json")]:
            raise UsageError(f"--{others[0].replace('_', '-')} has no effect with --list")
        from ladderize.planning.plans.listing import KnownHardware, show_known

        show_known(KnownHardware.read(), console)
        return
    choice = options_from(PlanModel, ctx.params)
    options = _options(ctx)
    goal = _goal(ctx)
    if goal is not None and goal.verify is not None:
        with console.stage(LOADING):
            goal = dataclasses.replace(goal, device=compute_options(device, threads))
    result = ladderize.plan(choice, options, goal, out=out, recipe_out=recipe_out, plot=plot, console=console)
    for path in (out, recipe_out):
        if path is not None:
            console.note(f"wrote {path}")
    if goal is None:
        _show_next(console, choice, options, calibrated=result.rows[0].basis == "calibrated")
    elif choice.model is not None:
        assert result.choice is not None
        _show_next_of_choice(console, choice.model, options, recipe_out, result.choice)


def _options(ctx: typer.Context) -> PlanOptions:
    given, params = given_options(ctx), dict(ctx.params)
    if params["hardware"] is None or params["tp_size"] is None:
        missing = "--hardware" if params["hardware"] is None else "--tp-size"
        raise UsageError(f"{missing} is missing: say on what to run, for example --hardware h100-sxm --tp-size 8")
    batches = PlanOptions.batch_sizes if params["batch_size"] is None else parse_counts(params["batch_size"])
    if params["workload"] is not None:
        if twice := [name for name in ("prompt_len", "output_len", "batch_size") if name in given]:
            raise UsageError(f"--workload and --{twice[0].replace('_', '-')} say the same; give one of them")
        served = parse_workload(params["workload"])
        batches = (served["batch_size"],)
        params |= {"prompt_len": served["prompt_len"], "output_len": served["output_len"]}
    ranks = parse_counts(params["tp_size"], "--tp-size")
    return options_from(PlanOptions, params, tp_sizes=ranks, batch_sizes=batches)


def _goal(ctx: typer.Context) -> PlanGoal | None:
    """None where no layout is to be chosen."""
    given = [name for name in given_options(ctx) if name in names_of(PlanGoal)]
    if given and not {"sensitivity", "sweep", "max_ppl_increase", "min_speedup"} & set(given):
        raise UsageError(
            f"--{given[0].replace('_', '-')} has no effect where no layout is chosen; give --max-ppl-increase or"
            " --min-speedup"
        )
    return options_from(PlanGoal, ctx.params) if given else None


def _show_next(console: Console, choice: PlanModel, options: PlanOptions, *, calibrated: bool) -> None:
    """What to do where the hardware is."""
    target = ["--random-weights", str(choice.shape)] if choice.model is None else [choice.model]
    own: dict[str, object] = {
        "--num-layers": choice.num_layers,
        "--dtype": None if choice.dtype == "auto" else choice.dtype,
    }
    if choice.model is None:
        own |= _layout_words(choice)
    target += [str(word) for option, value in own.items() if value is not None for word in (option, value)]
    steps = [("measure it there", command("bench", *target, *_bench_words(options)))]
    if not calibrated:
        sizes = ",".join(map(str, options.tp_sizes))
        steps.insert(0, ("calibrate there", command("calibrate", "--tp-size", sizes, "--out", "machine.json")))
    show_next(console, *steps)


def _layout_words(choice: PlanModel) -> dict[str, object]:
    """What ``bench --random-weights`` takes to time the rows of the plan; without --layout it has the same default."""
    if choice.layout is None:
        return {"--sync-tp-size": choice.sync_tp_size}
    layouts = list(dict.fromkeys(["dense", *(name for name in choice.rows if name not in BOUNDS)]))
    baselines = ",".join(name for name in choice.rows if name in BOUNDS)
    return {"--layout": ",".join(layouts), "--sync-tp-size": choice.sync_tp_size, "--baselines": baselines or None}


def _show_next_of_choice(
    console: Console, model: str, options: PlanOptions, recipe: Path | None, choice: PlanChoice
) -> None:
    """A checkpoint of a sweep that was chosen needs neither conversion nor adaptation."""
    if choice.model is not None:
        show_next(console, ("measure it there", command("bench", model, choice.model, *_bench_words(options))))
        return
    target = f"{resolved(model).name}-planned"  # beside where the user is, also for "." and hub ids
    steps = [("make it", command("convert", model, target, "--recipe", recipe or "RECIPE.yaml"))]
    made = target
    if choice.aligned is not None:
        steps.append(("align it, as was measured", align_command(target, model)))
        made = f"{target}-aligned"
    retrain = retrain_command(made, f"{target}-adapted", model, align=choice.aligned is None)
    steps.append(("recover accuracy", retrain))
    show_next(console, *steps, ("measure it there", command("bench", model, made, *_bench_words(options))))


def _bench_words(options: PlanOptions) -> list[object]:
    ranks = max(options.tp_sizes)
    words: list[object] = ["--tp-size", ranks, "--prompt-len", options.prompt_len, "--output-len", options.output_len]
    return [*words, "--batch-size", ",".join(map(str, options.batch_sizes))]
