"""The model of a plan, its layouts, and the rows of plan.json with their bands. Imports no torch.

A figure is computed for the parts of a pass as they are, and again for each of ``band_cases``, in which device and link
are off by their errors. Most of an error of the device is in both times of a speed-up, whose band is therefore narrower
than either's.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.checkpoint.config import check_config, check_quantised, most_positions, parameter_count
from ladderize.checkpoint.opening import read_checkpoint, read_config
from ladderize.checkpoint.quantised import Quantisation, plain_config, quantisation_of
from ladderize.checkpoint.reading import CAST_DTYPES, FLOAT_DTYPES, resolve_json
from ladderize.errors import UsageError, UserError
from ladderize.families.registry import find_family
from ladderize.layout import DROPPED, Layout
from ladderize.plan.document import NO_WEIGHTS, Basis, GroupLink, PlannedRow
from ladderize.plan.hardware import DeviceSpec, EngineFacts
from ladderize.plan.options import BOUNDS, PlanModel, PlanOptions, PlanWeights
from ladderize.plan.passes import (
    FP8,
    WIDTHS,
    PassParts,
    Prediction,
    Workload,
    pass_parts,
    predict_parallel,
    predict_pass,
    predict_silent,
)
from ladderize.runtime.bench.document import (
    BASELINE_ROW,
    END_TO_END,
    MODEL_ROW,
    NO_COMM,
    PARALLEL,
    PHASES,
    PhaseCommunication,
)
from ladderize.runtime.bench.options import named_layout
from ladderize.runtime.collectives.links import NO_LINK, Interconnect, Link, other_all_reduces
from ladderize.runtime.shards import (
    Shape,
    cache_bytes,
    check_activation,
    check_runnable,
    dense_config,
    read_shape,
    weight_bytes,
    with_layers,
)

CHOSEN_ROW = "chosen"
BOUND_ROWS = dict(zip(BOUNDS, (PARALLEL, NO_COMM), strict=True))
GIB = 2**30
COMPUTE_PARTS = ("attention", "mlp", "attention_apart", "mlp_apart", "parallel", "rest", "norm")
MESSAGE_PARTS = ("message", "message_start", "vocabulary")
# one standard deviation of contention: where it was measured on the link itself, and elsewhere
CALIBRATED_CONTENTION_ERROR, OTHER_CONTENTION_ERROR = 0.05, 0.1
SCATTER = 0.02  # of any one time: published runs of one program differ by this much
TWO_SIGMA = 2  # of a 95 % band
TOKEN_ID_BYTES = 36  # in a Python list: its place there, and most often an object of its own
Parts = Mapping[str, PassParts]  # by phase


# ---- the model and its layouts ----


@dataclass(frozen=True)
class ModelToPlan:
    """The model of a plan.

    folder: of a checkpoint; None: a shape, whose layout is dense.
    dtype: to compute in.
    """

    name: str
    folder: Path | None
    config: dict[str, Any]
    layout: Layout
    dtype: str
    weights: PlanWeights = "float"


@dataclass(frozen=True)
class RowVariant:
    """One row of each table.

    own: True for the checkpoint as it is.
    bound: one of BOUNDS; None: a layout.
    """

    name: str
    layout: Layout
    own: bool = False
    bound: str | None = None


def read_model(choice: PlanModel, options: PlanOptions) -> ModelToPlan:
    """Return the model after all checks that need no weights. Raises UserError or LayoutError."""
    folder, is_local, dtype = None, False, "bfloat16"
    if choice.model is None:
        config = read_shape(choice.name, "--shape")
        if config.get("model_type") is None or find_family(config) is not None:
            config = dense_config(config)
    else:
        folder, is_local = resolve_json(choice.model, choice.revision)
        config = read_config(folder)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or dtype).removeprefix("torch.")
    quantisation = quantisation_of(config, folder)
    config = plain_config(config)
    check_config(config)
    check_activation(config)
    if choice.num_layers is not None:
        config = with_layers(config, choice.num_layers)
    layout = Layout.dense(config["num_hidden_layers"]) if folder is None else Layout.from_config(config)
    layout.check_model(config)
    if folder is not None and is_local:
        checkpoint = read_checkpoint(folder)
        check_quantised(checkpoint)
        dtype = FLOAT_DTYPES[checkpoint.tensors["model.norm.weight"].dtype]
    dtype = dtype if choice.dtype == "auto" else choice.dtype
    if dtype not in CAST_DTYPES:
        raise UserError(
            f"{choice.name}: weights of {dtype} cannot be run as they are; give --dtype {' or '.join(CAST_DTYPES)}"
        )
    tokens, most = options.prompt_len + options.output_len, most_positions(config)
    if tokens > most:
        raise UserError(
            f"{choice.name}: --prompt-len and --output-len make {tokens} tokens, over the model's {most} positions"
        )
    return ModelToPlan(choice.name, folder, config, layout, dtype, _weights(choice, quantisation))


def _weights(choice: PlanModel, quantisation: Quantisation | None) -> PlanWeights:
    """Return the storage of the weights. Raises UserError for another quantisation, unless --weights says what it
    counts as."""
    if choice.weights != "auto" or quantisation is None:
        return "float" if choice.weights == "auto" else choice.weights
    if not quantisation.is_fp8:
        raise UserError(
            f"{choice.name}: how long products take is known of floats and of FP8, but its weights are others"
            f" ({quantisation.words}); give --weights fp8 or --weights float to plan as if they were these"
        )
    return "fp8"


def row_variants(
    model: ModelToPlan, choice: PlanModel, ranks: int, *, choosing: bool = False, chosen: Layout | None = None
) -> list[RowVariant]:
    """Return the rows: the dense model, which speed-ups are over, then the checkpoint's or the chosen layout, then
    those of --layout.

    choosing: a layout is chosen, now or later, so --sync-tp-size has an effect.

    Raises UsageError for unknown names, UserError or LayoutError for layouts that ``ranks`` cannot run.
    """
    layers = model.config["num_hidden_layers"]
    dense = Layout.dense(layers)
    own_is_dense, name = model.layout.is_dense, model.name
    if name in ("dense", CHOSEN_ROW, *choice.rows, *BOUND_ROWS.values()):  # rows are told apart by their names
        name = f"checkpoint {name}"
    found = [RowVariant(name if own_is_dense and model.folder else "dense", dense, own_is_dense)]
    if not own_is_dense:
        found.append(RowVariant(name, model.layout, True))
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


# ---- uncertainty ----


def band_cases(parts: Parts, device: DeviceSpec, interconnect: Interconnect | None) -> list[Parts]:
    """Return the parts as they are, then pairs with one error at plus and at minus a standard deviation, all others 0.

    The errors are of all compute, of all messages, and of contention.

    interconnect: None where nothing is sent.
    """

    def scaled(names: Sequence[str], factor: float) -> Parts:
        return {
            phase: dataclasses.replace(one, **{name: factor * getattr(one, name) for name in names})
            for phase, one in parts.items()
        }

    def contending(more: float) -> Parts:
        return {
            phase: dataclasses.replace(one, contention=min(0.99, max(0.0, one.contention + more)))
            for phase, one in parts.items()
        }

    cases = [parts, *(scaled(COMPUTE_PARTS, 1 + sign * device.relative_error) for sign in (1, -1))]
    if interconnect is not None:
        cases += [scaled(MESSAGE_PARTS, 1 + sign * interconnect.relative_error) for sign in (1, -1)]
        error = CALIBRATED_CONTENTION_ERROR if interconnect.calibrated else OTHER_CONTENTION_ERROR
        cases += [contending(sign * error) for sign in (1, -1)]
    return cases


def relative_band(values: Sequence[float], *, runs: int = 1) -> float:
    """Return half the width of the 95 % band of a figure, relative to it: 0.05 is 5 %.

    values: the figure in each of ``band_cases``.
    runs: the number of times that it depends on: 2 for a speed-up.

    The errors are taken to be independent. A figure that none of them changes has no band.
    """
    deviations = [(more - less) / 2 for more, less in zip(values[1::2], values[2::2], strict=True)]
    size = abs(values[0])
    if not size or max(map(abs, deviations)) <= 1e-12 * size:
        return 0.0
    return TWO_SIGMA * math.hypot(math.sqrt(runs) * SCATTER * size, *deviations) / size


def band_of(values: Sequence[float], *, runs: int = 1) -> list[float]:
    """Return the 95 % band [low, high] of a figure. Arguments are those of ``relative_band``."""
    half = relative_band(values, runs=runs)
    return [values[0] * max(0.0, 1 - half), values[0] * (1 + half)]


# ---- rows ----


@dataclass(frozen=True)
class PlannedGroup:
    """A group of devices of one kind, joined by a link.

    interconnect: None: one rank.
    """

    ranks: int
    device: DeviceSpec
    engine: EngineFacts
    interconnect: Interconnect | None

    @property
    def link(self) -> Link:
        return NO_LINK if self.interconnect is None else self.interconnect.at(self.ranks)

    @property
    def basis(self) -> Basis:
        """The basis of the figures: ``calibrated`` where device and link were timed, with this engine."""
        link = self.interconnect is None or (self.interconnect.calibrated and not self.link.derived)
        device = self.device.calibrated and self.engine.name == self.device.engine
        return "calibrated" if device and link else "predicted"

    @property
    def vllm_link(self) -> Interconnect | None:
        """vLLM's all-reduce over the same wires; None where that is unknown, or the link's own."""
        if self.interconnect is None or self.ranks in (self.interconnect.vllm_ranks or ()):
            return None
        others = other_all_reduces(self.interconnect, self.ranks)
        return next((one for one in others if self.ranks in (one.vllm_ranks or ())), None)

    def parts(self, model: ModelToPlan, workload: Workload, sync_tp_size: int | None) -> Parts:
        """Return the parts by phase. Raises UserError where the device or the link has no figures for them."""
        how = (self.device, self.engine, self.interconnect, self.ranks, model.dtype, workload)
        return pass_parts(model.config, *how, sync_tp_size, model.weights)

    def group_link(self, model: ModelToPlan, workloads: Sequence[Workload]) -> GroupLink:
        """Return the group's link, with the sizes of messages beyond those that it was timed at."""
        sizes = {parts.message_bytes for workload in workloads for parts in self.parts(model, workload, None).values()}
        outside = sorted(size for size in sizes if not self.link.in_range(size))
        return GroupLink(self.ranks, self.link, self.link.derived or None, outside[:1] + outside[1:][-1:])

    def memory_need(self, model: ModelToPlan, workload: Workload) -> tuple[int, int, int]:
        """Return the least bytes of a rank: weights, KV cache and prefill. Layouts do not differ in it."""
        engine, width, batch = self.engine, WIDTHS[model.dtype], workload.batch_size
        shape = Shape.from_config(model.config, tp_size=self.ranks, rank=0, replicate_vocab=engine.replicate_vocab)
        columns = workload.prompt_len + workload.output_len
        return (
            weight_bytes(shape, width, packed=False, projections=1 if model.weights == FP8 else None),
            cache_bytes(shape, batch, columns, width if engine.cache_bytes is None else engine.cache_bytes),
            _prefill_bytes(shape, batch, workload.prompt_len, width),
        )

    def fits(self, need_bytes: int) -> bool | None:
        """Return True if a rank's device has so much memory; None where that is unknown."""
        memory = self.device.memory_gib
        return None if memory is None else need_bytes <= memory * GIB


