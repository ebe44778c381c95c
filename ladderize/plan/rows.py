"""The rows of plan.json, as data: a layout, a bound, or another way of serving the dense model; and their bands.

A layout changes the model, so it has to beat what changes no result on the same ranks: vLLM fuses an all-reduce with
the norm behind it, which an overlapped sum gives up, and replicas of fewer ranks need less communication.

A figure is computed for the parts of a pass as they are, and again for each of ``band_cases``, in which device and link
are off by their errors. Most of an error of the device is in both times of a speed-up, whose band is therefore narrower
than a time's. Imports no torch.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ladderize.errors import LadderizeError
from ladderize.files.records import Record
from ladderize.layout import Layout
from ladderize.plan.hardware import DeviceSpec, EngineFacts
from ladderize.plan.options import BOUNDS, PlanModel, PlanWeights
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
from ladderize.runtime.bench.document import END_TO_END, PHASES
from ladderize.runtime.bench.options import LAYOUT_NAMES, named_layout
from ladderize.runtime.collectives.links import Interconnect, known_interconnects
from ladderize.runtime.shards import Shape, cache_bytes, check_runnable, weight_bytes

# predicted: from figures of other machines; calibrated: device and link were timed by `ladderize calibrate`
Basis = Literal["predicted", "calibrated"]
RowKind = Literal["layout", "bound", "exact"]  # exact: the dense model served in another way, which changes no result
Parts = Mapping[str, PassParts]  # by phase
CHOSEN_ROW = "chosen"
GIB, MIB = 2**30, 2**20
COMPUTE_PARTS = ("attention", "mlp", "attention_apart", "mlp_apart", "parallel", "rest", "norm")
MESSAGE_PARTS = ("message", "message_start", "vocabulary")
# one standard deviation of contention: where it was measured on the link itself, and elsewhere
CALIBRATED_CONTENTION_ERROR, OTHER_CONTENTION_ERROR = 0.05, 0.1
SCATTER = 0.02  # of any one time: published runs of one program differ by this much
TWO_SIGMA = 2  # of a 95 % band
TOKEN_ID_BYTES = 36  # in a Python list: its place there, and most often an object of its own
# The end-to-end gain of a fused norm: "5-20%" by vLLM 0.32's docs (design/fusions). From faster_unfused_mib on,
# decoding was up to 7.4 % slower by vLLM issue 44079 (8 H200, Qwen3-30B-A3B, batch 128), which the docs do not say.
DOCUMENTED_GAIN, DISPUTED_GAIN, NO_GAIN = (0.05, 0.20), (-0.074, 0.20), (0.0, 0.0)


@dataclass(frozen=True)
class SpeedUp(Record):
    """A speed-up over the dense model, with the ends of its 95 % band."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PlannedRow(Record):
    """A prediction for one group at one batch size.

    prefill_ms, decode_ms_per_token: the time of a text of the batch; of replicas, in the one with the largest part.
    wait_ms: the part of each phase's time that communication adds; empty where norms are fused into it.
    waiting_share: of the end-to-end time, the part that waits for all-reduces of layers.
    message_bytes: of an all-reduce of each phase.
    tokens_per_s: new tokens of the whole batch over prefill and all decode steps.
    speedup: by phase, and end to end.
    weight_bytes, kv_cache_bytes, memory_need_bytes: of a rank; the last is both and what a prefill takes.
    fits: True if the rank's device has so much memory; None where that is unknown.
    """

    name: str
    kind: RowKind
    layout: str
    tp_size: int
    batch_size: int
    basis: Basis
    prefill_ms: float
    decode_ms_per_token: float
    end_to_end_ms: float
    wait_ms: dict[str, float]
    waiting_share: float
    message_bytes: dict[str, int]
    tokens_per_s: float
    speedup: dict[str, SpeedUp]
    weight_bytes: int
    kv_cache_bytes: int
    memory_need_bytes: int
    fits: bool | None

    @property
    def gain(self) -> SpeedUp:
        """The speed-up end to end."""
        return self.speedup[END_TO_END]


