"""The sections of a report, in their order: what there is data for, and for the rest a sentence that says what makes
it."""

from ladderize.tradeoff.report.content.answer import MEASURE_ACCURACY, MEASURE_SPEED, Answer
from ladderize.tradeoff.report.content.commands import (
    all_commands,
    eval_commands,
    sensitivity_commands,
    sweep_commands,
    time_commands,
)
from ladderize.tradeoff.report.content.join import ReportContent
from ladderize.tradeoff.report.content.models_table import models_table
from ladderize.tradeoff.report.content.setup import setup_facts
from ladderize.tradeoff.report.content.strips import layout_strips
from ladderize.tradeoff.report.page import PageSection, ReportPage
from ladderize.tradeoff.report.plots.recovery import recovery_plots
from ladderize.tradeoff.report.plots.sensitivity import sensitivity_plots
from ladderize.tradeoff.report.plots.speed import speed_plots
from ladderize.tradeoff.report.plots.tasks import task_plots
from ladderize.tradeoff.report.plots.time import time_plots
from ladderize.tradeoff.report.plots.tradeoff import tradeoff_plots

TITLE = "Accuracy against speed"
MEASURE_SENSITIVITY = "ladderize sensitivity DENSE --data FILE --mode spd --sync-tp-size N --out sensitivity.json"
RETRAIN = "ladderize adapt MODEL OUT --distill-from DENSE --data FILE --max-tokens N"


def build_page(content: ReportContent, answer: Answer, title: str | None, version: str) -> ReportPage:
    """Everything that the page shows."""
    setting = answer.setting or next(iter(content.real_settings), None)
    reference = content.reference
    default = f"{TITLE}: {reference.name}" if reference is not None else TITLE
    times = f" Times: {setting.words}." if setting is not None else ""
    return ReportPage(
        title=title or default,
        answer=answer,
        tradeoff=_tradeoff(content, answer),
        models=models_table(content, setting),
        models_intro=f"Select a heading to sort by it.{times}",
        strips=layout_strips(content),
        sections=[_tasks(content), _speed(content), _time(content), _sensitivity(content), _recovery(content)],
        setup=setup_facts(content.found),
        remarks=content.remarks,
        version=version,
    )


def _tradeoff(content: ReportContent, answer: Answer) -> PageSection:
    plots = tuple(tradeoff_plots(content, answer, all_commands(content.found)))
    missing = ""
    if not plots:
        lacking = MEASURE_ACCURACY if content.real_settings else MEASURE_SPEED
        missing = f"There is no model with both a score and a time. `{lacking}` measures what is missing."
    return PageSection("tradeoff", "The trade-off", plots=plots, missing=missing)


def _tasks(content: ReportContent) -> PageSection:
    plots = tuple(task_plots(content, eval_commands(content.found)))
    missing = "" if plots else f"No task was evaluated. `{MEASURE_ACCURACY}` does it."
    return PageSection("tasks", "Task by task", plots=plots, missing=missing)


def _speed(content: ReportContent) -> PageSection:
    plots = tuple(speed_plots(content, time_commands(content.found)))
    missing = "" if plots else f"Nothing was timed. `{MEASURE_SPEED}` does it."
    return PageSection("speed", "Speed", plots=plots, missing=missing)


def _time(content: ReportContent) -> PageSection:
    plots = tuple(time_plots(content, time_commands(content.found)))
    missing = "" if plots else f"The communication was not measured. `{MEASURE_SPEED}` does it."
    return PageSection("time", "Where the time goes", plots=plots, missing=missing)


def _sensitivity(content: ReportContent) -> PageSection:
    found = content.found
    plots = tuple(sensitivity_plots(found.sensitivities, sensitivity_commands(found)))
    missing = "" if plots else f"The sensitivity of the blocks was not measured. `{MEASURE_SENSITIVITY}` does it."
    return PageSection("sensitivity", "Sensitivity", plots=plots, missing=missing)


def _recovery(content: ReportContent) -> PageSection:
    plots = tuple(recovery_plots(content, sweep_commands(content.found)))
    missing = "" if plots else f"Nothing was adapted here. `{RETRAIN}` wins accuracy back."
    return PageSection("recovery", "Recovery", plots=plots, missing=missing)
