"""``inspect``."""

from dataclasses import dataclass

from ladderize.choices import AS_JSON, REVISION, argument, option
from ladderize.commands.builder import MODELS, OUTPUT, GivenOptions, command
from ladderize.console import Console


@dataclass(frozen=True)
class InspectArguments:
    model: str = argument("MODEL", "A checkpoint: folder or hub id (only its .json files are downloaded).")
    tp_size: int | None = option("TP size to count bytes for.", min=2, shown="the layout's sync_tp_size, else up to 8")
    layers: bool = option("Print the table of all layers too.", False)
    revision: str | None = option(REVISION)
    as_json: bool = option(AS_JSON, False)


@command(InspectArguments, panels={OUTPUT: "tp_size layers json", MODELS: "revision"}, configurable=False)
def inspect(given: GivenOptions) -> None:
    """Show a checkpoint's layout, and its sync points and bytes per token beside the dense model's."""
    from ladderize.convert.inspection import inspect_checkpoint

    own = given.fill(InspectArguments)
    console = Console(own.as_json)
    report = inspect_checkpoint(own.model, revision=own.revision, tp_size=own.tp_size)
    console.document(report.to_dict())
    if report.refusal is not None:
        console.warn(f"convert would refuse it: {report.refusal}")
    if own.layers:
        console.table(report.layers, right=["layer"])
        console.result("")
    for line in report.lines():
        console.prose(line, indent=12)
    console.result(f"\nper token, on each of {report.tp_size} ranks:")
    console.table(report.rows(), right=["dense", "this layout"])
