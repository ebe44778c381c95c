"""What a sweep shows: a live table while it runs, and at its end what each point costs and how much faster it is."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.console import Console, human_seconds, printable
from ladderize.errors import UserError
from ladderize.eval.results import EvalResults, ModelResult
from ladderize.files.documents import read_document
from ladderize.runtime.bench.document import LEAST_ROUNDS, BenchDocument
from ladderize.tradeoff.sweep.points import SweepPlan
from ladderize.tradeoff.sweep.stages import TIMED, Stage
from ladderize.workflows.sweep_document import StageState, SweepDocument

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

STYLES = {"waiting": "dim", "running": "bold yellow", "done": "green", "failed": "bold red", "skipped": "magenta"}
STYLES["not promoted"] = "dim"


class Board:
    """A live table on a terminal, a line for each change elsewhere; used as a context around a run. Nothing is drawn
    while a benchmark runs, but at its begin and end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.plan: SweepPlan | None = None
        self.states: Mapping[str, StageState] = {}
        self.begun: dict[str, float] = {}
        self.live: Live | None = None

    def __enter__(self) -> "Board":
        if self.console.speaks and sys.stderr.isatty():
            from rich.console import Console as RichConsole
            from rich.live import Live

            self.live = Live(console=RichConsole(file=sys.stderr), auto_refresh=False, transient=False)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.draw()
            self.live.stop()

    def show(self, plan: SweepPlan, states: Mapping[str, StageState]) -> None:
        """What there is to do now. states: by key; looked at whenever something is drawn."""
        self.plan, self.states = plan, states
        self.draw()

    def changed(self, stage: Stage, state: StageState) -> None:
        if state.status == "running":
            self.begun[stage.key] = time.monotonic()
        if self.live is None:
            more = f" in {human_seconds(state.seconds or 0)}" if state.status == "done" else ""
            more = f": {state.message}" if state.message is not None and not more else more
            self.console.note(f"{stage.title}: {state.status}{more}")
        self.draw()

    def note(self, text: str) -> None:
        """A remark beside the table."""
        if self.live is not None:
            self.live.console.print(printable(text), markup=False, highlight=False)
        else:
            self.console.note(text)

    def draw(self) -> None:
        if self.live is not None and self.plan is not None:
            self.live.update(self._table(self.plan), refresh=True)

    def _table(self, plan: SweepPlan) -> "Table":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("", "convert", "adapt", "eval"):
            table.add_column(column, no_wrap=bool(column))

        def cell(stage: Stage | None) -> Any:
            if stage is None or stage.key not in self.states:
                return Text("-", style="dim")
            state = self.states[stage.key]
            return Text(self._words(state), style=STYLES[state.status])

        for point in plan.points:
            left = [stage for stage in point.adapting if self.states[stage.key].status != "done"]
            adapting = next(iter([*left, *point.adapting[-1:]]), None)  # of several the one that is on
            cells = [cell(stage) for stage in (point.converting, adapting, point.evaluating)]
            if point.held is not None and not left:
                cells[1] = Text(point.held.status, style=STYLES[point.held.status])
            table.add_row(Text(printable(point.name)), *cells)
        for stage in (*plan.sensitivities, *plan.benches):
            table.add_row(Text(printable(stage.title)), *(Text(""), Text(""), cell(stage)))
        return table

    def _words(self, state: StageState) -> str:
        if state.status == "running" and state.stage != TIMED:  # no clock may run beside what is timed
            return f"running {human_seconds(time.monotonic() - self.begun.get(state.key, time.monotonic()))}"
        if state.status == "done":
            return "kept" if state.reused else f"done {human_seconds(state.seconds or 0)}"
        return state.status


# ---- at the end ----

TEXT_COLUMNS = ("point", "not promoted", "failed")  # columns that are no numbers


def show_points(document: SweepDocument, root: Path, console: Console) -> None:
    """A table with a row for each point, read from the files that the sweep has written in ``root``."""
    rows = _point_rows(document, root)
    console.result("")
    console.table(rows, right=[key for key in rows[0] if key not in TEXT_COLUMNS])


def _point_rows(document: SweepDocument, root: Path) -> list[dict[str, str]]:
    found = {point.name: one_result(root / point.results) for point in document.points if point.results is not None}
    dense = found.get(document.points[0].name)
    benches = [BenchDocument.from_dict(read_document(root / path, "benchmark"), path) for path in document.benches]
    rows = []
    for point in document.points:
        row, result = {"point": point.name}, found.get(point.name)
        if any(one.model.perplexity is not None for one in found.values()):
            row |= _perplexity(result, dense)
        for task in dict.fromkeys(name for one in found.values() for name in one.tasks):
            row[task] = _accuracy(result, dense, task)
        for number, bench in enumerate(benches, start=1):
            row[_title(bench, number)] = _speedup(bench, point.timed)
        if any(one.not_promoted is not None for one in document.points):
            row["not promoted"] = point.not_promoted or ""
        if any(one.failure is not None for one in document.points):
            row["failed"] = point.failure or ""
        rows.append(row)
    return rows


def one_result(path: Path) -> ModelResult:
    """Of a results.json of a sweep, which holds one model."""
    models = EvalResults.from_dict(read_document(path, "results file"), path).models
    if len(models) != 1:
        raise UserError(f"{path} holds {len(models)} models, but a sweep's evaluation holds one; run it again")
    return models[0]


def _perplexity(found: ModelResult | None, dense: ModelResult | None) -> dict[str, str]:
    own, base = (one.model.perplexity if one is not None else None for one in (found, dense))
    if own is None:
        return {"perplexity": "", "difference": ""}
    difference = f"{own.perplexity - base.perplexity:+.4f}" if base is not None and found is not dense else ""
    return {"perplexity": f"{own.perplexity:.4f}", "difference": difference}


def _accuracy(found: ModelResult | None, dense: ModelResult | None, task: str) -> str:
    """A task's first metric, and its difference to the dense model's."""
    values = found.tasks.get(task, {}) if found is not None else {}
    metrics = (key for key, value in values.items() if "," in key and isinstance(value, int | float))
    metric = next((key for key in metrics if "_stderr" not in key), None)
    if metric is None:
        return ""
    base = dense.tasks.get(task, {}).get(metric) if dense is not None and dense is not found else None
    return f"{values[metric]:.4f}" + (f" ({float(values[metric]) - float(base):+.4f})" if base is not None else "")


def _title(bench: BenchDocument, number: int) -> str:
    options = bench.options
    where = f"emulated tp {options.emulate_tp}" if options.emulate_tp is not None else f"tp {options.tp_size}"
    batch = f", batch {options.batch_sizes[0]}" if len(options.batch_sizes) > 1 else ""
    return f"decode speed-up [{number}: {where}{batch}]"


def _speedup(bench: BenchDocument, model: str | None) -> str:
    """Of the first batch size, with its 95 % interval where the rounds are enough for one."""
    row = next((row for row in bench.rows if row.is_model and row.model == model), None)
    if row is None:
        return ""
    interval = row.speedup_decode_interval if bench.options.repeat >= LEAST_ROUNDS else []
    ends = f" [{interval[0]:.2f}, {interval[1]:.2f}]" if len(interval) == 2 else ""
    return f"{row.speedup_decode:.2f}x{ends}"
