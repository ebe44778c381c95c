"""plan.json for a person: a table for each group and batch size, and what to know when reading them; and what names
``ladderize plan`` knows. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ladderize.checkpoint.config import parameter_count
from ladderize.console import Console, human_bytes, human_count
from ladderize.convert.sensitivity_file import alignment_words
from ladderize.planning.hardware import DeviceSpec, EngineFacts, known_devices, known_engines
from ladderize.planning.passes import FP8
from ladderize.planning.plans.chosen_files import cost_words, shown_increase
from ladderize.planning.plans.document import (
    NO_WEIGHTS,
    ExactStack,
    FrontPoint,
    OtherAllReduce,
    PlanChoice,
    PlannedLayout,
    PlannedRow,
    PlanResult,
    speedup_band,
)
from ladderize.planning.plans.rows import CHOSEN_ROW, GIB
from ladderize.runtime.bench.document import PHASES
from ladderize.runtime.collectives.links import Interconnect, known_interconnects
from ladderize.runtime.shards import known_shapes

# of the end-to-end time of the dense layout: where less of it is waited for, no layout is worth its loss of accuracy
WORTH_CONVERTING = 0.03
SHOWN_POINTS = 8  # of the front, in the table
EXACT_WORDS = {"fused": "dense with fused norms", "replicas": "two dense replicas"}
VLLM = "vLLM's all-reduce"
NOTES = {  # on rows that are no layouts
    "parallel": "no layout: attention beside MLP",
    "no-comm": "no layout: nothing is sent",
    "fused": "dense, norms fused as in vLLM",
    "replicas": "dense, twice on half the ranks",
}
LONG_PROMPT = 4096  # tokens, from which attention that is not fused takes much of a prefill


def show_plan(result: PlanResult, console: Console, *, explain: bool = False) -> None:
    """Print the result of ``ladderize plan``, and warn of what makes it doubtful. explain: with times, and all that the
    figures rest on."""
    console.prose(_heading(result))
    for ranks in result.options.tp_sizes:
        for batch in result.options.batch_sizes:
            rows = result.rows_of(ranks, batch)
            group = f"\n{group_words(result, rows[0])} ({rows[0].basis})"
            console.result(f"{group}: speed-up over dense, 95 % band")
            console.table(_speedup_lines(result, ranks, batch, explain))
            if explain:
                lines = [_time_line(_shown_name(row), row) for row in rows]
                lines += [_time_line(one.name, one) for one in result.exact_of(ranks, batch)]
                console.result(f"{group}: times")
                console.table(lines, right=list(lines[0])[1:])
    console.result("")
    if result.link is not None and any(one.vllm for one in result.others):  # where its figures stand beside vLLM's
        console.prose(f"{result.link.name}: {result.link.source}.")
    for line in (*plan_verdicts(result), *(_explanations(result) if explain else [_what_is_left_out(result)])):
        console.prose(line)
    for warning in _warnings(result):
        console.warn(warning)


def group_words(result: PlanResult, row: PlannedRow) -> str:
    """``8 x h100-sxm over nvlink, batch 16``."""
    over = f" over {result.link.name}" if result.link is not None and row.tp_size > 1 else ""
    return f"{row.tp_size} x {result.device.name}{over}, batch {row.batch_size}"


def _heading(result: PlanResult) -> str:
    options = result.options
    weights = ", FP8 weights" if result.model.weights == FP8 else ""
    return (
        f"{result.model.name}, {result.rows[0].dtype}{weights}; prompt {options.prompt_len}, output"
        f" {options.output_len}; engine {result.engine.name}"
    )


def _all_reduces(result: PlanResult, ranks: int, batch: int) -> list[OtherAllReduce]:
    """What each known all-reduce makes of a group: that of vLLM first, which serves, then the one of --link."""
    link, exact = result.link, result.exact_of(ranks, batch)
    own = OtherAllReduce(
        link="" if link is None else link.name,
        ranks=ranks,
        batch_size=batch,
        vllm=link is not None and ranks in (link.vllm_ranks or ()),
        extrapolated=False,
        speedups={row.model: speedup_band(row) for row in result.rows_of(ranks, batch)},
        exact={one.name: speedup_band(one) for one in exact},
    )
    others = [one for one in result.others if (one.ranks, one.batch_size) == (ranks, batch)]
    return sorted([own, *others], key=lambda one: not one.vllm)


def _speedup_lines(result: PlanResult, ranks: int, batch: int, explain: bool) -> list[dict[str, str]]:
    """Over vLLM's all-reduce and that of --link, as narrow as a terminal of 80 columns; explain: over all, by name."""
    known, (dense, *_) = _all_reduces(result, ranks, batch), result.rows_of(ranks, batch)
    over = "" if result.link is None else result.link.name
    shown = [one for one in known if explain or one is known[0] or one.link == over]
    names = [one.link + " (vLLM)" * one.vllm if explain else VLLM if one.vllm else one.link for one in shown]
    names = ["speed-up"] if names == [over] else names
    notes = {"dense": f"{_digits(dense.end_to_end_tokens_per_s)} tokens/s" + (f" over {over}" if names[1:] else "")}
    rows = [(_shown_name(row), [one.speedups.get(row.model) for one in shown]) for row in result.rows_of(ranks, batch)]
    rows += [(one.name, [other.exact.get(one.name) for other in shown]) for one in result.exact_of(ranks, batch)]
    return [
        {"layout": name, **dict(zip(names, map(_speedup_text, found), strict=True)), "": (notes | NOTES).get(name, "")}
        for name, found in rows
    ]


