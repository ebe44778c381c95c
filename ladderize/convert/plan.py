"""The plan of a conversion, decided and checked before anything is written."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ladderize.checkpoint.config import check_config, check_quantised
from ladderize.checkpoint.opening import NOT_ITS_CODE, read_checkpoint, read_config
from ladderize.checkpoint.quantised import (
    QUANTISE_LAST,
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
from ladderize.checkpoint.writing import Shard, plan_shards
from ladderize.console import to_json
from ladderize.convert.assignment import ASSIGNMENT, RankAssignment, read_assignment
from ladderize.convert.inspection import read_retrainings
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.families.registry import family_of, is_authors, is_ladderized
from ladderize.files import output
from ladderize.files.documents import read_own
from ladderize.files.regular import check_regular
from ladderize.layout import Layout

RECORD = "ladderize.yaml"
CARDS = ("README.md", "README.source.md")
MADE_HERE = {"config.json", RECORD, *CARDS, INDEX}
CLOSED = ("original", "__pycache__")  # and hidden folders: nothing in them is carried over
# Other weights than the converted ones, their indices, and code.
FOREIGN = (*OTHER_WEIGHTS, ".safetensors", ".npz", ".index.json", ".py", ".pyc", ".so", ".dll")


@dataclass(frozen=True)
class Changes:
    """The changes besides the layout, with what is recorded about them; by default there are none.

    assignment: of heads and neurons to ranks, instead of the recipe's.
    replace: tensors from other files (``TensorInfo.file`` is absolute), already in their new order. They are stored in
    the dtype of those that they replace.
    config: keys of config.json with other values; they may ask for other ends.
    record: more keys of ladderize.yaml.
    extra_files: name -> text; they win over the source's.
    note: a paragraph for the model card.
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
        own = self.assignment
        return {} if own is None else {"heads": own.moved(own.heads), "neurons": own.moved(own.neurons)}


@dataclass(frozen=True)
class Plan:
    """Everything that a conversion will do.

    recipe: makes this output of the dense model; the layout may have come with the source.
    changes: with the assignment of the recipe.
    carried: names of files that are copied from the source.
    without_code: texts of those that name code, without that.
    """

    source: Checkpoint
    source_name: str
    hub_id: str | None
    out: Path
    recipe: Recipe
    before: Layout
    after: Layout
    shards: list[Shard]
    changes: Changes
    carried: list[str]
    without_code: dict[str, str]
    left_behind: list[str]
    warnings: list[str]
    quantisation: Quantisation | None

    @property
    def config(self) -> dict[str, Any]:
        """The source's config, with the changes."""
        return {**self.source.config, **self.changes.config}

    @property
    def weight_bytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


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
    folder, is_local = resolve_json(src, revision)
    out = output.check_target(out, folder, overwrite=overwrite)
    config = read_config(folder)
    check_config(plain_config(config))
    before, quantisation = Layout.from_config(config), quantisation_of(config, folder)
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
    source = read_checkpoint(folder if is_local else fetch_weights(src, revision))
    check_assignable(source, src, changes.assignment)
    check_quantised(source)
    if quantisation is not None:
        check_ranks(source, quantisation, after.sync_tp_size or 1)
    warnings = [*source.warnings, *layout_warnings(source, before, after)]
    if not has_tokenizer(source.folder):
        warnings.append("the source holds no tokenizer, so neither does OUT; eval, adapt and generate need one")
    shards = plan_shards(
        source,
        dtype=recipe.dtype,
        moves=changes.assignment.moves(config) if changes.assignment is not None else None,
        replace=changes.replace,
        config={**source.config, **changes.config},
    )
    carried, left_behind = sort_files(source)
    stripped = without_code(source.folder, carried)
    warnings += [f"auto_map of {name} is left out: {NOT_ITS_CODE}" for name in stripped]
    assigned = changes.assignment
    if assigned is None and ASSIGNMENT in carried:
        assigned = read_assignment(source.folder / ASSIGNMENT)
    is_assigned = assigned is not None and after.sync_tp_size in (None, assigned.sync_tp_size)
    if assigned is not None and not is_assigned:
        warnings.append(f"heads and neurons were assigned to {assigned.sync_tp_size} ranks, not {after.sync_tp_size}")
    for path in (source.folder / name for name in (*source.weight_files, *carried)):
        if out in path.resolve().parents:
            raise UserError(f"{path} is a link into OUT {out}, which would be replaced; choose another OUT")
    return Plan(
        source=source,
        source_name=src,
        hub_id=None if is_local else src,
        out=out,
        recipe=replace(Recipe.from_layout(after), dtype=recipe.dtype, assignment=ASSIGNMENT if is_assigned else None),
        before=before,
        after=after,
        shards=shards,
        changes=changes,
        carried=[name for name in carried if name not in changes.extra_files],
        without_code=stripped,
        left_behind=left_behind,
        warnings=warnings,
        quantisation=quantisation,
    )


def with_assignment(changes: Changes, recipe: Recipe, config: Mapping[str, Any], after: Layout) -> Changes:
    """Return the changes with the recipe's assignment, which is written beside the weights; raises UserError where it
    does not fit."""
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
    dtype = f"--dtype {recipe.dtype}" if recipe.dtype is not None else None
    if asked := dtype or (changes.assignment and "an assignment to ranks") or (changes.replace and "replacing tensors"):
        raise UserError(
            f"quantised weights pass through a conversion as they are, so {asked} is not possible; {QUANTISE_LAST}"
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
    found = [STATIC_SCALES] if after != before and has_measured_scales(source.tensors) else []
    retrainings = read_retrainings(source.folder)
    trained = retrainings[-1].layout if retrainings else str(after)
    if trained != str(after) and trained != str(Layout.dense(before.num_layers)):  # dense ones may go on
        result = "neither the dense model nor the retrained one" if after.is_dense else "not the retrained one"
        found.append(
            f"the weights were retrained ({retrainings[-1].method}) for another layout ({trained}); with this one"
            f" ({after}) the model is {result}: measure it, or convert the model that was not retrained"
        )
    return found


def sort_files(source: Checkpoint) -> tuple[list[str], list[str]]:
    """Return the other files that are carried over byte for byte, and those left behind, by their names in the source.

    Raises UserError for links and special files that cannot be carried over, OSError for a link to nothing.
    """
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
        closed = [i for i, part in enumerate(relative.parts[:-1]) if part in CLOSED or part.startswith(".")]
        if closed:
            left_behind.add("/".join(relative.parts[: closed[0] + 1]) + "/")
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
    configs = {name: read_own(folder / name) for name in carried if name.endswith("config.json")}
    return {
        name: json.dumps({key: value for key, value in config.items() if key != "auto_map"}, indent=2) + "\n"
        for name, config in configs.items()
        if "auto_map" in config
    }


def check_stays(path: Path, folder: Path) -> None:
    """Raise UserError where ``path`` is a link out of a stranger's ``folder``.

    The file elsewhere may be private, and whoever publishes OUT would publish it.
    """
    home, target = folder.resolve(), path.resolve()
    if home not in target.parents and home.parent.parent / "blobs" not in target.parents:  # of a hub's snapshot
        raise UserError(
            f"{path} is a link that leads out of its folder, to {target}; replace it by a copy or remove it"
        )
