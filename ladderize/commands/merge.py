"""``merge``."""

from dataclasses import dataclass
from pathlib import Path

from ladderize.adapt.lora import read_adapter_config
from ladderize.choices import AS_JSON, NO_VERIFY, OVERWRITE, REVISION, argument, option
from ladderize.commands.builder import MODELS, OUTPUT, GivenOptions, command
from ladderize.commands.shared import LOADING
from ladderize.console import Console, human_bytes


@dataclass(frozen=True)
class MergeArguments:
    adapter: str = argument("ADAPTER", "A LoRA adapter folder. It is never changed.")
    out: str = argument("OUT", "The checkpoint folder to write. It appears whole or not at all.")
    base: str | None = option(
        "The checkpoint that ADAPTER was trained on.", metavar="MODEL", shown="the one that ADAPTER names"
    )
    overwrite: bool = option(OVERWRITE, False)
    verify: bool = option(NO_VERIFY, True)
    revision: str | None = option(REVISION)
    as_json: bool = option(AS_JSON, False)


@command(MergeArguments, panels={MODELS: "base revision", OUTPUT: "overwrite no_verify json"}, configurable=False)
def merge(given: GivenOptions) -> None:
    """Merge a LoRA adapter into its base model, and write an ordinary checkpoint."""
    own = given.fill(MergeArguments)
    console = Console(own.as_json)
    read_adapter_config(Path(own.adapter).expanduser())
    with console.stage(LOADING):
        from ladderize.adapt.train.merge import merge as merge_adapter
    options = {key: value for key, value in vars(own).items() if key not in ("as_json", "out")}
    report = merge_adapter(out=own.out, console=console, **options)
    console.document(report.to_dict())
    how = " and ".join(f"{count} {how}" for how, count in (report.weights or {}).items())
    console.result(f"merged   {len(report.replaced_tensors)} tensors of {report.source}")
    console.result(f"layout   {report.layout}")
    console.result(f"weights  {human_bytes(report.weight_bytes)} in {len(report.weight_files)} files, {how}")
    console.result(f"wrote {own.out}")
