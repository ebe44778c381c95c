"""The model of a plan and its rows: its own layout beside others, all checked. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.checkpoint.llama import check_config, check_tensors, most_positions
from ladderize.checkpoint.reading import CAST_DTYPES, FLOAT_DTYPES, read_checkpoint, read_config, resolve_json
from ladderize.errors import UsageError, UserError
from ladderize.layout import CONFIG_KEYS, Layout
from ladderize.planning.plans.options import BOUNDS, PlanModel, PlanOptions
from ladderize.runtime.bench.options import named_layout
from ladderize.runtime.bench.rows import NO_COMM, PARALLEL
from ladderize.runtime.shards import check_activation, check_runnable, read_shape

CHOSEN_ROW = "chosen"
BOUND_ROWS = dict(zip(BOUNDS, (PARALLEL, NO_COMM), strict=True))


@dataclass(frozen=True)
class ModelToPlan:
    """folder: of a checkpoint; None: a shape, whose layout is dense. dtype: to compute in."""

    name: str
    folder: Path | None
    config: dict[str, Any]
    layout: Layout
    dtype: str


@dataclass(frozen=True)
class RowVariant:
    """One row of each table. bound: of BOUNDS, where it is no layout."""

    name: str
    layout: Layout
    own: bool = False
    bound: str | None = None


def read_model(choice: PlanModel, options: PlanOptions) -> ModelToPlan:
    """Everything about it that can be checked without its weights; raises UserError or LayoutError."""
    model = _shape(choice) if choice.model is None else _checkpoint(choice, choice.model)
    if model.dtype not in CAST_DTYPES:
        raise UserError(
            f"{model.name}: weights of {model.dtype} cannot be run as they are; give --dtype {' or '.join(CAST_DTYPES)}"
        )
    tokens, most = options.prompt_len + options.output_len, most_positions(model.config)
    if tokens > most:
        raise UserError(
            f"{model.name}: --prompt-len and --output-len make {tokens} tokens, over the model's {most} positions"
        )
    return model


def _checkpoint(choice: PlanModel, name: str) -> ModelToPlan:
    folder, is_local = resolve_json(name, choice.revision)
    config = read_config(folder)
    _check(config)
    layout = Layout.from_config(config)
    layout.check_model(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if is_local:
        checkpoint = read_checkpoint(folder)
        check_tensors(checkpoint)
        dtype = FLOAT_DTYPES[checkpoint.tensors["model.norm.weight"].dtype]
    return ModelToPlan(name, folder, config, layout, dtype if choice.dtype == "auto" else choice.dtype)


def _shape(choice: PlanModel) -> ModelToPlan:
    config = dict(read_shape(choice.name, "--shape"))
    _check(config)
    if choice.num_layers is not None:
        config["num_hidden_layers"] = choice.num_layers
    for key in CONFIG_KEYS:
        config.pop(key, None)
    config["model_type"] = "llama"
    layout = Layout.dense(config["num_hidden_layers"])
    return ModelToPlan(choice.name, None, config, layout, "bfloat16" if choice.dtype == "auto" else choice.dtype)


def _check(config: dict[str, Any]) -> None:
    check_config(config)
    check_activation(config)


def row_variants(
    model: ModelToPlan, choice: PlanModel, ranks: int, *, choosing: bool = False, chosen: Layout | None = None
) -> list[RowVariant]:
    """The dense model first, which speed-ups are over; then the checkpoint's own layout, or the one that was chosen for
    it, then what --layout lists. choosing: one is chosen, now or later, and --sync-tp-size says from which.

    Raises UsageError for names that are none, UserError or LayoutError for what ``ranks`` cannot run.
    """
    layers = model.config["num_hidden_layers"]
    dense = Layout.dense(layers)
    own_is_dense = model.layout.is_dense
    found = [RowVariant(model.name if own_is_dense and model.folder else "dense", dense, own_is_dense)]
    if not own_is_dense:
        found.append(RowVariant(model.name, model.layout, True))
    if chosen is not None:
        found.append(RowVariant(CHOSEN_ROW, chosen))
    virtual = choice.sync_tp_size or (chosen.sync_tp_size if chosen is not None else None) or ranks
    dropping = choosing
    for name in choice.rows:
        if name in BOUNDS:
            found.append(RowVariant(BOUND_ROWS[name], dense, bound=name))
            continue
        layout = named_layout(name, layers, virtual, more=BOUNDS)
        dropping = dropping or bool(layout.spd_layers)
        if not any(layout == other.layout and other.bound is None for other in found):
            found.append(RowVariant(name, layout))
    if choice.sync_tp_size is not None and not dropping:
        raise UsageError("--sync-tp-size has no effect: none of --layout drops a sync point")
    for variant in found:
        check_runnable(model.config, variant.layout, ranks)
    return found
