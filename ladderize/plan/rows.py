"""The rows of plan.json: a layout, a bound, or another way of serving the dense model; and their bands.

A layout changes the model, so it has to beat what changes no result on the same ranks: vLLM fuses an all-reduce with
the norm behind it, which an overlapped sum gives up, and replicas of fewer ranks need less communication.

A figure is computed for the parts of a pass as they are, and again for each of ``band_cases``, in which device and link
are off by their errors. Most of an error of the device is in both times of a speed-up, whose band is therefore narrower
than a time's. Imports no torch.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ladderize.errors import LadderizeError
from ladderize.files.records import Record
from ladderize.layout import Layout
from ladderize.plan.hardware import DeviceSpec
from ladderize.plan.losses import MeasuredLoss, measured_loss
from ladderize.plan.passes import (
    WIDTHS,
    PassParts,
    PassSeconds,
    Serving,
    pass_parts,
    predict_parallel,
    predict_pass,
    predict_silent,
)
from ladderize.runtime.collectives.links import Interconnect
from ladderize.runtime.shards import cache_bytes, check_runnable, weight_bytes

# predicted: from figures of other machines; calibrated: device and link were timed by `ladderize calibrate`
Basis = Literal["predicted", "calibrated"]
RowKind = Literal["layout", "bound", "exact"]  # exact: the dense model served in another way, which changes no result
Parts = Mapping[str, PassParts]  # by phase
BOUNDS = {"parallel": predict_parallel, "no-comm": predict_silent}
GIB, MIB = 2**30, 2**20
COMPUTE_PARTS = ("attention", "mlp", "attention_apart", "mlp_apart", "parallel", "rest", "norm", "reading")
MESSAGE_PARTS = ("message", "message_start", "within", "across", "gather", "vocabulary")
# one standard deviation of contention: where it was measured on the link itself, and elsewhere
CALIBRATED_CONTENTION_ERROR, OTHER_CONTENTION_ERROR = 0.05, 0.1
SCATTER = 0.02  # of any one time: published runs of one program differ by this much
TWO_SIGMA = 2  # of a 95 % band
TOKEN_ID_BYTES = 36  # in a Python list: its place there, and most often an object of its own
# The end-to-end gain of a fused norm: "5-20%" by vLLM 0.32's docs (design/fusions). From faster_unfused_mib on,
# decoding was up to 7.4 % slower by vLLM issue 44079 (8 H200, Qwen3-30B-A3B, batch 128), which the docs do not say.
DOCUMENTED_GAIN, DISPUTED_GAIN, NO_GAIN = (0.05, 0.20), (-0.074, 0.20), (0.0, 0.0)


@dataclass(frozen=True)
class PlannedRow(Record):
    """A prediction for one group at one batch size.

    prefill_ms, decode_ms_per_token: the time of a text of the batch; of replicas, in the one with the largest part.
    tokens_per_s: new tokens of the whole batch over prefill and all decode steps.
    speedup: over the dense model, end to end; its 95 % band is from ``speedup_low`` to ``speedup_high``.
    waiting_share: of the end-to-end time, the part that waits for all-reduces of layers.
    memory_need_bytes: of a rank: weights, KV cache, and what a prefill takes.
    fits: True if the rank's device has so much memory; None where that is unknown.
    all_reduces: the names of the links that the messages of layers take, by phase.
    loss: the accuracy that a real model lost with about this layout; None where that was not measured.
    """

    name: str
    kind: RowKind
    layout: str
    tp_size: int
    batch_size: int
    basis: Basis
    prefill_ms: float
    decode_ms_per_token: float
    tokens_per_s: float
    speedup: float
    speedup_low: float
    speedup_high: float
    waiting_share: float
    memory_need_bytes: int
    fits: bool | None
    all_reduces: dict[str, str]
    loss: MeasuredLoss | None


class _Variant(NamedTuple):
    """A row before its times are known.

    serving: the group and the batch, or those of the replica with the largest part, which ends last.
    only_if_faster: it is no row where it is slower than the dense model on all ranks.
    """

    name: str
    kind: RowKind
    layout: Layout
    serving: Serving
    only_if_faster: bool = False

    def predict(self, parts: PassParts) -> PassSeconds:
        """Return the times of a pass."""
        return BOUNDS[self.name](parts) if self.kind == "bound" else predict_pass(parts, self.layout)


def planned_rows(serving: Serving, layouts: Mapping[str, Layout]) -> list[PlannedRow]:
    """Return the rows of one group and batch: the dense layout, which speed-ups are over, then the others, then what
    changes no result.

    layouts: by row name, or by the name of one of BOUNDS, which has the dense one.

    Raises UserError or LayoutError where there are no figures for the group.
    """
    dense = Layout.dense(serving.config["num_hidden_layers"])
    variants = [
        _Variant(name, "bound" if name in BOUNDS else "layout", layout, serving)
        for name, layout in {"dense": dense, **layouts}.items()
    ]
    steps = serving.passes["decode"]
    rows: list[PlannedRow] = []
    dense_whole: list[float] = []
    for one in (*variants, *_exact_variants(serving, dense)):
        parts = pass_parts(one.serving, one.layout.sync_tp_size)
        cases = band_cases(parts, serving.device, serving.links)
        prefill, decode = (_seconds(one, [case[phase] for case in cases]) for phase in parts)
        whole = [first + steps * step for first, step in zip(prefill, decode, strict=True)]
        dense_whole = dense_whole or whole
        waiting = sum(count * one.predict(parts[phase]).waiting for phase, count in serving.passes.items())
        ratios = [before / after for before, after in zip(dense_whole, whole, strict=True)]
        if one.only_if_faster and ratios[0] <= 1:
            continue
        # of fused norms the gain itself is assumed, so the scatter of two runs is not in it
        half = relative_band(ratios, runs=0 if one.name == "fused" else 2)
        need = memory_need(one.serving, one.layout)
        rows.append(
            PlannedRow(
                name=one.name,
                kind=one.kind,
                layout=str(one.layout),
                tp_size=serving.ranks,
                batch_size=serving.batch_size,
                basis=_basis(serving),
                prefill_ms=1e3 * prefill[0],
                decode_ms_per_token=1e3 * decode[0],
                tokens_per_s=serving.batch_size * serving.output_len / whole[0],
                speedup=ratios[0],
                speedup_low=ratios[0] * max(0.0, 1 - half),
                speedup_high=ratios[0] * (1 + half),
                waiting_share=waiting / whole[0],
                memory_need_bytes=need,
                fits=fits(serving.device, need),
                all_reduces={phase: one.serving.fastest(part.message_bytes).name for phase, part in parts.items()},
                loss=measured_loss(one.layout) if one.kind == "layout" else None,
            )
        )
    return rows


def _basis(serving: Serving) -> Basis:
    """Return ``calibrated`` where device and link were timed, with this engine and so many ranks."""
    device = serving.device
    timed = all(link.calibrated and not link.at(serving.ranks).derived for link in serving.links)
    return "calibrated" if device.calibrated and serving.engine.name == device.engine and timed else "predicted"


def _exact_variants(serving: Serving, dense: Layout) -> Iterator[_Variant]:
    """Yield the other ways of serving the dense model on these ranks: norms fused where vLLM does so, and replicas at
    every divisor of the ranks whose memory suffices. Where the batch does not fill them, one replica has it whole."""
    for count in range(1, serving.ranks + 1):
        if serving.ranks % count:
            continue
        is_filled = count <= serving.batch_size
        rows = math.ceil(serving.batch_size / count) if is_filled else serving.batch_size
        part = dataclasses.replace(serving, ranks=serving.ranks // count, batch_size=rows)
        try:
            check_runnable(serving.config, dense, part.ranks)
            gains = [fused_gain(part, parts) for parts in pass_parts(part).values()]
        except LadderizeError:  # the heads, or the link, do not go with so few ranks
            continue
        is_another = (
            any(gain != NO_GAIN for gain in gains) if count == 1 else fits(part.device, memory_need(part, dense))
        )
        if is_another is not False:
            name = f"{count} replicas" if is_filled else f"{part.ranks} of {serving.ranks} ranks"
            yield _Variant("fused" if count == 1 else name, "exact", dense, part, not is_filled)


def fused_gain(serving: Serving, parts: PassParts) -> tuple[float, float]:
    """Return the 95 % band of the gain of a dense pass by fused norms, at most the time of waits and norms.

    It is NO_GAIN where vLLM fuses nothing: fused kernels write to each other's memory over NVLink. A link without a
    medium counts as NVLink.
    """
    size, device = parts.message_bytes / MIB, serving.device
    over_nvlink = any(link.medium in (None, "nvlink") and link.is_within(serving.ranks) for link in serving.links)
    if size > device.fused_norm_mib.get(serving.ranks, 0) or not over_nvlink:
        return NO_GAIN
    disputed = size >= device.faster_unfused_mib.get(serving.ranks, size + 1)
    dense = predict_pass(parts, Layout.dense(parts.layers))
    most = dense.total / (dense.busy - 2 * parts.layers * parts.norm) - 1
    low, high = DISPUTED_GAIN if disputed else DOCUMENTED_GAIN
    return min(low, most), min(high, most)


def _seconds(variant: _Variant, cases: Sequence[PassParts]) -> list[float]:
    """Return the time of a phase in each case; the last two cases are of more and less gain by fused norms."""
    low, high = fused_gain(variant.serving, cases[0]) if variant.kind == "exact" else NO_GAIN
    gain, deviation = (low + high) / 2, (high - low) / 4  # the band is two deviations on both sides
    totals = [variant.predict(case).total for case in cases]
    gains = [gain] * len(totals) + [gain + deviation, gain - deviation]
    return [total / (1 + one) for total, one in zip([*totals, totals[0], totals[0]], gains, strict=True)]


# ---- memory ----


def memory_need(serving: Serving, layout: Layout) -> int:
    """Return the least bytes of a rank: weights, KV cache, and what a prefill takes besides (token ids, the activations
    of one layer, logits)."""
    shape, width, batch = serving.shape, WIDTHS[serving.dtype], serving.batch_size
    columns = serving.prompt_len + serving.output_len
    heads = shape.own_heads + 2 * shape.own_kv_heads
    token = width * (3 * shape.hidden + 3 * shape.own_inner) + 4 * heads * shape.head_dim + TOKEN_ID_BYTES
    weights = weight_bytes(shape, width, packed=False, projections=1 if serving.is_fp8 else None)
    cached = width if serving.engine.cache_bytes is None else serving.engine.cache_bytes
    prefill = batch * (serving.prompt_len * token + width * shape.vocab)
    return weights + cache_bytes(shape, layout, batch, columns, cached) + prefill


def fits(device: DeviceSpec, need: int) -> bool | None:
    return None if device.memory_gib is None else need <= device.memory_gib * GIB


# ---- bands ----


def band_cases(parts: Parts, device: DeviceSpec, links: Sequence[Interconnect]) -> list[Parts]:
    """Return the parts as they are, then pairs with one error at plus and at minus a standard deviation, all others 0.

    The errors are of all compute, of all messages, and of contention.

    links: none where nothing is sent.
    """
    errors = [(device.relative_error, 0.0, 0.0)]
    if links:
        contention = CALIBRATED_CONTENTION_ERROR if links[0].calibrated else OTHER_CONTENTION_ERROR
        errors += [(0.0, 1.0, 0.0), (0.0, 0.0, contention)]

    def changed(compute: float, messages: float, contention: float) -> Parts:
        """messages: in deviations, whose size a phase's messages have."""
        return {phase: changed_phase(one, compute, messages, contention) for phase, one in parts.items()}

    def changed_phase(phase: PassParts, compute: float, messages: float, contention: float) -> PassParts:
        sent = (1 + phase.message_error) ** messages
        factors = dict.fromkeys(COMPUTE_PARTS, 1 + compute) | dict.fromkeys(MESSAGE_PARTS, sent)
        times = {name: factor * getattr(phase, name) for name, factor in factors.items()}
        return dataclasses.replace(phase, **times, contention=min(0.99, max(0.0, phase.contention + contention)))

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