def _prefill_bytes(shape: Shape, batch: int, prompt_len: int, width: int) -> int:
    """Return the least bytes beside weights and cache: token ids, the activations of one layer, logits."""
    heads = shape.own_heads + 2 * shape.own_kv_heads
    token = width * (3 * shape.hidden + 3 * shape.own_inner) + 4 * heads * shape.head_dim + TOKEN_ID_BYTES
    return batch * (prompt_len * token + width * shape.vocab)


def planned_rows(
    model: ModelToPlan, group: PlannedGroup, workload: Workload, variants: Sequence[RowVariant]
) -> list[PlannedRow]:
    """Return the rows of one group and workload. Speed-ups are over the first variant, the dense layout."""
    weights, cache, prefill = group.memory_need(model, workload)
    need = weights + cache + prefill
    batch, new = workload.batch_size, workload.output_len
    parts_of = {
        size: group.parts(model, workload, size) for size in {variant.layout.sync_tp_size for variant in variants}
    }
    dense: dict[str, list[float]] = {}
    rows = []
    for variant in variants:
        layout, parts = variant.layout, parts_of[variant.layout.sync_tp_size]
        passes = _passes(band_cases(parts, group.device, group.interconnect), variant, workload.decode_steps)
        ms = {phase: [1e3 * one.total for one in cases] for phase, cases in passes.items()}
        dense = dense or ms
        speedups = {phase: [a / b for a, b in zip(dense[phase], own, strict=True)] for phase, own in ms.items()}
        tokens_per_s = [1e3 * batch * new / whole for whole in ms[END_TO_END]]
        decode = ms["decode"][0]
        communication = {phase: _communication(variant, parts[phase], passes[phase], group) for phase in PHASES}
        rows.append(
            PlannedRow(
                model=variant.name,
                kind=MODEL_ROW if variant.bound is None else BASELINE_ROW,
                layout=str(layout),
                **layout.to_config(),
                weights=str(model.folder) if variant.own and model.folder is not None else NO_WEIGHTS,
                dtype=model.dtype,
                tp_size=group.ranks,
                batch_size=batch,
                prefill_ms=ms["prefill"][0],
                decode_ms_per_token=decode,
                output_tokens_per_s=batch * 1e3 / decode,
                end_to_end_ms=ms[END_TO_END][0],
                speedup_prefill=speedups["prefill"][0],
                speedup_decode=speedups["decode"][0],
                speedup_end_to_end=speedups[END_TO_END][0],
                speedup_prefill_interval=band_of(speedups["prefill"], runs=2),
                speedup_decode_interval=band_of(speedups["decode"], runs=2),
                speedup_end_to_end_interval=band_of(speedups[END_TO_END], runs=2),
                weight_bytes=weights,
                kv_cache_bytes=cache,
                peak_memory_bytes=None,
                parameters=parameter_count(model.config),
                basis=group.basis,
                end_to_end_tokens_per_s=tokens_per_s[0],
                end_to_end_tokens_per_s_interval=band_of(tokens_per_s),
                exposed_end_to_end_ms=1e3 * passes[END_TO_END][0].exposed,
                memory_need_bytes=need,
                fits=group.fits(need),
                communication=communication,
                prefill_start_ms=1e3 * communication["prefill"].all_reduces * parts["prefill"].message_start,
            )
        )
    return rows


