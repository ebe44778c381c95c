"""The best ways of serving the dense model on the same ranks that change no result. A layout has to beat them. Imports
no torch.

vLLM fuses an all-reduce with the norm behind it, which an overlapped sum gives up. Where communication is slow,
replicas of fewer ranks need less of it.
"""

import dataclasses

from ladderize.errors import LadderizeError
from ladderize.layout import Layout
from ladderize.plan.document import ExactStack
from ladderize.plan.passes import PassParts, Workload, predict_pass
from ladderize.plan.rows import ModelToPlan, PlannedGroup, band_cases, band_of
from ladderize.runtime.bench.document import END_TO_END, PHASES
from ladderize.runtime.collectives.links import Interconnect, known_interconnects
from ladderize.runtime.shards import check_runnable

# The end-to-end gain of a fused norm: "5-20%" by vLLM 0.32's docs (design/fusions). From faster_unfused_mib on,
# decoding was up to 7.4 % slower by vLLM issue 44079 (8 H200, Qwen3-30B-A3B, batch 128), which the docs do not say.
DOCUMENTED_GAIN, DISPUTED_GAIN, NO_GAIN = (0.05, 0.20), (-0.074, 0.20), (0.0, 0.0)
MIB = 2**20
Ms = dict[str, list[float]]  # by phase, and end to end: in each of band_cases, then with more and with less gain


def exact_stacks(model: ModelToPlan, group: PlannedGroup, workload: Workload) -> tuple[list[ExactStack], str]:
    """Return the ways as rows, and the reason why the first of the missing replicas is not there.

    The rows are ``fused``, where vLLM fuses messages of such a size on such a device, then replicas at every divisor of
    the ranks that the batch fills and whose memory suffices.
    """
    if group.ranks == 1:
        return [], ""
    dense = _dense_ms(model, group, workload, group.interconnect, fused=False)
    stacks, reason = [], ""
    if any(fused_gain(group, parts) != NO_GAIN for parts in group.parts(model, workload, None).values()):
        fused = _dense_ms(model, group, workload, group.interconnect, fused=True)
        # the speed-up itself is assumed, so the scatter of two runs is not in it
        stacks.append(_stack("fused", model, group, workload, workload, group.ranks, fused, dense, runs=0))
    for count in range(2, group.ranks + 1):
        if group.ranks % count or count > workload.batch_size:
            continue
        ranks = group.ranks // count
        replica = dataclasses.replace(group, ranks=ranks, interconnect=group.interconnect if ranks > 1 else None)
        # the replica with the largest part ends last
        part = dataclasses.replace(workload, batch_size=-(-workload.batch_size // count))
        try:
            check_runnable(model.config, Layout.dense(model.layout.num_layers), ranks)
            ms = _dense_ms(model, replica, part, group.interconnect, fused=True)
        except LadderizeError as error:
            reason = reason or str(error)
            continue
        stack = _stack(f"{count} replicas", model, replica, workload, part, group.ranks, ms, dense, runs=2)
        if stack.fits is False:
            reason = reason or f"{count} replicas do not fit: {stack.memory_need_bytes / 1e9:.0f} GB for each rank"
        else:
            stacks.append(stack)
    return stacks, reason


def fused_gain(group: PlannedGroup, parts: PassParts) -> tuple[float, float]:
    """Return the 95 % band of the gain of a dense pass by fused norms, at most the time of waits and norms.

    It is NO_GAIN where vLLM fuses nothing.
    """
    size = parts.message_bytes / MIB
    if size > group.device.fused_norm_mib.get(group.ranks, 0) or not _may_be_nvlink(group.interconnect):
        return NO_GAIN
    disputed = size >= group.device.faster_unfused_mib.get(group.ranks, size + 1)
    dense = predict_pass(parts, Layout.dense(parts.layers))
    most = dense.total / (dense.compute + parts.vocabulary - 2 * parts.layers * parts.norm) - 1
    low, high = DISPUTED_GAIN if disputed else DOCUMENTED_GAIN
    return min(low, most), min(high, most)


def _may_be_nvlink(interconnect: Interconnect | None) -> bool:
    """Return True if the link may be NVLink: fused kernels write to each other's memory. A link without a medium counts
    as NVLink."""
    return interconnect is not None and interconnect.medium in (None, known_interconnects()["nvlink"].medium)


def _dense_ms(
    model: ModelToPlan, group: PlannedGroup, workload: Workload, interconnect: Interconnect | None, *, fused: bool
) -> Ms:
    """Return the times of the dense model.

    interconnect: the link whose errors the cases have: the same for a group and its replicas.
    """
    layout = Layout.dense(model.layout.num_layers)
    cases = band_cases(group.parts(model, workload, None), group.device, interconnect)
    times: Ms = {}
    for phase in PHASES:
        low, high = fused_gain(group, cases[0][phase]) if fused else NO_GAIN
        middle, deviation = (low + high) / 2, (high - low) / 4  # the band is two deviations on both sides
        ms = [1e3 * predict_pass(case[phase], layout).total for case in cases]
        times[phase] = [one / (1 + middle) for one in ms]
        times[phase] += [ms[0] / (1 + middle + sign * deviation) for sign in (1, -1)]
    times[END_TO_END] = [first + workload.decode_steps * step for first, step in zip(*times.values(), strict=True)]
    return times


def _stack(
    name: str,
    model: ModelToPlan,
    serving: PlannedGroup,
    workload: Workload,
    part: Workload,
    ranks: int,
    ms: Ms,
    dense: Ms,
    *,
    runs: int,
) -> ExactStack:
    """Return the row of one way of serving.

    serving, part: each of the groups that serve, and its part of the workload.
    runs: of ``band_of``, for the speed-up.
    """
    tokens_per_s = [1e3 * workload.batch_size * workload.output_len / whole for whole in ms[END_TO_END]]
    speedups = [a / b for a, b in zip(dense[END_TO_END], ms[END_TO_END], strict=True)]
    need = sum(serving.memory_need(model, part))
    return ExactStack(
        name=name,
        ranks=ranks,
        batch_size=workload.batch_size,
        prefill_ms=ms["prefill"][0],
        decode_ms_per_token=ms["decode"][0],
        end_to_end_tokens_per_s=tokens_per_s[0],
        end_to_end_tokens_per_s_interval=band_of(tokens_per_s),
        speedup_end_to_end=speedups[0],
        speedup_end_to_end_interval=band_of(speedups, runs=runs),
        memory_need_bytes=need,
        fits=serving.fits(need),
    )
