"""From the parts of a pass to the rows of plan.json, and how sure they are. Imports no torch.

A figure is computed for the parts of a pass as they are, and again for each of ``band_cases``: what the errors of
device and link make of it. Most of an error of the device is in both times of a speed-up, whose band is therefore
narrower than either's.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ladderize.checkpoint.llama import parameter_count
from ladderize.layout import DROPPED, OVERLAPPED, Layout
from ladderize.planning.hardware import DeviceSpec, EngineFacts
from ladderize.planning.passes import (
    WIDTHS,
    PassParts,
    Workload,
    pass_parts,
    predict_parallel,
    predict_pass,
    predict_silent,
)
from ladderize.planning.plans.document import NO_WEIGHTS, Basis, GroupLink, PlannedRow
from ladderize.planning.plans.models import ModelToPlan, RowVariant
from ladderize.runtime.bench.cost_model import MemoryNeed, Prediction, cache_bytes, prefill_bytes, weight_bytes
from ladderize.runtime.bench.rows import BASELINE_ROW, MODEL_ROW, PHASES, PhaseCommunication
from ladderize.runtime.collectives.links import Interconnect, Link
from ladderize.runtime.shards import Shape

_COMPUTE = ("attention", "mlp", "attention_apart", "mlp_apart", "parallel", "rest")
_MESSAGES = ("message", "message_start", "vocabulary")
# What one standard deviation of contention is: where it was measured on the link itself, and elsewhere.
CALIBRATED_CONTENTION_ERROR, OTHER_CONTENTION_ERROR = 0.05, 0.1
# What no figure of device and link explains, of any one time: published runs of one program differ by this much.
SCATTER = 0.02
TWO_SIGMA = 2  # of a 95 % band


def band_cases(
    parts: Mapping[str, PassParts], device: DeviceSpec, interconnect: Interconnect | None
) -> list[Mapping[str, PassParts]]:
    """The parts as they are, then pairs: one error more and less by a standard deviation, and all others 0.

    parts: by phase. The errors are of all compute, of all messages, and of contention. interconnect: None where nothing
    is sent.
    """
    cases = [parts, *(_scaled(parts, _COMPUTE, 1 + sign * device.relative_error) for sign in (1, -1))]
    if interconnect is not None:
        contention = CALIBRATED_CONTENTION_ERROR if interconnect.calibrated else OTHER_CONTENTION_ERROR
        cases += [_scaled(parts, _MESSAGES, 1 + sign * interconnect.relative_error) for sign in (1, -1)]
        cases += [_contended(parts, sign * contention) for sign in (1, -1)]
    return cases


def relative_band(values: Sequence[float], *, runs: int = 1) -> float:
    """Half the width of the 95 % band of a figure, relative to it: 0.05 is 5 %.

    values: of the figure in each of ``band_cases``. runs: whose times are in it, 2 of a speed-up. The errors are taken
    to be independent. A figure that none of them changes, such as a speed-up over itself or a time of nothing, has no
    band.
    """
    deviations = [(more - less) / 2 for more, less in zip(values[1::2], values[2::2], strict=True)]
    size = abs(values[0])
    if not size:
        return 0.0
    if max(map(abs, deviations)) <= 1e-12 * size:
        return 0.0
    return TWO_SIGMA * math.hypot(math.sqrt(runs) * SCATTER * size, *deviations) / size


def _scaled(parts: Mapping[str, PassParts], names: tuple[str, ...], factor: float) -> dict[str, PassParts]:
    return {
        phase: dataclasses.replace(one, **{name: factor * getattr(one, name) for name in names})
        for phase, one in parts.items()
    }


def _contended(parts: Mapping[str, PassParts], change: float) -> dict[str, PassParts]:
    return {
        phase: dataclasses.replace(one, contention=min(0.99, max(0.0, one.contention + change)))
        for phase, one in parts.items()
    }


Parts = Mapping[str, PassParts]
GIB = 2**30


@dataclass(frozen=True)
class PlannedGroup:
    """Devices of one kind, joined by a link; None: one rank."""

    ranks: int
    device: DeviceSpec
    engine: EngineFacts
    interconnect: Interconnect | None

    @property
    def link(self) -> Link:
        return Link("none", 0.0, None) if self.interconnect is None else self.interconnect.at(self.ranks)

    @property
    def derived(self) -> str | None:
        """How the link at this number of ranks is known, where it was not timed."""
        return None if self.interconnect is None else self.interconnect.at(self.ranks).derived or None

    @property
    def basis(self) -> Basis:
        """Calibrated: all that the figures depend on was timed, with this engine."""
        link = self.interconnect is None or (self.interconnect.calibrated and self.derived is None)
        device = self.device.calibrated and self.engine.name == self.device.engine
        return "calibrated" if device and link else "predicted"

    def parts(self, model: ModelToPlan, workload: Workload, sync_tp_size: int | None) -> Parts:
        """By phase; raises UserError where the device or the link has no figures for it."""
        how = (self.device, self.engine, self.interconnect, self.ranks, model.dtype, workload)
        return pass_parts(model.config, *how, sync_tp_size)

    def cases(self, parts: Parts) -> list[Parts]:
        """The parts, and what they are where the figures of device or link are off."""
        return band_cases(parts, self.device, self.interconnect)


@dataclass(frozen=True)
class RowPasses:
    """The passes of one variant by phase, in each of ``band_cases``; the first is what is predicted."""

    cases: list[dict[str, Prediction]]
    decode_steps: int

    def exposed(self, phase: str) -> list[float]:
        """Seconds in each case. phase: ``end_to_end`` too: the prefill and all decode steps."""
        return [self._of(phase, {name: one.exposed for name, one in case.items()}) for case in self.cases]

    def seconds(self, phase: str) -> list[float]:
        return [self._of(phase, {name: one.total for name, one in case.items()}) for case in self.cases]

    def speedup(self, phase: str, dense: "RowPasses") -> list[float]:
        return [before / after for before, after in zip(dense.seconds(phase), self.seconds(phase), strict=True)]

    def _of(self, phase: str, values: Mapping[str, float]) -> float:
        return values["prefill"] + self.decode_steps * values["decode"] if phase == "end_to_end" else values[phase]


def band_of(values: Sequence[float], *, runs: int = 1) -> list[float]:
    """[low, high] of a figure by its values in each of ``band_cases``. runs: see ``relative_band``."""
    half = relative_band(values, runs=runs)
    return [values[0] * max(0.0, 1 - half), values[0] * (1 + half)]


class RowMaker:
    """Rows of one model on one group for one workload; speed-ups are over the dense layout's."""

    def __init__(self, model: ModelToPlan, group: PlannedGroup, workload: Workload) -> None:
        self.model, self.group, self.workload = model, group, workload
        self.parameters = parameter_count(model.config)
        self.need = memory_need_of(model, group, workload)
        memory = group.device.memory_gib
        self.fits = None if memory is None else self.need.total <= memory * GIB
        self.parts_of: dict[int | None, Parts] = {}  # by the number of virtual ranks
        self.dense = self.passes(RowVariant("dense", Layout.dense(model.config["num_hidden_layers"])))

    def row(self, variant: RowVariant) -> PlannedRow:
        passes = self.passes(variant)
        batch, new = self.workload.batch_size, self.workload.output_len
        ms = {phase: [1e3 * seconds for seconds in passes.seconds(phase)] for phase in (*PHASES, "end_to_end")}
        speedups = {phase: passes.speedup(phase, self.dense) for phase in (*PHASES, "end_to_end")}
        tokens_per_s = [1e3 * batch * new / whole for whole in ms["end_to_end"]]
        decode = ms["decode"][0]
        return PlannedRow(
            model=variant.name,
            kind=MODEL_ROW if variant.bound is None else BASELINE_ROW,
            layout=str(variant.layout),
            attention_sync=list(variant.layout.attention_sync),
            mlp_sync=list(variant.layout.mlp_sync),
            sync_tp_size=variant.layout.sync_tp_size,
            weights=str(self.model.folder) if variant.own and self.model.folder is not None else NO_WEIGHTS,
            dtype=self.model.dtype,
            checked=False,
            emulated=False,
            tp_size=self.group.ranks,
            batch_size=batch,
            prefill_ms=ms["prefill"][0],
            decode_ms_per_token=decode,
            output_tokens_per_s=batch * 1e3 / decode,
            tokens_per_s_per_user=1e3 / decode,
            end_to_end_ms=ms["end_to_end"][0],
            speedup_prefill=speedups["prefill"][0],
            speedup_decode=speedups["decode"][0],
            speedup_end_to_end=speedups["end_to_end"][0],
            speedup_prefill_interval=band_of(speedups["prefill"], runs=2),
            speedup_decode_interval=band_of(speedups["decode"], runs=2),
            speedup_end_to_end_interval=band_of(speedups["end_to_end"], runs=2),
            weight_bytes=self.need.weights,
            kv_cache_bytes=self.need.kv_cache,
            peak_memory_bytes=None,
            parameters=self.parameters,
            basis=self.group.basis,
            end_to_end_tokens_per_s=tokens_per_s[0],
            end_to_end_tokens_per_s_interval=band_of(tokens_per_s),
            prefill_ms_interval=band_of(ms["prefill"]),
            decode_ms_per_token_interval=band_of(ms["decode"]),
            exposed_end_to_end_ms=1e3 * passes.exposed("end_to_end")[0],
            memory_need_bytes=self.need.total,
            fits=self.fits,
            communication={phase: self._communication(variant, phase, passes) for phase in PHASES},
        )

    def parts(self, variant: RowVariant) -> Parts:
        """Those of virtual ranks that this variant drops sums of."""
        size = variant.layout.sync_tp_size
        if size not in self.parts_of:
            self.parts_of[size] = self.group.parts(self.model, self.workload, size)
        return self.parts_of[size]

    def passes(self, variant: RowVariant) -> RowPasses:
        cases = [predicted(case, variant) for case in self.group.cases(self.parts(variant))]
        return RowPasses(cases, self.workload.decode_steps)

    def _communication(self, variant: RowVariant, phase: str, passes: RowPasses) -> PhaseCommunication:
        count = message_count(variant) if self.group.ranks > 1 else 0
        overlaps = variant.bound is None and OVERLAPPED in (*variant.layout.attention_sync, *variant.layout.mlp_sync)
        parts, passed = self.parts(variant)[phase], passes.cases[0][phase]
        return PhaseCommunication(
            all_reduces=count,
            bytes=count * parts.message_bytes,
            no_communication_ms=1e3 * passed.compute,
            alone_ms=1e3 * passed.communication,
            vocabulary_alone_ms=0.0 if variant.bound == "no-comm" else 1e3 * parts.vocabulary,
            exposed_ms=1e3 * passed.exposed,
            exposed_interval_ms=[1e3 * end for end in band_of(passes.exposed(phase))],
            hidden_ms=1e3 * passed.hideable,
            hideable_ms=1e3 * passed.hideable,
            hidden_share=1.0 if overlaps and passed.hideable else None,
            predicted_ms=1e3 * passed.total,
        )


