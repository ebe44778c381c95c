"""The output of ``ladderize plan``: tables, verdicts, warnings, the choice and its recipe, and the known names. Imports
no torch."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from ladderize.checkpoint.config import parameter_count
from ladderize.console import Console, human_bytes, human_count
from ladderize.convert.recipe import Recipe
from ladderize.convert.sensitivity_file import alignment_words
from ladderize.files.regular import resolved
from ladderize.files.temporaries import replacement
from ladderize.plan.document import NO_WEIGHTS, ExactStack, PlanChoice, PlannedLayout, PlannedRow, PlanResult
from ladderize.plan.hardware import DeviceSpec, EngineFacts, known_devices, known_engines
from ladderize.plan.passes import FP8
from ladderize.plan.rows import CHOSEN_ROW, GIB
from ladderize.runtime.bench.document import PHASES
from ladderize.runtime.collectives.links import Interconnect, known_interconnects
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
        f"{result.model.name}, {result.rows[0].dtype}{weights}; prompt {options.prompt_len}, output"
        f" {options.output_len}; engine {result.engine.name}"
    )
    for ranks in options.tp_sizes:
        for batch in options.batch_sizes:
            rows: list[PlannedRow | ExactStack] = [*result.rows_of(ranks, batch), *result.exact_of(ranks, batch)]
            group = f"\n{group_words(result, ranks, batch)} ({result.rows_of(ranks, batch)[0].basis})"
            console.result(f"{group}: speed-up over dense, 95 % band")
            console.table(_speedup_lines(result, rows))
            if explain:
                lines = [_time_line(row) for row in rows]
                console.result(f"{group}: times")
                console.table(lines, right=list(lines[0])[1:])
    console.result("")
    for line in (*plan_verdicts(result), *(_explanations(result) if explain else [_hint(result)])):
        console.prose(line)
    for warning in _warnings(result):
        console.warn(warning)


def group_words(result: PlanResult, ranks: int, batch: int) -> str:
    """Return ``8 x h100-sxm over nvlink, batch 16``."""
    over = f" over {result.link.name}" if result.link is not None and ranks > 1 else ""
    return f"{ranks} x {result.device.name}{over}, batch {batch}"


def _speedup_lines(result: PlanResult, rows: Sequence[PlannedRow | ExactStack]) -> list[dict[str, str]]:
    """Return the lines of speed-ups, narrow enough for a terminal of 80 columns."""
    notes = NOTES | {"dense": f"{_digits(rows[0].end_to_end_tokens_per_s)} tokens/s"}
    lines = []
    for row in rows:
        name, (low, high) = _shown_name(row), row.speedup_end_to_end_interval
        band = f"{low:.2f}-{high:.2f}" if high > low else ""
        line = {"layout": name, "speed-up": f"{row.speedup_end_to_end:.2f}x", "band": band}
        if rows[0].speedup_over_vllm is not None:
            line["over vLLM's"] = "" if row.speedup_over_vllm is None else f"{row.speedup_over_vllm[0]:.2f}x"
        note = f"dense, {name} of fewer ranks" if name.endswith(" replicas") else notes.get(name, "")
        lines.append({**line, "": note})
    return lines


def _time_line(row: PlannedRow | ExactStack) -> dict[str, str]:
    """Return the line of a row's times. The waits of an exact stack are unknown."""
    waits = [_digits(row.communication[phase].exposed_ms) if isinstance(row, PlannedRow) else "" for phase in PHASES]
    slow, fast = row.end_to_end_tokens_per_s_interval
    return {
        "layout": _shown_name(row),
        "prefill": _digits(row.prefill_ms),
        "prefill wait": waits[0],
        "decode": _digits(row.decode_ms_per_token),
        "decode wait": waits[1],
        "tokens/s": _digits(row.end_to_end_tokens_per_s),
        "\u00b1": f"{(fast - slow) / 2 / row.end_to_end_tokens_per_s:.0%}",
    }


def _shown_name(row: PlannedRow | ExactStack) -> str:
    if isinstance(row, ExactStack):
        return row.name
    if row.weights == NO_WEIGHTS:
        return row.model.removesuffix(" baseline")
    return Path(row.model).name if not row.layout.endswith(": dense") else "dense"


def _digits(value: float) -> str:
    """Return a number with three digits, more than a prediction has."""
    if value == 0:
        return "0"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


# ---- verdicts ----


def plan_verdicts(result: PlanResult) -> list[str]:
    """Return a sentence for each group where converting is not worth it, or an exact way is as good. The report has
    them, too."""
    lines = []
    for ranks in result.options.tp_sizes:
        if ranks == 1:
            lines.append("One rank sends nothing: there is nothing to gain from converting there.")
            continue
        for batch in result.options.batch_sizes:
            dense, words = result.rows_of(ranks, batch)[0], group_words(result, ranks, batch)
            share = _layers_share(dense, result.options.output_len - 1)
            if share < WORTH_CONVERTING:
                lines.append(
                    f"{words}: dense waits for communication of its layers {share:.1%} of its time: converting is not"
                    " worth it there."
                )
            elif verdict := _against_exact(result, ranks, batch):
                over = ", vLLM's all-reduce" if dense.speedup_over_vllm is not None else ""
                lines.append(f"{words}{over}: {verdict}")
    return lines


