"""The answer of ``ladderize plan``: is a layout worth it on this group, and which one? Imports no torch.

A layout changes the model. So it has to gain more than a few per cent, and more than what changes no result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ladderize.console import human_bytes
from ladderize.files.records import Record
from ladderize.plan.rows import PlannedRow

CHECKPOINT_ROW, CHOSEN_ROW = "checkpoint", "chosen"  # the rows that are no names of --layout
WORTH_WAITING = 0.03  # of the dense time: where less of it is waiting, no layout is worth its loss of accuracy
WORTH_GAINING = 1.05  # a speed-up; below it, too
FUSED = "vLLM's fused all-reduces"
NEARLY = 0.95  # of a speed-up: what counts as no slower


@dataclass(frozen=True)
class PlanVerdict(Record):
    """The answer for one group at one batch size."""

    tp_size: int
    batch_size: int
    worth: Literal["yes", "perhaps", "no"]
    layout: str | None  # the name of the row that it is about, if it is about one
    sentence: str


def judge(rows: Sequence[PlannedRow], least_ranks: int | None = None) -> PlanVerdict:
    """Return the verdict on one group, by its rows, the dense model first.

    It is about the chosen layout or the checkpoint's own, if they are there, else about the fastest layout that was
    measured to need no long training (of those nearly as fast the most accurate), or else about the fastest.

    least_ranks: the fewest ranks whose memory holds the dense model; None where it is not known, or none do.
    """
    dense, *others = rows
    layouts = {row.name: row for row in others if row.kind == "layout" and row.fits is not False}
    short = [row for row in layouts.values() if row.loss is not None and not row.loss.needs_long_training]
    best = layouts.get(CHOSEN_ROW) or layouts.get(CHECKPOINT_ROW)
    best = best or max(short or layouts.values(), key=lambda row: row.speedup, default=None)
    if best is not None and best in short:
        nearly_as_fast = [row for row in short if row.speedup >= NEARLY * best.speedup]
        best = max(nearly_as_fast, key=lambda row: (row.loss.points if row.loss else -math.inf, row.speedup))
    rival = max([dense, *(row for row in others if row.kind == "exact")], key=lambda row: row.speedup)
    worth, sentence = _answer(dense, best, rival, least_ranks)
    return PlanVerdict(dense.tp_size, dense.batch_size, worth, best.name if best and worth != "no" else None, sentence)


def _answer(
    dense: PlannedRow, best: PlannedRow | None, rival: PlannedRow, least_ranks: int | None
) -> tuple[Literal["yes", "perhaps", "no"], str]:
    if dense.fits is False:
        advice = f"the smallest --tp-size that fits is {least_ranks}" if least_ranks else "no --tp-size does"
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
    """Return the name of a layout's row for people: ``ladder=16:32`` is ``ladder 16:32``."""
    return name.replace("=", " ")