@dataclass(frozen=True)
class ModelToPlan:
    """The model of a plan.

    dtype: to compute in.
    weights: how those of projections are stored.
    """

    config: dict[str, Any]
    layout: Layout
    dtype: str
    weights: PlanWeights = "float"


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
    def basis(self) -> Basis:
        """The basis of the figures: ``calibrated`` where device and link were timed, with this engine."""
        link = self.interconnect
        timed = link is None or (link.calibrated and not link.at(self.ranks).derived)
        is_calibrated = self.device.calibrated and self.engine.name == self.device.engine and timed
        return "calibrated" if is_calibrated else "predicted"

    def parts(self, model: ModelToPlan, workload: Workload, sync_tp_size: int | None) -> Parts:
        """Return the parts by phase. Raises UserError where the device or the link has no figures for them."""
        how = (self.device, self.engine, self.interconnect, self.ranks, model.dtype, workload)
        return pass_parts(model.config, *how, sync_tp_size, model.weights)

    def memory(self, model: ModelToPlan, workload: Workload) -> dict[str, Any]:
        """Return the least bytes of a rank, as fields of a ``PlannedRow``: weights, KV cache, and what a prefill takes
        besides (token ids, the activations of one layer, logits). Layouts do not differ in it."""
        engine, width, batch = self.engine, WIDTHS[model.dtype], workload.batch_size
        shape = Shape.from_config(model.config, tp_size=self.ranks, rank=0, replicate_vocab=engine.replicate_vocab)
        columns = workload.prompt_len + workload.output_len
        heads = shape.own_heads + 2 * shape.own_kv_heads
        token = width * (3 * shape.hidden + 3 * shape.own_inner) + 4 * heads * shape.head_dim + TOKEN_ID_BYTES
        weights = weight_bytes(shape, width, packed=False, projections=1 if model.weights == FP8 else None)
        cache = cache_bytes(shape, batch, columns, width if engine.cache_bytes is None else engine.cache_bytes)
        need = weights + cache + batch * (workload.prompt_len * token + width * shape.vocab)
        fits = None if self.device.memory_gib is None else need <= self.device.memory_gib * GIB
        return {"weight_bytes": weights, "kv_cache_bytes": cache, "memory_need_bytes": need, "fits": fits}


# ---- rows as data ----


