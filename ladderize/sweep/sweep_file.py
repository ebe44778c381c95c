"""The reading of sweep.yaml: its grids are expanded, and all is checked that needs nothing but the file."""

import difflib
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from ladderize.adapt.data_specs import HUB
from ladderize.adapt.methods import ALIGN, FULL, LORA, Method
from ladderize.adapt.train.options import parse_count
from ladderize.convert.recipe import AUTO, Recipe
from ladderize.convert.sensitivity_file import LADDER, SPD
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.files.parsing import read_yaml
from ladderize.files.records import read_value
from ladderize.runtime.bench.options import BenchOptions
from ladderize.sweep.stages import (
    Given,
    bench_options,
    check_adapt,
    check_sensitivity,
    errors_begin_with,
    eval_options,
    parsed_options,
    words_of,
)
from ladderize.sweep_document import AS_CONVERTED

MARGIN = 1.0  # points of accuracy, where the file says nothing
BOTH = "both"  # of a layout's mode
KEYS = ("model", "revision", "out", "data", "sensitivity", "layouts", "adapt", "eval", "bench", "margin", "no_verify")
PATH_KEYS = ("data", "eval_data", "perplexity", "include_path", "head_map")
# keys whose lists are no grids
LISTS = {"adapt": ("data", "eval_data", "lora_targets"), "bench": ("batch_size", "baselines")}
MOST_COMBINATIONS = 1000  # of one grid; more is taken for a mistake


@dataclass(frozen=True)
class LayoutChoice:
    """One layout of the grid, with options of ``ladderize convert``.

    where: its place in the file.
    ladder, spd: ranges of layers, or "auto": chosen by their sensitivity.
    """

    where: str
    name: str | None
    ladder: str | None = None
    spd: str | None = None
    sync_tp_size: int | None = None
    ladder_fraction: float | None = None
    spd_fraction: float | None = None
    max_ppl_increase: str | float | None = None
    head_map: str | None = None

    @property
    def auto(self) -> tuple[str, ...]:
        """The kinds of layers that are chosen by their sensitivity."""
        return tuple(kind for kind, layers in ((SPD, self.spd), (LADDER, self.ladder)) if layers == AUTO)

    def selecting(self, kind: str, sensitivity: str) -> Recipe:
        """Return the recipe that selects the layers of one kind by a sensitivity.json."""
        share, ranks = f"{kind}_fraction", self.sync_tp_size if kind == SPD else None
        options: Given = {kind: AUTO, share: getattr(self, share), "sync_tp_size": ranks}
        return Recipe(**options, sensitivity=sensitivity, max_ppl_increase=self.max_ppl_increase)

    def recipe(self, chosen: Mapping[str, str] | None = None) -> Recipe:
        """Return the recipe with all layers.

        chosen: the layers of each kind that is "auto"; None: all layers.
        """
        layers = {LADDER: self.ladder, SPD: self.spd, **(dict.fromkeys(self.auto, "all") if chosen is None else chosen)}
        return Recipe(ladder=layers[LADDER], spd=layers[SPD], sync_tp_size=self.sync_tp_size, head_map=self.head_map)

    def sensitivity_of(self, kind: str) -> tuple[str, int | None]:
        """Return the key of the sensitivity that selects layers of a kind: the kind and, for spd, the virtual ranks."""
        return kind, self.sync_tp_size if kind == SPD else None


@dataclass(frozen=True)
class AdaptStage:
    """One run of ``ladderize adapt``.

    where: its place in the file.
    promote: the number of layouts that get it, the best of those before it; None: all.
    """

    where: str
    method: Method
    options: Given
    promote: int | None = None

    @property
    def tokens(self) -> int | None:
        """The number of tokens that it reads; None where the file does not give it."""
        if self.method in (FULL, LORA):
            budget = self.options.get("max_tokens")
            return parse_count(str(budget), option="max_tokens") if budget is not None else None
        windows = [self.options.get("samples"), self.options.get("seq_len")]
        return None if None in windows else int(windows[0]) * int(windows[1])  # type: ignore[arg-type]


