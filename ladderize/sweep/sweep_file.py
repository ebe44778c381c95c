"""The reading of sweep.yaml: its grids are expanded, and all is checked that needs nothing but the file."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from ladderize.adapt.data_files import HUB
from ladderize.adapt.methods import ALIGN, Method
from ladderize.adapt.options import AdaptOptions
from ladderize.checkpoint.opening import open_sound_checkpoint
from ladderize.choices import near_names, options_from
from ladderize.commands.convert import ConvertOptions
from ladderize.convert.recipe import Recipe
from ladderize.errors import UsageError, UserError
from ladderize.eval.options import MARGIN, EvalOptions, check_margin
from ladderize.files.parsing import read_yaml
from ladderize.files.records import read_value
from ladderize.files.regular import names_a_file, resolved
from ladderize.layout import Layout, check_split
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, check_bench_usage
from ladderize.runtime.shards import check_runnable
from ladderize.sweep.stages import SHARDS, Given, adapt_words, errors_begin_with, outputs_in, parsed_options, words_of
from ladderize.sweep_document import AS_CONVERTED

KEYS = ("model", "out", "data", "layouts", "adapt", "eval", "bench", "margin", "no_verify")
PATH_KEYS = ("data", "eval_data", "teacher_cache", "perplexity", "include_path", "assignment", "recipe")
SWEEP_JSON = "sweep.json"
LINK_KEYS = ("link", "outer_link")  # paths where they name a file
# keys whose lists are no grids
LISTS = {"adapt": ("data", "eval_data", "lora_targets"), "bench": ("batch_size", "baselines", "schedules")}


@dataclass(frozen=True)
class LayoutChoice:
    """One layout of the grid.

    where: its place in the file.
    options: of ``ladderize convert``, as the file has them.
    recipe: the same, checked.
    assign: what is assigned to ranks, by the data of the options.
    """

    where: str
    name: str | None
    options: Given
    recipe: Recipe
    assign: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdaptStage:
    """One run of ``ladderize adapt``.

    promote: the number of layouts that get it, the best of those before it; None: all.
    """

    method: Method
    options: Given
    promote: int | None = None


@dataclass(frozen=True)
class AdaptChoice:
    """One way of adapting: stages, each of which reads the output of the one before; none: as converted.

    layouts: the names of the layouts that it is for; empty: all.
    """

    stages: tuple[AdaptStage, ...] = ()
    layouts: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchChoice:
    """One benchmark.

    options, link: of ``ladderize bench``.
    given: the options as the file has them.
    """

    where: str
    options: BenchOptions
    link: str | None
    given: Given
    layouts: tuple[str, ...] = ()

    def times(self, name: str | None) -> bool:
        """Return True if it times a layout of this name."""
        return not self.layouts or name in self.layouts


@dataclass(frozen=True)
class SweepSpec:
    """A sweep.yaml, with absolute paths.

    evaluation: options of ``ladderize eval``; None where there is no such section.
    margin: the accuracy that may be lost, in points.
    """

    model: str
    out: str | None
    layouts: tuple[LayoutChoice, ...]
    adapt: tuple[AdaptChoice, ...]
    evaluation: Given | None
    bench: tuple[BenchChoice, ...]
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
    given = mapping(document, where)
    if unknown := [key for key in given if key not in KEYS]:
        near = near_names(unknown[0], KEYS)
        raise UserError(f"{where}: unknown key {unknown[0]!r}{near}; known are {', '.join(KEYS)}")
    if "model" not in given:
        raise UserError(f"{where}: model is missing; name the dense checkpoint, a folder or a hub id")
    if "eval" not in given and "bench" not in given:
        raise UserError(f"{where} has neither eval nor bench, so there is nothing to measure")
    data = absolute({"data": given["data"]}) if "data" in given else {}
    evaluation = None
    if "eval" in given:
        with errors_begin_with(at := f"{where}: eval"):
            evaluation = absolute(mapping(given["eval"], at))
            parsed_options(words_of("eval", ["MODEL"], {}, evaluation)).fill(EvalOptions).check()
    layouts = tuple(_layouts(_entries(given, "layouts", where), data))
    if not layouts:
        raise UserError(f"{where}: layouts is missing; write for example '- ladder: all'")
    names = [choice.name for choice in layouts if choice.name is not None]
    margin = read_value(float, given.get("margin", MARGIN), f"{where}: margin")
    with errors_begin_with(where):
        check_margin(margin)
    adapt = tuple(_ways(_entries(given, "adapt", where), data, names)) or (AdaptChoice(),)
    if evaluation is None and any(stage.promote is not None for way in adapt for stage in way.stages):
        raise UserError(f"{where}: promote goes by what eval measures, but the file has no section eval")
    model = read_value(str, given["model"], f"{where}: model")
    return SweepSpec(
        model=str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model,
        out=read_value(str | None, given.get("out"), f"{where}: out"),
        layouts=layouts,
        adapt=adapt,
        evaluation=evaluation,
        bench=tuple(_benches(_entries(given, "bench", where), names)),
        margin=margin,
        verify=not read_value(bool, given.get("no_verify", False), f"{where}: no_verify"),
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
    config = open_sound_checkpoint(spec.model).config
    dense = Layout.from_config(config)
    if not dense.is_dense:
        raise UserError(f"{spec.model} is not dense ({dense}); a sweep converts the dense model")
    layouts = []
    for choice in spec.layouts:
        with errors_begin_with(choice.where):
            layouts.append(choice.recipe.layout(dense))
            layouts[-1].check_model(config)
    for setting in spec.bench:
        made = setting.options
        with errors_begin_with(setting.where):
            check_split(config, made.ranks, name=made.ranks_option)
        for choice, layout in zip(spec.layouts, layouts, strict=True):
            if setting.times(choice.name):
                with errors_begin_with(f"{setting.where} cannot time {choice.name or layout}"):
                    check_runnable(config, layout, made.ranks, name=made.ranks_option, in_groups=True)
    return layouts


def mapping(given: object, where: str) -> dict[str, Any]:
    """Return ``given`` as a mapping without nulls. Raises UserError for anything else, and for an empty list."""
    if not isinstance(given, Mapping):
        raise UserError(f"{where} is {'empty' if given is None else repr(given)}, but must hold options: 'key: value'")
    values = {str(key).replace("-", "_"): value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if value == []:
            raise UserError(f"{where}: {key} is an empty list; give a value, or leave it out")
    return values


def absolute(options: Given) -> dict[str, Any]:
    """Return the options with absolute paths, since stages run in the sweep's folder."""

    def path(key: str, text: Any) -> Any:
        if isinstance(text, list):
            return [path(key, item) for item in text]
        if isinstance(text, Mapping) or str(text).startswith(HUB) or (key in LINK_KEYS and not names_a_file(str(text))):
            return text
        return os.path.normpath(Path.cwd() / Path(str(text)).expanduser())  # YAML takes 2024 for a number

    return {key: path(key, value) if key in (*PATH_KEYS, *LINK_KEYS) else value for key, value in options.items()}