def _speedup_text(speedup: Sequence[float] | None) -> str:
    if speedup is None:
        return ""
    value, low, high = speedup
    return f"{value:.2f}x" + (f" {low:.2f}-{high:.2f}" if high > low else "")


def _time_line(name: str, row: PlannedRow | ExactStack) -> dict[str, str]:
    """What an exact stack waits for, nobody has measured."""
    waits = [_digits(row.communication[phase].exposed_ms) if isinstance(row, PlannedRow) else "" for phase in PHASES]
    slow, fast = row.end_to_end_tokens_per_s_interval
    return {
        "layout": name,
        "prefill": _digits(row.prefill_ms),
        "prefill wait": waits[0],
        "decode": _digits(row.decode_ms_per_token),
        "decode wait": waits[1],
        "tokens/s": _digits(row.end_to_end_tokens_per_s),
        "\u00b1": f"{(fast - slow) / 2 / row.end_to_end_tokens_per_s:.0%}",
    }


def _shown_name(row: PlannedRow) -> str:
    if row.weights == NO_WEIGHTS:
        return row.model.removesuffix(" baseline")
    return Path(row.model).name if not row.layout.endswith(": dense") else "dense"


def _digits(value: float) -> str:
    """Three: more than a prediction has."""
    if value == 0:
        return "0"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def plan_verdicts(result: PlanResult) -> list[str]:
    """Where communication is not worth hiding, or an exact way is as good: for the report, too."""
    lines = []
    for ranks in result.options.tp_sizes:
        if ranks == 1:
            lines.append("One rank sends nothing: there is nothing to gain from converting there.")
            continue
        for batch in result.options.batch_sizes:
            dense = result.rows_of(ranks, batch)[0]
            lines += [
                f"{group_words(result, dense)}: replicas do not fit: with twice the weights each rank holds"
                f" {human_bytes(one.memory_need_bytes)}."
                for one in result.exact_of(ranks, batch)
                if one.name == "replicas" and one.fits is False
            ]
            share = _layers_share(dense, result.options.output_len - 1)
            if share < WORTH_CONVERTING:
                lines.append(
                    f"{group_words(result, dense)}: dense waits for communication of its layers {share:.1%} of its"
                    " time: converting is not worth it there."
                )
            elif verdict := _against_exact(result, ranks, batch):
                over = f", {VLLM}" if _all_reduces(result, ranks, batch)[0].vllm else ""
                lines.append(f"{group_words(result, dense)}{over}: {verdict}")
    return lines


def _against_exact(result: PlanResult, ranks: int, batch: int) -> str | None:
    """Said unless the chosen layout, or else the fastest, is faster than all that is exact, bands included."""
    dense, *others = (row for row in result.rows_of(ranks, batch) if row.is_model)
    layouts = [row for row in others if row.model == CHOSEN_ROW] or others
    if not layouts:
        return None
    over = _all_reduces(result, ranks, batch)[0]
    best = max(layouts, key=lambda row: over.speedups[row.model][0])
    rivals = {
        EXACT_WORDS[one.name]: over.exact[one.name]
        for one in result.exact_of(ranks, batch)
        if one.name in over.exact and (one.fits is not False or dense.fits is False)
    }
    name, rival = max([("dense", over.speedups[dense.model]), *rivals.items()], key=lambda named: named[1][0])
    value, low, _ = over.speedups[best.model]
    high = rival[2]
    if value <= rival[0]:
        return f"{_shown_name(best)} does not pay: it is no faster than {name}, whose results are unchanged."
    if low <= high:
        return (
            f"{_shown_name(best)} is not shown to pay: {name}, with unchanged results, may be {high:.2f}x as fast as"
            f" dense, {_shown_name(best)} only {low:.2f}x."
        )
    return None