def _against_exact(result: PlanResult, ranks: int, batch: int) -> str | None:
    """Return a verdict unless the chosen layout, or else the fastest, is faster than all exact ways, bands included."""
    dense, *others = (row for row in result.rows_of(ranks, batch) if row.is_model)
    layouts = [row for row in others if row.model == CHOSEN_ROW] or others
    if not layouts:
        return None
    best = max(layouts, key=lambda row: row.speedup_band[0])
    rivals = {"dense": dense.speedup_band}
    for one in result.exact_of(ranks, batch):
        if dense.speedup_over_vllm is None or one.speedup_over_vllm is not None:
            rivals["dense with fused norms" if one.name == "fused" else f"dense in {one.name}"] = one.speedup_band
    name, rival = max(rivals.items(), key=lambda named: named[1][0])
    value, low, _ = best.speedup_band
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
    """Return the share of the end-to-end time that is waiting for all-reduces of layers. No layout hides the
    vocabulary's."""
    vocabulary = {phase: row.communication[phase].vocabulary_alone_ms for phase in PHASES}
    waited = row.exposed_end_to_end_ms - vocabulary["prefill"] - decode_steps * vocabulary["decode"]
    return waited / row.end_to_end_ms


def _hint(result: PlanResult) -> str:
    untimed = "Nothing was timed. " if any(row.basis == "predicted" for row in result.rows) else ""
    return f"{untimed}--explain: times, waits, and what these figures rest on."


def _explanations(result: PlanResult) -> list[str]:
    lines = [
        f"engine {result.engine.name}: {result.engine.source}.",
        "prefill, decode: ms, of decode for one step; wait: ms of it that communication adds (exposed). tokens/s: new"
        " tokens of the batch over prefill and decode. speed-up: end to end, over dense. \u00b1 and band: 95 %.",
    ]
    if any(row.basis == "predicted" for row in result.rows):
        lines.append(
            "predicted: nothing was timed on such a machine. Speed-ups are more certain than times;"
            " `ladderize calibrate` narrows both. Of all models on GPUs, only Llama-70B over nvlink of H100 (not spd)"
            " was compared with measurements."
        )
    if result.link is not None:
        lines.append(f"{result.link.name}: {result.link.source}.")
    lines += [
        f"over vLLM's: with {name}, the known all-reduce nearest to what vLLM takes with {ranks} ranks; its messages"
        " below 0.25 MB go by a kernel of its own. A band holds for one all-reduce, not for the choice among several."
        for ranks, name in result.vllm_links.items()
    ]
    if any(one.name == "fused" for one in result.exact):
        lines.append(
            "fused: dense (no result changed), with vLLM's kernel for an all-reduce and the norm behind it; assumed to"
            " be 5 to 20 % faster (vLLM's documentation), or from 7 % slower on (issue 44079), and at most by what"
            " waiting and norms take."
        )
    elif result.links:
        lines.append(f"No row fused: vLLM fuses no norm into such messages on {result.device.name} over such a link.")
    if any(one.name != "fused" for one in result.exact):
        lines.append(
            "replicas: dense (no result changed) in groups of fewer ranks, each with its part of the batch, fused where"
            " vLLM does so."
        )
    lines += [f"No further replicas of {ranks} ranks: {reason}." for ranks, reason in result.no_replicas.items()]
    return [*lines, *(line for row in result.rows if (line := _host_bound(result, row)))]


def _host_bound(result: PlanResult, row: PlannedRow) -> str | None:
    """Return a sentence for a dense prefill whose wait is mostly the host's; None for others."""
    start, waited = row.prefill_start_ms, row.communication["prefill"].exposed_ms
    if row is not result.rows_of(row.tp_size, row.batch_size)[0] or start < waited / 2 or not start:
        return None
    return (
        f"{group_words(result, row.tp_size, row.batch_size)}: {_digits(start)} of the {_digits(waited)} ms of prefill"
        " wait are what the host takes to start all-reduces: no link shortens it, and no layout with as many hides it."
    )


