"""The rows of plan.json: a layout, a bound, or another way of serving the dense model; their bands, and known losses.

A layout changes the model, so it has to beat what changes no result on the same ranks: vLLM fuses an all-reduce with
the norm behind it, which an overlapped sum gives up, and replicas of fewer ranks need less communication.

A figure is computed for the parts of a pass as they are, and again where compute, messages, contention or the gain of
fused norms are off by an error. Most of an error of the device is in both times of a speed-up, whose band is therefore
narrower than a time's. Imports no torch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from ladderize.console import human_bytes
from ladderize.convert.sensitivity_file import AlignmentWindows
from ladderize.errors import LadderizeError
from ladderize.files.documents import read_yaml
from ladderize.files.records import Record
from ladderize.layout import Layout, fitting_ranks
from ladderize.plan.hardware import DeviceSpec
from ladderize.plan.passes import (
    CASES,
    WIDTHS,
    Errors,
    PassParts,
    PassSeconds,
    Serving,
    pass_parts,
    predict_parallel,
    predict_pass,
    predict_silent,
)
from ladderize.runtime.shards import cache_bytes, check_runnable, weight_bytes

RowKind = Literal["layout", "bound", "exact"]  # exact: the dense model served in another way, which changes no result
BOUNDS = {"parallel": predict_parallel, "no-comm": predict_silent}
SCATTER = 0.02  # of any one time: published runs of one program differ by this much
TOKEN_ID_BYTES = 36  # in a Python list: its slot there, and most often an object of its own
# The end-to-end gain of a fused norm: "5-20%" by vLLM 0.32's docs (design/fusions). From faster_unfused_mib on,
# decoding was up to 7.4 % slower by vLLM issue 44079 (8 H200, Qwen3-30B-A3B, batch 128), which the docs do not say.
DOCUMENTED_GAIN, DISPUTED_GAIN, NO_GAIN = (0.05, 0.20), (-0.074, 0.20), (0.0, 0.0)
LOSS_TABLE = Path(__file__).parent / "losses.yaml"
SHARE_REACH = 0.1  # how far the share of converted layers may be from a measured one
LONG_TRAINING_POINTS = -5.0  # a loss that no short training makes good
CHECKPOINT_ROW, CHOSEN_ROW = "checkpoint", "chosen"  # the rows that are no names of --layout
WORTH_WAITING = 0.03  # of the dense time: where less of it is waiting, no layout is worth its loss of accuracy
WORTH_GAINING = 1.05  # a speed-up; below it, too
FUSED = "vLLM's fused all-reduces"
NEARLY = 0.95  # of a speed-up: what counts as no slower


@dataclass(frozen=True)
class MeasuredLoss(Record):
    """Points that a real model lost, aligned, and their 95 % interval; below 0 is worse than dense."""

    shares: dict[str, float]  # of its layers, by kind
    points: float
    low: float
    high: float

    @property
    def needs_long_training(self) -> bool:
        return self.points < LONG_TRAINING_POINTS


@dataclass(frozen=True)
class PlannedRow(Record):
    """A prediction for one group at one batch size."""

    name: str
    kind: RowKind
    layout: str
    tp_size: int
    batch_size: int
    # predicted: from figures of other machines; calibrated: device and link were timed by `ladderize calibrate`
    basis: Literal["predicted", "calibrated"]
    prefill_ms: float  # of a text of the batch; of replicas, in the one with the most texts
    decode_ms_per_token: float
    tokens_per_s: float  # new tokens of the whole batch over prefill and all decode steps
    speedup: float  # over the dense model, end to end, with its 95 % band
    speedup_low: float
    speedup_high: float
    waiting_share: float  # of the end-to-end time, what waits for all-reduces of layers
    memory_need_bytes: int  # of a rank: weights, KV cache, and what a prefill takes
    fits: bool | None  # None where the device's memory is unknown
    all_reduces: dict[str, str]  # the names of the links that the messages of layers take, by phase
    loss: MeasuredLoss | None  # that a real model had with about this layout; None where that was not measured


@dataclass(frozen=True)
class LayoutCost(Record):
    """The measured cost of a layout on so many windows: the increase of the mean negative log-likelihood of a token
    over the dense model's, in nats."""

    nats: float
    stderr: float  # the standard error, paired with the dense model by window
    windows: int


