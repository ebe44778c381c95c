"""``adapt``."""

import importlib
from dataclasses import dataclass, replace
from typing import Any

from ladderize.adapt.layers.options import AlignOptions, BlockwiseOptions
from ladderize.adapt.methods import ALIGN, BLOCKS, FULL, LORA, Method
from ladderize.adapt.train.options import RetrainOptions
from ladderize.choices import AS_JSON, NO_VERIFY, OVERWRITE, DeviceName, argument, check_options, flag, option
from ladderize.commands.builder import (
    DATA,
    MEMORY,
    METHOD,
    OPTIMISATION,
    OUTPUT,
    VALIDATION,
    GivenOptions,
    command,
    names_of,
)
from ladderize.commands.shared import loading, show_layers, start_on, start_server
from ladderize.console import Console
from ladderize.data.files import HUB
from ladderize.errors import UsageError
from ladderize.ranks.device import default_device


@dataclass(frozen=True)
class AdaptArguments:
    """The options of every method. Those without a description are described at RetrainOptions."""

    model: str = argument(
        "MODEL", "A converted checkpoint, or with --train a dense one: folder or hub id. It is never changed."
    )
    out: str | None = argument("OUT", "The folder to write. It appears whole or not at all.", None)
    method: Method = FULL
    train: str | None = None
    distill_from: str | None = None
    device: DeviceName | None = None
    dry_run: bool = option("full, lora: show the memory and disk it takes, and stop. No weights are read.", False)
    overwrite: bool = option(OVERWRITE, False, help="Replace OUT if it is a checkpoint (lora: an adapter).")
    verify: bool = option(NO_VERIFY, True)
    as_json: bool = option(AS_JSON, False)


OPTIONS: dict[Method, type] = {
    FULL: RetrainOptions,
    LORA: RetrainOptions,
    ALIGN: AlignOptions,
    BLOCKS: BlockwiseOptions,
}


@command(
    AdaptArguments,
    *(RetrainOptions, AlignOptions, BlockwiseOptions),
    panels={
        DATA: "data seq_len samples seed",
        METHOD: "method distill_from train distill_weight align lora_rank lora_alpha lora_dropout lora_targets",
        OPTIMISATION: "max_tokens max_steps batch_size lr lr_schedule warmup_steps weight_decay max_grad_norm",
        VALIDATION: "eval_data heldout eval_every write",
        MEMORY: "dry_run micro_batch_size gradient_checkpointing teacher_cache tp_size schedule dtype device",
        OUTPUT: "log_with overwrite no_verify json",
    },
    left_out="epochs",
)
def adapt(given: GivenOptions) -> None:
    """Retrain a converted checkpoint to win back accuracy, on text and on the dense model's predictions."""
    own = given.fill(AdaptArguments)
    check_options(own)
    if own.out is None and not own.dry_run:
        raise UsageError("OUT is missing: name the folder to write")
    console = Console(own.as_json)
    options = adapt_options(given)
    with loading(given, console):
        options = replace(options, device=own.device or default_device())
        start_server(1 if own.dry_run else given.params["tp_size"])
        importlib.import_module(f"ladderize.adapt.{'layers.rewrite' if own.method in (ALIGN, BLOCKS) else 'train.run'}")
    if isinstance(options, AlignOptions | BlockwiseOptions):
        _rewrite(own, options, console)
    else:
        _retrain(own, options, console)


def adapt_options(given: GivenOptions) -> RetrainOptions | AlignOptions | BlockwiseOptions:
    """Return the options of the method, by default on the CPU, after all checks that need nothing else. Raises
    UsageError."""
    own = given.fill(AdaptArguments)
    heeded = names_of(AdaptArguments) | names_of(OPTIONS[own.method]) | {"config"}
    for name in given.names:
        if name not in heeded:
            raise UsageError(f"{flag(name)} has no effect with --method {own.method}")
    if own.method in (FULL, LORA):
        options = given.fill(RetrainOptions, device=own.device or "cpu")
        options.check_usage()
        return options
    data = given.params["data"]
    if own.distill_from is None or len(data) > 1 or data[0].startswith(HUB) or own.dry_run:
        raise UsageError(
            f"--method {own.method} needs --distill-from DENSE, the checkpoint that MODEL was converted from, and one"
            " --data file; it has no --dry-run"
        )
    filled: AlignOptions | BlockwiseOptions = given.fill(
        OPTIONS[own.method], data=data[0], layers=own.train, device=own.device or "cpu"
    )
    return filled


def _rewrite(own: AdaptArguments, options: AlignOptions | BlockwiseOptions, console: Console) -> None:
    """Align, or train blocks."""
    out, dense = own.out, own.distill_from
    assert out is not None
    assert dense is not None
    start_on(own.device, None)
    from ladderize.adapt.layers.rewrite import adapt_layers

    how: dict[str, Any] = {"overwrite": own.overwrite, "verify": own.verify, "console": console}
    document = adapt_layers(own.model, out, dense, options, **how)
    if document is None:
        return
    console.document(document.to_dict())
    show_layers(console, document)


def _retrain(own: AdaptArguments, options: RetrainOptions, console: Console) -> None:
    """Retrain the whole model, or with --dry-run show what it takes."""
    from ladderize.adapt.train.memory import estimate_training
    from ladderize.adapt.train.run import adapt_checkpoint

    if own.dry_run:
        document, text = estimate_training(own.model, options)
        console.document(document)
        console.prose(text)
        return
    start_on(own.device, None)
    out = own.out
    assert out is not None
    adaptation = adapt_checkpoint(own.model, out, options, console=console, overwrite=own.overwrite, verify=own.verify)
    if adaptation is None:
        return
    console.document(adaptation.to_dict())
    console.result("\n".join(adaptation.summary()))
    merging = " (an adapter, which ladderize merge makes a checkpoint of)" if options.method == LORA else ""
    console.result(f"wrote {out}{merging}")
