"""What a conversion did, or would do: the document of ``ladderize convert --json``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ladderize.checkpoint.llama import parameter_count
from ladderize.convert.inspection import LayerSyncPoints, sync_points_by_layer
from ladderize.convert.plan import Plan
from ladderize.convert.selection import Selection
from ladderize.convert.verify import Verification
from ladderize.files.records import Record


@dataclass(frozen=True)
class ConversionReport(Record):
    """extra_files: added ones. checked: what the caller's own check of the output returned, if there was one.

    weights: how many files were linked, reflinked, copied and rewritten; like ``verified`` only of a written output.
    """

    LEFT_OUT: ClassVar = ("checked", "verified", "weights")

    source: str
    out: str
    layout: str
    layout_before: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    layers: list[LayerSyncPoints]
    parameters: int
    weight_bytes: int
    weight_files: list[str]
    weights_rewritten: bool
    weight_files_rewritten: list[str]
    permuted_layers: list[int]
    replaced_tensors: list[str]
    selection: Selection | None
    extra_files: list[str]
    carried_over: list[str]
    not_carried_over: list[str]
    remarks: list[str]
    warnings: list[str]
    checked: Mapping[str, Any] | None = None
    verified: Verification | None = None
    written: bool = False
    weights: dict[str, int] | None = None


def report_of(plan: Plan) -> ConversionReport:
    """The report of a plan that nothing was done of yet."""
    return ConversionReport(
        source=plan.source_name,
        out=str(plan.out),
        layout=str(plan.after),
        layout_before=str(plan.before),
        **plan.after.to_config(),
        layers=sync_points_by_layer(plan.after),
        parameters=parameter_count(plan.source.config),
        weight_bytes=plan.weight_bytes,
        weight_files=plan.weight_files,
        weights_rewritten=bool(plan.rewritten),
        weight_files_rewritten=[shard.file for shard in plan.rewritten],
        permuted_layers=plan.changes.permuted_layers,
        replaced_tensors=plan.changes.replaced_tensors,
        selection=plan.selection,
        extra_files=sorted(plan.changes.extra_files),
        carried_over=[str(path) for path in plan.carried],
        not_carried_over=plan.left_behind,
        remarks=plan.remarks,
        warnings=plan.warnings,
    )
