"""sweep.yaml: its content as options of the commands, with grids expanded, checked before torch is imported."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ladderize.adapt.options import ALIGN, AdaptOptions, Method
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.choices import OPTION, described, errors_begin_with, flag, near_names, options_from, parameter_name
from ladderize.commands.convert import ConvertOptions
from ladderize.convert.recipe import Recipe
from ladderize.data.files import HUB
from ladderize.errors import UsageError, UserError
from ladderize.eval.options import MARGIN, EvalOptions, check_margin, check_task_names
from ladderize.files.documents import read_yaml
from ladderize.files.records import read_value
from ladderize.files.regular import names_a_file, resolved
from ladderize.layout import Layout, check_split
from ladderize.runtime.bench.options import BenchOptions
from ladderize.runtime.shards import check_runnable
from ladderize.sweep.stages import outputs_in
from ladderize.sweep_document import AS_CONVERTED

SWEEP_JSON = "sweep.json"
KEYS = ("model", "out", "data", "layouts", "adapt", "eval", "bench", "margin", "no_verify")
PATH_KEYS = ("data", "eval_data", "teacher_cache", "perplexity", "include_path", "assignment", "recipe")
LINK_KEYS = ("link", "outer_link")  # paths where they name a file
# keys whose lists are no grids
LISTS = {"adapt": ("data", "eval_data", "lora_targets"), "bench": ("batch_size", "baselines", "schedules")}
# options that an entry may not give besides those that decide nothing: the sweep gives them, or has no use for them
RESERVED = {
    "convert": "src out dense dtype",
    "adapt": "model out distill_from align log_with",
    "eval": "models out keep_predictions reference resume engine",
    "bench": "models random_weights layout num_layers sync_tp_size engine train out profile",
}
Given = Mapping[str, Any]  # option -> value, as a file has them


@dataclass(frozen=True)
class LayoutEntry:
    """One layout of the grid.

    where: its place in the file.
    recipe: that of the options.
    """

    where: str
    name: str | None
    options: ConvertOptions
    recipe: Recipe


@dataclass(frozen=True)
class AdaptEntry:
    """One run of ``ladderize adapt``.

    typed: the options as words of a command line, for people.
    promote: the number of layouts that get it, the best of those before it; None: all.
    """

    options: AdaptOptions
    typed: tuple[str, ...] = ()
    promote: int | None = None


@dataclass(frozen=True)
class AdaptWay:
    """One way of adapting: stages, each of which reads the output of the one before; none: as converted.

    layouts: the names of the layouts that it is for; empty: all.
    """

    stages: tuple[AdaptEntry, ...] = ()
    layouts: tuple[str, ...] = ()

    def adapts(self, name: str | None) -> bool:
        """Return True if it is for a layout of this name."""
        return not self.layouts or name in self.layouts


@dataclass(frozen=True)
class BenchEntry:
    """One benchmark.

    typed: the options as the file has them.
    """

    where: str
    options: BenchOptions
    typed: Given
    layouts: tuple[str, ...] = ()

    def times(self, name: str | None) -> bool:
        """Return True if it times a layout of this name."""
        return not self.layouts or name in self.layouts


@dataclass(frozen=True)
class SweepSpec:
    """A sweep.yaml, with absolute paths.

    evaluation: None where there is no such section.
    margin: the accuracy that may be lost, in points.
    """

    model: str
    out: str | None
    layouts: tuple[LayoutEntry, ...]
    adapt: tuple[AdaptWay, ...]
    evaluation: EvalOptions | None
    bench: tuple[BenchEntry, ...]
    margin: float
    verify: bool


# ---- reading ----


def read_sweep(path: Path) -> SweepSpec:
    """Return the content of a sweep.yaml. Raises UserError, with the place, for an error in it."""
    return sweep_spec(read_yaml(path), str(path))


def sweep_spec(document: object, where: str) -> SweepSpec:
    """Return the checked content of a sweep.yaml. Raises UserError for an error in it.

    where: the begin of every message.
    """
    content = mapping(document, where)
    unknown = [key for key in content if key not in KEYS]
    if unknown:
        near = near_names(unknown[0], KEYS)
        raise UserError(f"{where}: unknown key {unknown[0]!r}{near}; known are {', '.join(KEYS)}")
    if "model" not in content:
        raise UserError(f"{where}: model is missing; name the dense checkpoint, a folder or a hub id")
    if "eval" not in content and "bench" not in content:
        raise UserError(f"{where} has neither eval nor bench, so there is nothing to measure")
    data = absolute({"data": content["data"]}) if "data" in content else {}
    evaluation = None
    if "eval" in content:
        at = f"{where}: eval"
        evaluation = _options(EvalOptions, "eval", mapping(content["eval"], at), at, models=["MODEL"])
        with errors_begin_with(at):
            check_task_names(evaluation)
    layouts = tuple(_layouts(_entries(content, "layouts", where), data))
    if not layouts:
        raise UserError(f"{where}: layouts is missing; write for example '- ladder: all'")
    names = [entry.name for entry in layouts if entry.name is not None]
    margin = read_value(float, content.get("margin", MARGIN), f"{where}: margin")
    with errors_begin_with(where):
        check_margin(margin)
    ways = tuple(_ways(_entries(content, "adapt", where), data, names)) or (AdaptWay(),)
    promotes = [stage for way in ways for stage in way.stages if stage.promote is not None]
    if evaluation is None and promotes:
        raise UserError(f"{where}: promote goes by what eval measures, but the file has no section eval")
    model = read_value(str, content["model"], f"{where}: model")
    local = Path(model).expanduser()
    return SweepSpec(
        model=str(local.resolve()) if local.exists() else model,
        out=read_value(str | None, content.get("out"), f"{where}: out"),
        layouts=layouts,
        adapt=ways,
        evaluation=evaluation,
        bench=tuple(_benches(_entries(content, "bench", where), names)),
        margin=margin,
        verify=not read_value(bool, content.get("no_verify", False), f"{where}: no_verify"),
    )


def find_folder(file: str | Path, out: str | Path | None = None) -> tuple[SweepSpec, Path]:
    """Return the content of the file and the sweep's folder. Raises UserError for a folder that holds something
    else."""
    spec = read_sweep(Path(file))
    if out is None and spec.out is None:
        raise UsageError(f"say where to keep everything: --out DIR, or a line 'out: DIR' in {file}")
    root = resolved(out if out is not None else str(spec.out), "--out ")
    if root.exists() and not root.is_dir():
        raise UserError(f"--out {root} is not a folder; choose another")
    is_ours = (root / SWEEP_JSON).is_file() or bool(outputs_in(root))
    if root.is_dir() and not is_ours and any(not entry.name.startswith(".") for entry in root.iterdir()):
        raise UserError(f"--out {root} is not empty, and no folder of a sweep (it has no {SWEEP_JSON}); choose another")
    return spec, root


def fit_layouts(spec: SweepSpec) -> list[Layout]:
    """Return the layout of each entry for the sweep's model.

    Raises UserError for a model that is not dense, and, with its entry, for a layout that the model or a benchmark
    cannot have.
    """
    config = open_checkpoint(spec.model, sound="any").config
    dense = Layout.from_config(config)
    if not dense.is_dense:
        raise UserError(f"{spec.model} is not dense ({dense}); a sweep converts the dense model")
    layouts = []
    for entry in spec.layouts:
        with errors_begin_with(entry.where):
            layout = entry.recipe.layout(dense)
            layout.check_model(config)
            layouts.append(layout)
    for setting in spec.bench:
        ranks, name = setting.options.ranks, setting.options.ranks_option
        with errors_begin_with(setting.where):
            check_split(config, ranks, name=name)
        for entry, layout in zip(spec.layouts, layouts, strict=True):
            if setting.times(entry.name):
                with errors_begin_with(f"{setting.where} cannot time {entry.name or layout}"):
                    check_runnable(config, layout, ranks, name=name, in_groups=True)
    return layouts


# ---- entries ----


def mapping(value: object, where: str) -> dict[str, Any]:
    """Return ``value`` as a mapping without nulls. Raises UserError for anything else, and for an empty list."""
    if not isinstance(value, Mapping):
        raise UserError(f"{where} is {'empty' if value is None else repr(value)}, but must hold options: 'key: value'")
    values = {str(key).replace("-", "_"): item for key, item in value.items() if item is not None}
    for key, item in values.items():
        if item == []:
            raise UserError(f"{where}: {key} is an empty list; give a value, or leave it out")
    return values


def absolute(options: Given) -> dict[str, Any]:
    """Return the options with absolute paths, since stages run in the sweep's folder."""

    def path(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [path(key, item) for item in value]
        text = str(value)  # YAML takes 2024 for a number
        if isinstance(value, Mapping) or text.startswith(HUB) or (key in LINK_KEYS and not names_a_file(text)):
            return value
        return os.path.normpath(Path.cwd() / Path(text).expanduser())

    return {key: path(key, value) if key in (*PATH_KEYS, *LINK_KEYS) else value for key, value in options.items()}


def grid(options: Given, section: str = "") -> Iterator[dict[str, Any]]:
    """Yield every combination of the values that are lists. Keys in ``LISTS`` keep their lists."""
    plain = LISTS.get(section, ())
    axes = [value if isinstance(value, list) and key not in plain else [value] for key, value in options.items()]
    return (dict(zip(options, values, strict=True)) for values in itertools.product(*axes))


def _options(kind: type, command: str, values: Given, where: str, **arguments: Any) -> Any:
    """Return the options of a command that an entry gives. Raises UserError for one that an entry may not give.

    arguments: what the sweep fills in later.
    """
    idle = [parameter_name(field) for field in described(kind) if not field.metadata[OPTION].decides]
    taken = [key for key in values if key in (*RESERVED[command].split(), *idle)]
    if taken:
        raise UserError(f"{where}: {taken[0]} cannot be given here: the sweep decides it, or has no use for it")
    return options_from(kind, {**arguments, **absolute(values)}, where)


def _entries(content: Given, key: str, where: str) -> list[tuple[str, Any]]:
    """Return the entries of a section, each behind its place in the file."""
    value = content.get(key, [])
    entries = [value] if isinstance(value, Mapping | str) else value
    if not isinstance(entries, list):
        raise UserError(f"{where}: {key} is {value!r}, but must be a list of entries")
    return [(f"{where}: {key}[{number}]", entry) for number, entry in enumerate(entries)]


def _take_layouts(options: dict[str, Any], where: str, names: Sequence[str]) -> tuple[str, ...]:
    """Remove the key ``layouts`` from an entry, and return its names. Raises UserError for a name that no layout
    has."""
    value = options.pop("layouts", ())
    wanted = tuple(map(str, value if isinstance(value, list | tuple) else [value]))
    unknown = [name for name in wanted if name not in names]
    if unknown:
        advice = f"known are {', '.join(dict.fromkeys(names))}" if names else "give the entry of layouts a name"
        near = near_names(unknown[0], names)
        raise UserError(f"{where}: layouts names {unknown[0]!r}, but no layout has this name{near}; {advice}")
    return wanted


def _layouts(entries: list[tuple[str, Any]], data: Given) -> Iterator[LayoutEntry]:
    """Yield a layout for each combination of the values that are lists.

    data: the data of entries that assign heads or neurons and name none.
    """
    for at, entry in entries:
        for values in grid(mapping(entry, at)):
            name = read_value(str | None, values.pop("name", None), f"{at}: name")
            if values.get("assign", "none") != "none":
                values = {**data, **values}
                if isinstance(values.get("data"), list):
                    raise UserError(f"{at}: assign reads one file; give this entry a data of its own")
            options = _options(ConvertOptions, "convert", values, at, src="SRC", out="OUT")
            with errors_begin_with(at):
                recipe = options.asked
            if not recipe.names_layers:
                raise UserError(
                    f"{at}: names no layers; give ladder, delayed, spd or a recipe (dense is always a point)"
                )
            yield LayoutEntry(at, name, options, recipe)


def _ways(entries: list[tuple[str, Any]], data: Given, names: Sequence[str]) -> Iterator[AdaptWay]:
    """Yield a way of adapting for each combination of the values that are lists.

    data: the data of stages that name none.
    names: of the layouts.

    An entry is ``none``; one stage, which is a method's name or a mapping with ``method`` and its options; or a chain,
    which is a list of stages or a mapping with ``stages``.
    """
    for at, entry in entries:
        values = mapping(entry, at) if isinstance(entry, Mapping) else {"stages": entry}
        layouts = _take_layouts(values, at, names)
        if "stages" in values and len(values) > 1:
            raise UserError(f"{at}: only layouts may stand beside stages; put the other options into them")
        stages = values.get("stages", values)
        if stages in (AS_CONVERTED, {"method": AS_CONVERTED}):
            yield AdaptWay((), layouts)
            continue
        if not isinstance(stages, list):
            stages = [stages]
        axes = []
        for number, stage in enumerate(stages):
            axes.append(list(_stages(stage, f"{at}: stages[{number}]" if len(stages) > 1 else at, data)))
            if number and axes[-1][0].options.method == ALIGN:
                raise UserError(f"{at}: align solves anew what the stages before it have trained; put it first")
        for chain in itertools.product(*axes):
            yield AdaptWay(chain, layouts)


def _stages(entry: Any, at: str, data: Given) -> Iterator[AdaptEntry]:
    """Yield a stage for each combination of its values. Raises UserError for one that is not valid."""
    common = {**data, **(mapping(entry, at) if isinstance(entry, Mapping) else {"method": entry})}
    method = common.get("method")
    if method not in get_args(Method):
        near = near_names(str(method), get_args(Method))
        raise UserError(f"{at}: method is {method!r}{near}, but must be one of {', '.join(get_args(Method))}")
    promote = read_value(int | None, common.pop("promote", None), f"{at}: promote")
    if promote is not None and promote < 1:
        raise UserError(f"{at}: promote is {promote}, but must be at least 1")
    for values in grid(common, "adapt"):
        dense = {"distill_from": "DENSE"} if values.get("distill_weight") != 0 else {}
        options = _options(AdaptOptions, "adapt", values, at, model="MODEL", out="OUT", **dense)
        typed = [flag(key) if value is True else f"{flag(key)} {value}" for key, value in values.items()]
        yield AdaptEntry(options, tuple(typed), promote)


def _benches(entries: list[tuple[str, Any]], names: Sequence[str]) -> Iterator[BenchEntry]:
    for at, entry in entries:
        common = mapping(entry, at)
        layouts = _take_layouts(common, at, names)
        for values in grid(common, "bench"):
            options = _options(BenchOptions, "bench", values, at, models=["DENSE", "MODEL"])
            yield BenchEntry(at, options, absolute(values), layouts)