def _layers_share(row: PlannedRow, decode_steps: int) -> float:
    """Of the end-to-end time, what is waited for all-reduces of layers: the vocabulary's, no layout hides."""
    vocabulary = {phase: row.communication[phase].vocabulary_alone_ms for phase in ("prefill", "decode")}
    waited = row.exposed_end_to_end_ms - vocabulary["prefill"] - decode_steps * vocabulary["decode"]
    return waited / row.end_to_end_ms


def _what_is_left_out(result: PlanResult) -> str:
    untimed = "Nothing was timed. " if any(row.basis == "predicted" for row in result.rows) else ""
    return f"{untimed}--explain: times, waits, and what these figures rest on."


def _explanations(result: PlanResult) -> list[str]:
    lines = [f"No row replicas of {ranks} ranks: {reason}." for ranks, reason in result.no_replicas.items()]
    lines.append(f"engine {result.engine.name}: {result.engine.source}.")
    lines.append(
        "prefill, decode: ms, of decode for one step; wait: ms of it that communication adds (exposed). tokens/s: new"
        " tokens of the batch over prefill and decode. speed-up: end to end, over dense. \u00b1 and band: 95 %."
    )
    if any(row.basis == "predicted" for row in result.rows):
        lines.append(
            "predicted: nothing was timed on such a machine. Speed-ups are more certain than times;"
            " `ladderize calibrate` narrows both. Of all models on GPUs, only Llama-70B over nvlink of H100 (not spd)"
            " was compared with measurements."
        )
    if result.links:
        lines.append(_of_exact(result))
    if result.others:
        lines.append("A band holds for one all-reduce, not for the choice among several." + _of_others(result))
    lines += [line for row in result.rows if (line := _host_bound(result, row))]
    return lines


def _of_exact(result: PlanResult) -> str:
    """What the rows are that change no result, and what they rest on."""
    names = {one.name for one in result.exact}
    if "fused" in names:
        text = (
            "fused: dense (no result changed), with vLLM's kernel for an all-reduce and the norm behind it; assumed to"
            " be 5 to 20 % faster (vLLM's documentation), or from 7 % slower on (issue 44079), and at most by what"
            " waiting and norms take."
        )
    else:
        text = f"No row fused: vLLM fuses no norm into such messages on {result.device.name} over such a link."
    if "replicas" in names:
        text += (
            " replicas: two dense ones (no result changed) on half the ranks each, with half of the batch, fused where"
            " vLLM does so."
        )
    return f"{text} The published speeds that known figures are fitted to had neither fused norms nor replicas."


def _of_others(result: PlanResult) -> str:
    """What is to be known of the all-reduces that are shown beside the link."""
    text = ""
    if any(one.vllm for one in result.others) or (result.link is not None and result.link.vllm_ranks):
        text += " (vLLM): nearest to what vLLM takes; its messages below 0.25 MB go by a kernel of its own."
    if outside := dict.fromkeys(one.link for one in result.others if one.extrapolated):
        text += f" Extrapolated to sizes of messages that were not timed: {', '.join(outside)}."
    return text


def _host_bound(result: PlanResult, row: PlannedRow) -> str | None:
    """Said of a dense prefill whose wait is the host's for the most part."""
    start, waited = row.prefill_start_ms, row.communication["prefill"].exposed_ms
    if row is not result.rows_of(row.tp_size, row.batch_size)[0] or start < waited / 2 or not start:
        return None
    return (
        f"{group_words(result, row)}: {_digits(start)} of the {_digits(waited)} ms of prefill wait are what the host"
        " takes to start all-reduces: no link shortens it, and no layout with as many hides it."
    )