@dataclass(frozen=True)
class PlannedLayout(Record):
    """A layout with its speed-up over the dense one, end to end, and its costs."""

    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    speedup: float
    estimated_nats: float  # the sum of the costs of its layers
    measured: LayoutCost | None = None  # on the windows that it was chosen on
    held_out: LayoutCost | None = None  # on other windows

    @property
    def as_layout(self) -> Layout:
        return Layout(tuple(self.attention_sync), tuple(self.mlp_sync), self.sync_tp_size)

    @property
    def cost_sentence(self) -> str:
        """``+1.20% estimated, +1.43% measured, +1.51% (standard error 0.30) on 16 held-out windows``."""
        costs = [f"{shown_increase(self.estimated_nats)} estimated"]
        if self.measured is not None:
            costs.append(f"{shown_increase(self.measured.nats)} measured")
        if self.held_out is None:
            return ", ".join([*costs, "not verified"])
        nats, windows = self.held_out.nats, self.held_out.windows
        error = f"standard error {100 * math.exp(min(nats, 30.0)) * self.held_out.stderr:.2f}"
        return ", ".join([*costs, f"{shown_increase(nats)} ({error}) on {windows} held-out windows"])


@dataclass(frozen=True)
class PlanChoice(Record):
    """The fastest layout within the budget of ``max_nats``."""

    LEFT_OUT: ClassVar = ("aligned",)

    max_nats: float
    chosen: PlannedLayout
    measured: list[PlannedLayout] = field(default_factory=list)  # all that were, in order
    costs_file: str = ""  # the sensitivity that it was chosen by
    aligned: AlignmentWindows | None = None  # the windows that layouts were aligned on before they were measured


def shown_increase(nats: float, digits: int = 2) -> str:
    """Return an increase of the perplexity in per cent, with its sign."""
    return f"{100 * math.expm1(min(nats, 30.0)):+.{digits}f}%"


class _Variant(NamedTuple):
    """A row before its times are known."""

    name: str
    kind: RowKind
    layout: Layout
    serving: Serving  # the group and the batch; of replicas that with the most texts, which ends last
    only_if_faster: bool = False  # than the dense model on all ranks; else it is no row

    def seconds(self, times: PassParts, errors: Errors) -> float:
        """Return the time of a pass where its parts are off by these errors."""
        low, high = fused_gain(self.serving, times) if self.kind == "exact" else NO_GAIN
        gain = (low + high) / 2 + errors.gain * (high - low) / 4  # the band is two deviations on both sides
        return self.predict(times.off_by(errors)).total / (1 + gain)

    def predict(self, times: PassParts) -> PassSeconds:
        return BOUNDS[self.name](times) if self.kind == "bound" else predict_pass(times, self.layout)


def planned_rows(serving: Serving, layouts: Mapping[str, Layout]) -> list[PlannedRow]:
    """Return the rows of one group and batch: the dense layout, which speed-ups are over, then those of ``layouts`` by
    their name or that of one of BOUNDS, then what changes no result."""
    device, links, passes = serving.device, serving.links, serving.passes
    dense = Layout.dense(serving.config["num_hidden_layers"])
    timed = all(link.calibrated and not link.at(serving.ranks).derived for link in links)
    is_calibrated = device.calibrated and serving.engine.name == device.speeds and timed
    named = {"dense": dense, **layouts}
    variants = [_Variant(name, "bound" if name in BOUNDS else "layout", named[name], serving) for name in named]
    rows: list[PlannedRow] = []
    dense_seconds: list[float] = []
    for variant in (*variants, *_exact_variants(serving, dense)):
        times = pass_parts(variant.serving, variant.layout.sync_tp_size)
        prefill = [variant.seconds(times["prefill"], errors) for errors in CASES]
        decode = [variant.seconds(times["decode"], errors) for errors in CASES]
        seconds = [first + passes["decode"] * step for first, step in zip(prefill, decode, strict=True)]
        dense_seconds = dense_seconds or seconds
        speedups = [before / after for before, after in zip(dense_seconds, seconds, strict=True)]
        if variant.only_if_faster and speedups[0] <= 1:
            continue
        # of fused norms the gain itself is assumed, so the scatter of two runs is not in it
        half = relative_band(speedups, runs=0 if variant.name == "fused" else 2)
        waiting = sum(count * variant.predict(times[phase]).waiting for phase, count in passes.items())
        need = memory_need(variant.serving, variant.layout)
        rows.append(
            PlannedRow(
                name=variant.name,
                kind=variant.kind,
                layout=str(variant.layout),
                tp_size=serving.ranks,
                batch_size=serving.batch_size,
                basis="calibrated" if is_calibrated else "predicted",
                prefill_ms=1e3 * prefill[0],
                decode_ms_per_token=1e3 * decode[0],
                tokens_per_s=serving.batch_size * serving.output_len / seconds[0],
                speedup=speedups[0],
                speedup_low=speedups[0] * max(0.0, 1 - half),
                speedup_high=speedups[0] * (1 + half),
                waiting_share=waiting / seconds[0],
                memory_need_bytes=need,
                fits=fits(device, need),
                all_reduces={name: variant.serving.fastest(phase.message_bytes).name for name, phase in times.items()},
                loss=measured_loss(variant.layout) if variant.kind == "layout" else None,
            )
        )
    return rows


