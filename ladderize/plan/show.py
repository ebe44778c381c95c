"""The output of ``ladderize plan``: a table, verdicts, doubts, and the choice. Imports no torch."""

from collections.abc import Sequence

from ladderize.console import Console
from ladderize.convert.sensitivity_file import alignment_words
from ladderize.plan.rows import CHOSEN_ROW, PlanChoice, PlannedRow, PlanVerdict, shown_increase, shown_name
from ladderize.plan.run import PlanResult

LONG_TRAINING = "*"  # the mark of a layout that needs one
LOSS_PAGE = "docs/results.md"


def show_plan(result: PlanResult, console: Console) -> None:
    options = result.options
    weights = ", FP8 weights" if result.is_fp8 else ""
    console.prose(
        f"{options.name}, {result.dtype}{weights}; prompt {options.prompt_len}, output {options.output_len};"
        f" speeds of {result.speeds}"
    )
    groups = [*zip(result.groups(), result.verdicts, strict=True)]
    for rows, verdict in groups:
        _show_group(rows, verdict, result.device.name, console)
    fitting = [(rows, verdict) for rows, verdict in groups if rows[0].fits is not False]
    if any(row.loss is not None for rows, _ in fitting for row in rows):
        console.prose(
            "\naccuracy: points that SmolLM2-135M lost on four tasks, aligned, with about this share of its layers"
            f" converted ({LOSS_PAGE}); {LONG_TRAINING} needs a long training"
        )
    for doubt in result.doubts:
        console.prose(doubt)
    if result.choice is not None:
        _show_choice(result.choice, next(row for row in result.rows if row.name == CHOSEN_ROW), console)
    console.result("")
    for rows, verdict in fitting:
        console.prose(f"{_group(rows[0], result.device.name)}: {verdict.sentence}")


def _group(dense: PlannedRow, device: str) -> str:
    return f"{dense.tp_size} x {device}, batch {dense.batch_size}"


def _show_group(rows: Sequence[PlannedRow], verdict: PlanVerdict, device: str, console: Console) -> None:
    dense = rows[0]
    group = _group(dense, device)
    if dense.fits is False:
        console.prose(f"\n{group}: {verdict.sentence}")
        return
    console.result(f"\n{group} ({dense.basis}): speed-up over dense, 95 % band")
    if dense.tp_size > 1:
        console.prose("all-reduces: " + ", ".join(f"{phase} {name}" for phase, name in dense.all_reduces.items()))
    lines = [_line(row) for row in rows]
    console.table(lines, right=list(lines[0])[1:])


def _line(row: PlannedRow) -> dict[str, str]:
    """Return the line of a row, narrow enough for a terminal of 90 columns."""
    is_certain = row.speedup_low == row.speedup_high
    mark = LONG_TRAINING if row.loss is not None and row.loss.needs_long_training else ""
    return {
        "layout": f"{shown_name(row.name)} (bound)" if row.kind == "bound" else shown_name(row.name),
        "speed-up": f"{row.speedup:.2f}x",
        "band": "" if is_certain else f"{row.speedup_low:.2f}-{row.speedup_high:.2f}",
        "accuracy": "" if row.loss is None else f"{mark}{row.loss.points:+.1f}",
        "prefill ms": _digits(row.prefill_ms),
        "decode ms": _digits(row.decode_ms_per_token),
        "waits": "" if row.kind == "exact" else f"{row.waiting_share:.0%}",  # of fused norms unknown
        "tokens/s": _digits(row.tokens_per_s),
    }


def _digits(value: float) -> str:
    """Return a number with three digits, more than a prediction has."""
    return f"{value:.{sum(0 < value < bound for bound in (1, 10, 100))}f}"


def _show_choice(choice: PlanChoice, row: PlannedRow, console: Console) -> None:
    chosen = choice.chosen
    if choice.measured:
        console.result("\nMeasured")
        lines = [
            {
                "layout": tried.layout.partition(": ")[2],
                "speed-up": f"{tried.speedup:.3f}x",
                "estimated": shown_increase(tried.estimated_nats),
                "measured": "" if tried.measured is None else shown_increase(tried.measured.nats),
                "held out": "" if tried.held_out is None else shown_increase(tried.held_out.nats),
            }
            for tried in choice.measured
        ]
        console.table(lines, right=[*lines[0]][1:])
    console.result("")
    speed = f"{chosen.speedup:.3f}x ({row.speedup_low:.2f}-{row.speedup_high:.2f}), {row.basis}"
    for line in (f"chosen   {chosen.layout}", f"speed    {speed}", f"costs    perplexity {chosen.cost_sentence}"):
        console.prose(line, indent=9)
    if choice.aligned is not None:
        console.prose(f"aligned  {alignment_words(choice.aligned)}", indent=9)
    if row.speedup_low <= 1:
        console.warn("the band of its speed-up includes 1: it may not be faster than dense on this hardware")
    if chosen.held_out is None:
        more = "a larger --verify" if choice.measured else "--verify N"
        console.warn(f"costs of layers do not add up, so it may cost more than the budget; {more} measures it")
