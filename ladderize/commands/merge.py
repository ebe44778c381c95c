"""``merge``."""

from typing import Annotated

import typer

from ladderize.commands.next_steps import FILE, command, show_next
from ladderize.commands.options import LOADING, MODELS, AsJson, NoVerify, Overwrite, Revision
from ladderize.console import Console, human_bytes
from ladderize.errors import UsageError
from ladderize.layout import format_ranges


def merge(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A LoRA adapter folder. It is never changed.")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="The checkpoint folder to write. It appears whole or not at all.")
    ],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The checkpoint that ADAPTER was trained on.",
            show_default="the one that ADAPTER names",
            rich_help_panel=MODELS,
        ),
    ] = None,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Merge a LoRA adapter into its base model. The logits are compared with PEFT's before OUT appears."""
    if not out.strip():
        raise UsageError("OUT is empty; name the folder to write")
    if not adapter.strip():
        raise UsageError("ADAPTER is empty; name the folder of a PEFT adapter")
    console = Console(as_json)
    with console.stage(LOADING):
        from ladderize.adapt.merge.run import merge as merge_adapter
    report = merge_adapter(
        adapter, out, base=base, console=console, overwrite=overwrite, verify=not no_verify, revision=revision
    )
    console.document(report.to_dict())
    how = " and ".join(f"{count} {how}" for how, count in report.weights.items())
    console.result(
        f"merged   {len(report.merged_tensors)} tensors in layers {format_ranges(report.layers)} of {report.base}"
    )
    console.result(f"layout   {report.layout}")
    console.result(f"weights  {human_bytes(report.weight_bytes)} in {len(report.weight_files)} files, {how}")
    console.prose(
        f"logits   largest difference to PEFT's: {report.max_abs_logit_difference:.2g} (of which rounding of the merged"
        f" weights: {report.max_abs_logit_difference_of_rounding:.2g}); largest logit: {report.max_abs_logit:.3g}",
        indent=9,
    )
    console.result(f"wrote {out}")
    show_next(console, ("measure it", command("eval", report.base, out, "--perplexity", FILE)))