def relative_band(figures: Sequence[float], *, runs: int = 1) -> float:
    """Return half the width of the 95 % band of a figure by its values in CASES, relative to it; it depends on so many
    times as ``runs``: 2 for a speed-up."""
    deviations = [(more - less) / 2 for more, less in zip(figures[1::2], figures[2::2], strict=True)]
    size = abs(figures[0])
    if not size or max(map(abs, deviations)) <= 1e-12 * size:
        return 0.0
    return 2 * math.hypot(math.sqrt(runs) * SCATTER * size, *deviations) / size


def _exact_variants(serving: Serving, dense: Layout) -> Iterator[_Variant]:
    """Yield the other ways of serving the dense model on these ranks: norms fused where vLLM does so, and replicas at
    every divisor of the ranks whose memory suffices. Where the batch does not fill them, one replica has it whole."""
    for count in range(1, serving.ranks + 1):
        if serving.ranks % count:
            continue
        ranks, is_filled = serving.ranks // count, count <= serving.batch_size
        rows = math.ceil(serving.batch_size / count) if is_filled else serving.batch_size
        replica = replace(serving, ranks=ranks, batch_size=rows)
        try:
            check_runnable(serving.config, dense, ranks)
            gains = [fused_gain(replica, times) for times in pass_parts(replica).values()]
        except LadderizeError:  # the heads, or the link, do not go with so few ranks
            continue
        if count > 1 and fits(replica.device, memory_need(replica, dense)) is not False:
            name = f"{count} replicas" if is_filled else f"{ranks} of {serving.ranks} ranks"
            yield _Variant(name, "exact", dense, replica, only_if_faster=not is_filled)
        elif count == 1 and any(gain != NO_GAIN for gain in gains):
            yield _Variant("fused", "exact", dense, replica)


def fused_gain(serving: Serving, times: PassParts) -> tuple[float, float]:
    """Return the 95 % band of the gain of a dense pass by fused norms, at most the time of waits and norms. Fused
    kernels write to each other's memory over NVLink; a link without a medium counts as one."""
    size, device = times.message_bytes / 2**20, serving.device
    over_nvlink = any(link.medium in (None, "nvlink") and link.is_within(serving.ranks) for link in serving.links)
    if size > device.fused_norm_mib.get(serving.ranks, 0) or not over_nvlink:
        return NO_GAIN
    disputed = size >= device.faster_unfused_mib.get(serving.ranks, size + 1)
    dense = predict_pass(times, Layout.dense(times.layers))
    most = dense.total / (dense.busy - 2 * times.layers * times.norm) - 1
    low, high = DISPUTED_GAIN if disputed else DOCUMENTED_GAIN
    return min(low, most), min(high, most)


def memory_need(serving: Serving, layout: Layout) -> int:
    """Return the least bytes of a rank: weights, KV cache, and what a prefill takes besides (token ids, the activations
    of one layer, logits)."""
    shape, width, batch = serving.shape, WIDTHS[serving.dtype], serving.batch_size
    columns = serving.prompt_len + serving.output_len
    heads = shape.own_heads + 2 * shape.own_kv_heads
    token = width * (3 * shape.hidden + 3 * shape.own_inner) + 4 * heads * shape.head_dim + TOKEN_ID_BYTES
    weights = weight_bytes(shape, width, packed=False, projections=1 if serving.is_fp8 else None)
    prefill = batch * (serving.prompt_len * token + width * shape.vocab)
    return weights + cache_bytes(shape, layout, batch, columns, width) + prefill


def fits(device: DeviceSpec, need: int) -> bool | None:
    return None if device.memory_gib is None else need <= device.memory_gib * 2**30


