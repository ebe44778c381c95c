"""``spd``."""

from dataclasses import dataclass

import ladderize
from ladderize.adapt.layers.options import SpdOptions
from ladderize.choices import AS_JSON, NO_VERIFY, OVERWRITE, THREADS, argument, option
from ladderize.commands.builder import (
    DATA,
    LAYOUT,
    MEMORY,
    METHOD,
    MODELS,
    OPTIMISATION,
    OUTPUT,
    GivenOptions,
    command,
)
from ladderize.commands.shared import loading, show_layers, start_on
from ladderize.console import Console


@dataclass(frozen=True)
class SpdArguments:
    model: str = argument("MODEL", "A dense checkpoint: folder or hub id. It is never changed.")
    out: str = argument("OUT", "The folder to write. It appears whole or not at all.")
    threads: int | None = option(THREADS)
    overwrite: bool = option(OVERWRITE, False)
    verify: bool = option(NO_VERIFY, True)
    as_json: bool = option(AS_JSON, False)


@command(
    SpdArguments,
    SpdOptions,
    panels={
        LAYOUT: "sync_tp_size spd_fraction",
        DATA: "data samples heldout seq_len seed",
        METHOD: "repair assign",
        OPTIMISATION: "epochs lr",
        MEMORY: "dtype device threads",
        OUTPUT: "overwrite no_verify json",
        MODELS: "revision",
    },
)
def spd(given: GivenOptions) -> None:
    """Sync-Point Drop in one command: measure sensitivity, drop, assign heads and neurons to ranks, and repair."""
    own = given.fill(SpdArguments)
    console = Console(own.as_json)
    if given.params["repair"] == "align":
        given.refuse(("epochs", "lr"), "with --repair align, which trains nothing")
    with loading(given, console):
        device = start_on(given.params["device"], own.threads)
    options = given.fill(SpdOptions, device=device)
    document = ladderize.spd(own.model, own.out, options, console=console, overwrite=own.overwrite, verify=own.verify)
    if document is None:
        return
    console.document(document.to_dict())
    rows = [
        {"block": str(each.block), "S": f"{each.sensitivity:+.4f}", "sync": "dropped" if each.dropped else "kept"}
        for each in document.spd or ()
    ]
    console.table(rows, right=["block", "S"])
    console.result("")
    show_layers(console, document)
