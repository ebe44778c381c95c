"""checkpoint -> checkpoint: plan, validate, write, verify, rename into place."""

import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ladderize import __version__
from ladderize.console import SCHEMA_VERSION, Console, UserError, human_bytes, sentence
from ladderize.convert import output
from ladderize.convert.card import MARK, make_card
from ladderize.convert.checkpoint import (
    INDEX,
    PICKLES,
    WEIGHTS,
    Checkpoint,
    fetch_weights,
    header_sha256,
    read_checkpoint,
    read_config,
    resolve_json,
)
from ladderize.convert.llama import check_config, check_tensors, parameter_count
from ladderize.convert.recipe import Recipe
from ladderize.convert.verify import verify as verify_output
from ladderize.convert.weights import DTYPES, Shard, index_for, parse_size, plan_shards, write_shard
from ladderize.layout import CONFIG_KEYS, Layout, format_ranges

REMOTE_CODE = Path(__file__).parent / "remote_code"
AUTO_MAP = {
    "AutoConfig": "configuration_ladderized_llama.LadderizedLlamaConfig",
    "AutoModel": "modeling_ladderized_llama.LadderizedLlamaModel",
    "AutoModelForCausalLM": "modeling_ladderized_llama.LadderizedLlamaForCausalLM",
}
MADE_HERE = {"config.json", "ladderize.yaml", "README.md", "README.source.md", INDEX}
CLOSED = ("original", "__pycache__")  # and hidden folders: nothing in them is carried over
# weights that are not the ones converted, their indices, and code
FOREIGN = (*PICKLES, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".index.json", ".py", ".pyc", ".so", ".dll")


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will do, decided before anything is written."""

    source: Checkpoint
    source_name: str
    hub_id: str | None
    out: Path
    recipe: Recipe
    before: Layout
    after: Layout
    shards: list[Shard] | None  # None: the weight files are taken over as they are
    carried: list[Path]  # relative to the source
    left_behind: list[str]
    remarks: list[str]

    @property
    def weight_bytes(self) -> int:
        return self.source.weight_bytes if self.shards is None else sum(shard.nbytes for shard in self.shards)

    @property
    def weight_files(self) -> list[str]:
        return self.source.weight_files if self.shards is None else [shard.file for shard in self.shards]


def make_plan(src: str, out: Path, recipe: Recipe, *, revision: str | None = None, overwrite: bool = False) -> Plan:
    """Read and validate the source (headers only) and decide what to write; raises UserError or LayoutError."""
    folder, local = resolve_json(src, revision)
    out = output.check_target(out, folder, overwrite=overwrite)
    config = read_config(folder)
    check_config(config)
    before = Layout.from_config(config)
    after = recipe.layout(before)
    after.check_model(config)
    if config["model_type"] == "llama" and after.is_dense and not recipe.dense:
        raise UserError(f"nothing to convert: {src} is a dense Llama; name layers with --ladder or --spd, or give a --recipe")
    if (folder / "adapter_config.json").is_file():
        raise UserError(f"{src} holds a PEFT adapter beside its weights; merge it first (merge_and_unload), then convert the result")
    source = read_checkpoint(folder if local else fetch_weights(src, revision))
    remarks = check_tensors(source)
    stored = {tensor.dtype for tensor in source.tensors.values()}
    dtype = recipe.dtype if recipe.dtype and stored != {DTYPES[recipe.dtype]} else None
    limit = parse_size(recipe.max_shard_size) if recipe.max_shard_size else None
    carried, left_behind = sort_files(source)
    for path in [source.folder / name for name in source.weight_files] + [source.folder / relative for relative in carried]:
        if out in path.resolve().parents:
            raise UserError(f"{path} is a link into OUT {out}, which would be replaced; choose another OUT")
    return Plan(
        source=source, source_name=src, hub_id=None if local else src, out=out, recipe=recipe, before=before, after=after,
        shards=plan_shards(source, dtype, limit) if dtype or limit else None,
        carried=carried, left_behind=left_behind, remarks=remarks,
    )  # fmt: skip


def sort_files(source: Checkpoint) -> tuple[list[Path], list[str]]:
    """Which other files are carried over byte for byte, and which are left behind (and only listed)."""
    carried: list[Path] = []
    left_behind: list[str] = []
    known = {*source.weight_files, *MADE_HERE}
    home = source.folder.resolve()
    cache = home.parent.parent / "blobs"  # where the links of a hub snapshot lead
    for path in sorted(source.folder.rglob("*")):
        relative = path.relative_to(source.folder)
        if path.is_dir() or str(relative) in known:
            continue
        closed = [i for i, part in enumerate(relative.parts[:-1]) if part in CLOSED or part.startswith(".")]
        if closed:
            left_behind.append("/".join(relative.parts[: closed[0] + 1]) + "/")
        elif not path.is_file() or path.name.lower().endswith(FOREIGN):
            left_behind.append(str(relative))
        else:
            target = path.resolve()
            if home not in target.parents and cache not in target.parents:
                raise UserError(f"{path} is a link that leads out of the checkpoint, to {target}; replace it by a copy or remove it")
            carried.append(relative)
    return carried, sorted(set(left_behind))


def make_config(plan: Plan) -> dict[str, Any]:
    """The output's config.json: the source's, with model type, code and layout exchanged."""
    dropped_keys = {*CONFIG_KEYS, "auto_map", "ladder_layers"}
    config = {key: value for key, value in plan.source.config.items() if key not in dropped_keys}
    if plan.recipe.dtype:
        config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": plan.recipe.dtype}
    if plan.after.is_dense:
        return config | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return config | {
        "model_type": "ladderized_llama",
        "architectures": ["LadderizedLlamaForCausalLM"],
        "auto_map": AUTO_MAP,
        **plan.after.to_config(),
    }


def full_recipe(plan: Plan) -> Recipe:
    """The recipe that makes this output of the dense model, also where the layout was the source's and went unsaid."""
    if plan.recipe.names_layers or plan.after.is_dense:
        return plan.recipe
    ladder, spd, ranks = plan.after.ladder_layers, plan.after.spd_layers, plan.after.sync_tp_size
    if Layout.from_layers(plan.after.num_layers, ladder=ladder, spd=spd, sync_tp_size=ranks) != plan.after:
        return plan.recipe  # modes that no names compile to
    return replace(
        plan.recipe, ladder=format_ranges(ladder) if ladder else None, spd=format_ranges(spd) if spd else None, sync_tp_size=ranks
    )