@dataclass(frozen=True)
class AdaptChoice:
    """One way of adapting: stages, each of which reads the output of the one before; none: as converted.

    layouts: the names of the layouts that it is for; empty: all.
    control: True if the dense model is trained in this way, too.
    """

    where: str
    stages: tuple[AdaptStage, ...] = ()
    layouts: tuple[str, ...] = ()
    control: bool = False


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

    def times(self, names: Iterable[str]) -> bool:
        """Return True if it times a layout that has these names."""
        return not self.layouts or any(name in self.layouts for name in names)


@dataclass(frozen=True)
class SweepSpec:
    """A sweep.yaml, with absolute paths.

    sensitivity, evaluation: options of ``ladderize sensitivity`` and ``eval``; None where there is no such section.
    margin: the accuracy that may be lost, in points.
    text: the file as it was read.
    """

    model: str
    revision: str | None
    out: str | None
    sensitivity: Given | None
    layouts: tuple[LayoutChoice, ...]
    adapt: tuple[AdaptChoice, ...]
    evaluation: Given | None
    eval_options: EvalOptions | None
    bench: tuple[BenchChoice, ...]
    margin: float
    verify: bool
    text: str

    def sensitivity_mode(self, kind: str) -> str:
        """Return the mode that measures layers of a kind: the paper's sweep, or each layer alone."""
        return str((self.sensitivity or {}).get("mode", "sweep")) if kind == SPD else "layers"


# ---- reading ----


def read_sweep(path: Path) -> SweepSpec:
    """Return the content of a sweep.yaml. Raises UserError, with the place, for an error in it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the sweep's YAML file (--write-example writes one)")
    return sweep_spec(read_yaml(path), str(path), path.read_text(encoding="utf-8"))


def sweep_spec(document: object, where: str, text: str = "") -> SweepSpec:
    """Return the checked content of a sweep.yaml. Raises UserError for an error in it.

    where: the begin of every message.
    """
    given = mapping(document, where, KEYS)
    if "model" not in given:
        raise UserError(f"{where}: model is missing; name the dense checkpoint, a folder or a hub id")
    if "eval" not in given and "bench" not in given:
        raise UserError(f"{where} has neither eval nor bench, so there is nothing to measure")
    data = absolute({"data": given["data"]}) if "data" in given else {}
    sensitivity = evaluation = options = None
    if "sensitivity" in given:
        at = f"{where}: sensitivity"
        sensitivity = {**data, **absolute(mapping(given["sensitivity"], at))}
        if "data" not in sensitivity:
            raise UserError(f"{at}: data is missing; name the text or the token ids to measure on")
        check_sensitivity(sensitivity, at)
    if "eval" in given:
        evaluation = absolute(mapping(given["eval"], f"{where}: eval"))
        options = eval_options(evaluation, f"{where}: eval")
    layouts = tuple(_layouts(_entries(given, "layouts", where), where, sensitivity is not None))
    if not layouts:
        raise UserError(f"{where}: layouts is empty; write for example '- ladder: all'")
    margin = read_value(float, given.get("margin", MARGIN), f"{where}: margin")
    if not 0 < margin <= 100:
        raise UserError(f"{where}: margin is {margin:g}, but must be above 0 and at most 100 points of accuracy")
    adapt = tuple(_ways(_entries(given, "adapt", where) or [AS_CONVERTED], where, data))
    bench = tuple(_benches(_entries(given, "bench", where), where))
    for stage in (stage for way in adapt for stage in way.stages if stage.promote is not None):
        if evaluation is None:
            raise UserError(f"{stage.where}: promote goes by what eval measures, but the file has no section eval")
        if bench and all(setting.layouts for setting in bench):
            raise UserError(
                f"{stage.where}: promote goes by the first benchmark that times every layout, but each names its own"
                " in layouts; leave that out of one"
            )
    model = read_value(str, given["model"], f"{where}: model")
    return SweepSpec(
        model=str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model,
        revision=read_value(str | None, given.get("revision"), f"{where}: revision"),
        out=read_value(str | None, given.get("out"), f"{where}: out"),
        sensitivity=sensitivity,
        layouts=layouts,
        adapt=adapt,
        evaluation=evaluation,
        eval_options=options,
        bench=bench,
        margin=margin,
        verify=not read_value(bool, given.get("no_verify", False), f"{where}: no_verify"),
        text=text,
    )


def mapping(given: object, where: str, known: Sequence[str] | None = None) -> dict[str, Any]:
    """Return ``given`` as a mapping without nulls. Raises UserError for anything else, and for unknown keys.

    known: the valid keys; None: the section's command checks them.
    """
    if not isinstance(given, Mapping):
        raise UserError(f"{where} is {'empty' if given is None else repr(given)}, but must hold options: 'key: value'")
    values = {str(key).replace("-", "_"): value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if known is not None and key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
            raise UserError(f"{where}: unknown key {key!r}; {hint}")
        if known is None and value == []:
            raise UserError(f"{where}: {key} is an empty list; give a value, or leave it out")
    return values


def absolute(options: Given) -> dict[str, Any]:
    """Return the options with absolute paths, since stages run in the sweep's folder."""

    def path(text: Any) -> Any:
        if isinstance(text, list):
            return [path(item) for item in text]
        if isinstance(text, Mapping) or str(text).startswith(HUB):
            return text
        return os.path.normpath(Path.cwd() / Path(str(text)).expanduser())  # YAML takes 2024 for a number

    return {key: path(value) if key in PATH_KEYS else value for key, value in options.items()}


