"""The plan of a conversion, decided and checked before anything is written."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from ladderize.checkpoint.config import check_config, parameter_count
from ladderize.checkpoint.opening import NOT_ITS_CODE, find_source
from ladderize.checkpoint.quantised import (
    QUANTISE_LAST,
    STATIC_SCALES,
    Quantisation,
    check_ranks,
    has_measured_scales,
    plain_config,
    quantisation_of,
)
from ladderize.checkpoint.reading import INDEX, OTHER_WEIGHTS, Checkpoint, TensorInfo, has_tokenizer
from ladderize.checkpoint.tensors import fingerprint
from ladderize.checkpoint.writing import Shard, plan_shards
from ladderize.console import human_bytes, to_json
from ladderize.convert.assignment import ASSIGNMENT, RankAssignment, read_assignment
from ladderize.convert.inspection import read_retrainings
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.families.registry import family_of, is_authors, is_ladderized
from ladderize.files import output
from ladderize.files.documents import read_own
from ladderize.files.records import Record
from ladderize.files.regular import check_regular
from ladderize.layout import Layout, format_ranges

RECORD = "ladderize.yaml"
CARDS = ("README.md", "README.source.md")
MADE_HERE = {"config.json", RECORD, *CARDS, INDEX}
CLOSED = ("original", "__pycache__")  # and hidden folders: nothing in them is carried over
# Other weights than the converted ones, their indices, and code.
FOREIGN = (*OTHER_WEIGHTS, ".safetensors", ".npz", ".index.json", ".py", ".pyc", ".so", ".dll")


@dataclass(frozen=True)
class Changes:
    """The changes besides the layout, with what is recorded about them.

    assignment: of heads and neurons to ranks, instead of the recipe's.
    replace: tensors from other files (``TensorInfo.file`` is absolute), in their new order; their dtype stays the old.
    config: keys of config.json with other values. record: more keys of ladderize.yaml.
    extra_files: name -> text; they win over the source's. note: a paragraph for the model card.
    """

    assignment: RankAssignment | None = None
    replace: Mapping[str, TensorInfo] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    extra_files: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def moved(self) -> dict[str, list[int]]:
        """The layers whose heads, and whose neurons, change places."""
        ranks = self.assignment
        return {} if ranks is None else {"heads": ranks.moved(ranks.heads), "neurons": ranks.moved(ranks.neurons)}


@dataclass(frozen=True)
class ConversionReport(Record):
    """The document of ``ladderize convert``. weights: how many files were linked, copied and rewritten."""

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
    verified: dict[str, Any] | None = None
    weights: dict[str, int] | None = None

    def lines(self) -> list[str]:
        layout = self.layout
        if layout != self.layout_before:
            after = Layout(tuple(self.attention_sync), tuple(self.mlp_sync), self.sync_tp_size)
            layout = f"{self.layout_before} -> {after.words}"
        number, rewritten = len(self.weight_files), len(self.weight_files_rewritten)
        ways = f"{rewritten} to be rewritten, {number - rewritten} to be taken over as they are"
        if self.weights is not None:
            ways = " and ".join(f"{count} {way}" for way, count in self.weights.items())
        lines = [f"layout   {layout}", f"weights  {human_bytes(self.weight_bytes)} in {number} files, {ways}"]
        for name, layers in {"heads": self.moved_heads, "neurons": self.moved_neurons}.items():
            if layers:
                lines.append(f"{name:<8} reordered in layers {format_ranges(layers)}")
        if not self.written:
            files = [*self.weight_files, *self.carried_over, *self.extra_files]
            lines.append(f"files    {', '.join(files)}, config.json, README.md, ladderize.yaml and the model code")
        if self.not_carried_over:
            lines.append(f"skipped  {', '.join(self.not_carried_over)} (not carried over)")
        return lines


@dataclass(frozen=True)
class Plan:
    """The means of a conversion, and its report as far as it is known before anything is written. Its recipe makes this
    output of the dense model."""

    source: Checkpoint
    hub_id: str | None
    recipe: Recipe
    before: Layout
    after: Layout
    shards: list[Shard]
    changes: Changes
    without_code: dict[str, str]
    quantisation: Quantisation | None
    report: ConversionReport

    @property
    def config(self) -> dict[str, Any]:
        """The source's config, with the changes."""
        return {**self.source.config, **self.changes.config}


