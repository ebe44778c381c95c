"""The command ``adapt``: align, or train layer by layer, or retrain the whole model."""

import importlib
from dataclasses import replace

from ladderize.adapt.layers.options import AlignOptions, BlockwiseOptions
from ladderize.adapt.methods import ALIGN, BLOCKS, LORA
from ladderize.adapt.options import AdaptOptions
from ladderize.commands.builder import (
    DATA,
    MEMORY,
    METHOD,
    OPTIMISATION,
    OUTPUT,
    VALIDATION,
    GivenOptions,
    command,
)
from ladderize.commands.shared import loading, show_layers, start_on, start_server
from ladderize.console import Console


@command(
    AdaptOptions,
    panels={
        DATA: "data seq_len samples seed",
        METHOD: "method distill_from train distill_weight align lora_rank lora_alpha lora_dropout lora_targets",
        OPTIMISATION: "max_tokens max_steps batch_size lr lr_schedule warmup_steps weight_decay max_grad_norm",
        VALIDATION: "eval_data heldout eval_every write",
        MEMORY: "dry_run micro_batch_size gradient_checkpointing teacher_cache tp_size schedule dtype device",
        OUTPUT: "log_with overwrite no_verify json",
    },
)
def adapt(given: GivenOptions) -> None:
    """Retrain a converted checkpoint to win back accuracy, on text and on the dense model's predictions."""
    options = given.fill(AdaptOptions)
    layer_by_layer = layer_options(options) if options.method in (ALIGN, BLOCKS) else None
    console = Console(options.as_json)
    with loading(given, console):
        start_server(1 if options.dry_run else options.tp_size)
        importlib.import_module(f"ladderize.adapt.{'train.run' if layer_by_layer is None else 'layers.rewrite'}")
    if options.dry_run:
        from ladderize.adapt.train.memory import estimate_training

        document, text = estimate_training(options)
        console.document(document)
        console.prose(text)
        return
    device = start_on(options.device, None)
    if layer_by_layer is None:
        retrain(replace(options, device=device), console)
    else:
        rewrite(options, replace(layer_by_layer, device=device), console)


def layer_options(options: AdaptOptions) -> AlignOptions | BlockwiseOptions:
    shared = {name: getattr(options, name) for name in ("samples", "heldout", "seq_len", "dtype", "write", "seed")}
    shared |= {"data": options.data[0], "layers": options.train, "device": "cpu"}
    return AlignOptions(**shared) if options.method == ALIGN else BlockwiseOptions(**shared, lr=options.lr)


def rewrite(options: AdaptOptions, layers: AlignOptions | BlockwiseOptions, console: Console) -> None:
    from ladderize.adapt.layers.rewrite import adapt_layers

    dense, switches = str(options.distill_from), {"overwrite": options.overwrite, "verify": options.verify}
    document = adapt_layers(options.model, str(options.out), dense, layers, console=console, **switches)
    if document is not None:
        console.document(document.to_dict())
        show_layers(console, document)


def retrain(options: AdaptOptions, console: Console) -> None:
    from ladderize.adapt.train.run import adapt_checkpoint

    adaptation = adapt_checkpoint(options, console=console)
    if adaptation is not None:
        console.document(adaptation.to_dict())
        console.result("\n".join(adaptation.summary()))
        merging = " (an adapter, which ladderize merge makes a checkpoint of)" if options.method == LORA else ""
        console.result(f"wrote {options.out}{merging}")
