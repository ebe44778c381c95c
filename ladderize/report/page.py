"""The command ``ladderize report``: one HTML page without scripts, all text escaped, its pictures, and Markdown."""

import html
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import ladderize
from ladderize.console import SILENT, Console, printable
from ladderize.errors import UsageError, UserError
from ladderize.eval.options import check_margin
from ladderize.eval.results import EvalResults
from ladderize.eval.table import margin_text
from ladderize.files.documents import check_writable
from ladderize.files.output import replacement
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.report.documents import FoundDocuments, find_documents
from ladderize.report.join import ReportContent, join_documents
from ladderize.report.models import ReportModel, Setting, listing, number_text, points_text, speedup_text
from ladderize.runtime.bench.document import ENOUGH_ROUNDS, BenchDocument, BenchRow, few_rounds
from ladderize.sweep_document import SweepDocument

if TYPE_CHECKING:
    from ladderize.report.plots import ReportPlot

TEMPLATES = Path(__file__).parent / "templates"
# the beginnings of columns that hold no numbers
TEXT_COLUMNS = ("model", "layout", "adapted", "within", "not promoted", "failed")


@dataclass(frozen=True)
class Answer:
    headline: str
    sentences: list[str]
    best: ReportModel | None  # the model that is recommended
    setting: Setting | None  # of its speed-up


@dataclass(frozen=True)
class ReportTable:
    """Rows with a text for every column: the first four are the model, how good, within the margin, and how fast."""

    caption: str
    rows: list[dict[str, str]]
    numbers: list[str]  # the columns that hold numbers
    note: str  # below it


@dataclass(frozen=True)
class ReportPage:
    """All that the templates show."""

    title: str
    answer: Answer
    models: ReportTable
    sections: dict[str, list["ReportPlot"]]  # the plots by their title
    setup: list[tuple[str, dict[str, str]]]
    remarks: list[str]

    @property
    def plots(self) -> list["ReportPlot"]:
        return [plot for plots in self.sections.values() for plot in plots]


@dataclass(frozen=True)
class ReportSummary(Record):
    out: str
    headline: str
    best: str | None  # the model that is recommended
    files: list[str]  # page, pictures and Markdown


def write_report(
    paths: Sequence[str | Path],
    out: str | Path,
    *,
    margin: float | None = None,
    markdown: str | Path | None = None,
    console: Console = SILENT,
) -> ReportSummary:
    """Write one HTML page about the trade-off between accuracy and speed.

    paths: folders of sweeps, or files and folders with results.json, bench.json, sensitivity.json and metrics.jsonl.
    margin: the accuracy that may be lost, in points; None: that of the sweep, or 1.
    markdown: a file for the answer, the table of models and links to pictures, which lie in FILE-pictures.
    """
    out = _output(out, "--out", ".html", ".htm")
    card = _output(markdown, "--markdown", ".md", ".markdown") if markdown is not None else None
    if margin is not None:
        check_margin(margin)
    check_libraries()
    if not paths:
        raise UsageError("name the folder of a sweep, or files that eval and bench wrote")
    with console.stage("reading"):
        page = build_page(join_documents(find_documents([Path(path) for path in paths]), margin))
    written = [out]
    with console.stage("drawing"):
        css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
        _write(out, "page.html.j2", page=page, css=css)
        if card is not None:
            folder = card.with_name(f"{card.stem}-pictures")
            folder.mkdir(exist_ok=True)
            links = {}
            for plot in page.plots:
                pictures = plot.save_pictures(folder)
                written += pictures
                links[plot.name] = [quote(f"{folder.name}/{path.name}") for path in pictures if path.suffix == ".png"]
            _write(card, "report.md.j2", page=page, pictures=links)
            written.append(card)
    best = page.answer.best.model if page.answer.best is not None else None
    return ReportSummary(str(out), page.answer.headline, best, [str(path) for path in written])


def _output(path: str | Path, option: str, *endings: str) -> Path:
    path = resolved(path)
    if path.suffix.lower() not in endings:
        raise UsageError(f"{option} {path} must end in {endings[0]}")
    check_writable(path, option)
    return path


def check_libraries() -> None:
    """Raise UserError where the extra ``report`` is not installed."""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        libraries = "altair jinja2 vl-convert-python"
        raise UserError(f"a report needs {libraries}: pip install {libraries}") from None


def build_page(content: ReportContent) -> ReportPage:
    """Return the page, without the sections of what was not measured."""
    from ladderize.report import plots

    answer = find_answer(content)
    # the last two parts of the reference's path: the folder of a model may be called ``dense``
    of_model = f": {Path(*Path(content.models[0].model).parts[-2:])}" if content.models else ""
    sections = {
        "The trade-off": plots.tradeoff_plots(content, answer.setting),
        "Task by task": plots.task_plots(content),
        "Speed": plots.speed_plots(content),
        "Where the time goes": plots.time_plots(content),
        "Sensitivity": plots.sensitivity_plots(content.documents),
        "Recovery": [*plots.recovery_plots(content), *plots.retraining_plots(content.documents)],
    }
    filled = {title: drawn for title, drawn in sections.items() if drawn}
    table, setup = models_table(content, answer.setting), setup_facts(content.documents)
    return ReportPage(f"Accuracy against speed{of_model}", answer, table, filled, setup, content.remarks)


