"""The conversion of a checkpoint: plan, write, verify, rename into place."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ladderize import __version__
from ladderize.checkpoint.config import parameter_count
from ladderize.checkpoint.tensors import fingerprint
from ladderize.checkpoint.writing import write_checkpoint
from ladderize.console import SCHEMA_VERSION, SILENT, Console
from ladderize.convert.card import make_card, source_card
from ladderize.convert.plan import RECORD, Changes, Plan, make_plan
from ladderize.convert.recipe import Recipe
from ladderize.convert.verify import Verification
from ladderize.convert.verify import verify as verify_output
from ladderize.families.registry import family_of
from ladderize.files import output
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.layout import CONFIG_KEYS, Layout
from ladderize.modeling import auto_map

REMOTE_CODE = Path(__file__).parent / "remote_code"


@dataclass(frozen=True)
class ConversionReport(Record):
    """The document of ``ladderize convert``.

    weights: how many files were linked, copied and rewritten; like ``verified`` only of a written output.
    """

    LEFT_OUT: ClassVar = ("verified", "weights")

    source: str
    out: str
    layout: str
    layout_before: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    layers: list[dict[str, Any]]
    parameters: int
    weight_bytes: int
    weight_files: list[str]
    weight_files_rewritten: list[str]
    moved_heads: list[int]
    moved_neurons: list[int]
    replaced_tensors: list[str]
    extra_files: list[str]
    carried_over: list[str]
    not_carried_over: list[str]
    warnings: list[str]
    written: bool = False
    verified: Verification | None = None
    weights: dict[str, int] | None = None


def convert_checkpoint(
    src: str | Path,
    out: str | Path,
    recipe: Recipe | Layout,
    changes: Changes | None = None,
    *,
    revision: str | None = None,
    copy: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    console: Console = SILENT,
) -> ConversionReport:
    """Convert the checkpoint ``src`` (a folder or a hub id) into the folder ``out``; return a report.

    The output appears whole or not at all, and ``src`` is never touched. Weight files that do not change are
    hard-linked where possible; ``copy=True`` copies them.

    recipe: what to do, or just the layout to make.
    changes: changes besides the layout.
    Raises UserError, LayoutError or OSError, each with a message for the user.
    """
    if not dry_run:
        output.clean_up(resolved(out, "OUT "))
    plan = make_plan(str(src), Path(out), recipe, revision=revision, overwrite=overwrite, changes=changes or Changes())
    report = report_of(plan)
    if dry_run:
        return report
    verified: list[Verification] = []

    def examine(folder: Path) -> None:
        if verify:
            problem = plan.quantisation.not_run if plan.quantisation is not None else None
            how = f"class and tensors alone: {problem}" if problem else "loading the output in plain transformers"
            with console.stage(f"verifying: {how}"):
                verified.append(verify_output(folder, plan.weight_bytes, plan.quantisation))

    how = write_checkpoint(
        plan.source.folder,
        plan.shards,
        plan.out,
        copied=copied_files(plan),
        texts=made_files(plan),
        copy=copy,
        overwrite=overwrite,
        check=examine,
        console=console,
    )
    return replace(report, verified=verified[0] if verified else None, written=True, weights=dict(how))


def copied_files(plan: Plan) -> dict[str, Path]:
    """Return the files of the output that are copied byte for byte, by name."""
    copied = {name: plan.source.folder / name for name in plan.carried}
    if not plan.after.is_dense:
        copied |= {path.name: path for path in REMOTE_CODE.glob("*_ladderized.py")}
    if (card := source_card(plan.source.folder)) is not None:
        copied["README.source.md"] = card
    return copied


def made_files(plan: Plan) -> dict[str, str]:
    """Return the texts of the files that are made for the output, by name."""
    return {
        **plan.without_code,
        **plan.changes.extra_files,
        "config.json": json.dumps(make_config(plan), indent=2, allow_nan=False) + "\n",
        RECORD: yaml.safe_dump(make_record(plan), sort_keys=False, allow_unicode=True),
        "README.md": make_card(plan),
    }


def make_config(plan: Plan) -> dict[str, Any]:
    """Return the output's config.json: the source's, with model type, code and layout replaced."""
    dropped = {*CONFIG_KEYS, "auto_map", "ladder_layers", *(["torch_dtype"] if plan.recipe.dtype else [])}
    config = {key: value for key, value in plan.config.items() if key not in dropped}
    if plan.recipe.dtype:
        config["dtype"] = plan.recipe.dtype
    family = family_of(config)
    if plan.after.is_dense:
        return config | {"model_type": family.model_type, "architectures": [f"{family.class_prefix}ForCausalLM"]}
    return config | {
        "model_type": family.ladderized_type,
        "architectures": [f"Ladderized{family.class_prefix}ForCausalLM"],
        "auto_map": auto_map(family),
        **plan.after.to_config(),
    }


def make_record(plan: Plan) -> dict[str, Any]:
    """Return the content of ladderize.yaml: the recipe, the source, and the version that made the output."""
    record = {
        "schema_version": SCHEMA_VERSION,
        "ladderize_version": __version__,
        "layout": str(plan.after),
        "recipe": plan.recipe.to_dict(),
        "source": {
            "name": plan.source_name,
            "layout": str(plan.before),
            "fingerprint": fingerprint(plan.source),
        },
    }
    if plan.changes.replace:
        record["replaced_tensors"] = sorted(plan.changes.replace)
    if plan.changes.config:
        record["changed_config"] = dict(plan.changes.config)
    return record | dict(plan.changes.record)


def report_of(plan: Plan) -> ConversionReport:
    """Return the report of a plan before anything is written."""
    return ConversionReport(
        source=plan.source_name,
        out=str(plan.out),
        layout=str(plan.after),
        layout_before=str(plan.before),
        **plan.after.to_config(),
        layers=plan.after.table(),
        parameters=parameter_count(plan.config),
        weight_bytes=plan.weight_bytes,
        weight_files=[shard.file for shard in plan.shards],
        weight_files_rewritten=[shard.file for shard in plan.shards if shard.rewritten],
        moved_heads=plan.changes.moved.get("heads", []),
        moved_neurons=plan.changes.moved.get("neurons", []),
        replaced_tensors=sorted(plan.changes.replace),
        extra_files=sorted(plan.changes.extra_files),
        carried_over=plan.carried,
        not_carried_over=plan.left_behind,
        warnings=plan.warnings,
    )
