"""The output of a sweep: its plan, a live table while it runs, and at its end the models and the answer."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.console import Console, human_seconds, table
from ladderize.errors import UserError
from ladderize.files.documents import read_own
from ladderize.sweep.plan import SweepPlan
from ladderize.sweep.stages import LOG, MARKER, Stage, is_finished
from ladderize.sweep_document import StageState, SweepDocument

if TYPE_CHECKING:
    from rich.live import Live


# ---- the plan ----


def plan_document(plan: SweepPlan, root: Path) -> dict[str, Any]:
    """Return the JSON of ``--dry-run``. ``unplanned`` has the points whose stages depend on future measurements."""
    seconds: dict[tuple[str, str], float] = {}
    for stage in plan.stages:
        marker = read_own(root / stage.output / MARKER) if is_finished(stage, root) else {}
        if "seconds" in marker:
            seconds[stage.work] = max(float(marker["seconds"]), seconds.get(stage.work, 0))
    stages = [
        {
            "stage": stage.kind,
            "title": stage.title,
            "output": stage.output,
            "command": stage.command,
            "kept": is_finished(stage, root),
            "processes": stage.processes,
            "needs": [needed.output for needed in stage.needs],
            "expected_seconds": seconds.get(stage.work),
        }
        for stage in plan.stages
    ]
    return {"out": str(root), "stages": stages, "unplanned": [point.name for point in plan.waiting]}


def show_stages(document: Mapping[str, Any], console: Console) -> None:
    """Print a row for each stage.

    document: of ``plan_document``.
    """
    rows = [_stage_row(stage) for stage in document["stages"]]
    later = {**dict.fromkeys(rows[0], ""), "status": "planned when what decides it is measured"}
    rows += [{**later, "stage": name} for name in document["unplanned"]]
    filled = [key for key in rows[0] if any(row[key] for row in rows)]
    console.table([{key: row[key] for key in filled} for row in rows])
    to_run = [stage for stage in document["stages"] if not stage["kept"]]
    times = [stage["expected_seconds"] for stage in to_run if stage["expected_seconds"] is not None]
    whose = "the others" if len(times) == len(to_run) else f"{len(times)} of the others"
    estimate = f"; {whose} take about {human_seconds(sum(times))}" if times else ""
    console.result(f"\n{len(document['stages']) - len(to_run)} of {len(document['stages'])} stages are kept{estimate}")


def _stage_row(stage: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the plan; the time is known of work that another stage has done."""
    seconds = None if stage["kept"] else stage["expected_seconds"]
    return {
        "stage": stage["title"],
        "status": "kept" if stage["kept"] else "to run",
        "on": f"{stage['processes']} processes" if stage["processes"] > 1 else "",
        "time": f"about {human_seconds(seconds)}" if seconds is not None else "",
    }


def plan_script(plan: SweepPlan, root: Path) -> str:
    """Return a shell script with the commands of all stages to run, each with the numbers of the stages before it. Each
    ends with the marker of a complete output."""
    numbers = {stage.key: number for number, stage in enumerate(plan.stages, 1)}
    folder = shlex.quote(str(root))
    lines = [f"mkdir -p {folder} && cd {folder} || exit 1"]
    for stage in plan.stages:
        needs = ", ".join(map(str, sorted(numbers[needed.key] for needed in stage.needs)))
        when = "kept" if is_finished(stage, root) else f"after {needs}" if needs else "at any time"
        alone = "; alone on its machine" if stage.kind == "bench" else ""
        lines.append(f"\n# {numbers[stage.key]}. {stage.title}: {when}{alone}")
        if not is_finished(stage, root):
            lines.append(f"mkdir -p {stage.output} && {stage.command} && echo '{{}}' > {stage.output}/{MARKER}")
    lines += [f"\n# {point.name}: to be printed when what decides it is measured" for point in plan.waiting]
    return "\n".join(lines)


# ---- while it runs ----


class Board:
    """A live table on a terminal; elsewhere a line for each change.

    It is drawn only when a stage begins or ends, so that nothing runs beside a benchmark.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shown: dict[str, str] = {}
        self.live: Live | None = None

    def __enter__(self) -> "Board":
        if self.console.speaks and sys.stderr.isatty():
            from rich.console import Console as RichConsole
            from rich.live import Live

            self.live = Live(console=RichConsole(file=sys.stderr), auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def show(self, plan: SweepPlan, states: Mapping[str, StageState]) -> None:
        """Show the states of all stages.

        states: by the stages' keys.
        """
        if self.live is not None:
            from rich.text import Text

            rows = table(_table_rows(plan, states))
            self.live.update(Text(rows, no_wrap=True, overflow="ellipsis"), refresh=True)
            return
        for stage in plan.stages:
            state = states[stage.key]
            if self.shown.get(stage.key, "waiting") != state.status and not state.reused:
                more = f" in {human_seconds(state.seconds or 0)}" if state.status == "done" else ""
                self.console.note(f"{stage.title}: {state.status}{more}{f': {state.message}' if state.message else ''}")
            self.shown[stage.key] = state.status


def _table_rows(plan: SweepPlan, states: Mapping[str, StageState]) -> list[dict[str, str]]:
    """Return a row for each point, with a column for each kind of stage, and for each benchmark."""

    def words(stage: Stage | None) -> str:
        if stage is None:
            return "-"
        state = states[stage.key]
        done = "kept" if state.reused else f"done {human_seconds(state.seconds or 0)}"
        return done if state.status == "done" else state.status

    rows = []
    for point in plan.points:
        left = [stage for stage in point.adapting if states[stage.key].status != "done"]
        adapting = words(next(iter([*left, *point.adapting[-1:]]), None))
        if point.hold is not None and not left:
            adapting = point.hold.status
        converting, evaluating = words(point.planned.converting), words(point.evaluating)
        rows.append({"": point.name, "convert": converting, "adapt": adapting, "measure": evaluating})
    return rows + [{"": one.title, "convert": "", "adapt": "", "measure": words(one)} for one in plan.benches]


# ---- at the end ----


def check_stages(document: SweepDocument, root: Path) -> None:
    """Raise UserError where a stage has failed."""
    if failed := document.failed:
        log = f" (log {root / failed[0].output / LOG})" if failed[0].output else ""
        raise UserError(
            f"{len(failed)} stage{'s' if len(failed) > 1 else ''} failed, the first with: {failed[0].message}{log};"
            " mend it and run the same command again"
        )


def show_models(root: Path, console: Console) -> None:
    """Print the first four columns of the report's table of all models of a sweep, and its answer."""
    from ladderize.report.answer import find_answer
    from ladderize.report.documents import find_documents
    from ladderize.report.join import join_documents
    from ladderize.report.tables import models_table

    content = join_documents(find_documents([root]))
    answer = find_answer(content)
    models = models_table(content, answer.setting)
    console.result("")
    console.table([dict(list(row.items())[:4]) for row in models.rows], right=models.numbers)
    if models.note:
        console.prose(models.note)
    for model in content.models:
        if reason := model.failure or model.not_promoted:
            console.prose(f"{model.name}: {reason}")
    console.result("")
    console.prose(answer.headline)
