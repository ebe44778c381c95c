"""What a sweep.yaml says of one stage, as the dataclass of options that the stage's command has: the keys are the
command's options with underscores."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from ladderize.adapt.align.options import AlignOptions
from ladderize.adapt.blockwise.options import BlockwiseOptions, DistillOptions
from ladderize.adapt.data.sources import parse_specs
from ladderize.adapt.lora.config import LoraOptions
from ladderize.adapt.methods import ALIGN, BLOCKS, CONVERTED, LORA, Method
from ladderize.adapt.retrain.options import Budget, Objective, RetrainOptions, parse_count
from ladderize.convert.weights import parse_size
from ladderize.errors import LadderizeError, UserError
from ladderize.eval.options import EvalOptions, SensitivityOptions
from ladderize.files.records import read_value
from ladderize.runtime.bench.options import BenchOptions, ModelChoice, check_bench_usage

Kind = TypeVar("Kind")
Given = Mapping[str, Any]  # option -> value, as a file has them

# fields that a sweep decides itself
OF_THE_SWEEP = {"revision", "work_dir", "log_dir", "log_with", "resume", "keep"}
SENSITIVITY_KEYS = (
    *("data", "mode", "samples", "seq_len", "seed", "batch_size", "tau1", "tau2", "dtype", "device"),
    *("align", "align_samples"),
)
EVAL_KEYS = tuple(field.name for field in fields(EvalOptions) if field.name not in OF_THE_SWEEP)
BENCH_KEYS = (
    *(field.name for field in fields(BenchOptions) if field.name not in ("batch_sizes", "check", "profile")),
    "batch_size",
    "no_check",
    "link",
    "dtype",
)
_NESTED = {"objective", "lora", "budget", "packing", "method", "distill_from", "align"}  # align: a stage of its own
_OF_RANKS = {"tp_size", "schedule", "threads"}  # a sweep trains in one process
RETRAIN_KEYS = (
    *(field.name for field in fields(RetrainOptions) if field.name not in OF_THE_SWEEP | _NESTED | _OF_RANKS),
    *(field.name for field in fields(Objective)),
    "max_tokens",
    "max_steps",
    "no_packing",
)
LORA_KEYS = tuple(f"lora_{field.name}" for field in fields(LoraOptions))
BLOCKS_KEYS = (
    *(f.name for f in fields(BlockwiseOptions) if f.name not in OF_THE_SWEEP | {"distill", "layers"}),
    *(field.name for field in fields(DistillOptions)),
    "train",
)
ALIGN_KEYS = (*(f.name for f in fields(AlignOptions) if f.name not in OF_THE_SWEEP | {"layers", "tokens"}), "train")
DISTILL_WEIGHT = 1.0  # of full and lora, where the file says nothing
AdaptOptions = RetrainOptions | BlockwiseOptions | AlignOptions


def check_keys(given: object, known: Iterable[str], where: str) -> dict[str, Any]:
    """``given`` as a mapping without what is null; raises UserError for an unknown key, with the nearest name."""
    known = list(known)
    if not isinstance(given, Mapping):
        raise UserError(
            f"{where} is {'empty' if given is None else repr(given)}, but must hold options, such as '{known[0]}: ...'"
        )
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key).replace("-", "_"), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}"
            raise UserError(f"{where}: unknown key {key!r}; {hint}")
    return {key: value for key, value in given.items() if value is not None}


def options_of(kind: type[Kind], given: Given, where: str, *, prefix: str = "", **more: Any) -> Kind:
    """The dataclass of options from those of ``given`` that are its fields, each checked against its annotation.

    prefix: of their names in ``given``. more: fields that are given otherwise. Raises UserError.
    """
    hints = get_type_hints(kind)
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        key = prefix + field.name
        if key in given and field.name not in more:
            values[field.name] = read_value(hints[field.name], given[key], f"{where}: {key}")
    return kind(**values, **more)


def names(value: Any) -> tuple[str, ...]:
    """``a, b`` or a list of names."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(str(part).strip() for part in parts if str(part).strip()))


def sensitivity_settings(given: Given, mode: str, sync_tp_size: int | None, where: str) -> SensitivityOptions:
    """mode, sync_tp_size: of the layers whose sensitivity is measured. Raises UserError."""
    if "data" not in given:
        raise UserError(f"{where}: data is missing; name the text or the token ids to measure on")
    more: dict[str, Any] = {"mode": mode, "sync_tp_size": sync_tp_size}
    return _checked(where, lambda: options_of(SensitivityOptions, given, where, **more))


def eval_settings(given: Given, revision: str | None, where: str) -> EvalOptions:
    """Raises UserError."""

    def make() -> EvalOptions:
        more: dict[str, Any] = {"tasks": names(given["tasks"])} if "tasks" in given else {}
        options = options_of(EvalOptions, given, where, **more, revision=revision)
        options.check()
        if options.backend == "vllm":
            raise UserError("a sweep compares predictions, which vLLM does not tell; say backend: runtime, or hf")
        return options

    return _checked(where, make)


