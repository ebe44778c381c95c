"""sweep.yaml: read, its grids unfolded, and checked as far as the file alone decides."""

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

from ladderize.adapt.data.sources import HUB
from ladderize.adapt.methods import ALIGN, FULL, LORA, Method
from ladderize.convert.recipe import AUTO
from ladderize.convert.sensitivity_file import LADDER, SPD, Mode
from ladderize.errors import LadderizeError, UserError
from ladderize.files.parsing import read_yaml
from ladderize.files.records import read_value
from ladderize.tradeoff.sweep.settings import (
    BENCH_KEYS,
    DISTILL_WEIGHT,
    EVAL_KEYS,
    SENSITIVITY_KEYS,
    adapt_keys,
    adapt_settings,
    bench_link,
    bench_settings,
    check_keys,
    eval_settings,
    names,
    sensitivity_settings,
)
from ladderize.tradeoff.sweep.spec import AdaptChoice, AdaptStage, BenchChoice, LayoutChoice, SweepSpec
from ladderize.workflows.sweep_document import AS_CONVERTED

MOST_POINTS = 1000  # of one grid; more is a slip
PATH_KEYS = {"data", "eval_data", "perplexity", "include_path", "head_map"}


def absolute(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same with absolute paths: stages run elsewhere."""

    def path(text: Any) -> Any:
        if isinstance(text, list):
            return [path(item) for item in text]
        if not isinstance(text, str) or text.startswith(HUB):
            return text
        return os.path.normpath(Path.cwd() / Path(text).expanduser())

    return {key: path(value) if key in PATH_KEYS else value for key, value in given.items()}


def grid(given: Mapping[str, Any], where: str, plain: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Every combination of the values that are lists, but those of ``plain``."""
    axes = [
        [(key, item) for item in value] if isinstance(value, list) and key not in plain else [(key, value)]
        for key, value in given.items()
    ]
    if empty := [key for (key, value), axis in zip(given.items(), axes, strict=True) if not axis and value == []]:
        raise UserError(f"{where}: {empty[0]} is an empty list; give a value, or leave it out")
    return map(dict, combinations(axes, where))


def combinations(axes: Collection[Collection[Any]], where: str) -> Iterator[tuple[Any, ...]]:
    """One of each axis; raises UserError for more than anybody means."""
    for number, combination in enumerate(itertools.product(*axes)):
        if number >= MOST_POINTS:
            raise UserError(f"{where} is a grid of more than {MOST_POINTS:,} combinations; give fewer values")
        yield combination


def only(given: dict[str, Any], at: str, known: Collection[str]) -> tuple[str, ...]:
    """The names of layouts that an entry is for."""
    named = names(given.pop("layouts", ()))
    if unknown := [name for name in named if name not in known]:
        raise UserError(
            f"{at}: layouts names {unknown[0]!r}, but no layout has this name;"
            f" {'known are ' + ', '.join(sorted(known)) if known else 'give one a name'}"
        )
    return named


PROMOTE = "promote"
ENTRY_KEYS = ("layouts", "control")
PLAIN = ("data", "eval_data", "lora_targets")  # keys whose lists are no grids


def adapt_choices(entries: list[Any], where: str, known: Collection[str], data: Any) -> Iterator[AdaptChoice]:
    """One for each combination of the values that are lists. known: names of layouts. data: of stages that name none.

    An entry is ``none``; one stage, which is a method's name or a mapping with ``method`` and its options; or a chain,
    which is a list of stages or a mapping with ``stages``. Raises UserError.
    """
    for number, entry in enumerate(entries):
        at = f"{where}: adapt[{number}]"
        given = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, Mapping) else {}
        own = {key: given.pop(key) for key in ENTRY_KEYS if key in given}
        stage = given if isinstance(entry, Mapping) else entry
        if isinstance(entry, list) or "stages" in given:
            check_keys(given, ("stages", *ENTRY_KEYS), at)
            chains = _chains(given.get("stages", entry), at, data)
        elif stage in (AS_CONVERTED, {"method": AS_CONVERTED}):
            chains = iter([()])
        else:
            chains = ((one,) for one in _stage(stage, at, data))
        layouts = only(own, at, known)
        control = read_value(bool, own.get("control", False), f"{at}: control")
        for stages in chains:
            if control:
                check_controlled(stages, at)
            yield AdaptChoice(at, stages, layouts, control)


def _chains(stages: Any, at: str, data: Any) -> Iterator[tuple[AdaptStage, ...]]:
    if not isinstance(stages, list) or not stages:
        raise UserError(f"{at}: stages is {stages!r}, but must be a list of stages, such as [align, full]")
    axes = [list(_stage(stage, f"{at}: stages[{number}]", data)) for number, stage in enumerate(stages)]
    for later in (one for axis in axes[1:] for one in axis if one.method == ALIGN):
        raise UserError(f"{later.where}: align solves anew what the stages before it have trained; put it first")
    return combinations(axes, at)


