"""The output of ``ladderize plan``: a table, verdicts, doubts, and the choice. Imports no torch."""

from collections.abc import Sequence

from ladderize.console import Console
from ladderize.convert.sensitivity_file import alignment_words
from ladderize.plan.choice import PlanChoice, shown_increase
from ladderize.plan.rows import PlannedRow
from ladderize.plan.run import CHOSEN_ROW, PlanResult

# of the end-to-end time of the dense layout: where less of it is waiting, no layout is worth its loss of accuracy
WORTH_CONVERTING = 0.03


def show_plan(result: PlanResult, console: Console) -> None:
    """Print the result of ``ladderize plan``, and its doubts as warnings."""
    options = result.options
    weights = ", FP8 weights" if result.is_fp8 else ""
    console.prose(
        f"{result.model.name}, {result.dtype}{weights}; prompt {options.prompt_len}, output {options.output_len};"
        f" engine {result.engine}"
    )
    verdicts = []
    for rows in result.groups():
        ranks, batch = rows[0].tp_size, rows[0].batch_size
        over = f" over {result.link.name}" if result.link is not None and ranks > 1 else ""
        group = f"{ranks} x {result.device.name}{over}, batch {batch}"
        console.result(f"\n{group} ({rows[0].basis}): speed-up over dense, 95 % band")
        lines = [_line(row) for row in rows]
        console.table(lines, right=list(lines[0])[1:])
        if (verdict := _verdict(rows)) is not None:
            verdicts.append(f"{group}: {verdict}")
    console.result("")
    for line in verdicts:
        console.prose(line)
    for doubt in result.doubts:
        console.warn(doubt)
    if result.choice is not None:
        _show_choice(result.choice, next(row for row in result.rows if row.name == CHOSEN_ROW), console)


def _line(row: PlannedRow) -> dict[str, str]:
    """Return the line of a row, narrow enough for a terminal of 80 columns."""
    is_certain = row.speedup_low == row.speedup_high
    return {
        "layout": f"{row.name} (bound)" if row.kind == "bound" else row.name,
        "speed-up": f"{row.speedup:.2f}x",
        "band": "" if is_certain else f"{row.speedup_low:.2f}-{row.speedup_high:.2f}",
        "prefill ms": _digits(row.prefill_ms),
        "decode ms": _digits(row.decode_ms_per_token),
        "waits": "" if row.kind == "exact" else f"{row.waiting_share:.0%}",  # of fused norms unknown
        "tokens/s": _digits(row.tokens_per_s),
    }


def _digits(value: float) -> str:
    """Return a number with three digits, more than a prediction has."""
    digits = 0 if value >= 100 or value == 0 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:.{digits}f}"


def _verdict(rows: Sequence[PlannedRow]) -> str | None:
    """Return a sentence where converting is not worth it; None where the chosen layout, or else the fastest, is faster
    than all that changes no result, bands included."""
    dense, *others = rows
    if dense.tp_size == 1:
        return "one rank sends nothing: there is nothing to gain from converting."
    if dense.waiting_share < WORTH_CONVERTING:
        return (
            f"dense waits for communication of its layers {dense.waiting_share:.1%} of its time: converting is not"
            " worth it there."
        )
    layouts = [row for row in others if row.kind == "layout"]
    layouts = [row for row in layouts if row.name == CHOSEN_ROW] or layouts
    if not layouts:
        return None
    best = max(layouts, key=lambda row: row.speedup)
    rival = max([dense, *(row for row in others if row.kind == "exact")], key=lambda row: row.speedup)
    if best.speedup <= rival.speedup:
        same = "" if rival is dense else ", whose results are those of dense"
        return f"{best.name} does not pay: it is no faster than {rival.name}{same}."
    if best.speedup_low <= rival.speedup_high:
        return (
            f"{best.name} is not shown to pay: {rival.name} may be {rival.speedup_high:.2f}x as fast as dense,"
            f" {best.name} only {best.speedup_low:.2f}x."
        )
    return None


def _show_choice(choice: PlanChoice, row: PlannedRow, console: Console) -> None:
    """Print the chosen layout, its costs, and the measurements.

    row: of the chosen layout.
    """
    chosen = choice.chosen
    if choice.measured:
        console.result("\nMeasured")
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
        "speed": f"{chosen.speedup:.3f}x ({row.speedup_low:.2f}-{row.speedup_high:.2f}), {row.basis}",
        "costs": f"perplexity {chosen.cost_words}",
    }
    if choice.aligned is not None:
        words["aligned"] = alignment_words(choice.aligned)
    console.result("")
    for name, text in words.items():
        console.prose(f"{name:8} {text}", indent=9)
    if row.speedup_low <= 1:
        console.warn("the band of its speed-up includes 1: it may not be faster than dense on this hardware")
    if not choice.is_verified:
        more = "a larger --verify" if choice.measured else "--verify N"
        console.warn(f"costs of layers do not add up, so it may cost more than the budget; {more} measures it")
