"""The command that a user types, in the sweep's folder, to run one stage by hand."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ladderize.adapt.methods import LORA
from ladderize.tradeoff.sweep.stages import ADAPTER_FOLDER, BENCH_JSON, MODEL_FOLDER, RESULTS, SENSITIVITY_JSON

NOT_ON_THE_COMMAND_LINE = ("include_default_tasks",)


def options_by_hand(given: Mapping[str, Any], *, repeated: Sequence[str] = ("data", "eval_data")) -> list[str]:
    """Options as words. repeated: those that are given once for each of several values; others join them by commas."""
    words = []
    for key, value in given.items():
        option = f"--{key.replace('_', '-')}"
        if key in NOT_ON_THE_COMMAND_LINE or value is None or value is False:
            continue
        if value is True:
            words.append(option)
        elif isinstance(value, list | tuple) and key in repeated:
            words += [word for item in value for word in (option, str(item))]
        else:
            words += [option, ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]
    return words


def line(*words: object) -> str:
    return shlex.join(["ladderize", *map(str, words)])


def sensitivity_by_hand(model: str, output: str, given: Mapping[str, Any], mode: str, ranks: int | None) -> str:
    own = {**given, "mode": mode, "sync_tp_size": ranks}
    return line("sensitivity", model, *options_by_hand(own), "--out", f"{output}/{SENSITIVITY_JSON}")


def convert_by_hand(model: str, output: str, recipe: Mapping[str, Any], revision: str | None, verify: bool) -> str:
    own = {**recipe, "revision": revision, "no_verify": not verify}
    return line("convert", model, f"{output}/{MODEL_FOLDER}", *options_by_hand(own))


def adapt_by_hand(
    model: str, output: str, method: str, teacher: str | None, given: Mapping[str, Any], verify: bool
) -> str:
    out = f"{output}/{ADAPTER_FOLDER if method == LORA else MODEL_FOLDER}"
    own = {"method": method, "distill_from": teacher, **given, "no_verify": not verify and method != LORA}
    if teacher is None:
        own = {key: value for key, value in own.items() if key not in ("distill_weight", "hidden_weight")}
    made = line("adapt", model, out, *options_by_hand(own))
    if method != LORA:
        return made
    return f"{made} && {line('merge', out, f'{output}/{MODEL_FOLDER}', *options_by_hand({'no_verify': not verify}))}"


def eval_by_hand(models: Sequence[str], output: str, given: Mapping[str, Any]) -> str:
    return line("eval", *models, *options_by_hand(given), "--out", f"{output}/{RESULTS}")


def bench_by_hand(models: Sequence[str], output: str, given: Mapping[str, Any]) -> str:
    return line("bench", *models, *options_by_hand(given), "--out", f"{output}/{BENCH_JSON}")