def make_plan(src: str, out: Path, recipe: Recipe | Layout, changes: Changes, *, overwrite: bool = False) -> Plan:
    """Return the plan of a conversion, from the validated headers of the source; no weights are downloaded in vain."""
    located = find_source(src)
    target, config = output.check_target(out, located.folder, overwrite=overwrite), located.config
    check_config(plain_config(config))
    before, quantisation = Layout.from_config(config), quantisation_of(config, located.folder)
    if isinstance(recipe, Layout):
        recipe.check_layers(before.num_layers)
        recipe = Recipe.from_layout(recipe)
    after = recipe.layout(before)
    after.check_model(config)
    if not (is_ladderized(config) or is_authors(config) or recipe.dense or changes.replace) and after.is_dense:
        raise UserError(
            f"nothing to convert: {src} is a dense {family_of(config).class_prefix}; name layers with --ladder,"
            " --delayed or --spd, or give a --recipe"
        )
    changes = with_assignment(changes, recipe, config, after)
    if quantisation is not None:
        check_unchanged(recipe, changes)
    source = located.open("any")
    check_assignable(source, src, changes.assignment)
    if quantisation is not None:
        check_ranks(source, quantisation, after.sync_tp_size or 1)
    moves = changes.assignment.moves(config) if changes.assignment is not None else {}
    shards = plan_shards(source, recipe.dtype, moves, changes.replace)
    carried, left_behind = sort_files(source)
    for path in (source.folder / name for name in (*source.weight_files, *carried)):
        if target in path.resolve().parents:
            raise UserError(f"{path} is a link into OUT {target}, which would be replaced; choose another OUT")
    stripped = without_code(source.folder, carried)
    assigned = changes.assignment
    if assigned is None and ASSIGNMENT in carried:
        assigned = read_assignment(source.folder / ASSIGNMENT)
    is_assigned = assigned is not None and after.sync_tp_size in (None, assigned.sync_tp_size)
    warnings = [*source.warnings, *layout_warnings(source, before, after)]
    if not has_tokenizer(source.folder):
        warnings.append("the source holds no tokenizer, so neither does OUT; eval, adapt and generate need one")
    warnings += [f"auto_map of {name} is left out: {NOT_ITS_CODE}" for name in stripped]
    if assigned is not None and not is_assigned:
        warnings.append(f"heads and neurons were assigned to {assigned.sync_tp_size} ranks, not {after.sync_tp_size}")
    report = ConversionReport(
        source=src,
        out=str(target),
        layout=str(after),
        layout_before=str(before),
        **after.to_config(),
        layers=after.table(),
        parameters=parameter_count({**source.config, **changes.config}),
        weight_bytes=sum(shard.nbytes for shard in shards),
        weight_files=[shard.file for shard in shards],
        weight_files_rewritten=[shard.file for shard in shards if shard.rewritten],
        moved_heads=changes.moved.get("heads", []),
        moved_neurons=changes.moved.get("neurons", []),
        replaced_tensors=sorted(changes.replace),
        extra_files=sorted(changes.extra_files),
        carried_over=[name for name in carried if name not in changes.extra_files],
        not_carried_over=left_behind,
        warnings=warnings,
    )
    record = replace(Recipe.from_layout(after), dtype=recipe.dtype, assignment=ASSIGNMENT if is_assigned else None)
    hub_id = None if located.is_local else src
    return Plan(source, hub_id, record, before, after, shards, changes, stripped, quantisation, report)


def with_assignment(changes: Changes, recipe: Recipe, config: Mapping[str, Any], after: Layout) -> Changes:
    """Return the changes with the recipe's assignment, which must fit and is written beside the weights."""
    assignment = changes.assignment
    if assignment is None and recipe.assignment is not None:
        assignment = read_assignment(Path(recipe.assignment))
    if assignment is None:
        return changes
    if after.sync_tp_size not in (None, assignment.sync_tp_size):
        raise UserError(
            f"the assignment is for sync_tp_size {assignment.sync_tp_size}, but the layout has {after.sync_tp_size}"
        )
    assignment.check(config)
    written = {ASSIGNMENT: to_json(assignment.to_dict()) + "\n"}
    return replace(changes, assignment=assignment, extra_files={**changes.extra_files, **written})