def predicted(parts: Parts, variant: RowVariant) -> dict[str, Prediction]:
    """By phase."""
    if variant.bound == "parallel":
        return {phase: predict_parallel(one) for phase, one in parts.items()}
    if variant.bound == "no-comm":
        return {phase: predict_silent(one) for phase, one in parts.items()}
    return {phase: predict_pass(one, variant.layout) for phase, one in parts.items()}


def message_count(variant: RowVariant) -> int:
    """All-reduces of the layers in one pass."""
    layout = variant.layout
    if variant.bound == "no-comm":
        return 0
    return layout.num_layers if variant.bound == "parallel" else 2 * layout.num_layers - layout.count(DROPPED)


def memory_need_of(model: ModelToPlan, group: PlannedGroup, workload: Workload) -> MemoryNeed:
    """What one rank holds at the least. Layouts do not differ in it."""
    shape = Shape.from_config(model.config, tp_size=group.ranks, rank=0, replicate_vocab=group.engine.replicate_vocab)
    width, batch = WIDTHS[model.dtype], workload.batch_size
    columns = workload.prompt_len + workload.output_len
    cached = width if group.engine.cache_bytes is None else group.engine.cache_bytes
    return MemoryNeed(
        weight_bytes(shape, width, packed=False),
        cache_bytes(shape, batch, columns, cached),
        prefill_bytes(shape, batch, workload.prompt_len, width),
    )


def group_link(group: PlannedGroup, model: ModelToPlan, workloads: Sequence[Workload]) -> GroupLink:
    """The link as it is taken for this group, with the sizes of messages beyond those that it was timed at."""
    sizes = {parts.message_bytes for workload in workloads for parts in group.parts(model, workload, None).values()}
    outside = sorted(size for size in sizes if not group.link.in_range(size))
    return GroupLink(group.ranks, group.link, group.derived, outside[:1] + outside[1:][-1:])