@cache
def all_losses() -> list[MeasuredLoss]:
    return [MeasuredLoss.from_dict(row, LOSS_TABLE) for row in read_yaml(LOSS_TABLE)]


def measured_loss(layout: Layout) -> MeasuredLoss | None:
    """Return the loss of the measured layout that has the same kinds on about the same shares of its layers."""
    shares = {kind: len(layers) / layout.num_layers for kind, layers in layout.kinds.items()}

    def distance(loss: MeasuredLoss) -> float:
        return max((abs(loss.shares[kind] - share) for kind, share in shares.items()), default=0.0)

    alike = [loss for loss in all_losses() if loss.shares.keys() == shares.keys() and distance(loss) <= SHARE_REACH]
    return min(alike, key=distance, default=None)


@dataclass(frozen=True)
class PlanVerdict(Record):
    """The answer for one group at one batch size."""

    tp_size: int
    batch_size: int
    worth: Literal["yes", "perhaps", "no"]
    layout: str | None  # the name of the row that it is about, if it is about one
    sentence: str


def judge(rows: Sequence[PlannedRow], serving: Serving) -> PlanVerdict:
    """Return the verdict on one group, by its rows: on the chosen layout or the checkpoint's own, if they are there,
    else on the fastest layout that was measured to need no long training (of those nearly as fast the most accurate),
    or else on the fastest."""
    dense, *others = rows
    layouts = {row.name: row for row in others if row.kind == "layout" and row.fits is not False}
    short = [row for row in layouts.values() if row.loss is not None and not row.loss.needs_long_training]
    best = layouts.get(CHOSEN_ROW) or layouts.get(CHECKPOINT_ROW)
    best = best or max(short or layouts.values(), key=lambda row: row.speedup, default=None)
    if best is not None and best in short:
        nearly_as_fast = [row for row in short if row.speedup >= NEARLY * best.speedup]
        best = max(nearly_as_fast, key=lambda row: (row.loss.points if row.loss else -math.inf, row.speedup))
    rival = max([dense, *(row for row in others if row.kind == "exact")], key=lambda row: row.speedup)
    worth, sentence = _answer(dense, best, rival, serving)
    return PlanVerdict(dense.tp_size, dense.batch_size, worth, best.name if best and worth != "no" else None, sentence)


def _answer(
    dense: PlannedRow, best: PlannedRow | None, rival: PlannedRow, serving: Serving
) -> tuple[Literal["yes", "perhaps", "no"], str]:
    if dense.fits is False:
        layout = Layout.dense(serving.config["num_hidden_layers"])
        sizes = [replace(serving, ranks=ranks) for ranks in fitting_ranks(serving.config)]
        enough = (size.ranks for size in sizes if fits(serving.device, memory_need(size, layout)))
        least = next(enough, None)
        advice = f"the smallest --tp-size that fits is {least}" if least else "no --tp-size does"
        need = human_bytes(dense.memory_need_bytes)
        return "no", f"It does not fit: each rank needs {need} or more; {advice}."
    if dense.tp_size == 1:
        return "no", "Nothing to gain: one rank sends nothing."
    if dense.waiting_share < WORTH_WAITING:
        return "no", f"Not worth it: dense waits for all-reduces {dense.waiting_share:.1%} of its time."
    if best is None:
        return "no", "No layout was asked for."
    gain = f"{shown_name(best.name)} gives {_speed(best)}"
    unchanged = f"without any change by {FUSED if rival.name == 'fused' else rival.name}"
    if best.speedup <= rival.speedup and rival is not dense:
        return "no", f"Not worth it: {rival.speedup:.2f}x {unchanged}; {gain}."
    if best.speedup < WORTH_GAINING:
        return "no", f"Not worth it: {gain}."
    training = " after a long training" if best.loss is not None and best.loss.needs_long_training else ""
    if best.speedup_low <= 1:
        return "perhaps", f"Perhaps: {gain}{training}, so that it may be slower than dense."
    if rival is not dense and best.speedup_low <= rival.speedup_high:
        return "perhaps", f"Perhaps: {gain}{training}, but {_speed(rival)} {unchanged}."
    return "yes", f"Worth trying: {gain}{training}."


def _speed(row: PlannedRow) -> str:
    return f"{row.speedup:.2f}x ({row.speedup_low:.2f} to {row.speedup_high:.2f})"


def shown_name(name: str) -> str:
    return name.replace("=", " ")
