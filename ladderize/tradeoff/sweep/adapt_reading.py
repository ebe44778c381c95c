"""``adapt`` of a sweep.yaml: ways of adapting, each a chain of stages."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast, get_args

from ladderize.adapt.methods import ALIGN, FULL, LORA, Method
from ladderize.errors import UserError
from ladderize.files.records import read_value
from ladderize.tradeoff.sweep.grids import absolute, combinations, grid, only
from ladderize.tradeoff.sweep.settings import DISTILL_WEIGHT, adapt_keys, adapt_settings, check_keys
from ladderize.tradeoff.sweep.spec import AdaptChoice, AdaptStage
from ladderize.workflows.sweep_document import AS_CONVERTED

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
