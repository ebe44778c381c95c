"""sweep.yaml: read, its grids unfolded, and checked as far as the file alone decides."""

import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from ladderize.adapt.data.sources import HUB
from ladderize.adapt.methods import BLOCKS, LORA
from ladderize.convert.recipe import AUTO
from ladderize.convert.sensitivity_file import LADDER, SPD, Mode
from ladderize.errors import LadderizeError, UserError
from ladderize.files.records import read_value
from ladderize.files.yaml12 import read_yaml
from ladderize.tradeoff.sweep.settings import (
    BENCH_KEYS,
    BLOCKS_KEYS,
    EVAL_KEYS,
    LORA_KEYS,
    RETRAIN_KEYS,
    SENSITIVITY_KEYS,
    bench_link,
    bench_settings,
    blocks_settings,
    check_keys,
    eval_settings,
    names,
    retraining_settings,
    sensitivity_settings,
)
from ladderize.tradeoff.sweep.spec import NONE, AdaptChoice, BenchChoice, LayoutChoice, SweepSpec
from ladderize.workflows.sweep_document import Adapted

KEYS = ("model", "revision", "out", "sensitivity", "layouts", "adapt", "eval", "bench", "margin", "no_verify")
BOTH = "both"
MARGIN = 1.0  # points of accuracy, where the file says nothing
MOST_POINTS = 1000  # of one grid; more is a slip
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
PATH_KEYS = {"data", "eval_data", "perplexity", "include_path", "head_map"}


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
    sensitivity = given.get("sensitivity")
    if sensitivity is not None:
        at = f"{where}: sensitivity"
        sensitivity = absolute(check_keys(sensitivity, SENSITIVITY_KEYS, at))
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
    model = read_value(str, given["model"], f"{where}: model")
    return SweepSpec(
        model=str(Path(model).expanduser().resolve()) if Path(model).expanduser().exists() else model,
        revision=read_value(str | None, given.get("revision"), f"{where}: revision"),
        out=read_value(str | None, given.get("out"), f"{where}: out"),
        sensitivity=sensitivity,
        layouts=layouts,
        adapt=tuple(_adapts(_entries(given, "adapt", where) or [NONE], where, known)),
        eval_given=evaluation,
        bench=tuple(_benches(_entries(given, "bench", where), where, known)),
        margin=margin,
        verify=not read_value(bool, given.get("no_verify", False), f"{where}: no_verify"),
        text=text,
    )


def _entries(given: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = given.get(key, [])
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping) or value == NONE:
        return [value]
    raise UserError(f"{where}: {key} is {value!r}, but must be a list of entries")


def absolute(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same with absolute paths: stages run elsewhere."""

    def path(text: Any) -> Any:
        if isinstance(text, list):
            return [path(item) for item in text]
        if not isinstance(text, str) or text.startswith(HUB):
            return text
        return os.path.normpath(Path.cwd() / Path(text).expanduser())

    return {key: path(value) if key in PATH_KEYS else value for key, value in given.items()}


def _grid(given: Mapping[str, Any], where: str, plain: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Every combination of the values that are lists, but those of ``plain``."""
    axes = [
        [(key, item) for item in value] if isinstance(value, list) and key not in plain else [(key, value)]
        for key, value in given.items()
    ]
    if empty := [key for (key, value), axis in zip(given.items(), axes, strict=True) if not axis and value == []]:
        raise UserError(f"{where}: {empty[0]} is an empty list; give a value, or leave it out")
    for number, combination in enumerate(itertools.product(*axes)):
        if number >= MOST_POINTS:
            raise UserError(f"{where} is a grid of more than {MOST_POINTS:,} combinations; give fewer values")
        yield dict(combination)


def _layouts(entries: list[Any], where: str, has_sensitivity: bool) -> Iterator[LayoutChoice]:
    for number, entry in enumerate(entries):
        at = f"{where}: layouts[{number}]"
        given = absolute(check_keys(entry, LAYOUT_KEYS, at))
        for combination in _grid(given, at):
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
        choice.selecting(kind, "sensitivity.json")  # raises for what cannot be meant
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


def _only(given: dict[str, Any], at: str, known: Collection[str]) -> tuple[str, ...]:
    """The names of layouts that an entry is for."""
    only = names(given.pop("layouts", ()))
    if unknown := [name for name in only if name not in known]:
        raise UserError(
            f"{at}: layouts names {unknown[0]!r}, but no layout has this name;"
            f" {'known are ' + ', '.join(sorted(known)) if known else 'give one a name'}"
        )
    return only


def _adapts(entries: list[Any], where: str, known: Collection[str]) -> Iterator[AdaptChoice]:
    for number, entry in enumerate(entries):
        at = f"{where}: adapt[{number}]"
        if entry == NONE or (isinstance(entry, Mapping) and dict(entry) == {"method": NONE}):
            yield AdaptChoice(at, NONE)
            continue
        said = entry.get("method") if isinstance(entry, Mapping) else None
        if said not in get_args(Adapted):
            raise UserError(f"{at}: method is {said!r}, but must be one of {', '.join(get_args(Adapted))}")
        method = cast(Adapted, said)
        keys = BLOCKS_KEYS if method == BLOCKS else (*RETRAIN_KEYS, *(LORA_KEYS if method == LORA else ()))
        given = absolute(check_keys(entry, ("method", "layouts", *keys), at))
        only = _only(given, at, known)
        del given["method"]
        for combination in _grid(given, at, plain=("data", "eval_data", "lora_targets")):
            if method == BLOCKS:
                blocks_settings(combination, at)
            else:
                retraining_settings(combination, method, "the dense model", at)
            yield AdaptChoice(at, method, combination, only)


def _benches(entries: list[Any], where: str, known: Collection[str]) -> Iterator[BenchChoice]:
    seen = []
    for number, entry in enumerate(entries):
        at = f"{where}: bench[{number}]"
        given = check_keys(entry, ("layouts", *BENCH_KEYS), at)
        only = _only(given, at, known)
        for combination in _grid(given, at, plain=("batch_size", "baselines")):
            choice = BenchChoice(at, bench_settings(combination, at), bench_link(combination, at), combination, only)
            if (choice.options, choice.link, combination.get("dtype"), only) not in seen:
                seen.append((choice.options, choice.link, combination.get("dtype"), only))
                yield choice