@dataclass(frozen=True)
class RowVariant:
    """One row of each table.

    bound: the times of a pass of a bound; None: those of the layout.
    replicas: groups that share ranks and batch; each has its part of both at the same time.
    fused: norms are fused into all-reduces where vLLM does so.
    """

    name: str
    layout: Layout
    kind: RowKind = "layout"
    bound: Callable[[PassParts], Prediction] | None = None
    replicas: int = 1
    fused: bool = False

    def predict(self, parts: PassParts) -> Prediction:
        return self.bound(parts) if self.bound is not None else predict_pass(parts, self.layout)

    def served_by(self, group: PlannedGroup, workload: Workload) -> tuple[PlannedGroup, Workload]:
        """Return the group and the workload of one replica: the one with the largest part, which ends last."""
        ranks = group.ranks // self.replicas
        interconnect = group.interconnect if ranks > 1 else None
        part = dataclasses.replace(workload, batch_size=-(-workload.batch_size // self.replicas))
        return dataclasses.replace(group, ranks=ranks, interconnect=interconnect), part


def row_variants(model: ModelToPlan, choice: PlanModel, ranks: int, chosen: Layout | None = None) -> list[RowVariant]:
    """Return the rows: the dense model, which speed-ups are over, then the checkpoint's or the chosen layout, then
    those of --layout.

    Raises UsageError for unknown names, UserError or LayoutError for layouts that ``ranks`` cannot run.
    """
    layers = model.config["num_hidden_layers"]
    dense, name = Layout.dense(layers), choice.name
    if name in (CHOSEN_ROW, *LAYOUT_NAMES, *choice.rows):  # rows are told apart by their names
        name = f"checkpoint {name}"
    variants = [RowVariant("dense", dense)]
    if not model.layout.is_dense:
        variants.append(RowVariant(name, model.layout))
    if chosen is not None:
        variants.append(RowVariant(CHOSEN_ROW, chosen))
    bounds = {"parallel": predict_parallel, "no-comm": predict_silent}
    for name in choice.rows:
        if name in bounds:
            variants.append(RowVariant(name, dense, "bound", bounds[name]))
            continue
        layout = named_layout(name, layers, choice.sync_tp_size or ranks, more=BOUNDS)
        if all(layout != other.layout or other.kind != "layout" for other in variants):
            variants.append(RowVariant(name, layout))
    for variant in variants:
        check_runnable(model.config, variant.layout, ranks)
    return variants


def exact_variants(model: ModelToPlan, group: PlannedGroup, workload: Workload) -> Iterator[RowVariant]:
    """Yield the other ways of serving the dense model on these ranks: norms fused where vLLM does so, and replicas at
    every divisor of the ranks that the batch fills and whose memory suffices."""
    layout = Layout.dense(model.config["num_hidden_layers"])
    if any(fused_gain(group, parts) != NO_GAIN for parts in group.parts(model, workload, None).values()):
        yield RowVariant("fused", layout, "exact", fused=True)
    for count in range(2, min(group.ranks, workload.batch_size) + 1):
        if group.ranks % count:
            continue
        replicas = RowVariant(f"{count} replicas", layout, "exact", replicas=count, fused=True)
        serving, part = replicas.served_by(group, workload)
        try:
            check_runnable(model.config, layout, serving.ranks)
            serving.parts(model, part, None)
        except LadderizeError:  # the heads, or the link, do not go with so few ranks
            continue
        if serving.memory(model, part)["fits"] is not False:
            yield replicas


def fused_gain(group: PlannedGroup, parts: PassParts) -> tuple[float, float]:
    """Return the 95 % band of the gain of a dense pass by fused norms, at most the time of waits and norms.

    It is NO_GAIN where vLLM fuses nothing: fused kernels write to each other's memory over NVLink. A link without a
    medium counts as NVLink.
    """
    size, link = parts.message_bytes / MIB, group.interconnect
    nvlink = (None, known_interconnects()["nvlink"].medium)
    if size > group.device.fused_norm_mib.get(group.ranks, 0) or link is None or link.medium not in nvlink:
        return NO_GAIN
    disputed = size >= group.device.faster_unfused_mib.get(group.ranks, size + 1)
    dense = predict_pass(parts, Layout.dense(parts.layers))
    most = dense.total / (dense.compute + parts.vocabulary - 2 * parts.layers * parts.norm) - 1
    low, high = DISPUTED_GAIN if disputed else DOCUMENTED_GAIN
    return min(low, most), min(high, most)


# ---- bands ----


def band_cases(parts: Parts, device: DeviceSpec, interconnect: Interconnect | None) -> list[Parts]:
    """Return the parts as they are, then pairs with one error at plus and at minus a standard deviation, all others 0.

    The errors are of all compute, of all messages, and of contention.

    interconnect: None where nothing is sent.
    """
    errors = [(device.relative_error, 0.0, 0.0)]
    if interconnect is not None:
        contention = CALIBRATED_CONTENTION_ERROR if interconnect.calibrated else OTHER_CONTENTION_ERROR
        errors += [(0.0, interconnect.relative_error, 0.0), (0.0, 0.0, contention)]

    def changed(compute: float, messages: float, contention: float) -> Parts:
        factors = dict.fromkeys(COMPUTE_PARTS, 1 + compute) | dict.fromkeys(MESSAGE_PARTS, 1 + messages)
        return {
            phase: dataclasses.replace(
                one,
                **{name: factor * getattr(one, name) for name, factor in factors.items()},
                contention=min(0.99, max(0.0, one.contention + contention)),
            )
            for phase, one in parts.items()
        }

    return [parts, *(changed(*(sign * size for size in error)) for error in errors for sign in (1, -1))]


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


# ---- rows ----


def planned_rows(
    model: ModelToPlan, group: PlannedGroup, workload: Workload, variants: Sequence[RowVariant]
) -> list[PlannedRow]:
    """Return the rows of one group and workload. Speed-ups are over the first variant, the dense layout."""
    rows: list[PlannedRow] = []
    dense: dict[str, list[float]] = {}
    steps = workload.decode_steps
    for variant in variants:
        serving, part = variant.served_by(group, workload)
        parts = serving.parts(model, part, variant.layout.sync_tp_size)
        # replicas have the errors of the whole group's link
        cases = band_cases(parts, group.device, group.interconnect)
        ms = {phase: _milliseconds(variant, serving, [case[phase] for case in cases]) for phase in PHASES}
        ms[END_TO_END] = [first + steps * step for first, step in zip(*ms.values(), strict=True)]
        dense = dense or ms
        passes = {phase: variant.predict(parts[phase]) for phase in PHASES}
        waiting = 1e3 * sum(
            count * (one.messages - one.hidden) for count, one in zip((1, steps), passes.values(), strict=True)
        )
        rows.append(
            PlannedRow(
                name=variant.name,
                kind=variant.kind,
                layout=str(variant.layout),
                tp_size=group.ranks,
                batch_size=workload.batch_size,
                basis=group.basis,
                prefill_ms=ms["prefill"][0],
                decode_ms_per_token=ms["decode"][0],
                end_to_end_ms=ms[END_TO_END][0],
                wait_ms={} if variant.fused else {phase: 1e3 * one.exposed for phase, one in passes.items()},
                waiting_share=waiting / ms[END_TO_END][0],
                message_bytes={phase: parts[phase].message_bytes for phase in PHASES},
                tokens_per_s=1e3 * workload.batch_size * workload.output_len / ms[END_TO_END][0],
                speedup={name: _speedup(variant, dense[name], times) for name, times in ms.items()},
                **serving.memory(model, part),
            )
        )
    return rows


def _milliseconds(variant: RowVariant, group: PlannedGroup, cases: Sequence[PassParts]) -> list[float]:
    """Return the time of a phase in each case; the last two cases are of more and less gain by fused norms."""
    low, high = fused_gain(group, cases[0]) if variant.fused else NO_GAIN
    gain, deviation = (low + high) / 2, (high - low) / 4  # the band is two deviations on both sides
    totals = [1e3 * variant.predict(case).total for case in cases]
    gains = [gain] * len(totals) + [gain + deviation, gain - deviation]
    return [total / (1 + one) for total, one in zip([*totals, totals[0], totals[0]], gains, strict=True)]


def _speedup(variant: RowVariant, dense: Sequence[float], ms: Sequence[float]) -> SpeedUp:
    # of fused norms the gain itself is assumed, so the scatter of two runs is not in it
    runs = 0 if variant.fused and variant.replicas == 1 else 2
    ratios = [before / after for before, after in zip(dense, ms, strict=True)]
    half = relative_band(ratios, runs=runs)
    return SpeedUp(ratios[0], ratios[0] * max(0.0, 1 - half), ratios[0] * (1 + half))
