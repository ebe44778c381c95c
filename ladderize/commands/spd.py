"""Make a Sync-Point Drop checkpoint, and show what it costs."""

from dataclasses import replace

from ladderize.adapt.layers.options import SpdOptions
from ladderize.commands.shared import loading, show_layers, start_on
from ladderize.console import Console


def spd(options: SpdOptions, console: Console) -> None:
    """Sync-Point Drop in one command: measure sensitivity, drop, assign heads and neurons to ranks, and repair."""
    with loading(options, console):
        device = start_on(options.device)
        from ladderize.adapt.layers.rewrite import spd as make_spd
    document = make_spd(replace(options, device=device), console=console)
    if document is None:
        return
    console.document(document.to_dict())
    rows = [
        {"block": str(block.block), "S": f"{block.sensitivity:+.4f}", "sync": "dropped" if block.dropped else "kept"}
        for block in document.spd or ()
    ]
    console.table(rows, right=["block", "S"])
    console.result("")
    show_layers(console, document)