def make_record(plan: Plan) -> dict[str, Any]:
    """The content of ladderize.yaml: what was done, to what, by which version."""
    folder = plan.source.folder
    files = [folder / name for name in ("config.json", INDEX) if (folder / name).is_file()]
    hashes = {path.name: {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for path in files}
    for name in plan.source.weight_files:
        path = folder / name
        hashes[name] = {"size_bytes": path.stat().st_size, "header_sha256": header_sha256(path)}  # type: ignore[dict-item]
        if re.fullmatch(r"[0-9a-f]{64}", path.resolve().name):  # a blob of the hub's cache is named by its hash
            hashes[name]["sha256"] = path.resolve().name
    return {
        "schema_version": SCHEMA_VERSION,
        "ladderize_version": __version__,
        "layout": str(plan.after),
        "recipe": full_recipe(plan).to_dict(),
        "source": {"name": plan.source_name, "layout": str(plan.before), "files": hashes},
    }


def write(plan: Plan, folder: Path, *, copy: bool, advance: Callable[[int], None]) -> Counter[str]:
    """Write the whole output into ``folder``; returns how many weight files were linked, reflinked, copied, rewritten."""
    source, how = plan.source.folder, Counter[str]()
    if plan.shards is None:
        for name in plan.source.weight_files:
            how[output.transfer(source / name, folder / name, copy=copy, advance=advance)] += 1
        if plan.source.weight_files != [WEIGHTS]:
            shutil.copyfile(source / INDEX, folder / INDEX)
    else:
        for shard in plan.shards:
            write_shard(plan.source, shard, folder / shard.file, advance)
            how["rewritten"] += 1
        if (index := index_for(plan.shards)) is not None:
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for relative in plan.carried:
        target = folder / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / relative, target)
    (folder / "config.json").write_text(json.dumps(make_config(plan), indent=2, allow_nan=False) + "\n")
    if not plan.after.is_dense:
        for code in sorted(REMOTE_CODE.glob("*_ladderized_llama.py")):
            shutil.copyfile(code, folder / code.name)
    record = yaml.safe_dump(make_record(plan), sort_keys=False, allow_unicode=True)
    (folder / "ladderize.yaml").write_text(record, encoding="utf-8")
    card = ""
    if (path := source_card(source)) is not None:
        shutil.copyfile(path, folder / "README.source.md")
        card = path.read_text(encoding="utf-8-sig", errors="replace")
    text = make_card(plan.out.name, plan.source_name, card, plan.after, plan.before, hub_id=plan.hub_id)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return how


