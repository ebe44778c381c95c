"""The live table of a sweep that runs."""

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ladderize.console import Console, human_seconds, printable
from ladderize.tradeoff.sweep.points import SweepPlan
from ladderize.tradeoff.sweep.stages import TIMED, Stage
from ladderize.workflows.sweep_document import StageState

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