def grid(options: Given, section: str = "") -> Iterator[dict[str, Any]]:
    """Yield every combination of the values that are lists. Keys in ``LISTS`` keep their lists."""
    plain = LISTS.get(section, ())
    axes = [value if isinstance(value, list) and key not in plain else [value] for key, value in options.items()]
    return (dict(zip(options, values, strict=True)) for values in itertools.product(*axes))


def _entries(given: Given, key: str, where: str) -> list[tuple[str, Any]]:
    """Return the entries of a section, each behind its place in the file."""
    value = given.get(key, [])
    entries = [value] if isinstance(value, Mapping | str) else value
    if not isinstance(entries, list):
        raise UserError(f"{where}: {key} is {value!r}, but must be a list of entries")
    return [(f"{where}: {key}[{number}]", entry) for number, entry in enumerate(entries)]


def _take_layouts(options: dict[str, Any], where: str, names: Sequence[str]) -> tuple[str, ...]:
    """Remove the key ``layouts`` from an entry, and return its names. Raises UserError for a name that no layout
    has."""
    value = options.pop("layouts", ())
    wanted = tuple(map(str, value if isinstance(value, list | tuple) else [value]))
    if unknown := [name for name in wanted if name not in names]:
        known = f"known are {', '.join(dict.fromkeys(names))}" if names else "give the entry of layouts a name"
        near = near_names(unknown[0], names)
        raise UserError(f"{where}: layouts names {unknown[0]!r}, but no layout has this name{near}; {known}")
    return wanted


# ---- sections ----