def check_unchanged(recipe: Recipe, changes: Changes) -> None:
    """Raise UserError where the recipe or the changes would alter quantised weights."""
    asked = {f"--dtype {recipe.dtype}": recipe.dtype, "an assignment to ranks": changes.assignment}
    for name, value in {**asked, "replacing tensors": changes.replace}.items():
        if value:
            raise UserError(
                f"quantised weights pass through a conversion as they are, so {name} is not possible; {QUANTISE_LAST}"
            )


def check_assignable(source: Checkpoint, name: str, assignment: RankAssignment | None) -> None:
    """Raise UserError unless the assignment was made for this very model, which still lies in its own order."""
    if assignment is None:
        return
    if (source.folder / ASSIGNMENT).is_file():
        raise UserError(
            f"{name} lies in the order of its own {ASSIGNMENT} already; assign the dense model that it was made of"
        )
    if assignment.fingerprint != fingerprint(source):
        raise UserError(
            f"the assignment was computed for another model than {name} (their fingerprints differ); make one for this"
            " one"
        )


def layout_warnings(source: Checkpoint, before: Layout, after: Layout) -> list[str]:
    """Return warnings where weights were retrained, or scales measured, for another layout than this one."""
    warnings = [STATIC_SCALES] if after != before and has_measured_scales(source.tensors) else []
    retrainings = read_retrainings(source.folder)
    trained = retrainings[-1].layout if retrainings else str(after)
    if trained not in (str(after), str(Layout.dense(before.num_layers))):  # dense ones may go on
        result = "neither the dense model nor the retrained one" if after.is_dense else "not the retrained one"
        warnings.append(
            f"the weights were retrained ({retrainings[-1].method}) for another layout ({trained}); with this one"
            f" ({after}) the model is {result}: measure it, or convert the model that was not retrained"
        )
    return warnings


def sort_files(source: Checkpoint) -> tuple[list[str], list[str]]:
    """Return the other files that are carried over byte for byte, and those left behind, by their names in the source.
    Links out of the folder and special files are a UserError."""
    carried: list[str] = []
    left_behind: set[str] = set()
    for card in CARDS:
        check_stays(source.folder / card, source.folder)
    for path in sorted(source.folder.rglob("*")):
        relative = path.relative_to(source.folder)
        if path.is_dir():
            if path.is_symlink():  # it may lead anywhere
                left_behind.add(f"{relative}/")
            continue
        if str(relative) in {*source.weight_files, *MADE_HERE}:
            continue
        folders = [folder for folder in reversed(relative.parents) if folder.name in CLOSED or folder.name[:1] == "."]
        if folders:
            left_behind.add(f"{folders[0]}/")
        elif path.name.lower().endswith(FOREIGN):
            left_behind.add(str(relative))
        else:
            check_regular(path)
            check_stays(path, source.folder)
            carried.append(str(relative))
    return carried, sorted(left_behind)


def without_code(folder: Path, carried: Iterable[str]) -> dict[str, str]:
    """Return the texts of carried configs that name code, such as a tokenizer's, without that: OUT's card has its
    reader trust the code of OUT, which is ours alone."""
    texts = {}
    for name in carried:
        config = read_own(folder / name) if name.endswith("config.json") else {}
        if config.pop("auto_map", None) is not None:
            texts[name] = json.dumps(config, indent=2) + "\n"
    return texts


def check_stays(path: Path, folder: Path) -> None:
    """Raise UserError where ``path`` is a link out of a stranger's ``folder``, maybe to a private file: whoever
    publishes OUT would publish it."""
    home, target = folder.resolve(), path.resolve()
    if home not in target.parents and home.parent.parent / "blobs" not in target.parents:  # of a hub's snapshot
        raise UserError(
            f"{path} is a link that leads out of its folder, to {target}; replace it by a copy or remove it"
        )
