"""The output of ``ladderize plan``: tables, verdicts, warnings, the choice, and the known names. Imports no torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from ladderize.checkpoint.config import parameter_count
from ladderize.console import Console, human_bytes, human_count
from ladderize.convert.sensitivity_file import alignment_words
from ladderize.plan.choice import PlanChoice, shown_increase
from ladderize.plan.hardware import DeviceSpec, EngineFacts, known_devices, known_engines
from ladderize.plan.passes import FP8
from ladderize.plan.rows import CHOSEN_ROW, GIB, PlannedRow
from ladderize.plan.run import PlanResult
from ladderize.runtime.collectives.links import Interconnect, known_interconnects, other_all_reduces
from ladderize.runtime.shards import known_shapes

# of the end-to-end time of the dense layout: where less of it is waiting, no layout is worth its loss of accuracy
WORTH_CONVERTING = 0.03
LONG_PROMPT = 4096  # tokens, from which attention that is not fused takes much of a prefill
NOTES = {  # on rows that are no layouts
    "parallel": "no layout: attention beside MLP",
    "no-comm": "no layout: nothing is sent",
    "fused": "dense, norms fused as in vLLM",
}


def show_plan(result: PlanResult, console: Console, *, explain: bool = False) -> None:
    """Print the result of ``ladderize plan``, and its doubts as warnings.

    explain: print times and sources of the figures, too.
    """
    options = result.options
    weights = ", FP8 weights" if result.model.weights == FP8 else ""
    console.prose(
        f"{result.model.name}, {result.dtype}{weights}; prompt {options.prompt_len}, output"
        f" {options.output_len}; engine {result.engine.name}"
    )
    for ranks in options.tp_sizes:
        for batch in options.batch_sizes:
            rows = result.rows_of(ranks, batch)
            group = f"\n{group_words(result, ranks, batch)} ({rows[0].basis})"
            console.result(f"{group}: speed-up over dense, 95 % band")
            console.table(_speedup_lines(rows))
            if explain:
                lines = [_time_line(row) for row in rows]
                console.result(f"{group}: times")
                console.table(lines, right=list(lines[0])[1:])
    console.result("")
    for line in (*plan_verdicts(result), *_explanations(result, explain)):
        console.prose(line)
    for warning in _warnings(result):
        console.warn(warning)
    if result.choice is not None:
        _show_choice(result, result.choice, console)


def group_words(result: PlanResult, ranks: int, batch: int) -> str:
    """Return ``8 x h100-sxm over nvlink, batch 16``."""
    over = f" over {result.link.name}" if result.link is not None and ranks > 1 else ""
    return f"{ranks} x {result.device.name}{over}, batch {batch}"


def _speedup_lines(rows: Sequence[PlannedRow]) -> list[dict[str, str]]:
    """Return the lines of speed-ups, narrow enough for a terminal of 80 columns."""
    notes = NOTES | {"dense": f"{_digits(rows[0].tokens_per_s)} tokens/s"}
    return [
        {
            "layout": Path(row.name).name,
            "speed-up": f"{row.gain.value:.2f}x",
            "band": f"{row.gain.low:.2f}-{row.gain.high:.2f}" if row.gain.high > row.gain.low else "",
            "": f"dense, {row.name} of fewer ranks" if row.name.endswith(" replicas") else notes.get(row.name, ""),
        }
        for row in rows
    ]


def _time_line(row: PlannedRow) -> dict[str, str]:
    """Return the line of a row's times. The waits of fused all-reduces are unknown."""
    waits = {phase: _digits(ms) for phase, ms in row.wait_ms.items()}
    return {
        "layout": Path(row.name).name,
        "prefill": _digits(row.prefill_ms),
        "prefill wait": waits.get("prefill", ""),
        "decode": _digits(row.decode_ms_per_token),
        "decode wait": waits.get("decode", ""),
        "tokens/s": _digits(row.tokens_per_s),
    }