def _layouts(entries: list[tuple[str, Any]], data: Given) -> Iterator[LayoutChoice]:
    """Yield a layout for each combination of the values that are lists.

    data: the data of entries that assign heads or neurons and name none.
    """
    for at, entry in entries:
        for options in grid(absolute(mapping(entry, at))):
            name = read_value(str | None, options.pop("name", None), f"{at}: name")
            if options.get("assign", "none") != "none":
                options = {**data, **options}
                if isinstance(options.get("data"), list):
                    raise UserError(f"{at}: assign reads one file; give this entry a data of its own")
            with errors_begin_with(at):
                words_of("convert", ["SRC", "OUT"], {}, options)
                asked = options_from(ConvertOptions, {"src": "SRC", "out": "OUT", **options})
                recipe, assign = asked.asked, asked.assign
                if not recipe.names_layers:
                    raise UserError("names no layers; give ladder, delayed, spd or a recipe (dense is always a point)")
            yield LayoutChoice(at, name, options, recipe, assign)


def _ways(entries: list[tuple[str, Any]], data: Given, names: Sequence[str]) -> Iterator[AdaptChoice]:
    """Yield a way of adapting for each combination of the values that are lists.

    data: the data of stages that name none.
    names: of the layouts.

    An entry is ``none``; one stage, which is a method's name or a mapping with ``method`` and its options; or a chain,
    which is a list of stages or a mapping with ``stages``.
    """
    for at, entry in entries:
        given = mapping(entry, at) if isinstance(entry, Mapping) else {"stages": entry}
        layouts = _take_layouts(given, at, names)
        if "stages" in given and len(given) > 1:
            raise UserError(f"{at}: only layouts may stand beside stages; put the other options into them")
        stages = given.get("stages", given)
        if stages in (AS_CONVERTED, {"method": AS_CONVERTED}):
            yield AdaptChoice((), layouts)
            continue
        if not isinstance(stages, list):
            stages = [stages]
        places = [f"{at}: stages[{place}]" if len(stages) > 1 else at for place in range(len(stages))]
        axes = [list(_stages(stage, place, data)) for stage, place in zip(stages, places, strict=True)]
        if any(stage.method == ALIGN for axis in axes[1:] for stage in axis):
            raise UserError(f"{at}: align solves anew what the stages before it have trained; put it first")
        for chain in itertools.product(*axes):
            yield AdaptChoice(chain, layouts)


def _stages(entry: Any, at: str, data: Given) -> Iterator[AdaptStage]:
    """Yield a stage for each combination of its values. Raises UserError for one that is not valid."""
    given = {**data, **absolute(mapping(entry, at) if isinstance(entry, Mapping) else {"method": entry})}
    method = given.pop("method", None)
    if method not in get_args(Method):
        near = near_names(str(method), get_args(Method))
        raise UserError(f"{at}: method is {method!r}{near}, but must be one of {', '.join(get_args(Method))}")
    promote = read_value(int | None, given.pop("promote", None), f"{at}: promote")
    if promote is not None and promote < 1:
        raise UserError(f"{at}: promote is {promote}, but must be at least 1")
    for options in grid(given, "adapt"):
        with errors_begin_with(at):
            adapt_words("MODEL", "OUTPUT", method, "DENSE", options, True)  # names what a sweep may not give
            taught = method not in SHARDS or bool(options.get("distill_weight", 1))
            given_options = {name: value for name, value in options.items() if taught or name != "distill_weight"}
            given_options |= {
                "model": "MODEL",
                "out": "OUT",
                "method": method,
                "distill_from": "DENSE" if taught else None,
            }
            options_from(AdaptOptions, given_options)
        yield AdaptStage(cast(Method, method), options, promote)


def _benches(entries: list[tuple[str, Any]], names: Sequence[str]) -> Iterator[BenchChoice]:
    for at, entry in entries:
        given = absolute(mapping(entry, at))
        layouts = _take_layouts(given, at, names)
        for options in grid(given, "bench"):
            with errors_begin_with(at):
                given_options = parsed_options(words_of("bench", ["DENSE", "MODEL"], {}, options))
                device = given_options.params["device"] or "cpu"  # another is known where torch is
                made, link = given_options.fill(BenchOptions, device=device), given_options.params["link"]
                check_bench_usage(given_options.fill(ModelChoice), made, link)
            yield BenchChoice(at, made, link, options, layouts)
