"""The conversion of a checkpoint: plan, write, verify, rename into place."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from ladderize import __version__
from ladderize.checkpoint.tensors import fingerprint
from ladderize.checkpoint.writing import write_weights
from ladderize.console import SCHEMA_VERSION, SILENT, Console
from ladderize.convert.card import make_card, source_card
from ladderize.convert.plan import RECORD, Changes, ConversionReport, Plan, make_plan
from ladderize.convert.recipe import Recipe
from ladderize.convert.verify import verify as verify_output
from ladderize.families.registry import family_of
from ladderize.files import output
from ladderize.files.regular import resolved
from ladderize.layout import CONFIG_KEYS, Layout
from ladderize.modeling import auto_map

REMOTE_CODE = Path(__file__).parent / "remote_code"


def convert_checkpoint(
    src: str | Path,
    out: str | Path,
    recipe: Recipe | Layout,
    changes: Changes | None = None,
    *,
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
    Errors are UserError, LayoutError or OSError, each with a message for the user.
    """
    if not dry_run:
        output.clean_up(resolved(out, "OUT "))
    plan = make_plan(str(src), Path(out), recipe, overwrite=overwrite, changes=changes or Changes())
    report, source = plan.report, plan.source.folder
    if dry_run:
        return report
    copied = {name: source / name for name in report.carried_over}
    if not plan.after.is_dense:
        copied |= {path.name: path for path in REMOTE_CODE.glob("*_ladderized.py")}
    card = source_card(source)
    if card is not None:
        copied["README.source.md"] = card
    texts = {
        **plan.without_code,
        **plan.changes.extra_files,
        "config.json": json.dumps(make_config(plan), indent=2, allow_nan=False) + "\n",
        RECORD: yaml.safe_dump(make_record(plan), sort_keys=False, allow_unicode=True),
        "README.md": make_card(plan),
    }
    verified = None
    with output.atomic_folder(Path(report.out), overwrite=overwrite) as folder:
        with console.progress("writing weights", report.weight_bytes, is_bytes=True) as advance:
            weights = write_weights(source, plan.shards, folder, copy=copy, advance=advance)
        for name, path in copied.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if verify:
            problem = plan.quantisation.not_run if plan.quantisation is not None else None
            way = f"class and tensors alone: {problem}" if problem else "loading the output in plain transformers"
            with console.stage(f"verifying: {way}"):
                verified = verify_output(folder, report.weight_bytes, plan.quantisation)
    return replace(report, verified=verified, written=True, weights=dict(weights))


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
    source = {"name": plan.report.source, "layout": str(plan.before), "fingerprint": fingerprint(plan.source)}
    record = {
        "schema_version": SCHEMA_VERSION,
        "ladderize_version": __version__,
        "layout": str(plan.after),
        "recipe": plan.recipe.to_dict(),
        "source": source,
    }
    if plan.changes.replace:
        record["replaced_tensors"] = sorted(plan.changes.replace)
    if plan.changes.config:
        record["changed_config"] = dict(plan.changes.config)
    return record | dict(plan.changes.record)