def grid(options: Given, where: str, section: str = "") -> Iterator[dict[str, Any]]:
    """Return every combination of the values that are lists. Keys in ``LISTS`` keep their lists."""
    plain = LISTS.get(section, ())
    axes = [value if isinstance(value, list) and key not in plain else [value] for key, value in options.items()]
    return (dict(zip(options, values, strict=True)) for values in combinations(axes, where))


def combinations(axes: Iterable[Collection[Any]], where: str) -> Iterator[tuple[Any, ...]]:
    """Yield every combination of one value of each axis. Raises UserError for more than MOST_COMBINATIONS."""
    for number, combination in enumerate(itertools.product(*axes)):
        if number >= MOST_COMBINATIONS:
            raise UserError(f"{where} is a grid of more than {MOST_COMBINATIONS:,} combinations; give fewer values")
        yield combination


def _entries(given: Given, key: str, where: str) -> list[Any]:
    value = given.get(key, [])
    if isinstance(value, Mapping | str):
        return [value]
    if not isinstance(value, list):
        raise UserError(f"{where}: {key} is {value!r}, but must be a list of entries")
    return value


def _take_layouts(options: dict[str, Any]) -> tuple[str, ...]:
    """Remove the key ``layouts`` from an entry, and return its names."""
    value = options.pop("layouts", ())
    return tuple(str(text).strip() for text in (value if isinstance(value, list | tuple) else [value]))


# ---- sections ----


def _layouts(entries: list[Any], where: str, has_sensitivity: bool) -> Iterator[LayoutChoice]:
    named: dict[str, str] = {}
    for number, entry in enumerate(entries):
        at = f"{where}: layouts[{number}]"
        for combination in grid(absolute(mapping(entry, at)), at):
            with errors_begin_with(at):
                choice = _layout(combination, at, has_sensitivity)
            if choice.name is not None and named.setdefault(choice.name, at) != at:
                raise UserError(f"{at}: {named[choice.name]} has the name {choice.name!r} already; give it another")
            yield choice


def _layout(options: dict[str, Any], at: str, has_sensitivity: bool) -> LayoutChoice:
    """Return one combination with its shorthands expanded: a mode with a fraction is that fraction by sensitivity.

    Raises UserError for an entry that is not valid.
    """
    name, mode, fraction = (options.pop(key, None) for key in ("name", "mode", "fraction"))
    if mode not in (None, SPD, LADDER, BOTH):
        raise UserError(f"{at}: mode is {mode!r}, but must be one of {SPD}, {LADDER}, {BOTH}")
    if fraction is not None and mode is None:
        raise UserError(f"{at}: fraction needs mode: spd, ladder or both; or give spd_fraction or ladder_fraction")
    for kind in (SPD, LADDER):
        if mode in (kind, BOTH) and fraction is not None:
            options.setdefault(f"{kind}_fraction", fraction)
        if mode in (kind, BOTH) or f"{kind}_fraction" in options:
            options.setdefault(kind, AUTO)
    if SPD not in options and LADDER not in options:
        raise UserError(f"{at} names no layers; give ladder, spd, or a mode with a fraction (dense is always a point)")
    parsed = parsed_options(words_of("convert", ["SRC", "OUT"], {}, options, at))
    choice = parsed.fill(LayoutChoice, where=at, name=read_value(str | None, name, f"{at}: name"))
    if choice.spd is not None and choice.sync_tp_size is None:
        raise UserError(f"{at}: sync_tp_size is missing, the number of ranks that the sync points are dropped for")
    for key in ("ladder_fraction", "spd_fraction", "max_ppl_increase"):
        choosing = choice.auto if key == "max_ppl_increase" else key.removesuffix("_fraction") in choice.auto
        if key in options and not choosing:
            raise UserError(f"{at}: {key} has no effect where the layers are named")
    for kind in choice.auto:
        choice.selecting(kind, "sensitivity.json")  # raises for values that are not valid
    if choice.auto and not has_sensitivity:
        raise UserError(f"{at} chooses layers by their sensitivity, but the file has no section sensitivity")
    choice.recipe()
    return choice


