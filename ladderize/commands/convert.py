"""``convert``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.adapt.layers.options import AssignOptions
from ladderize.choices import AS_JSON, NO_VERIFY, OVERWRITE, REVISION, argument, flag, option
from ladderize.commands.builder import LAYOUT, MODELS, OUTPUT, GivenOptions, command, names_of
from ladderize.commands.shared import LOADING, start_on
from ladderize.console import Console
from ladderize.convert.recipe import Recipe, read_recipe
from ladderize.errors import UsageError, UserError
from ladderize.layout import RangeSyntaxError, format_ranges

if TYPE_CHECKING:
    from ladderize.convert.plan import Changes


@dataclass(frozen=True)
class ConvertArguments:
    src: str = argument("SRC", "A checkpoint: folder or hub id. It is never changed.")
    out: str = argument("OUT", "The folder to write. It appears whole or not at all.")
    recipe: Path | None = option(
        "Read these options from YAML: a recipe, or the ladderize.yaml of a checkpoint.", metavar="FILE"
    )
    copy: bool = option("Copy unchanged weights instead of hard-linking them.", False)
    dry_run: bool = option("Show what would be done and write nothing.", False)
    overwrite: bool = option(OVERWRITE, False)
    verify: bool = option(NO_VERIFY, True)
    revision: str | None = option(REVISION)
    as_json: bool = option(AS_JSON, False)


@command(
    ConvertArguments,
    AssignOptions,
    Recipe,
    panels={
        LAYOUT: "ladder delayed spd sync_tp_size dense recipe",
        "Who shares a rank": "assign data device assignment",
        "Weights": "dtype copy",
        OUTPUT: "dry_run overwrite no_verify json",
        MODELS: "revision",
    },
    configurable=False,
)
def convert(given: GivenOptions) -> None:
    """Convert a checkpoint to a layout of overlapped, delayed and dropped all-reduces.

    Weights keep their values, except with --dtype. --assign and --assignment change the order of heads and neurons,
    which changes nothing in a dense model. Layers that no option names stay as they are in SRC.
    """
    from ladderize.convert.pipeline import convert_checkpoint

    own, assigning = given.fill(ConvertArguments), given.fill(AssignOptions)
    src, out, recipe, dry_run = own.src, own.out, own.recipe, own.dry_run
    asked = asked_recipe(given)
    if assigning.assign and asked.assignment is not None:
        raise UsageError("--assign computes what --assignment reads from a file; give one of them")
    console = Console(own.as_json)
    how: dict[str, Any] = {"revision": own.revision, "copy": own.copy, "overwrite": own.overwrite}
    how |= {"dry_run": dry_run, "verify": own.verify, "console": console}
    try:
        changes = assigned(src, out, asked, assigning, how) if assigning.assign else None
        report = convert_checkpoint(src, out, asked, changes, **how)
    except RangeSyntaxError as error:
        if recipe is None:
            raise
        raise UserError(f"{recipe}: {error}") from None
    console.document(report.to_dict())
    for warning in report.warnings:
        console.warn(warning)
    if dry_run:
        console.table(report.layers, right=["layer"])
        console.result("")
    for line in report.lines():
        console.result(line)
    console.result(f"{'would write' if dry_run else 'wrote'} {out}")


def assigned(src: str, out: str, asked: Recipe, options: AssignOptions, how: Mapping[str, Any]) -> "Changes":
    """Return the changes that an assignment makes; with --dry-run none, since nothing is computed.

    how: the options of the conversion, which is planned first: its faults are told before the work.
    """
    console = how["console"]
    with console.stage(LOADING):
        device = start_on(options.device, None)
        from ladderize.adapt.layers.assign import apart_layers, assign_ranks, assignable
        from ladderize.convert.pipeline import convert_checkpoint
        from ladderize.convert.plan import Changes

    convert_checkpoint(src, out, asked, **{**how, "dry_run": True})
    if how["dry_run"]:
        _, layout = assignable(src, asked, how["revision"])
        console.note(f"would assign {' and '.join(options.assign)} in layers {format_ranges(apart_layers(layout))}")
        return Changes()
    options = replace(options, device=device)
    return Changes(assignment=assign_ranks(src, asked, options, revision=how["revision"], console=console))


def asked_recipe(given: GivenOptions) -> Recipe:
    """Return the recipe of --recipe, or of the other options. Raises UsageError for both."""
    recipe = given.fill(ConvertArguments).recipe
    if recipe is None:
        return given.fill(Recipe)
    if clash := [name for name in given.names if name in names_of(Recipe)]:
        raise UsageError(f"--recipe and {flag(clash[0])} cannot be combined; give one of them")
    return read_recipe(recipe)