def _warnings(result: PlanResult) -> Iterator[str]:
    device, link, engine, prompt = result.device, result.link, result.engine, result.options.prompt_len
    for row in result.rows:
        if row.fits is False and row.model == result.rows[0].model and device.memory_gib is not None:
            yield (
                f"{group_words(result, row)}: it does not fit: weights {human_bytes(row.weight_bytes)}, KV cache"
                f" {human_bytes(row.kv_cache_bytes)} and prefill make {human_bytes(row.memory_need_bytes)} on each,"
                f" which has {human_bytes(device.memory_gib * GIB)}; take more ranks or a smaller batch"
            )
    own = device.nvlink_gb_s
    if link is not None and link.nvlink_gb_s is not None and own not in (None, link.nvlink_gb_s):
        has = f"one of {own:g}" if own else "none"
        yield (
            f"--link {link.name} is NVLink of {link.nvlink_gb_s:g} GB/s in each direction, and {device.name} has"
            f" {has}: give --link ALPHA_US,BETA_GB_S, or a file of its own link"
        )
    for one in result.links:
        if one.derived is not None:
            yield f"{one.link.name} was not timed with {one.ranks} ranks: {one.derived}"
        if one.bytes_outside_range:
            sizes = " to ".join(human_bytes(size) for size in one.bytes_outside_range)
            yield (
                f"extrapolated beyond the sizes that {one.link.name} was timed at with {one.ranks} ranks: messages of"
                f" {sizes}"
            )
    if names := device.uncertain + (link.uncertain if link is not None else []):
        yield (
            f"the calibration's timings hardly show {', '.join(names)} (uncertain by more than its size): times that"
            " depend on it more than those did are guesses"
        )
    if prompt >= LONG_PROMPT and engine.score_passes:
        yield (
            f"the engine {engine.name} writes all attention scores of a prompt to memory, which takes long at"
            f" {prompt} tokens: with a fused attention prefills are shorter, and more of them is communication;"
            " --engine runtime has one"
        )


# ---- a choice ----


def show_choice(result: PlanResult, choice: PlanChoice, console: Console) -> None:
    """Print the layout that was chosen, what it costs, and what it was chosen from."""
    chosen, row = choice.chosen, next(row for row in result.rows if row.model == CHOSEN_ROW)
    phase = {"end_to_end": "end to end", "prefill": "in prefill", "decode": "in decode"}[choice.phase]
    low, high = row.speedup_end_to_end_interval if choice.phase == "end_to_end" else row.speedup_interval(choice.phase)
    console.result("\nThe best layouts to choose from: whatever is faster than one of them costs more")
    console.table(_front_lines(choice), right=["speed-up", "perplexity"])
    if choice.verification is not None:
        made = choice.verification.made
        console.result(f"\nMeasured ({made} measurements of at most {choice.verification.limit})")
        measured = [_measured_line(one) for one in choice.verification.layouts]
        console.table(measured, right=[key for key in measured[0] if key != "layout"])
    console.result("")
    console.prose(f"chosen   {chosen.layout}", indent=9)
    console.prose(f"speed    {chosen.speedup:.3f}x {phase} ({low:.2f}-{high:.2f}), {row.basis}", indent=9)
    console.prose(f"costs    perplexity {cost_words(chosen)}; {choice.statement}", indent=9)
    if choice.model is not None:
        console.prose(f"model    {choice.model}, as the sweep retrained it", indent=9)
    if choice.beyond is not None:
        console.prose(
            f"beyond   {choice.beyond.layout}: {choice.beyond.speedup:.3f}x, perplexity {cost_words(choice.beyond)};"
            " not retrained",
            indent=9,
        )
    if choice.aligned is not None:
        console.prose(f"aligned  {alignment_words(choice.aligned)}", indent=9)
    for note in (*choice.notes, *(choice.verification.notes if choice.verification is not None else ())):
        console.prose(f"note     {note}", indent=9)
    if low <= 1:
        console.warn(
            f"the band of its speed-up, {low:.2f} to {high:.2f}, includes 1: it may not be faster than dense on this"
            " hardware; `ladderize calibrate` narrows the band"
        )
    if choice.costs == "sensitivity" and choice.verification is None:
        console.warn(
            "costs of single sync points do not add up, so what the choice costs is an estimate, most often too low:"
            " --verify N measures it"
        )