def _warnings(result: PlanResult) -> Iterator[str]:
    device, link, engine, prompt = result.device, result.link, result.engine, result.options.prompt_len
    for row in result.rows:
        if row.fits is False and row.model == result.rows[0].model and device.memory_gib is not None:
            yield (
                f"{group_words(result, row.tp_size, row.batch_size)}: it does not fit: weights"
                f" {human_bytes(row.weight_bytes)}, KV cache {human_bytes(row.kv_cache_bytes)} and prefill make"
                f" {human_bytes(row.memory_need_bytes)} on each, which has {human_bytes(device.memory_gib * GIB)}; take"
                " more ranks or a smaller batch"
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
    if prompt >= LONG_PROMPT and engine.score_passes:
        yield (
            f"the engine {engine.name} writes all attention scores of a prompt to memory, which takes long at"
            f" {prompt} tokens: with a fused attention prefills are shorter, and more of them is communication;"
            " --engine runtime has one"
        )


# ---- a choice ----


def show_choice(result: PlanResult, choice: PlanChoice, console: Console) -> None:
    """Print the chosen layout, its costs, and the measurements."""
    chosen, row = choice.chosen, next(row for row in result.rows if row.model == CHOSEN_ROW)
    phase = {"end_to_end": "end to end", "prefill": "in prefill", "decode": "in decode"}[choice.phase]
    low, high = getattr(row, f"speedup_{choice.phase}_interval")
    if choice.verification is not None:
        console.result(f"\nMeasured ({choice.verification.made} measurements of at most {choice.verification.limit})")
        lines = [
            {
                "layout": one.layout.partition(": ")[2],
                "speed-up": f"{one.speedup:.3f}x",
                "estimated": shown_increase(one.estimated_nats),
                "measured": "" if one.measured is None else shown_increase(one.measured.increase),
                "held out": "" if one.held_out is None else shown_increase(one.held_out.increase),
            }
            for one in choice.verification.layouts
        ]
        console.table(lines, right=[*lines[0]][1:])
    console.result("")
    console.prose(f"chosen   {chosen.layout}", indent=9)
    console.prose(f"speed    {chosen.speedup:.3f}x {phase} ({low:.2f}-{high:.2f}), {row.basis}", indent=9)
    console.prose(f"costs    perplexity {cost_words(chosen)}; {choice.statement}", indent=9)
    if choice.aligned is not None:
        console.prose(f"aligned  {alignment_words(choice.aligned)}", indent=9)
    for note in (*choice.notes, *(choice.verification.notes if choice.verification is not None else ())):
        console.prose(f"note     {note}", indent=9)
    if low <= 1:
        console.warn(
            f"the band of its speed-up, {low:.2f} to {high:.2f}, includes 1: it may not be faster than dense on this"
            " hardware; `ladderize calibrate` narrows the band"
        )
    if choice.verification is None:
        console.warn(
            "costs of layers do not add up, so what the choice costs is an estimate, most often too low: --verify N"
            " measures it"
        )


def shown_increase(nats: float) -> str:
    """Return an increase of the perplexity in per cent, with its sign."""
    return f"{100 * math.expm1(min(nats, 30.0)):+.2f}%"


def cost_words(one: PlannedLayout) -> str:
    """Return ``+1.20% estimated, +1.43% measured, +1.51% (standard error 0.30) on 16 held-out windows``."""
    words = [f"{shown_increase(one.estimated_nats)} estimated"]
    if one.measured is not None:
        words.append(f"{shown_increase(one.measured.increase)} measured")
    if (confirmed := one.held_out) is not None:
        error = confirmed.increase_stderr
        percent = math.exp(min(confirmed.increase, 30.0)) * 100
        sure = "" if error is None else f" (standard error {percent * error:.2f})"
        words.append(f"{shown_increase(confirmed.increase)}{sure} on {confirmed.windows} held-out windows")
    return ", ".join(words)


def write_plan_recipe(path: Path, choice: PlanChoice) -> None:
    """Write ``--recipe-out``, whole or not at all: YAML that ``convert`` takes, with its origin in comments."""
    chosen = choice.chosen
    recipe = Recipe.from_layout(chosen.as_layout).to_dict()
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in recipe.items()}
    part = {"end_to_end": "Prefill and decode", "prefill": "Prefill", "decode": "Decode"}[choice.phase]
    sentences = [
        f"Chosen by `ladderize plan` for {choice.target}, by the costs of {choice.costs_file}.",
        f"{chosen.layout}. {part}: {chosen.speedup:.3f}x of the dense layout's speed, predicted.",
        f"Perplexity: {cost_words(chosen)} ({choice.statement}).",
    ]
    if choice.aligned is not None:
        sentences.append(
            f"Of that, {alignment_words(choice.aligned)}: align what is made of this, with `ladderize adapt --method"
            " align`."
        )
    comments = [
        f"# {line}"
        for sentence in sentences
        for line in textwrap.wrap("".join(c if c.isprintable() else "?" for c in sentence), 98)
    ]
    text = "\n".join([*comments, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)])
    with replacement(resolved(path, "--recipe-out ")) as file:
        file.write(text)


# ---- the known names ----


def show_known(console: Console) -> None:
    """Print tables of the known values of --hardware, --link, --engine and --shape."""
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
