"""The command ``adapt``: align, train layer by layer, or retrain the whole model."""

import importlib
from dataclasses import replace
from typing import cast

from ladderize.adapt.layers.options import AlignOptions, BlockwiseOptions
from ladderize.adapt.options import ALIGN, BLOCKS, LORA, AdaptOptions
from ladderize.choices import DeviceName
from ladderize.commands.shared import loading, show_layers, start_on, start_server
from ladderize.console import Console


def adapt(options: AdaptOptions, console: Console) -> None:
    """Retrain a converted checkpoint to win back accuracy, on text and on the dense model's predictions."""
    layers = layer_options(options)
    with loading(options, console):
        start_server(1 if options.dry_run else options.tp_size)
        importlib.import_module(f"ladderize.adapt.{'train.run' if layers is None else 'layers.rewrite'}")
    if options.dry_run:
        from ladderize.adapt.train.task import estimate_training

        document, text = estimate_training(options)
        console.document(document)
        console.prose(text)
        return
    device = start_on(cast("DeviceName | None", options.device))
    if layers is not None:
        from ladderize.adapt.layers.rewrite import adapt_layers

        layers = replace(layers, device=device)
        dense, overwrite, verify = str(options.distill_from), options.overwrite, options.verify
        rewritten = adapt_layers(
            options.model, str(options.out), dense, layers, overwrite=overwrite, verify=verify, console=console
        )
        if rewritten is not None:
            console.document(rewritten.to_dict())
            show_layers(console, rewritten)
        return
    from ladderize.adapt.train.run import adapt_checkpoint

    adaptation = adapt_checkpoint(replace(options, device=device), console=console)
    if adaptation is not None:
        console.document(adaptation.to_dict())
        console.result("\n".join(adaptation.summary()))
        merging = " (an adapter, which ladderize merge makes a checkpoint of)" if options.method == LORA else ""
        console.result(f"wrote {options.out}{merging}")


def layer_options(options: AdaptOptions) -> AlignOptions | BlockwiseOptions | None:
    """Return the options of a method that goes layer by layer; None for the others. The device is chosen later."""
    if options.method not in (ALIGN, BLOCKS):
        return None
    names = ("samples", "heldout", "seq_len", "dtype", "write", "seed")
    shared = {name: getattr(options, name) for name in names}
    shared |= {"data": options.data[0], "layers": options.train, "device": "cpu"}
    return AlignOptions(**shared) if options.method == ALIGN else BlockwiseOptions(**shared, lr=options.lr)