def _write(path: Path, template: str, **values: Any) -> None:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=template.endswith(".html.j2"))
    environment.undefined, environment.keep_trailing_newline = StrictUndefined, True
    environment.trim_blocks = environment.lstrip_blocks = True
    # not of Markup, which is HTML already
    environment.finalize = lambda value: printable(value) if type(value) is str else value
    environment.filters["md"] = _markdown
    text = environment.get_template(template).render(version=ladderize.__version__, **values)
    with replacement(path) as file:
        file.write(text)


def _markdown(text: object) -> str:
    """Return text on one line, escaped for Markdown and HTML."""
    line = " ".join(str(text).split())
    return html.escape(re.sub(r"([\\`*_\[\]|#])", r"\\\1", line), quote=False)


def find_answer(content: ReportContent) -> Answer:
    """Return the answer: the fastest layout that is shown to be within the margin, else the one nearest to dense."""
    margin, others = margin_text(content.margin), content.models[1:]
    shown = [model for model in others if model.verdict == "shown"]
    nearest = None if shown else _nearest(others)
    best, setting = _fastest(shown or ([nearest] if nearest is not None else others), content.settings)
    timing = best.timings[setting] if best is not None and setting is not None else None
    recommended = best if shown and (timing is None or timing.is_faster) else None
    sentences = _not_evaluated(content.models)
    if best is not None and setting is not None and timing is not None:
        accuracy = f"{points_text(best.difference)} points from dense; " if best.difference else ""
        speedup = speedup_text(timing.speedup()) + ", no interval: too few rounds" * (not timing.has_interval)
        note = " This speed-up is emulated, not measured on a whole group." * (setting.kind == "emulated")
        sentences.append(f"{best.name}: {accuracy}end to end {speedup}, {setting.title}.{note}")
    if best is not None and shown:
        headline = f"{best.title} is at most {margin} less accurate than dense"
        if timing is None:
            headline += ", as the 95 % interval shows. Its speed was not measured."
        elif timing.is_faster:
            headline += f" and {timing.speedup().value:.2f}\u00d7 as fast: both are shown by 95 % intervals."
        else:
            headline += ", but no layout within that is shown to be faster in any setting that was timed."
    elif any(model.difference for model in others):
        headline = f"No layout is shown to be within {margin} of dense."
    else:
        headline = "The accuracy was not measured: `ladderize eval DENSE MODEL... --tasks A,B` does."
    if nearest is not None:
        headline += f" The nearest to dense is {nearest.title}: {nearest.scores}."
    gain = recommended.difference if recommended is not None and recommended.was_trained else None
    if recommended is not None and gain is not None and gain.value > 0:
        sentences.append(
            f"That {recommended.name} is better than dense may come of the text it was trained on: train the dense"
            " model on it too, and compare the two."
        )
    sweeps = [sweep for _, sweep in content.documents.of(SweepDocument) if not sweep.complete]
    sentences += [f"The sweep is not complete. `{sweep.command}` goes on with it." for sweep in sweeps]
    benches = [bench for _, bench in content.documents.of(BenchDocument)]
    if not all(bench.complete for bench in benches):
        sentences.append("A benchmark was interrupted: its rows are those measured so far.")
    if warning := few_rounds(min((bench.options.repeat for bench in benches), default=ENOUGH_ROUNDS)):
        sentences.append(f"Speeds: {warning}.")
    return Answer(headline, sentences, recommended, setting)


def _not_evaluated(models: list[ReportModel]) -> list[str]:
    """Return sentences on models that were evaluated on less than others were."""
    tasks = list(dict.fromkeys(itertools.chain.from_iterable(model.tasks for model in models)))
    lacking: dict[str, list[str]] = {}
    for model in models:
        missing = [task for task in tasks if task not in model.tasks]
        if missing and model.not_promoted is None:
            lacking.setdefault("any task" if missing == tasks else listing(missing), []).append(model.name)
    common = "Points are over the tasks that dense has in common."
    return [f"Not evaluated on {missing}: {listing(names)}. {common}" for missing, names in lacking.items()]


def _fastest(models: list[ReportModel], settings: list[Setting]) -> tuple[ReportModel | None, Setting | None]:
    """Return the fastest model and the setting of its time; None for what is not there. Models shown to be faster go
    before others, then earlier settings. Of equally fast ones it is the most accurate."""

    def rank(timed: tuple[ReportModel, Setting]) -> tuple[bool, int, float, float]:
        model, setting = timed
        timing = model.timings[setting]
        return timing.is_faster, -settings.index(setting), timing.speedup().value, model.accuracy or 0.0

    timed = [(model, setting) for model in models for setting in model.timings]
    if timed:
        return max(timed, key=rank)
    return (models[0] if models else None), None