def _front_lines(choice: PlanChoice) -> list[dict[str, str]]:
    """At most SHOWN_POINTS of the front, evenly, the ends too; and the chosen layout among them, marked, also where it
    was found beside the front by measuring."""
    one, front, shown = choice.chosen, choice.front, choice.front
    nats = one.nats if one.estimated_nats is None else one.estimated_nats
    chosen = FrontPoint.of(one.as_layout, ms=one.ms, speedup=one.speedup, nats=nats or 0.0)
    if len(front) > SHOWN_POINTS:
        shown = [front[round(k * (len(front) - 1) / (SHOWN_POINTS - 1))] for k in range(SHOWN_POINTS)]
    mark = "chosen" if any(point.changes == chosen.changes for point in front) else "chosen, beside the front"
    lines = [_front_line(point, "") for point in shown if point.changes != chosen.changes]
    place = sum(point.speedup >= one.speedup for point in shown if point.changes != chosen.changes)
    return [*lines[:place], _front_line(chosen, mark), *lines[place:]]


def _front_line(point: FrontPoint, mark: str) -> dict[str, str]:
    return {
        "speed-up": f"{point.speedup:.3f}x",
        "perplexity": shown_increase(point.nats),
        "attention overlapped": point.attention_overlapped,
        "attention dropped": point.attention_dropped,
        "MLP overlapped": point.mlp_overlapped,
        "choice": mark,
    }


def _measured_line(one: PlannedLayout) -> dict[str, str]:
    return {
        "layout": one.layout.partition(": ")[2],
        "speed-up": f"{one.speedup:.3f}x",
        "estimated": "" if one.estimated_nats is None else shown_increase(one.estimated_nats),
        "measured": "" if one.measured is None else shown_increase(one.measured.increase),
        "held out": "" if one.held_out is None else shown_increase(one.held_out.increase),
    }


# ---- what is known ----


def show_known(console: Console) -> None:
    """Tables of what --hardware, --link, --engine and --shape take."""
    known = list(known_devices().values())
    interconnects, engines = list(known_interconnects().values()), list(known_engines().values())
    parameters = {name: parameter_count(config) for name, config in known_shapes().items()}
    console.document(
        {
            "devices": [device.to_dict() for device in known],
            "links": [link.to_dict() for link in interconnects],
            "engines": [engine.to_dict() for engine in engines],
            "shapes": parameters,
        }
    )
    no_rates = {dtype: "" for device in known for dtype in device.matmul_tflop_s}
    devices = [_device(device, no_rates) for device in known]
    console.result("Devices (--hardware): GB/s of memory, TFLOP/s by dtype")
    console.table(devices, right=[key for key in devices[0] if key not in ("name", "engine")])
    console.result("\nLinks (--link): an all-reduce takes latency, and its bytes over GB/s of the bus")
    links = [line for link in interconnects for line in _link(link)]
    console.table(links, right=list(links[0])[1:])
    console.result("\nShapes (--shape)")
    shapes = [{"name": name, "parameters": human_count(count)} for name, count in parameters.items()]
    console.table(shapes, right=["parameters"])
    console.result("\nEngines (--engine), and where the figures are from")
    named: list[EngineFacts | DeviceSpec | Interconnect] = [*engines, *known, *interconnects]
    for one in named:
        console.prose(f"{one.name}: {one.source}", indent=2)
    console.result("")
    console.prose(
        "error: one standard deviation, of the time of compute or of a message. A file of `ladderize calibrate` stands"
        " for a device, a link, or both; so does YAML with device: or link: and the keys of --list --json."
    )


def _device(device: DeviceSpec, no_rates: Mapping[str, str]) -> dict[str, str]:
    return {
        "name": device.name,
        "GB/s": f"{device.memory_bandwidth_gb_s:g}",
        **no_rates,
        **{dtype: f"{rate:g}" for dtype, rate in device.matmul_tflop_s.items()},
        "memory": f"{device.memory_gib:g} GiB" if device.memory_gib is not None else "",
        "error": f"{device.relative_error:.0%}",
        "engine": device.engine,
    }


def _link(link: Interconnect) -> list[dict[str, str]]:
    return [
        {
            "name": link.name,
            "ranks": str(row.ranks),
            "latency": f"{row.alpha_us:.3g} us",
            "GB/s": "" if row.bus_gb_s is None else f"{row.bus_gb_s:.3g}",
            "error": f"{link.relative_error:.0%}",
        }
        for row in link.rows
    ]
