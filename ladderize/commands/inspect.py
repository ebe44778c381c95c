"""``inspect``."""

from typing import Annotated

import typer

from ladderize.commands.options import OUTPUT, AsJson, Revision
from ladderize.console import Console


def inspect(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A checkpoint: folder or hub id (only its .json files are downloaded)."),
    ],
    tp_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="TP size to count bytes for.",
            show_default="the layout's sync_tp_size, else up to 8",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Print the table of all layers too.", rich_help_panel=OUTPUT)
    ] = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Show a checkpoint's layout, and its sync points and bytes per token beside the dense model's."""
    from ladderize.convert.inspection import inspect_checkpoint

    console = Console(as_json)
    report = inspect_checkpoint(model, revision=revision, tp_size=tp_size)
    console.document(report.to_dict())
    if layers:
        console.table([layer.to_dict() for layer in report.layers], right=["layer"])
        console.result("")
    console.result(f"model       {report.model} ({report.model_type})")
    console.result(f"layout      {report.layout}")
    console.result(f"parameters  {report.parameters:,} stored as {report.dtype}")
    for retraining in report.retrainings:
        console.prose(f"retrained   {retraining.summary()}", indent=12)
    console.result(f"\nper token, on each of {report.tp_size} ranks:")
    dense, this = report.dense.to_dict(), report.this.to_dict()
    rows = [
        {"": name, "dense": dense[key], "this layout": this[key]}
        for name, key in (
            ("blocking all-reduces", "blocking"),
            ("overlapped all-reduces", "overlapped"),
            ("dropped sync points", "dropped"),
            ("bytes reduced", "reduced_bytes"),
            ("bytes sent (ring)", "sent_bytes"),
            ("of these, waited for", "exposed_sent_bytes"),
        )
    ]
    console.table(rows, right=["dense", "this layout"])
