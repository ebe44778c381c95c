"""The plan of a conversion, decided and checked before anything is written, and its report."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ladderize.checkpoint.config import check_config, check_quantised, parameter_count
from ladderize.checkpoint.opening import read_checkpoint, read_config
from ladderize.checkpoint.quantised import (
    STATIC_SCALES,
    Quantisation,
    check_ranks,
    has_measured_scales,
    plain_config,
    quantisation_of,
)
from ladderize.checkpoint.reading import (
    INDEX,
    OTHER_WEIGHTS,
    Checkpoint,
    TensorInfo,
    fetch_weights,
    has_tokenizer,
    resolve_json,
)
from ladderize.checkpoint.tensors import fingerprint
from ladderize.checkpoint.writing import Shard, parse_size, plan_shards
from ladderize.console import to_json
from ladderize.convert.heads import HEAD_MAP, HeadMap, read_head_map
from ladderize.convert.recipe import Recipe
from ladderize.convert.retraining import layout_warning, read_retrainings
from ladderize.convert.selection import Selection
from ladderize.convert.verify import Verification
from ladderize.errors import UserError
from ladderize.families.registry import family_of, is_authors, is_ladderized
from ladderize.files import output
from ladderize.files.records import Record
from ladderize.files.regular import check_regular
from ladderize.layout import Layout


@dataclass(frozen=True)
class Changes:
    """The changes besides the layout, with what is recorded about them; by default there are none."""

    head_map: HeadMap | None = None  # instead of the recipe's: the order that heads are stored in
    # Tensors from other files (TensorInfo.file, absolute), with heads already in their new order. They are stored in
    # the dtype of those that they replace.
    replace: Mapping[str, TensorInfo] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)  # more keys of ladderize.yaml
    extra_files: Mapping[str, str] = field(default_factory=dict)  # name -> JSON text; they win over the source's
    note: str = ""  # a paragraph for the model card

    @property
    def permuted_layers(self) -> list[int]:
        """The layers whose heads change places."""
        return self.head_map.permuted_layers if self.head_map is not None else []


CARDS = ("README.md", "README.source.md")
MADE_HERE = {"config.json", "ladderize.yaml", *CARDS, INDEX}
CLOSED = ("original", "__pycache__")  # and hidden folders: nothing in them is carried over
# Other weights than the converted ones, their indices, and code.
FOREIGN = (*OTHER_WEIGHTS, ".safetensors", ".npz", ".index.json", ".py", ".pyc", ".so", ".dll")


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will do.

    recipe: as it will be recorded, with layers instead of ``auto``.
    """

    source: Checkpoint
    source_name: str
    hub_id: str | None
    out: Path
    recipe: Recipe
    before: Layout
    after: Layout
    shards: list[Shard]
    changes: Changes  # with the head map of the recipe
    selection: Selection | None
    carried: list[Path]  # relative to the source
    left_behind: list[str]
    remarks: list[str]
    warnings: list[str]
    quantisation: Quantisation | None = None

    @property
    def weight_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def weight_files(self) -> list[str]:
        return [shard.file for shard in self.shards]

    @property
    def rewritten(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.rewritten]


def make_plan(
    src: str,
    out: Path,
    recipe: Recipe | Layout,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    changes: Changes,
) -> Plan:
    """Return the plan of a conversion, from the validated headers of the source; raises UserError or LayoutError."""
    folder, local = resolve_json(src, revision)
    out = output.check_target(out, folder, overwrite=overwrite)
    config = read_config(folder)
    check_config(plain_config(config))
    quantisation = quantisation_of(config, folder)
    before = Layout.from_config(config)
    if isinstance(recipe, Layout):
        recipe.check_layers(before.num_layers)
        recipe = Recipe.from_layout(recipe)
    recipe, selection = recipe.resolve(before)
    after = recipe.layout(before)
    after.check_model(config)
    converted = is_ladderized(config) or is_authors(config)
    if not converted and after.is_dense and not recipe.dense and not changes.replace:
        raise UserError(
            f"nothing to convert: {src} is a dense {family_of(config).class_prefix}; name layers with --ladder or"
            " --spd, or give a --recipe"
        )
    if recipe.head_map is not None:
        if changes.head_map is not None:
            raise UserError(f"the recipe names the head map {recipe.head_map}, and another is given; give one of them")
        changes = dataclasses.replace(changes, head_map=read_head_map(Path(recipe.head_map)))
    head_map = changes.head_map
    if head_map is not None:
        head_map.check(config)
        if after.sync_tp_size not in (None, head_map.sync_tp_size):
            raise UserError(
                f"the head map is for sync_tp_size {head_map.sync_tp_size}, but the layout has {after.sync_tp_size}"
            )
        recipe = dataclasses.replace(recipe, head_map=HEAD_MAP)
        written = {HEAD_MAP: to_json(head_map.to_dict()) + "\n"}
        changes = dataclasses.replace(changes, extra_files={**changes.extra_files, **written})
    if quantisation is not None:
        check_unchanged(recipe, changes)
    check_extra_files(changes.extra_files)
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{src} holds a PEFT adapter beside its weights; merge it first (merge_and_unload), then convert the result"
        )
    source = read_checkpoint(folder if local else fetch_weights(src, revision))
    remarks = [*source.remarks, *check_quantised(source)]
    if quantisation is not None:
        check_ranks(source, quantisation, after.sync_tp_size or 1)
    if not has_tokenizer(source.folder):
        remarks.append(f"{src} holds no tokenizer, so neither does OUT; eval of tasks, adapt and generate need one")
    warnings = [*source.warnings, layout_warning(read_retrainings(source.folder), before, after)]
    warnings += [STATIC_SCALES] if has_measured_scales(source.tensors) and before != after else []
    check_fingerprint(source, src, head_map, selection)
    limit = parse_size(recipe.max_shard_size) if recipe.max_shard_size else None
    moves = head_map.moves(config) if head_map is not None else None
    shards = plan_shards(source, dtype=recipe.dtype, max_bytes=limit, moves=moves, replace=changes.replace)
    carried, left_behind = sort_files(source)
    for path in (source.folder / name for name in (*map(Path, source.weight_files), *carried)):
        if out in path.resolve().parents:
            raise UserError(f"{path} is a link into OUT {out}, which would be replaced; choose another OUT")
    return Plan(
        source=source,
        source_name=src,
        hub_id=None if local else src,
        out=out,
        recipe=recipe,
        before=before,
        after=after,
        shards=shards,
        changes=changes,
        selection=selection,
        carried=[path for path in carried if str(path) not in changes.extra_files],
        left_behind=left_behind,
        remarks=remarks,
        warnings=[warning for warning in warnings if warning is not None],
        quantisation=quantisation,
    )


