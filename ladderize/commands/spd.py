"""``spd``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ladderize
from ladderize.adapt.layers.options import SpdOptions
from ladderize.choices import AS_JSON, NO_VERIFY, OVERWRITE, THREADS, argument, option
from ladderize.commands.builder import (
    DATA,
    LAYOUT,
    MEASUREMENT,
    MEMORY,
    METHOD,
    MODELS,
    OPTIMISATION,
    OUTPUT,
    GivenOptions,
    command,
)
from ladderize.commands.shared import LOADING, command_line, retrain_command, scoring_file, show_next, start_on
from ladderize.console import Console

if TYPE_CHECKING:
    from ladderize.adapt.layers.spd import SpdBlock, SpdDocument


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
        LAYOUT: "sync_tp_size spd_fraction max_ppl_increase",
        DATA: "data calibration_samples samples heldout seq_len seed",
        MEASUREMENT: "tau1 tau2",
        METHOD: "repair head_grouping",
        OPTIMISATION: "epochs patience lr batch_size",
        MEMORY: "dtype device threads",
        OUTPUT: "work_dir overwrite no_verify json",
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
    adapted = f"{own.out.rstrip('/')}-adapted"
    show_next(
        console,
        ("measure it", command_line("eval", own.model, own.out, "--perplexity", scoring_file([]))),
        ("retrain it", retrain_command(own.out, adapted, own.model, options.data, align=False)),
    )


def spd_rows(document: "SpdDocument") -> list[dict[str, str]]:
    """Return the table's row of each block. Steps that no block got have no column."""
    columns: dict[str, Callable[[SpdBlock], str]] = {
        "block": lambda row: str(row.block),
        "S": lambda row: f"{row.sensitivity:+.4f}",
        "class": lambda row: row.sensitivity_class,
        "attention sync": lambda row: "dropped" if row.selected else "kept",
        "head grouping: error": lambda row: (
            f"{row.grouping.error_before:.2e} to {row.grouping.error_after:.2e}" if row.grouping else ""
        ),
        "alignment: error of the MLP's writes": lambda row: (
            "{error_before:.1%} to {error_after:.1%}".format(**vars(row.alignment.projections[-1]))
            if row.alignment
            else ""
        ),
        "distillation: block error": lambda row: (
            f"{row.distillation.share_lost_before:.2%} to {row.distillation.share_lost_after:.2%}"
            if row.distillation
            else ""
        ),
    }
    cells = {name: [text(row) for row in document.blocks] for name, text in columns.items()}
    shown = {name: texts for name, texts in cells.items() if any(texts)}
    return [{name: texts[number] for name, texts in shown.items()} for number in range(len(document.blocks))]
