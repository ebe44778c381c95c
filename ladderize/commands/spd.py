"""``spd``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ladderize
from ladderize.choices import (
    AS_JSON,
    DEVICE,
    LOWER_TAU,
    NO_VERIFY,
    OVERWRITE,
    REVISION,
    SEQ_LEN,
    THREADS,
    UPPER_TAU,
    DeviceName,
    Dtype,
    argument,
    flag,
    option,
)
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
from ladderize.commands.next_steps import command_line, retrain_command, scoring_file, show_next
from ladderize.commands.options import (
    COMPUTE_DTYPE,
    LOADING,
    TRAINING_SEED,
    WORK_DIR,
    memory_limit,
    start_training_on,
)
from ladderize.console import Console
from ladderize.errors import UsageError


@dataclass(frozen=True)
class SpdArguments:
    model: str = argument("MODEL", "A dense checkpoint: folder or hub id. It is never changed.")
    out: str = argument("OUT", "The folder to write. It appears whole or not at all.")
    sync_tp_size: int = option(
        "TP size that OUT is made for (virtual ranks). It also runs on TP sizes that divide it.", ..., min=2
    )
    data: str = option("jsonl, parquet, txt, npy, npz:array, or a glob of one kind.", ..., metavar="FILE")
    spd_fraction: float | None = option("Fraction of all blocks to drop, least sensitive first.", shown="0.7")
    max_ppl_increase: float | None = option(
        "Instead: drop blocks while their summed sensitivities stay within this perplexity."
    )
    tau1: float | None = option(LOWER_TAU)
    tau2: float = option(UPPER_TAU, 10.0)
    repair: Literal["align", "blocks", "align+blocks"] = option(
        "align: solve the projections from the first dropped block on by least squares. blocks: distil each dropped"
        " block, as in the paper. align+blocks: the one, then the other.",
        "align",
    )
    distill: Literal["all", "sensitive"] = option(
        "Dropped blocks to repair. sensitive: not the insensitive ones, as in the paper.", "all"
    )
    head_grouping: Literal["error", "paper", "none"] = option(
        "Regroup attention heads over ranks. error: of every distilled block, to minimise its output error. paper: of"
        " extremely sensitive blocks, by the paper's criterion.",
        "error",
    )
    calibration_samples: int = option("Windows for sensitivity and head grouping, out of --samples.", 128, min=1)
    samples: int | None = option("Windows to train on.", min=1, shown="what the data give, up to 1024")
    heldout: int | None = option(
        "Windows to hold out for early stopping and for the table.", min=1, shown="a tenth, up to 64"
    )
    seq_len: int | None = option(SEQ_LEN)
    seed: int = option(TRAINING_SEED, 0)
    epochs: int = option("Most epochs per block; see --patience.", 10, min=1)
    patience: int = option("A block stops after this many epochs without a better held-out loss.", 2, min=1)
    lr: float | None = option("Peak learning rate.", shown="5e-5 * 4096 / hidden size")
    batch_size: int | None = option("Windows per step.", min=1, shown="2048 tokens")
    max_memory: str | None = option(
        "Memory for the dense model's states, per process. What is beyond it goes to disk.",
        metavar="SIZE",
        shown="8GB",
    )
    dtype: Dtype = option(COMPUTE_DTYPE, "auto")
    device: DeviceName | None = option(DEVICE)
    threads: int | None = option(THREADS)
    work_dir: Path | None = option(WORK_DIR)
    overwrite: bool = option(OVERWRITE, False)
    verify: bool = option(NO_VERIFY, True)
    revision: str | None = option(REVISION)
    as_json: bool = option(AS_JSON, False)


@command(
    SpdArguments,
    panels={
        LAYOUT: "sync_tp_size spd_fraction max_ppl_increase",
        DATA: "data calibration_samples samples heldout seq_len seed",
        MEASUREMENT: "tau1 tau2",
        METHOD: "repair distill head_grouping",
        OPTIMISATION: "epochs patience lr batch_size",
        MEMORY: "max_memory dtype device threads",
        OUTPUT: "work_dir overwrite no_verify json",
        MODELS: "revision",
    },
    short="spd_fraction max_ppl_increase repair head_grouping samples seq_len dtype device overwrite json config",
)
def spd(given: GivenOptions) -> None:
    """Sync-Point Drop in one command: measure sensitivity, drop, regroup heads, repair, and show what each step won."""
    own = given.fill(SpdArguments)
    console = Console(own.as_json)
    for name in ("epochs", "patience", "lr", "batch_size"):
        if own.repair == "align" and name in given.names:
            raise UsageError(f"{flag(name)} has no effect with --repair align, which trains nothing")
    with console.stage(LOADING):
        device = start_training_on(own.device, own.threads)
        from ladderize.adapt.blockwise.distill import BLOCK_ERROR
        from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
        from ladderize.adapt.blockwise.rewrite import perplexity_rows
        from ladderize.workflows.spd import SpdOptions
        from ladderize.workflows.spd_document import spd_rows

    distillation = given.fill(DistillOptions, max_memory=memory_limit(own.max_memory))
    training = given.fill(BlockwiseOptions, distill=distillation, device=device)
    options = given.fill(SpdOptions, training=training)
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
        ("retrain it", retrain_command(own.out, adapted, own.model, own.data, align=False)),
    )