def check_unchanged(recipe: Recipe, changes: Changes) -> None:
    """Raise UserError where the recipe or the changes would alter quantised weights."""
    kept = "quantised weights pass through a conversion as they are"
    if recipe.dtype is not None:
        raise UserError(f"{kept}, so --dtype {recipe.dtype} is not possible; leave it out")
    if changes.head_map is not None:
        raise UserError(f"{kept}, so heads cannot be reordered; group the unquantised model's, then quantise")
    if changes.replace:
        raise UserError(f"{kept}, so tensors cannot be replaced; adapt the unquantised model, then quantise")


def check_fingerprint(source: Checkpoint, name: str, head_map: HeadMap | None, selection: Selection | None) -> None:
    """Raise UserError unless head map and sensitivities were made for this very model."""
    made = [("the head map was computed for", head_map.fingerprint)] if head_map is not None else []
    if selection is not None:
        measured = selection.sensitivity
        made.append((f"{measured.file} was measured on", measured.fingerprint))
    if made and (found := fingerprint(source)):
        for what, other in made:
            if other != found:
                raise UserError(f"{what} another model than {name} (their fingerprints differ); make one for this one")


def check_extra_files(files: Mapping[str, str]) -> None:
    """Raise ValueError unless all names are plain names of JSON or JSON lines files that a conversion does not write
    itself."""
    for name in files:
        if not re.fullmatch(r"[\w-][\w.-]*\.jsonl?", name) or name.endswith(FOREIGN) or name in MADE_HERE:
            raise ValueError(f"{name!r} is not the plain name of a JSON file")


def sort_files(source: Checkpoint) -> tuple[list[Path], list[str]]:
    """Return the other files that are carried over byte for byte, and the names of those left behind.

    Raises UserError for links and special files that cannot be carried over.
    """
    carried: list[Path] = []
    left_behind: list[str] = []
    known = {*source.weight_files, *MADE_HERE}
    for card in CARDS:
        check_stays(source.folder / card, source.folder)
    for path in sorted(source.folder.rglob("*")):
        relative = path.relative_to(source.folder)
        if path.is_dir() or str(relative) in known:
            continue
        closed = [i for i, part in enumerate(relative.parts[:-1]) if part in CLOSED or part.startswith(".")]
        if closed:
            left_behind.append("/".join(relative.parts[: closed[0] + 1]) + "/")
        elif path.name.lower().endswith(FOREIGN):
            left_behind.append(str(relative))
        elif not path.exists():
            raise UserError(f"{path} is a link to nothing, so it cannot be carried over; repair or remove it")
        else:
            check_regular(path)
            check_stays(path, source.folder)
            carried.append(relative)
    return carried, sorted(set(left_behind))


def check_stays(path: Path, folder: Path) -> None:
    """Raise UserError where ``path`` is a link out of a stranger's ``folder``.

    The file elsewhere may be private, and whoever publishes OUT would publish it.
    """
    home, target = folder.resolve(), path.resolve()
    if home not in target.parents and home.parent.parent / "blobs" not in target.parents:  # of a hub's snapshot
        raise UserError(
            f"{path} is a link that leads out of its folder, to {target}; replace it by a copy or remove it"
        )


@dataclass(frozen=True)
class ConversionReport(Record):
    """The document of ``ladderize convert``.

    extra_files: added ones.
    checked: the result of the caller's own check of the output.
    weights: how many files were linked, copied and rewritten; like ``verified`` only of a written output.
    """

    LEFT_OUT: ClassVar = ("checked", "verified", "weights")

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
    """Return the report of a plan before anything is written."""
    return ConversionReport(
        source=plan.source_name,
        out=str(plan.out),
        layout=str(plan.after),
        layout_before=str(plan.before),
        **plan.after.to_config(),
        layers=plan.after.table(),
        parameters=parameter_count(plan.source.config),
        weight_bytes=plan.weight_bytes,
        weight_files=plan.weight_files,
        weights_rewritten=bool(plan.rewritten),
        weight_files_rewritten=[shard.file for shard in plan.rewritten],
        permuted_layers=plan.changes.permuted_layers,
        replaced_tensors=sorted(plan.changes.replace),
        selection=plan.selection,
        extra_files=sorted(plan.changes.extra_files),
        carried_over=[str(path) for path in plan.carried],
        not_carried_over=plan.left_behind,
        remarks=plan.remarks,
        warnings=plan.warnings,
    )
