"""The commands ``convert`` and ``inspect``: make a checkpoint of a layout, and show what a checkpoint is."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.adapt.layers.options import AssignOptions, assign_names, check_assign
from ladderize.choices import (
    LAYOUT,
    NO_VERIFY,
    OUTPUT,
    OVERWRITE,
    argument,
    check_options,
    flag,
    option,
)
from ladderize.commands.shared import LOADING, start_on
from ladderize.console import Console
from ladderize.convert.recipe import Recipe, read_recipe
from ladderize.errors import UsageError, UserError
from ladderize.layout import RangeSyntaxError, format_ranges

if TYPE_CHECKING:
    from ladderize.convert.plan import Changes, ConversionReport

SHARING, WEIGHTS = "Who shares a rank", "Weights"  # titles of the help


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Recipe):
    """The options of ``ladderize convert``: a recipe, or the file that holds one, and what is done with it."""

    src: str = argument("SRC", "A checkpoint: folder or hub id. It is never changed.")
    out: str = argument("OUT", "The folder to write. It appears whole or not at all.")
    recipe: Path | None = option(
        "Read these options from YAML: a recipe, or the ladderize.yaml of a checkpoint.", panel=LAYOUT, metavar="FILE"
    )
    assign: tuple[str, ...] = option(
        "Assign KV groups, MLP neurons or both to the ranks where they lose least: heads, neurons.",
        (),
        panel=SHARING,
        metavar="A,B",
        parse=assign_names,
        shown="none",
        needs="data",
    )
    data: str | None = option("The text or ids to assign by.", panel=SHARING, metavar="FILE", needs="assign")
    copy: bool = option("Copy unchanged weights instead of hard-linking them.", False, panel=WEIGHTS, decides=False)
    dry_run: bool = option("Show what would be done and write nothing.", False, panel=OUTPUT, decides=False)
    overwrite: bool = option(OVERWRITE, False)
    verify: bool = option(NO_VERIFY, True)

    def __post_init__(self) -> None:
        asked = [field.name for field in fields(Recipe) if getattr(self, field.name) is not None]
        if self.recipe is not None and asked:
            raise UsageError(f"--recipe and {flag(asked[0])} cannot be combined; give one of them")
        super().__post_init__()
        check_assign(self.assign)
        if self.assign and self.assignment is not None:
            raise UsageError("--assign computes what --assignment reads from a file; give one of them")

    @property
    def asked(self) -> Recipe:
        """The recipe of the options, or of the file of --recipe. Raises UserError for a file that holds none."""
        if self.recipe is not None:
            return read_recipe(self.recipe)
        return Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})


def convert(options: ConvertOptions, console: Console) -> None:
    """Convert a checkpoint to a layout of overlapped, delayed and dropped all-reduces.

    Weights keep their values, except with --dtype. --assign and --assignment change the order of heads and neurons,
    which changes nothing in a dense model. Layers that no option names stay as they are in SRC.
    """
    try:
        report = _converted(options, console)
    except RangeSyntaxError as error:
        if options.recipe is None:
            raise
        raise UserError(f"{options.recipe}: {error}") from None
    console.document(report.to_dict())
    for warning in report.warnings:
        console.warn(warning)
    if options.dry_run:
        console.table(report.layers, right=["layer"])
        console.result("")
    for line in report.lines():
        console.result(line)
    console.result(f"{'would write' if options.dry_run else 'wrote'} {options.out}")


def _converted(options: ConvertOptions, console: Console) -> "ConversionReport":
    """Convert, and with --assign assign first."""
    from ladderize.convert.pipeline import convert_checkpoint

    recipe = options.asked

    def converted(changes: "Changes | None" = None, *, dry_run: bool = options.dry_run) -> "ConversionReport":
        return convert_checkpoint(
            options.src,
            options.out,
            recipe,
            changes,
            copy=options.copy,
            dry_run=dry_run,
            overwrite=options.overwrite,
            verify=options.verify,
            console=console,
        )

    if not options.assign:
        return converted()
    with console.stage(LOADING):
        device = start_on(None)
        from ladderize.adapt.layers.assign import apart_layers, assign_ranks, assignable
        from ladderize.convert.plan import Changes

    report = converted(dry_run=True)  # whose faults are told before the work
    if options.dry_run:
        _, layout = assignable(options.src, recipe)
        console.note(f"would assign {' and '.join(options.assign)} in layers {format_ranges(apart_layers(layout))}")
        return report
    assigning = AssignOptions(assign=options.assign, data=options.data, device=device)
    assignment = assign_ranks(options.src, recipe, assigning, console=console)
    return converted(Changes(assignment=assignment))


@dataclass(frozen=True)
class InspectOptions:
    model: str = argument("MODEL", "A checkpoint: folder or hub id (only its .json files are downloaded).")
    tp_size: int | None = option(
        "TP size to count bytes for.", panel=OUTPUT, min=2, shown="the layout's sync_tp_size, else up to 8"
    )
    layers: bool = option("Print the table of all layers too.", False, panel=OUTPUT)

    def __post_init__(self) -> None:
        check_options(self)


def inspect(options: InspectOptions, console: Console) -> None:
    """Show a checkpoint's layout, and its sync points and bytes per token beside the dense model's."""
    from ladderize.convert.inspection import inspect_checkpoint

    report = inspect_checkpoint(options.model, tp_size=options.tp_size)
    console.document(report.to_dict())
    if report.refusal is not None:
        console.warn(f"convert would refuse it: {report.refusal}")
    if options.layers:
        console.table(report.layers, right=["layer"])
        console.result("")
    for line in report.lines():
        console.prose(line, indent=12)
    console.result(f"\nper token, on each of {report.tp_size} ranks:")
    console.table(report.rows(), right=["dense", "this layout"])