def _digits(value: float) -> str:
    """Return a number with three digits, more than a prediction has."""
    digits = 0 if value >= 100 or value == 0 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


# ---- verdicts ----


def plan_verdicts(result: PlanResult) -> list[str]:
    """Return a sentence for each group where converting is not worth it, or an exact way is as good."""
    lines = []
    for ranks in result.options.tp_sizes:
        if ranks == 1:
            lines.append("One rank sends nothing: there is nothing to gain from converting there.")
            continue
        for batch in result.options.batch_sizes:
            rows = result.rows_of(ranks, batch)
            verdict = _against_exact(rows)
            if rows[0].waiting_share < WORTH_CONVERTING:
                verdict = (
                    f"dense waits for communication of its layers {rows[0].waiting_share:.1%} of its time: converting"
                    " is not worth it there."
                )
            if verdict is not None:
                lines.append(f"{group_words(result, ranks, batch)}: {verdict}")
    return lines


def _against_exact(rows: Sequence[PlannedRow]) -> str | None:
    """Return a verdict unless the chosen layout, or else the fastest, is faster than all exact ways, bands included."""
    dense, *layouts = (row for row in rows if row.kind == "layout")
    layouts = [row for row in layouts if row.name == CHOSEN_ROW] or layouts
    if not layouts:
        return None
    best, rival = (
        max(some, key=lambda row: row.gain.value)
        for some in (layouts, [dense, *(row for row in rows if row.kind == "exact")])
    )
    name = Path(best.name).name
    way = "" if rival is dense else " with fused norms" if rival.name == "fused" else f" in {rival.name}"
    if best.gain.value <= rival.gain.value:
        return f"{name} does not pay: it is no faster than dense{way}, whose results are unchanged."
    if best.gain.low <= rival.gain.high:
        return (
            f"{name} is not shown to pay: dense{way} may be {rival.gain.high:.2f}x as fast as"
            f" dense, {name} only {best.gain.low:.2f}x."
        )
    return None


def _explanations(result: PlanResult, explain: bool) -> list[str]:
    if not explain:
        untimed = "Nothing was timed. " if any(row.basis == "predicted" for row in result.rows) else ""
        return [f"{untimed}--explain: times, waits, and what these figures rest on."]
    lines = [
        "prefill, decode: ms, of decode for one step; wait: ms of it that communication adds. tokens/s: new tokens of"
        " the batch over prefill and decode.",
        f"device {result.device.name}: {result.device.source}.",
        f"engine {result.engine.name}: {result.engine.source}.",
    ]
    if result.link is not None:
        lines.append(f"link {result.link.name}: {result.link.source}.")
    if any(row.name == "fused" for row in result.rows):
        lines.append(
            "fused: vLLM's kernel for an all-reduce and the norm behind it, assumed to be 5 to 20 % faster (vLLM's"
            " documentation), or from 7 % slower on (issue 44079), and at most by what waiting and norms take."
        )
    return lines