def check_controlled(stages: Sequence[AdaptStage], at: str) -> None:
    """Raise UserError where training the dense model in the same way would change nothing."""
    trained = [stage for stage in stages if stage.method != ALIGN]
    if not trained or any(stage.method not in (FULL, LORA) for stage in trained):
        raise UserError(f"{at}: control needs stages of full or lora: nothing else changes the dense model")
    for stage in trained:
        if stage.given.get("distill_weight", DISTILL_WEIGHT) == 1:
            raise UserError(
                f"{stage.where}: control has no effect with a distill_weight of 1, since the dense model's own"
                " predictions teach it nothing; set distill_weight below 1, so that all models learn from the text too"
            )


def _stage(entry: Any, at: str, data: Any) -> Iterator[AdaptStage]:
    """A stage with each combination of its values."""
    named = entry.get("method") if isinstance(entry, Mapping) else entry
    if named not in get_args(Method):
        raise UserError(f"{at}: method is {named!r}, but must be one of {', '.join(get_args(Method))}")
    method = cast(Method, named)
    given = check_keys(entry if isinstance(entry, Mapping) else {}, ("method", PROMOTE, *adapt_keys(method)), at)
    given = absolute({**({"data": data} if data is not None else {}), **given})
    given.pop("method", None)
    promote = read_value(int | None, given.pop(PROMOTE, None), f"{at}: {PROMOTE}")
    if promote is not None and promote < 1:
        raise UserError(f"{at}: {PROMOTE} is {promote}, but must be at least 1")
    for combination in grid(given, at, PLAIN):
        adapt_settings(method, combination, "the dense model", at)
        yield AdaptStage(at, method, combination, promote)


KEYS = ("model", "revision", "out", "data", "sensitivity", "layouts", "adapt", "eval", "bench", "margin", "no_verify")
BOTH = "both"
MARGIN = 1.0  # points of accuracy, where the file says nothing
LAYOUT_KEYS = (
    "name",
    "mode",
    "fraction",
    "ladder",
    "spd",
    "sync_tp_size",
    "ladder_fraction",
    "spd_fraction",
    "max_ppl_increase",
    "head_map",
)


