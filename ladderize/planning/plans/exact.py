"""What a layout has to beat: the dense model on the same ranks, served in the best way that changes no result. Imports
no torch.

vLLM fuses an all-reduce with the norm behind it, which an overlapped sum gives up. And where communication is dear, two
replicas of half the ranks need less of it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from ladderize.errors import LadderizeError
from ladderize.layout import Layout
from ladderize.planning.passes import PassParts, Workload, predict_pass
from ladderize.planning.plans.document import ExactStack
from ladderize.planning.plans.rows import ModelToPlan, PlannedGroup, band_cases, band_of
from ladderize.runtime.bench.document import END_TO_END, PHASES
from ladderize.runtime.collectives.links import Interconnect, known_interconnects
from ladderize.runtime.shards import check_runnable

# What a fused norm gains end to end: "5-20%" by vLLM 0.32's docs (design/fusions). From faster_unfused_mib on, decoding
# was up to 7.4 % slower by vLLM issue 44079 (8 H200, Qwen3-30B-A3B, batch 128), which the docs do not say.
DOCUMENTED_GAIN, DISPUTED_GAIN, NO_GAIN = (0.05, 0.20), (-0.074, 0.20), (0.0, 0.0)
MIB = 2**20
Ms = dict[str, list[float]]  # by phase, and end to end: in each of band_cases, then with more and with less gain


def exact_stacks(model: ModelToPlan, group: PlannedGroup, workload: Workload) -> Iterator[ExactStack]:
    """Those that there are: ``fused`` where vLLM fuses messages of such a size on such a device, ``replicas`` unless
    ``no_replicas`` has a reason. None of one rank."""
    if group.ranks == 1:
        return
    dense = _dense_ms(model, group, workload, group.interconnect, fused=False)
    passes = group.parts(model, workload, None).values()
    if any(fused_gain(group, parts) != NO_GAIN for parts in passes):
        fused = _dense_ms(model, group, workload, group.interconnect, fused=True)
        # what is assumed is the speed-up itself, so the scatter of two runs is not in it
        yield _stack("fused", model, group, group, workload, fused, dense, runs=0)
    if no_replicas(model, group, [workload]) is None:
        half, own = _half(group), _half_batch(workload)
        replica = _dense_ms(model, half, own, group.interconnect, fused=True)
        yield _stack("replicas", model, group, half, workload, replica, dense, runs=2)


def no_replicas(model: ModelToPlan, group: PlannedGroup, workloads: Sequence[Workload]) -> str | None:
    """Why two replicas of half the ranks cannot be predicted."""
    if group.ranks == 1:
        return None
    if group.ranks % 2:
        return f"{group.ranks} ranks have no half"
    try:
        check_runnable(model.config, Layout.dense(model.layout.num_layers), group.ranks // 2)
        for workload in workloads:
            _half(group).parts(model, _half_batch(workload), None)
    except LadderizeError as error:
        return str(error)
    return None


def _half(group: PlannedGroup) -> PlannedGroup:
    ranks = group.ranks // 2
    return dataclasses.replace(group, ranks=ranks, interconnect=group.interconnect if ranks > 1 else None)


def _half_batch(workload: Workload) -> Workload:
    """Of an odd batch, the larger half: the other replica is done before."""
    return dataclasses.replace(workload, batch_size=-(-workload.batch_size // 2))


def fused_gain(group: PlannedGroup, parts: PassParts) -> tuple[float, float]:
    """How much faster a dense pass is with fused norms: a 95 % band, at most what waiting and norms take. NO_GAIN
    where vLLM fuses nothing."""
    size = parts.message_bytes / MIB
    if size > group.device.fused_norm_mib.get(group.ranks, 0) or not _may_be_nvlink(group.interconnect):
        return NO_GAIN
    disputed = size >= group.device.faster_unfused_mib.get(group.ranks, size + 1)
    dense = predict_pass(parts, Layout.dense(parts.layers))
    most = dense.total / (dense.compute + parts.vocabulary - 2 * parts.layers * parts.norm) - 1
    low, high = DISPUTED_GAIN if disputed else DOCUMENTED_GAIN
    return min(low, most), min(high, most)


def _may_be_nvlink(interconnect: Interconnect | None) -> bool:
    """The kernels that fuse write to each other's memory. Of wires that nobody names, this is taken to be so."""
    return interconnect is not None and interconnect.medium in (None, known_interconnects()["nvlink"].medium)


def _dense_ms(
    model: ModelToPlan, group: PlannedGroup, workload: Workload, interconnect: Interconnect | None, *, fused: bool
) -> Ms:
    """interconnect: whose errors are looked at, so that cases are the same ones for a group and its half."""
    layout = Layout.dense(model.layout.num_layers)
    cases = band_cases(group.parts(model, workload, None), group.device, interconnect)
    found: Ms = {}
    for phase in PHASES:
        low, high = fused_gain(group, cases[0][phase]) if fused else NO_GAIN
        middle, deviation = (low + high) / 2, (high - low) / 4  # the band is two deviations on both sides
        ms = [1e3 * predict_pass(case[phase], layout).total for case in cases]
        found[phase] = [one / (1 + middle) for one in ms]
        found[phase] += [ms[0] / (1 + middle + sign * deviation) for sign in (1, -1)]
    steps = workload.decode_steps
    found[END_TO_END] = [first + steps * step for first, step in zip(*found.values(), strict=True)]
    return found


def _stack(
    name: Literal["fused", "replicas"],
    model: ModelToPlan,
    group: PlannedGroup,
    serving: PlannedGroup,
    workload: Workload,
    ms: Ms,
    dense: Ms,
    *,
    runs: int,
) -> ExactStack:
    """serving: each of the groups that serve it. runs: of ``band_of``, for the speed-up."""
    own = workload if serving is group else _half_batch(workload)
    tokens_per_s = [1e3 * workload.batch_size * workload.output_len / whole for whole in ms[END_TO_END]]
    speedups = [a / b for a, b in zip(dense[END_TO_END], ms[END_TO_END], strict=True)]
    need = serving.memory_need(model, own).total
    return ExactStack(
        name=name,
        ranks=group.ranks,
        batch_size=workload.batch_size,
        prefill_ms=ms["prefill"][0],
        decode_ms_per_token=ms["decode"][0],
        end_to_end_tokens_per_s=tokens_per_s[0],
        end_to_end_tokens_per_s_interval=band_of(tokens_per_s),
        speedup_end_to_end=speedups[0],
        speedup_end_to_end_interval=band_of(speedups, runs=runs),
        memory_need_bytes=need,
        fits=group.fits(need),
    )
