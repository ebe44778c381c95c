"""The output of a sweep: its plan, and at its end the models and the answer."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.console import Console, human_seconds
from ladderize.errors import UserError
from ladderize.sweep.stages import LOG, MARKER, Stage
from ladderize.sweep_document import SweepDocument

if TYPE_CHECKING:
    from ladderize.sweep.run import SweepRun


# ---- the plan ----


def plan_document(sweep: "SweepRun") -> dict[str, Any]:
    """Return the JSON of ``--dry-run``. ``unplanned`` has the points whose stages depend on future measurements."""
    states = {stage.key: sweep.state(stage) for stage in sweep.stages()}
    longest: dict[tuple[str, str], float] = {}  # by the kind and the work of stages that are done
    for stage in sweep.stages():
        seconds = states[stage.key].seconds
        if seconds is not None:
            longest[stage.kind, stage.work] = max(seconds, longest.get((stage.kind, stage.work), 0))
    stages = [
        _stage_document(stage, states[stage.key].status == "done", longest.get((stage.kind, stage.work)))
        for stage in sweep.stages()
    ]
    return {"out": str(sweep.root), "stages": stages, "unplanned": sweep.unplanned()}


def _stage_document(stage: Stage, is_kept: bool, seconds: float | None) -> dict[str, Any]:
    return {
        "stage": stage.kind,
        "title": stage.title,
        "output": stage.output,
        "command": stage.command,
        "kept": is_kept,
        "processes": stage.steps[0].processes,
        "needs": [needed.output for needed in stage.needs],
        "expected_seconds": seconds,
    }


def show_stages(document: Mapping[str, Any], console: Console) -> None:
    """Print a row for each stage, with the columns that say something.

    document: of ``plan_document``.
    """
    rows = [_stage_row(stage) for stage in document["stages"]]
    later = {**dict.fromkeys(rows[0], ""), "status": "planned when what decides it is measured"}
    rows += [{**later, "stage": name} for name in document["unplanned"]]
    for key in rows[0].keys() - {key for row in rows for key, text in row.items() if text}:
        for row in rows:
            del row[key]
    console.table(rows)
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


def plan_script(document: Mapping[str, Any]) -> str:
    """Return a shell script with the commands of all stages to run, each with the numbers of the stages before it. Each
    ends with the marker of a complete output.

    document: of ``plan_document``.
    """
    numbers = {stage["output"]: number for number, stage in enumerate(document["stages"], 1)}
    folder = shlex.quote(document["out"])
    lines = [f"mkdir -p {folder} && cd {folder} || exit 1"]
    for stage in document["stages"]:
        output, needs = stage["output"], sorted(numbers[needed] for needed in stage["needs"])
        when = f"after {', '.join(map(str, needs))}" if needs else "at any time"
        alone = "; alone on its machine" if stage["stage"] == "bench" else ""
        lines.append(f"\n# {numbers[output]}. {stage['title']}: {'kept' if stage['kept'] else when}{alone}")
        if not stage["kept"]:
            lines.append(f"mkdir -p {output} && {stage['command']} && echo '{{}}' > {output}/{MARKER}")
    lines += [f"\n# {name}: to be printed when what decides it is measured" for name in document["unplanned"]]
    return "\n".join(lines)


# ---- at the end ----


def check_stages(document: SweepDocument, root: Path) -> None:
    """Raise UserError where a stage has failed."""
    failed = document.failed
    if failed:
        log = f" (log {root / failed[0].output / LOG})" if failed[0].output else ""
        raise UserError(
            f"{len(failed)} stage{'s' if len(failed) > 1 else ''} failed, the first with: {failed[0].message}{log};"
            " mend it and run the same command again"
        )


def show_models(root: Path, console: Console) -> None:
    """Print the first four columns of the report's table of all models of a sweep, and its answer."""
    from ladderize.report.documents import find_documents
    from ladderize.report.join import join_documents
    from ladderize.report.page import find_answer, models_table

    content = join_documents(find_documents([root]))
    answer = find_answer(content)
    models = models_table(content, answer.setting)
    console.result("")
    console.table([dict(list(row.items())[:4]) for row in models.rows], right=models.numbers)
    if models.note:
        console.prose(models.note)
    for model in content.models:
        reason = model.failure or model.not_promoted
        if reason:
            console.prose(f"{model.name}: {reason}")
    console.result("")
    console.prose(answer.headline)