def _warnings(result: PlanResult) -> Iterator[str]:
    device, link, engine, options = result.device, result.link, result.engine, result.options
    firsts = [result.rows_of(ranks, batch)[0] for ranks in options.tp_sizes for batch in options.batch_sizes]
    for row in firsts:
        if row.fits is False and device.memory_gib is not None:
            yield (
                f"{group_words(result, row.tp_size, row.batch_size)}: it does not fit: weights"
                f" {human_bytes(row.weight_bytes)}, KV cache {human_bytes(row.kv_cache_bytes)} and prefill make"
                f" {human_bytes(row.memory_need_bytes)} on each, which has {human_bytes(device.memory_gib * GIB)}; take"
                " more ranks or a smaller batch"
            )
    if link is not None and link.nvlink_gb_s is not None and device.nvlink_gb_s not in (None, link.nvlink_gb_s):
        has = f"one of {device.nvlink_gb_s:g}" if device.nvlink_gb_s else "none"
        yield (
            f"--link {link.name} is NVLink of {link.nvlink_gb_s:g} GB/s in each direction, and {device.name} has"
            f" {has}: give --link ALPHA_US,BETA_GB_S, or a file of its own link"
        )
    for ranks in options.tp_sizes if link is not None else ():
        assert link is not None
        one = link.at(ranks)
        if one.derived:
            yield f"{one.name} was not timed with {ranks} ranks: {one.derived}"
        others = other_all_reduces(link, ranks) if ranks not in (link.vllm_ranks or ()) else []
        if there := [other.name for other in others if ranks in (other.vllm_ranks or ())]:
            yield f"vLLM takes another all-reduce at {ranks} ranks: --link {there[0]}"
        sizes = {size for row in firsts if row.tp_size == ranks for size in row.message_bytes.values()}
        if outside := sorted(size for size in sizes if not one.in_range(size)):
            yield (
                f"extrapolated beyond the sizes that {one.name} was timed at with {ranks} ranks: messages of"
                f" {' to '.join(human_bytes(size) for size in outside[:1] + outside[1:][-1:])}"
            )
    if options.prompt_len >= LONG_PROMPT and engine.score_passes:
        yield (
            f"the engine {engine.name} writes all attention scores of a prompt to memory, which takes long at"
            f" {options.prompt_len} tokens; --engine runtime has a fused attention"
        )


# ---- a choice ----


def _show_choice(result: PlanResult, choice: PlanChoice, console: Console) -> None:
    """Print the chosen layout, its costs, and the measurements."""
    chosen, row = choice.chosen, next(row for row in result.rows if row.name == CHOSEN_ROW)
    low, high = row.speedup[choice.phase].low, row.speedup[choice.phase].high
    if choice.measured:
        console.result(f"\nMeasured ({choice.measurements} measurements)")
        lines = [
            {
                "layout": one.layout.partition(": ")[2],
                "speed-up": f"{one.speedup:.3f}x",
                "estimated": shown_increase(one.estimated_nats),
                "measured": "" if one.measured is None else shown_increase(one.measured.nats),
                "held out": "" if one.held_out is None else shown_increase(one.held_out.nats),
            }
            for one in choice.measured
        ]
        console.table(lines, right=[*lines[0]][1:])
    words = {
        "chosen": chosen.layout,
        "speed": f"{chosen.speedup:.3f}x {choice.phase.replace('_', ' ')} ({low:.2f}-{high:.2f}), {row.basis}",
        "costs": f"perplexity {chosen.cost_words}; {choice.statement}",
    }
    if choice.aligned is not None:
        words["aligned"] = alignment_words(choice.aligned)
    console.result("")
    for name, text in (*words.items(), *(("note", note) for note in choice.notes)):
        console.prose(f"{name:8} {text}", indent=9)
    if low <= 1:
        console.warn(
            f"the band of its speed-up, {low:.2f} to {high:.2f}, includes 1: it may not be faster than dense on this"
            " hardware; `ladderize calibrate` narrows the band"
        )
    if not choice.measured:
        console.warn(
            "costs of layers do not add up, so what the choice costs is an estimate, most often too low: --verify N"
            " measures it"
        )


# ---- the known names ----


def show_known(console: Console) -> None:
    """Print the known values of --hardware, --link, --engine and --shape. --json has all their figures."""
    shapes = {name: parameter_count(config) for name, config in known_shapes().items()}
    devices, links, engines = known_devices().values(), known_interconnects().values(), known_engines().values()
    known: dict[str, list[DeviceSpec | Interconnect | EngineFacts]]
    known = {"hardware": [*devices], "link": [*links], "engine": [*engines]}
    console.document({**{name: [one.to_dict() for one in some] for name, some in known.items()}, "shape": shapes})
    for name, some in known.items():
        console.result(f"--{name}")
        for one in some:
            console.prose(f"  {one.name}: {one.source}", indent=4)
    console.prose("--shape")
    console.prose(f"  {', '.join(f'{name} ({human_count(count)})' for name, count in shapes.items())}", indent=4)
