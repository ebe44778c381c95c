"""``spd``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from ladderize.commands.shared import LOADING, start_on
from ladderize.console import Console

if TYPE_CHECKING:
    from ladderize.adapt.layers.spd import SpdDocument


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
        DATA: "data calibration_samples samples heldout seq_len seed",
        METHOD: "repair head_grouping",
        OPTIMISATION: "epochs patience lr batch_size",
        MEMORY: "dtype device threads",
        OUTPUT: "overwrite no_verify json",
        MODELS: "revision",
    },
)
def spd(given: GivenOptions) -> None:
    """Sync-Point Drop in one command: measure sensitivity, drop, regroup heads, repair, and show what each step won."""
    own = given.fill(SpdArguments)
    console = Console(own.as_json)
    if given.params["repair"] == "align":
        given.refuse(("epochs", "patience", "lr", "batch_size"), "with --repair align, which trains nothing")
    with console.stage(LOADING):
        device = start_on(given.params["device"], own.threads)
        from ladderize.adapt.layers.distill import BLOCK_ERROR
        from ladderize.adapt.layers.rewrite import perplexity_rows

    options = given.fill(SpdOptions, device=device)
    document = ladderize.spd(own.model, own.out, options, console=console, overwrite=own.overwrite, verify=own.verify)
    if document is None:
        return
    console.document(document.to_dict())
    console.table(spd_rows(document), right=["block", "S"])
    if any(block.distillation for block in document.blocks):
        console.prose(BLOCK_ERROR)
    console.result("")
    console.table(
        perplexity_rows(document.perplexity, document.divergence),
        right=["perplexity", "stderr", "difference", "KL to dense"],
    )
    console.result(f"wrote {own.out}")


def spd_rows(document: "SpdDocument") -> list[dict[str, str]]:
    """Return the table's row of each block. Steps that no block got have no column."""
    rows = [
        {
            "block": str(block.block),
            "S": f"{block.sensitivity:+.4f}",
            "attention sync": "dropped" if block.dropped else "kept",
            "head grouping: error": _change(block.grouping, "error_{}", ".2e"),
            "alignment: error of the MLP's writes": _change(
                None if block.alignment is None else block.alignment.projections[-1], "error_{}", ".1%"
            ),
            "distillation: block error": _change(block.distillation, "share_lost_{}", ".2%"),
        }
        for block in document.blocks
    ]
    return [{name: text for name, text in row.items() if any(other[name] for other in rows)} for row in rows]


def _change(report: object, name: str, form: str) -> str:
    """Return a figure of a report before and after; empty where there is no report."""
    if report is None:
        return ""
    return " to ".join(format(getattr(report, name.format(when)), form) for when in ("before", "after"))