def bench_settings(given: Given, where: str) -> BenchOptions:
    """Raises UserError. Whether its options go together is checked too, of any two models."""

    def make() -> BenchOptions:
        sizes = given.get("batch_size", list(BenchOptions.batch_sizes))
        options = options_of(
            BenchOptions,
            given,
            where,
            batch_sizes=tuple(sizes) if isinstance(sizes, list) else (sizes,),
            baselines=names(given.get("baselines", [])),
            check=not read_value(bool, given.get("no_check", False), f"{where}: no_check"),
            profile=None,
        )
        if any(type(size) is not int for size in options.batch_sizes):
            raise UserError(f"{where}: batch_size is {sizes!r}, but must be an integer, or a list of them")
        check_bench_usage(bench_choice(given, ["a", "b"], None, where), options, bench_link(given, where))
        return options

    return _checked(where, make)


def bench_choice(given: Given, models: Sequence[str], revision: str | None, where: str) -> ModelChoice:
    own = {"dtype": given.get("dtype", "auto")}
    return options_of(ModelChoice, own, where, models=tuple(models), revision=revision)


def bench_link(given: Given, where: str) -> str | None:
    link: str | None = read_value(str | None, given.get("link"), f"{where}: link")
    return link


def adapt_keys(method: Method) -> tuple[str, ...]:
    """Of one run of ``ladderize adapt``."""
    return {BLOCKS: BLOCKS_KEYS, ALIGN: ALIGN_KEYS, LORA: (*RETRAIN_KEYS, *LORA_KEYS)}.get(method, RETRAIN_KEYS)


def adapt_settings(method: Method, given: Given, teacher: str, where: str) -> AdaptOptions:
    """teacher: the dense model. Raises UserError."""
    if method == BLOCKS:
        return blocks_settings(given, where)
    if method == ALIGN:
        return align_settings(given, where)
    return retraining_settings(given, method, teacher, where)


def retraining_settings(given: Given, method: str, teacher: str, where: str) -> RetrainOptions:
    """Of full or lora. teacher: the dense model, unless distill_weight and hidden_weight are 0. Raises UserError."""

    def make() -> RetrainOptions:
        if method != LORA and (stray := [key for key in given if key in LORA_KEYS]):
            raise UserError(f"{where}: {stray[0]} has no effect with method {method}")
        tokens = parse_count(str(given["max_tokens"]), option="max_tokens") if "max_tokens" in given else None
        objective = options_of(Objective, {"distill_weight": DISTILL_WEIGHT, **given}, where)
        targets: dict[str, Any] = {"targets": names(given["lora_targets"])} if "lora_targets" in given else {}
        options = options_of(
            RetrainOptions,
            given,
            where,
            method=method,
            data=tuple(parse_specs(texts(given, "data", where))),
            eval_data=tuple(parse_specs(texts(given, "eval_data", where), "--eval-data")),
            distill_from=teacher if objective.has_teacher else None,
            objective=objective,
            lora=options_of(LoraOptions, given, where, prefix="lora_", **targets),
            packing=not read_value(bool, given.get("no_packing", False), f"{where}: no_packing"),
            budget=Budget(tokens, read_value(int | None, given.get("max_steps"), f"{where}: max_steps")),
        )
        options.check()
        options.budget.check()
        return options

    return _checked(where, make)


def blocks_settings(given: Given, where: str) -> BlockwiseOptions:
    """Raises UserError."""

    def make() -> BlockwiseOptions:
        windows = _windows(given, BLOCKS, where)
        windows["layers"] = None if windows["layers"] == CONVERTED else windows["layers"]
        distill = options_of(DistillOptions, given, where, **_memory(given))
        return options_of(BlockwiseOptions, given, where, **windows, distill=distill)

    return _checked(where, make)


def align_settings(given: Given, where: str) -> AlignOptions:
    """Raises UserError."""

    def make() -> AlignOptions:
        return options_of(AlignOptions, given, where, **_windows(given, ALIGN, where), **_memory(given))

    return _checked(where, make)


def _windows(given: Given, method: Method, where: str) -> dict[str, Any]:
    """What the methods that read windows of one file, layer by layer, are told in other words."""
    data = texts(given, "data", where)
    if len(data) != 1:
        raise UserError(f"{where}: method {method} reads one file as data, not {len(data)}")
    train = read_value(str | None, given.get("train"), f"{where}: train")
    return {"data": data[0], "layers": train}


def _memory(given: Given) -> dict[str, Any]:
    return {"max_memory": parse_size(str(given["max_memory"]), option="max_memory")} if "max_memory" in given else {}


def texts(given: Given, key: str, where: str) -> list[str]:
    """One text, or a list of them."""
    value = given.get(key, [])
    found: list[str] = read_value(list[str], value if isinstance(value, list) else [value], f"{where}: {key}")
    return found


def _checked(where: str, make: Any) -> Any:
    """What the options themselves refuse, with the place in the file in front."""
    try:
        return make()
    except LadderizeError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None