def source_card(folder: Path) -> Path | None:
    """The card that somebody wrote for the source: its README.md, or, where that is one of ours, the original kept with it."""
    readme, kept = folder / "README.md", folder / "README.source.md"
    if readme.is_file() and MARK.encode() not in readme.read_bytes():
        return readme
    return kept if kept.is_file() else None


def describe(plan: Plan) -> dict[str, Any]:
    """A plan as the JSON of ``--json`` and of the return value."""
    return {
        "source": plan.source_name,
        "out": str(plan.out),
        "layout": str(plan.after),
        "layout_before": str(plan.before),
        **plan.after.to_config(),
        "layers": plan.after.table(),
        "parameters": parameter_count(plan.source.config),
        "weight_bytes": plan.weight_bytes,
        "weight_files": plan.weight_files,
        "weights_rewritten": plan.shards is not None,
        "carried_over": [str(path) for path in plan.carried],
        "not_carried_over": plan.left_behind,
        "remarks": plan.remarks,
    }


def convert_checkpoint(
    src: str | Path,
    out: str | Path,
    recipe: Recipe,
    *,
    revision: str | None = None,
    copy: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    console: Console | None = None,
) -> dict[str, Any]:
    """Convert the checkpoint ``src`` (a folder or a hub id) into the folder ``out``; returns what was done.

    The output appears whole or not at all, and ``src`` is never touched. Weight files that do not change are hard-linked
    where possible; ``copy=True`` copies them. Raises UserError, LayoutError or OSError, each with a message for the user.
    """
    console = console or Console()
    if not dry_run:
        output.complete_journal(Path(out).expanduser().resolve())
    plan = make_plan(str(src), Path(out), recipe, revision=revision, overwrite=overwrite)
    report = describe(plan)
    if dry_run:
        return report | {"written": False}
    check_space(plan, copy=copy)
    try:
        with output.atomic_folder(plan.out, overwrite=overwrite) as folder:
            with console.progress("writing weights", plan.source.weight_bytes, is_bytes=True) as advance:
                how = write(plan, folder, copy=copy, advance=advance)
            if verify:
                console.status("verifying: loading the output in plain transformers")
                report["verified"] = verify_output(folder, plan.weight_bytes)
    except OSError as error:
        raise UserError(f"writing OUT {plan.out} failed ({sentence(error)}); nothing was left there") from error
    return report | {"written": True, "weights": dict(how)}


def check_space(plan: Plan, *, copy: bool) -> None:
    """Find a full disk before writing, not after an hour."""
    parent = output.existing_parent(plan.out)
    same_disk = parent.stat().st_dev == plan.source.folder.resolve().stat().st_dev
    needed = plan.weight_bytes if plan.shards is not None or copy or not same_disk else 0
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise UserError(f"OUT {plan.out} needs {human_bytes(needed)}, but only {human_bytes(free)} are free there; choose another disk")
