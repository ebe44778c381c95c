"""What ``adapt`` is asked to do: which options go together, and the dataclass of retraining made of them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from typer import BadParameter

from ladderize.adapt.methods import ALIGN, BLOCKS, FULL, LORA
from ladderize.adapt.retrain.schedule import ScheduleKind
from ladderize.commands.options import names_of, options_from
from ladderize.commands.training import start_training_on
from ladderize.errors import UsageError
from ladderize.runtime.schedule import ScheduleName

if TYPE_CHECKING:
    from ladderize.adapt.retrain.options import RetrainOptions

# options of retraining that no field of its dataclasses is called after
ONLY_RETRAINING = {"preset", "no_packing", "show_data", "show_data_rows", "domino_chunks", "domino_columns"}
PRESETS: dict[str, dict[str, Any]] = {
    # Ladder Residual, arXiv 2501.06589, section 4: supervised fine-tuning of Llama-3.1-8B-Instruct
    "ladder-paper": {"lr": 5e-6, "warmup_steps": 200, "lr_schedule": "cosine", "max_tokens": "3B"},
}


def check_effect(method: str, given: Sequence[str]) -> None:
    """Raise UsageError for options that were given and have no effect on this method."""
    effective = effective_options()
    for name in given:
        if name not in effective[method] and any(name in names for names in effective.values()):
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --method {method}")
    if method == LORA and "no_verify" in given:
        raise UsageError("--no-verify has no effect with --method lora: an adapter cannot be loaded alone")


def effective_options() -> dict[str, set[str]]:
    """Of each method the parameters that it heeds, among those that not every method does."""
    from ladderize.adapt.align.options import AlignOptions
    from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
    from ladderize.adapt.lora.config import LoraOptions
    from ladderize.adapt.retrain.losses import Objective
    from ladderize.adapt.retrain.options import RetrainOptions
    from ladderize.adapt.retrain.schedule import Budget

    retraining = names_of(RetrainOptions) | names_of(Objective) | names_of(Budget, "max_") | ONLY_RETRAINING
    windows = {"train", "method", "distill_from", "threads"}
    return {
        FULL: retraining,
        LORA: retraining | names_of(LoraOptions, "lora_"),
        BLOCKS: names_of(BlockwiseOptions) | names_of(DistillOptions) | windows,
        ALIGN: names_of(AlignOptions) | windows,
    }


def check_windowed(method: str, params: Mapping[str, Any]) -> None:
    """Raise UsageError where a method that rewrites layers from windows of data lacks what it reads."""
    if params["distill_from"] is None:
        raise UsageError(f"--method {method} needs --distill-from DENSE, the checkpoint that MODEL was converted from")
    if len(params["data"]) > 1:
        raise UsageError(f"--method {method} reads one --data file")


def schedule_name(text: str) -> str:
    """The value of --schedule; raises typer's BadParameter. The learning rate's schedule was called so before."""
    if text in get_args(ScheduleKind):
        raise BadParameter(f"{text!r} is a schedule of the learning rate; write --lr-schedule {text}")
    if text not in get_args(ScheduleName):
        raise BadParameter(f"{text!r} is not one of {', '.join(map(repr, get_args(ScheduleName)))}.")
    return text


def preset_filled_in(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with the preset's values where the user said nothing."""
    values = dict(PRESETS.get(params["preset"] or "", {}))
    if params["max_steps"] is not None:
        values.pop("max_tokens", None)
    return {**params, **{name: value for name, value in values.items() if params[name] is None}}


def retrain_options(params: Mapping[str, Any]) -> "RetrainOptions":
    """The options of retraining, checked."""
    from ladderize.adapt.data.sources import parse_specs
    from ladderize.adapt.lora.config import LoraOptions
    from ladderize.adapt.retrain.losses import Objective
    from ladderize.adapt.retrain.options import RetrainOptions
    from ladderize.adapt.retrain.schedule import Budget, parse_count
    from ladderize.runtime.schedule import Schedule

    # an option that may be repeated and was not given is an empty list or tuple, by the version of typer
    given = {name: value for name, value in params.items() if value not in (None, [], ())}
    check_retraining(given)
    tokens = parse_count(given["max_tokens"], option="--max-tokens") if "max_tokens" in given else None
    steps = given.get("max_steps")
    budget = Budget(tokens, steps)
    if not given["show_data"]:
        budget.check()
    trackers = split_names(given.get("log_with", ""))
    if "log_with" in given and not trackers:
        raise UsageError("--log-with names no tracker; write for example tensorboard")
    device = start_training_on(params["device"], params["dtype"], params["threads"], None)
    distill_weight = given.get("distill_weight", 1.0) if "distill_from" in given else 0.0
    targets = {"targets": split_names(given["lora_targets"])} if "lora_targets" in given else {}
    options = options_from(
        RetrainOptions,
        params,
        data=tuple(parse_specs(given["data"])),
        eval_data=tuple(parse_specs(given.get("eval_data") or [], "--eval-data")),
        objective=options_from(Objective, params, distill_weight=distill_weight),
        lora=options_from(LoraOptions, params, prefix="lora_", **targets),
        packing=not given["no_packing"],
        budget=budget,
        resume=given.get("resume") != "no",
        device=device,
        log_with=trackers,
        schedule=options_from(Schedule, params, prefix="domino_", name=given.get("schedule", "sequential")),
    )
    options.check()
    return options


def check_retraining(given: Mapping[str, Any]) -> None:
    """Raise UsageError for options that were given and take no effect together, whatever their values."""
    for name in ("domino_chunks", "domino_columns"):
        if name in given and given.get("schedule") != "domino":
            raise UsageError(f"--{name.replace('_', '-')} has no effect without --schedule domino")
    for name in ("distill_weight", "temperature", "hidden_weight"):
        if name in given and "distill_from" not in given:
            raise UsageError(f"--{name.replace('_', '-')} has no effect without --distill-from")
    if "show_data_rows" in given and not given["show_data"]:
        raise UsageError("--show-data-rows has no effect without --show-data")
    if "plot" in given and given["show_data"]:
        raise UsageError("--plot has no effect with --show-data, which trains nothing")
    for name in ("write", "eval_every"):
        if name in given and given.get("heldout") == 0:
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect with --heldout 0, where nothing is validated on"
            )


def split_names(text: str) -> tuple[str, ...]:
    """``a, b`` -> (a, b)."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
