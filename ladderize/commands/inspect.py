"""Show what a checkpoint is."""

from dataclasses import dataclass

from ladderize.choices import OUTPUT, REVISION, argument, check_options, option
from ladderize.console import Console


@dataclass(frozen=True)
class InspectOptions:
    model: str = argument("MODEL", "A checkpoint: folder or hub id (only its .json files are downloaded).")
    tp_size: int | None = option(
        "TP size to count bytes for.", panel=OUTPUT, min=2, shown="the layout's sync_tp_size, else up to 8"
    )
    layers: bool = option("Print the table of all layers too.", False, panel=OUTPUT)
    revision: str | None = option(REVISION)

    def __post_init__(self) -> None:
        check_options(self)


def inspect(options: InspectOptions, console: Console) -> None:
    """Show a checkpoint's layout, and its sync points and bytes per token beside the dense model's."""
    from ladderize.convert.inspection import inspect_checkpoint

    report = inspect_checkpoint(options.model, revision=options.revision, tp_size=options.tp_size)
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