def read_sweep(path: Path) -> SweepSpec:
    """Read a sweep.yaml; raises UserError for what is wrong in it, with the place."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the sweep's YAML file (--write-example writes one)")
    return sweep_spec(read_yaml(path), str(path), path.read_text(encoding="utf-8"))


def sweep_spec(document: object, where: str, text: str = "") -> SweepSpec:
    """The same of a mapping that is read already. where: precedes every message."""
    given = check_keys(document, KEYS, where)
    if "model" not in given:
        raise UserError(f"{where}: model is missing; name the dense checkpoint, a folder or a hub id")
    if "eval" not in given and "bench" not in given:
        raise UserError(f"{where} has neither eval nor bench, so there is nothing to measure")
    data = given.get("data")
    sensitivity = given.get("sensitivity")
    if sensitivity is not None:
        at = f"{where}: sensitivity"
        sensitivity = check_keys(sensitivity, SENSITIVITY_KEYS, at)
        sensitivity = absolute({"data": data, **sensitivity} if data is not None else sensitivity)
        read_value(Mode, sensitivity.get("mode", "spd"), f"{at}: mode")  # type: ignore[arg-type]
        sensitivity_settings({key: v for key, v in sensitivity.items() if key != "mode"}, "ladder", None, at)
    evaluation = given.get("eval")
    if evaluation is not None:
        evaluation = absolute(check_keys(evaluation, EVAL_KEYS, f"{where}: eval"))
        eval_settings(evaluation, None, f"{where}: eval")
    layouts = tuple(_layouts(_entries(given, "layouts", where), where, sensitivity is not None))
    if not layouts:
        raise UserError(f"{where}: layouts is empty; write for example '- ladder: all'")
    known = {layout.name for layout in layouts if layout.name is not None}
    margin = read_value(float, given.get("margin", MARGIN), f"{where}: margin")
    if not 0 < margin <= 100:
        raise UserError(f"{where}: margin is {margin:g}, but must be above 0 and at most 100 points of accuracy")
    adapt = tuple(adapt_choices(_entries(given, "adapt", where) or [AS_CONVERTED], where, known, data))
    bench = tuple(_benches(_entries(given, "bench", where), where, known))
    readers = [sensitivity or {}, *(stage.given for choice in adapt for stage in choice.stages)]
    judged = next((stage for choice in adapt for stage in choice.stages if stage.promote is not None), None)
    if judged is not None and evaluation is None:
        raise UserError(f"{judged.where}: promote goes by what eval measures, but the file has no section eval")
    if judged is not None and bench and all(setting.layouts for setting in bench):
        raise UserError(
            f"{judged.where}: promote goes by the first benchmark that times every layout, but each names its own in"
            " layouts; leave that out of one"
        )
    if data is not None and all(one.get("data") != absolute({"data": data})["data"] for one in readers):
        raise UserError(f"{where}: data has no effect: no stage of adapt and no sensitivity lacks data of its own")
    model = read_value(str, given["model"], f"{where}: model")
    return SweepSpec(
        model=str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model,
        revision=read_value(str | None, given.get("revision"), f"{where}: revision"),
        out=read_value(str | None, given.get("out"), f"{where}: out"),
        sensitivity=sensitivity,
        layouts=layouts,
        adapt=adapt,
        eval_given=evaluation,
        bench=bench,
        margin=margin,
        verify=not read_value(bool, given.get("no_verify", False), f"{where}: no_verify"),
        text=text,
    )


def _entries(given: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = given.get(key, [])
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping | str):
        return [value]
    raise UserError(f"{where}: {key} is {value!r}, but must be a list of entries")


def _layouts(entries: list[Any], where: str, has_sensitivity: bool) -> Iterator[LayoutChoice]:
    for number, entry in enumerate(entries):
        at = f"{where}: layouts[{number}]"
        given = absolute(check_keys(entry, LAYOUT_KEYS, at))
        for combination in grid(given, at):
            try:
                yield _layout(combination, at, has_sensitivity)
            except LadderizeError as error:
                text = str(error)
                raise UserError(text if text.startswith(at) else f"{at}: {text}") from None


def _layout(given: dict[str, Any], at: str, has_sensitivity: bool) -> LayoutChoice:
    """One combination, its shorthands written out: a mode with a fraction is that fraction by sensitivity."""
    mode = read_value(str | None, given.pop("mode", None), f"{at}: mode")
    if mode is not None and mode not in (SPD, LADDER, BOTH):
        raise UserError(f"{at}: mode is {mode!r}, but must be one of {SPD}, {LADDER}, {BOTH}")
    fraction = read_value(float | None, given.pop("fraction", None), f"{at}: fraction")
    if fraction is not None and mode is None:
        raise UserError(f"{at}: fraction needs mode: spd, ladder or both; or give spd_fraction or ladder_fraction")
    kinds = {None: (), SPD: (SPD,), LADDER: (LADDER,), BOTH: (SPD, LADDER)}[mode]
    for kind in (SPD, LADDER):
        share = f"{kind}_fraction"
        if kind in kinds and fraction is not None:
            given.setdefault(share, fraction)
        if kind in given:
            given[kind] = _ranges(given[kind], f"{at}: {kind}")
        elif kind in kinds or share in given:
            given[kind] = AUTO
        if mode is not None and kind not in kinds and kind in given:
            raise UserError(f"{at}: {kind} does not go with mode {mode}; leave one of them out")
    if SPD not in given and LADDER not in given:
        raise UserError(f"{at} names no layers; give ladder, spd, or a mode with a fraction (dense is always a point)")
    types = {"name": str, "sync_tp_size": int, "head_map": str, "max_ppl_increase": float}
    types |= {"ladder_fraction": float, "spd_fraction": float}
    choice = LayoutChoice(
        where=at,
        ladder=given.get(LADDER),
        spd=given.get(SPD),
        **{key: read_value(kind | None, given.get(key), f"{at}: {key}") for key, kind in types.items()},
    )
    if choice.spd is not None and choice.sync_tp_size is None:
        raise UserError(f"{at}: sync_tp_size is missing, the number of ranks that the sync points are dropped for")
    for key in ("ladder_fraction", "spd_fraction", "max_ppl_increase"):
        kind = key.removesuffix("_fraction")
        if given.get(key) is not None and not (kind in choice.auto or (kind == key and choice.auto)):
            raise UserError(f"{at}: {key} has no effect where the layers are named")
    for kind in choice.auto:
        choice.selecting(kind, "sensitivity.json")  # raises for what is not valid
    if choice.auto and not has_sensitivity:
        raise UserError(f"{at} chooses layers by their sensitivity, but the file has no section sensitivity")
    choice.recipe(dict.fromkeys(choice.auto, "all"))
    return choice


def _ranges(value: Any, where: str) -> str:
    if isinstance(value, list) and value and all(type(item) in (int, str) for item in value):
        return ",".join(map(str, value))
    if type(value) in (int, str):
        return str(value)
    raise UserError(f"{where} is {value!r}; write ranges such as 16:32, or a list of those for a grid")


def _benches(entries: list[Any], where: str, known: Collection[str]) -> Iterator[BenchChoice]:
    seen = []
    for number, entry in enumerate(entries):
        at = f"{where}: bench[{number}]"
        given = check_keys(entry, ("layouts", *BENCH_KEYS), at)
        layouts = only(given, at, known)
        for combination in grid(given, at, plain=("batch_size", "baselines")):
            choice = BenchChoice(at, bench_settings(combination, at), bench_link(combination, at), combination, layouts)
            if (choice.options, choice.link, combination.get("dtype"), layouts) not in seen:
                seen.append((choice.options, choice.link, combination.get("dtype"), layouts))
                yield choice