def _nearest(others: list[ReportModel]) -> ReportModel | None:
    """Return the layout nearest to dense by the divergence, else the perplexity, else the tasks, of those that are
    shown to be faster, where there are any."""
    converted = [model for model in others if model.family != "dense"]
    faster = [model for model in converted if model.is_faster]
    for name, sign in (("divergence", 1), ("perplexity_growth", 1), ("difference", -1)):
        measured = [model for model in faster or converted if getattr(model, name) is not None]
        if measured:
            return min(measured, key=lambda model: sign * getattr(model, name).value)
    return None


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """Return the table of all models, without empty columns; without a setting times are of the first that has any."""
    timed = {setting for model in content.models for setting in model.timings}
    setting = setting or next((setting for setting in content.settings if setting in timed), None)
    rows = [_model_row(model, setting, content.margin) for model in content.models]
    filled = {name for row in rows for name, text in row.items() if text}
    shared: dict[str, list[str]] = {}
    for model, row in zip(content.models, rows, strict=True):
        for name in row.keys() - filled:
            del row[name]
        if model.timed_as is not None:
            shared.setdefault(model.timed_as.name, []).append(model.name)
    donors = "; ".join(f"{', '.join(names)} those of {timed}" for timed, names in shared.items())
    note = f"* Times of another model with the same layout, on which alone speed depends: {donors}." * bool(donors)
    caption = "All models, with 95 % intervals" + (f". Times: {setting.title}" if setting is not None else "")
    numbers = [name for name in (rows[0] if rows else ()) if not name.startswith(TEXT_COLUMNS)]
    return ReportTable(caption, rows, numbers, note)


def _model_row(model: ReportModel, setting: Setting | None, margin: float) -> dict[str, str]:
    timing = model.timings.get(setting) if setting is not None else None
    kind = setting.kind if setting is not None else ""
    predictions = model.comparison.predictions if model.comparison is not None else None
    star = " *" * (model.timed_as is not None)
    return {
        "model": model.name,
        "points from dense": points_text(model.difference) if model.difference else "",
        f"within {margin_text(margin)}": "no: shown to be worse" if model.verdict == "worse" else model.verdict,
        f"{kind} speed-up": speedup_text(timing.speedup()) + star if timing else "",
        "perplexity": number_text(model.perplexity, 3) if model.perplexity is not None else "",
        "KL to dense, nats": f"{model.divergence.value:.4f}" if model.divergence else "",
        "layout": model.layout.words,
        "adapted": model.adaptation,
        "accuracy": f"{100 * model.accuracy:.1f} %" if model.accuracy is not None else "",
        "change of perplexity": model.perplexity_change.text(3, sign=True) if model.perplexity_change else "",
        "same top token": f"{100 * predictions.same_top_share:.1f} %" if predictions else "",
        f"{kind} prefill ms": f"{timing.row.ms['prefill']:.2f}" if timing else "",
        f"{kind} decode ms": f"{timing.row.ms['decode']:.2f}" if timing else "",
        f"{kind} decode, of bandwidth": _bandwidth_text(timing.row) if timing else "",
        "not promoted": model.not_promoted or "",
        "failed": model.failure or "",
    }


def _bandwidth_text(row: BenchRow) -> str:
    """Return the share of the memory's bandwidth that a decode step reaches, and what it reads; empty if unknown."""
    if row.bandwidth_share is None or row.decode_read_bytes is None:
        return ""
    return f"{100 * row.bandwidth_share:.0f} % ({row.decode_read_bytes / 1e9:.2f} GB)"


def setup_facts(documents: FoundDocuments) -> list[tuple[str, dict[str, str]]]:
    """Return the facts of machines, versions and options, each with the names of the documents that share them."""
    facts: list[tuple[Path, dict[str, object]]] = []
    for path, results in documents.of(EvalResults):
        options, model = results.options, results.models[0].model
        versions = {"torch": model.torch_version, "transformers": model.transformers_version}
        asked = {
            "tasks": [*options.get("tasks", ())],
            "samples for each task": options.get("limit"),
            "perplexity on": options.get("perplexity"),
        }
        facts.append((path, {"device": model.device, "dtype": model.dtype, **versions, **asked}))
    for path, bench in documents.of(BenchDocument):
        machine = {name.replace("_", " "): fact for name, fact in vars(bench.environment).items() if name != "settings"}
        link = f"emulated link {bench.link.name}" if bench.link is not None else bench.backend
        rounds = f"{bench.options.repeat}, after {bench.options.warmup} to warm up"
        facts.append((path, {**machine, "communication": link, "rounds": rounds}))
    together: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for path, stated in facts:
        texts = {
            name: ", ".join(fact) if isinstance(fact, list) else str(fact) for name, fact in stated.items() if fact
        }
        together.setdefault(tuple(texts.items()), []).append(f"{path.parent.name}/{path.name}")
    return [(listing(names), dict(texts)) for texts, names in together.items()]