def _ways(entries: list[Any], where: str, data: Given) -> Iterator[AdaptChoice]:
    """Yield a way of adapting for each combination of the values that are lists.

    data: the data of stages that name none.

    An entry is ``none``; one stage, which is a method's name or a mapping with ``method`` and its options; or a chain,
    which is a list of stages or a mapping with ``stages``.
    """
    for number, entry in enumerate(entries):
        at = f"{where}: adapt[{number}]"
        given = mapping(entry, at) if isinstance(entry, Mapping) else {}
        layouts = _take_layouts(given)
        control = read_value(bool, given.pop("control", False), f"{at}: control")
        stage = given if isinstance(entry, Mapping) else entry
        if isinstance(entry, list) or "stages" in given:
            mapping(given, at, ("stages",))
            chains = _chains(given.get("stages", entry), at, data)
        elif stage in (AS_CONVERTED, {"method": AS_CONVERTED}):
            chains = iter([()])
        else:
            chains = ((one,) for one in _stages(stage, at, data))
        for stages in chains:
            if control:
                _check_controlled(stages, at)
            yield AdaptChoice(at, stages, layouts, control)


def _chains(stages: Any, at: str, data: Given) -> Iterator[tuple[AdaptStage, ...]]:
    if not isinstance(stages, list) or not stages:
        raise UserError(f"{at}: stages is {stages!r}, but must be a list of stages, such as [align, full]")
    axes = [list(_stages(stage, f"{at}: stages[{number}]", data)) for number, stage in enumerate(stages)]
    for later in (one for axis in axes[1:] for one in axis if one.method == ALIGN):
        raise UserError(f"{later.where}: align solves anew what the stages before it have trained; put it first")
    return combinations(axes, at)


def _stages(entry: Any, at: str, data: Given) -> Iterator[AdaptStage]:
    """Yield a stage for each combination of its values. Raises UserError for one that is not valid."""
    given = {**data, **absolute(mapping(entry, at) if isinstance(entry, Mapping) else {"method": entry})}
    method = given.pop("method", None)
    if method not in get_args(Method):
        raise UserError(f"{at}: method is {method!r}, but must be one of {', '.join(get_args(Method))}")
    promote = read_value(int | None, given.pop("promote", None), f"{at}: promote")
    if promote is not None and promote < 1:
        raise UserError(f"{at}: promote is {promote}, but must be at least 1")
    for combination in grid(given, at, "adapt"):
        check_adapt(method, combination, at)
        yield AdaptStage(at, cast(Method, method), combination, promote)


def _check_controlled(stages: Sequence[AdaptStage], at: str) -> None:
    """Raise UserError where training the dense model in the same way would change nothing."""
    trained = [stage for stage in stages if stage.method != ALIGN]
    if not trained or any(stage.method not in (FULL, LORA) for stage in trained):
        raise UserError(f"{at}: control needs stages of full or lora: nothing else changes the dense model")
    for stage in trained:
        if float(stage.options.get("distill_weight", 1)) == 1:
            raise UserError(
                f"{stage.where}: control has no effect with a distill_weight of 1, since the dense model's own"
                " predictions teach it nothing; set distill_weight below 1, so that all models learn from the text too"
            )


def _benches(entries: list[Any], where: str) -> Iterator[BenchChoice]:
    for number, entry in enumerate(entries):
        at = f"{where}: bench[{number}]"
        given = mapping(entry, at)
        layouts = _take_layouts(given)
        for combination in grid(given, at, "bench"):
            yield BenchChoice(at, *bench_options(combination, at), combination, layouts)
