"""The command ``merge``: an adapter and its base become a checkpoint."""

from pathlib import Path

from ladderize.adapt.lora import read_adapter_config
from ladderize.adapt.options import MergeOptions
from ladderize.commands.shared import LOADING
from ladderize.console import Console, human_bytes


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
