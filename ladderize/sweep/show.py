"""The output of a sweep: its plan, a line for each change while it runs, and at its end the models and the answer."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ladderize.console import Console, human_seconds
from ladderize.errors import UserError
from ladderize.sweep.plan import SweepPlan
from ladderize.sweep.stages import LOG, MARKER, is_finished
from ladderize.sweep_document import StageState, SweepDocument

# ---- the plan ----


def plan_document(plan: SweepPlan, root: Path) -> dict[str, Any]:
    """Return the JSON of ``--dry-run``. ``unplanned`` has the points whose stages depend on future measurements."""
    stages = [
        {
            "stage": stage.kind,
            "title": stage.title,
            "output": stage.output,
            "command": stage.command,
            "kept": is_finished(stage, root),
            "processes": stage.processes,
            "needs": [needed.output for needed in stage.needs],
        }
        for stage in plan.stages
    ]
    return {"out": str(root), "stages": stages, "unplanned": [point.name for point in plan.waiting]}


def show_stages(document: Mapping[str, Any], console: Console) -> None:
    """Print a row for each stage.

    document: of ``plan_document``.
    """
    rows = [
        {
            "stage": stage["title"],
            "": "kept" if stage["kept"] else "to run",
            "on": f"{stage['processes']} processes" if stage["processes"] > 1 else "",
        }
        for stage in document["stages"]
    ]
    unplanned = [
        {"stage": name, "": "planned when what decides it is measured", "on": ""} for name in document["unplanned"]
    ]
    console.table([*rows, *unplanned])
    console.result(f"\n{sum(row[''] == 'kept' for row in rows)} of {len(rows)} stages are kept")


def plan_script(plan: SweepPlan, root: Path) -> str:
    """Return a shell script with the commands of all stages to run, each with the numbers of the stages before it. Each
    ends with the marker of a complete output."""
    numbers = {stage.key: number for number, stage in enumerate(plan.stages, 1)}
    lines = [f"cd {shlex.quote(str(root))}"]
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


def show_changes(plan: SweepPlan, states: Mapping[str, StageState], shown: dict[str, str], console: Console) -> None:
    """Print a line for each stage whose status has changed.

    states: by the stages' keys.
    shown: the statuses that were printed before; those of ``states`` are added.
    """
    for stage in plan.stages:
        state = states[stage.key]
        if shown.get(stage.key, "waiting") != state.status and not state.reused:
            more = f" in {human_seconds(state.seconds or 0)}" if state.status == "done" else ""
            console.note(f"{stage.title}: {state.status}{more}{f': {state.message}' if state.message else ''}")
        shown[stage.key] = state.status


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
    """Print the report's table of all models of a sweep, and its answer."""
    from ladderize.report.answer import find_answer
    from ladderize.report.documents import find_documents
    from ladderize.report.join import join_documents
    from ladderize.report.tables import models_table

    content = join_documents(find_documents([root]))
    answer = find_answer(content)
    models = models_table(content, answer.setting)
    console.result("")
    console.table(models.rows, right=models.numbers)
    if models.note:
        console.prose(models.note)
    console.result("")
    console.prose(answer.headline)
