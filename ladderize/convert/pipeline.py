"""The conversion of a checkpoint: plan, validate, write, verify, rename into place."""

import dataclasses
import filecmp
import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ladderize import __version__
from ladderize.checkpoint.quantised import dense_targets
from ladderize.checkpoint.reading import INDEX, header_sha256
from ladderize.checkpoint.tensors import fingerprint
from ladderize.checkpoint.writing import Content, write_checkpoint
from ladderize.console import SCHEMA_VERSION, SILENT, Console
from ladderize.convert.card import make_card, source_card
from ladderize.convert.plan import Changes, ConversionReport, Plan, make_plan, report_of
from ladderize.convert.recipe import Recipe
from ladderize.convert.verify import verify as verify_output
from ladderize.convert.verify import what_is_verified
from ladderize.families.registry import family_of
from ladderize.files import output
from ladderize.files.regular import resolved
from ladderize.layout import CONFIG_KEYS, Layout
from ladderize.modeling import auto_map

RECORD = "ladderize.yaml"
THERE = "there already"  # counts weight files of an output that an earlier run wrote
REMOTE_CODE = Path(__file__).parent / "remote_code"


def make_config(plan: Plan) -> dict[str, Any]:
    """Return the output's config.json: the source's, with model type, code and layout replaced."""
    dropped_keys = {*CONFIG_KEYS, "auto_map", "ladder_layers"}
    config = {key: value for key, value in plan.source.config.items() if key not in dropped_keys}
    if plan.recipe.dtype:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": plan.recipe.dtype}
    family = family_of(config)
    if plan.after.is_dense:
        config = dense_targets(config)
        return config | {"model_type": family.model_type, "architectures": [f"{family.class_prefix}ForCausalLM"]}
    return config | {
        "model_type": family.ladderized_type,
        "architectures": [f"Ladderized{family.class_prefix}ForCausalLM"],
        "auto_map": auto_map(family),
        **plan.after.to_config(),
    }


def full_recipe(plan: Plan) -> Recipe:
    """Return the recipe that makes this output of the dense model, even where the layout came from the source."""
    if plan.recipe.names_layers or plan.after.is_dense:
        return plan.recipe
    made = Recipe.from_layout(plan.after)
    names = ("ladder", "spd", "sync_tp_size", "attention_sync", "mlp_sync")
    return dataclasses.replace(plan.recipe, **{name: getattr(made, name) for name in names})


def make_record(plan: Plan) -> dict[str, Any]:
    """Return the content of ladderize.yaml: the recipe, the source, and the version that made the output.

    Raises ValueError where ``changes.record`` has one of these keys.
    """
    folder = plan.source.folder
    files = [folder / name for name in ("config.json", INDEX) if (folder / name).is_file()]
    hashes: dict[str, dict[str, str | int]] = {
        path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in files
    }
    for name in plan.source.weight_files:
        path = folder / name
        hashes[name] = {"size_bytes": path.stat().st_size, "header_sha256": header_sha256(path)}
        if re.fullmatch(r"[0-9a-f]{64}", path.resolve().name):  # a blob of the hub's cache is named by its hash
            hashes[name]["sha256"] = path.resolve().name
    record = {
        "schema_version": SCHEMA_VERSION,
        "ladderize_version": __version__,
        "layout": str(plan.after),
        "recipe": full_recipe(plan).to_dict(),
        "source": {
            "name": plan.source_name,
            "layout": str(plan.before),
            "fingerprint": fingerprint(plan.source),
            "files": hashes,
        },
    }
    if plan.selection is not None:
        record["selection"] = plan.selection.to_dict()
    if plan.changes.replace:
        record["replaced_tensors"] = sorted(plan.changes.replace)
    if clash := record.keys() & plan.changes.record.keys():
        raise ValueError(f"ladderize.yaml has its own {min(clash)}; name the additional key otherwise")
    return record | dict(plan.changes.record)


def record_text(plan: Plan) -> str:
    """Return the text of ladderize.yaml."""
    return yaml.safe_dump(make_record(plan), sort_keys=False, allow_unicode=True)


def is_written(plan: Plan) -> bool:
    """Return whether OUT is what this plan makes, since a run may be killed after its output appeared.

    The record holds hashes of the source's configuration and a fingerprint of its weights; other files are compared.
    """
    record, source = plan.out / RECORD, plan.source.folder
    if not record.is_file() or not all((plan.out / name).is_file() for name in plan.weight_files):
        return False
    texts = {RECORD: record_text(plan), **plan.changes.extra_files}  # of head_map.json the record holds the name only
    for name, text in texts.items():
        path = plan.out / name
        if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
            return False
    return all(
        (plan.out / path).is_file() and filecmp.cmp(source / path, plan.out / path, shallow=False)
        for path in plan.carried
    )


def content_of(plan: Plan) -> Content:
    """Return the content of the output's folder."""
    copied = {str(path): plan.source.folder / path for path in plan.carried}
    texts = dict(plan.changes.extra_files)
    texts["config.json"] = json.dumps(make_config(plan), indent=2, allow_nan=False) + "\n"
    texts[RECORD] = record_text(plan)
    texts["README.md"] = make_card(plan)
    if not plan.after.is_dense:
        copied |= {path.name: path for path in REMOTE_CODE.glob("*_ladderized.py")}
    if (card := source_card(plan.source.folder)) is not None:
        copied["README.source.md"] = card
    return Content(plan.source, plan.shards, copied, texts)


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
    check: Callable[[Path], Mapping[str, Any]] | None = None,
    console: Console = SILENT,
) -> ConversionReport:
    """Convert the checkpoint ``src`` (a folder or a hub id) into the folder ``out``; return a report.

    The output appears whole or not at all, and ``src`` is never touched. Weight files that do not change are
    hard-linked where possible; ``copy=True`` copies them. Where ``out`` already holds the output of the same
    conversion, nothing is done.

    recipe: what to do, or just the layout to make.
    changes: changes besides the layout.
    check: receives the finished folder before it appears as ``out``; if it raises, nothing appears. Its result is the
    report's ``checked``.
    Raises UserError, LayoutError or OSError, each with a message for the user.
    """
    if not dry_run:
        output.clean_up(resolved(out, "OUT "))
    make = functools.partial(make_plan, str(src), Path(out), recipe, revision=revision, changes=changes or Changes())
    if changes is None and not overwrite and (resolved(out) / RECORD).is_file():
        plan = make(overwrite=True)  # OUT is only compared, so it may be there
        if is_written(plan):
            console.note(f"{plan.out} is complete: this command wrote it in an earlier run")
            output.clean_up(plan.out)
            return dataclasses.replace(report_of(plan), written=True, weights={THERE: len(plan.shards)})
    plan = make(overwrite=overwrite)
    report = report_of(plan)
    if dry_run:
        return report
    results: dict[str, Any] = {"checked": None, "verified": None}

    def examine(folder: Path) -> None:
        if check is not None:
            results["checked"] = check(folder)
        if verify:
            with console.stage(f"verifying: {what_is_verified(plan.quantisation)}"):
                results["verified"] = verify_output(folder, plan.weight_bytes, plan.quantisation)

    how = write_checkpoint(content_of(plan), plan.out, copy=copy, overwrite=overwrite, check=examine, console=console)
    return dataclasses.replace(report, **results, written=True, weights=dict(how))
