"""``inspect``."""

from dataclasses import dataclass

from ladderize.choices import AS_JSON, REVISION, argument, option
from ladderize.commands.builder import MODELS, OUTPUT, GivenOptions, command
from ladderize.console import Console


@dataclass(frozen=True)
class InspectArguments:
    model: str = argument("MODEL", "A checkpoint: folder or hub id (only its .json files are downloaded).")
    tp_size: int | None = option("TP size to count bytes for.", min=2, shown="the layout's sync_tp_size, else up to 8")
    layers: bool = option("Print the table of all layers too.", False)
    revision: str | None = option(REVISION)
    as_json: bool = option(AS_JSON, False)


@command(InspectArguments, panels={OUTPUT: "tp_size layers json", MODELS: "revision"}, configurable=False)
def inspect(given: GivenOptions) -> None:
    """Show a checkpoint's layout, and its sync points and bytes per token beside the dense model's."""
    from ladderize.convert.inspection import inspect_checkpoint

    own = given.fill(InspectArguments)
    console = Console(own.as_json)
    report = inspect_checkpoint(own.model, revision=own.revision, tp_size=own.tp_size)
    console.document(report.to_dict())
    if report.refusal is not None:
        console.warn(f"convert would refuse it: {report.refusal}")
    if own.layers:
        console.table(report.layers, right=["layer"])
        console.result("")
    console.result(f"model       {report.model} ({report.model_type})")
    console.result(f"layout      {report.layout}")
    console.result(f"parameters  {report.parameters:,} stored as {report.dtype}")
    sizes = ", ".join(map(str, report.tp_sizes))
    if report.sync_tp_size is not None:
        sizes += f"; in groups, on ladderize's runtime, multiples of {report.sync_tp_size}"
    console.result(f"heads       {report.num_attention_heads}, KV heads {report.num_key_value_heads}; TP sizes {sizes}")
    if report.quantisation is not None:
        console.prose(f"quantised   {report.quantisation}", indent=12)
    for retraining in report.retrainings:
        console.prose(f"retrained   {retraining.summary()}", indent=12)
    console.result(f"\nper token, on each of {report.tp_size} ranks:")
    dense, this = report.dense.to_dict(), report.this.to_dict()
    rows = [
        {"": name, "dense": dense[key], "this layout": this[key]}
        for name, key in (
            ("blocking all-reduces", "blocking"),
            ("overlapped all-reduces", "overlapped"),
            ("delayed all-reduces", "delayed"),
            ("dropped sync points", "dropped"),
            ("bytes reduced", "reduced_bytes"),
            ("bytes sent (ring)", "sent_bytes"),
            ("of these, waited for", "exposed_sent_bytes"),
        )
    ]
    console.table(rows, right=["dense", "this layout"])
