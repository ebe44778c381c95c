"""The commands ``sensitivity`` and ``spd``, which measure layers, and ``adapt`` and ``merge``, which repair a model."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ladderize.adapt.layers.options import AlignOptions, BlockwiseOptions, SensitivityOptions, SpdOptions
from ladderize.adapt.lora import read_adapter_config
from ladderize.adapt.options import ALIGN, BLOCKS, LORA, AdaptOptions, MergeOptions
from ladderize.choices import DeviceName
from ladderize.commands.shared import LOADING, command_line, loading, start_on, start_server
from ladderize.console import Console, human_bytes
from ladderize.convert.sensitivity_file import cheapest_half, cost_rows, summary
from ladderize.files.regular import resolved

if TYPE_CHECKING:
    from ladderize.adapt.layers.rewrite import LayersDocument


def sensitivity(options: SensitivityOptions, console: Console) -> None:
    """Measure what each layer of a dense model costs when its sync points are overlapped or dropped."""
    with loading(options, console):
        device = start_on(options.device)
        from ladderize.adapt.layers.sensitivity import write_sensitivity
    document = write_sensitivity(replace(options, device=device), console=console)
    console.document(document.to_dict())
    rows = cost_rows(document)
    console.table(rows, right=[*rows[0]])
    for line in summary(document):
        console.prose(line)
    console.note(f"wrote {options.out}")
    kind, changed = cheapest_half(document)
    made = f"{resolved(options.model).name}-{kind}"  # in the current folder, also for "." and hub ids
    console.result(f"next, the half that costs least: {command_line('convert', options.model, made, *changed)}")


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
    show_layers(document, console)


def adapt(options: AdaptOptions, console: Console) -> None:
    """Retrain a converted checkpoint to win back accuracy, on text and on the dense model's predictions."""
    layers = layer_options(options)
    with loading(options, console):
        start_server(1 if options.dry_run else options.tp_size)
        if layers is not None:
            from ladderize.adapt.layers.rewrite import adapt_layers
        else:
            from ladderize.adapt.train.run import adapt_checkpoint
            from ladderize.adapt.train.task import estimate_training
    if options.dry_run:
        document, text = estimate_training(options)
        console.document(document)
        console.prose(text)
        return
    device = start_on(cast("DeviceName | None", options.device))
    if layers is not None:
        rewritten = adapt_layers(
            options.model,
            str(options.out),
            str(options.distill_from),
            replace(layers, device=device),
            overwrite=options.overwrite,
            verify=options.verify,
            console=console,
        )
        if rewritten is not None:
            console.document(rewritten.to_dict())
            show_layers(rewritten, console)
        return
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


def show_layers(document: "LayersDocument", console: Console) -> None:
    """Print what happened to each layer, and the measures of the model before and after."""
    from ladderize.adapt.layers.rewrite import METHODS

    rows = [report.row() for report in document.layers]
    console.table(rows, right=[next(iter(rows[0]))])
    console.prose(METHODS[document.method].errors)
    console.result("")
    console.table(document.measured_rows(), right=["perplexity", "stderr", "KL to dense"])
    console.prose(document.target)
    console.result(f"wrote {document.out}")


def merge(options: MergeOptions, console: Console) -> None:
    """Merge a LoRA adapter into its base model, and write an ordinary checkpoint."""
    read_adapter_config(Path(options.adapter).expanduser())
    with console.stage(LOADING):
        from ladderize.adapt.train.merge import merge as merge_adapter
    report = merge_adapter(options, console=console)
    console.document(report.to_dict())
    files = " and ".join(f"{count} {written}" for written, count in (report.weights or {}).items())
    console.result(f"merged   {len(report.replaced_tensors)} tensors of {report.source}")
    console.result(f"layout   {report.layout}")
    console.result(f"weights  {human_bytes(report.weight_bytes)} in {len(report.weight_files)} files, {files}")
    console.result(f"wrote {options.out}")