def _passes(cases: Sequence[Parts], variant: RowVariant, decode_steps: int) -> dict[str, list[Prediction]]:
    """Return the predictions by phase, and ``end_to_end``, in each case."""
    passes = {phase: [_predicted(case[phase], variant) for case in cases] for phase in PHASES}
    passes[END_TO_END] = [
        Prediction(*(getattr(first, key) + decode_steps * getattr(step, key) for key in vars(first)))
        for first, step in zip(*passes.values(), strict=True)
    ]
    return passes


def _predicted(parts: PassParts, variant: RowVariant) -> Prediction:
    if variant.bound == "parallel":
        return predict_parallel(parts)
    return predict_silent(parts) if variant.bound == "no-comm" else predict_pass(parts, variant.layout)


def _communication(
    variant: RowVariant, parts: PassParts, cases: Sequence[Prediction], group: PlannedGroup
) -> PhaseCommunication:
    layout, one = variant.layout, cases[0]
    of_layout = 2 * layout.num_layers - layout.count(DROPPED)
    count = {"parallel": layout.num_layers, "no-comm": 0}.get(variant.bound or "", of_layout) * (group.ranks > 1)
    return PhaseCommunication(
        all_reduces=count,
        bytes=count * parts.message_bytes,
        no_communication_ms=1e3 * one.compute,
        alone_ms=1e3 * one.communication,
        vocabulary_alone_ms=0.0 if variant.bound == "no-comm" else 1e3 * parts.vocabulary,
        exposed_ms=1e3 * one.exposed,
        exposed_interval_ms=[1e3 * end for end in band_of([case.exposed for case in cases])],
        hidden_ms=1e3 * one.hidden,
    )
