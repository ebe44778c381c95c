"""The command ``ladderize report``: one HTML page that needs nothing else, its pictures, and Markdown.

All text of documents is escaped. The page runs no script.
"""

import html
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
from ladderize.report.answer import Answer, find_answer
from ladderize.report.documents import FoundDocuments, find_documents
from ladderize.report.join import ReportContent, join_documents
from ladderize.report.models import ReportModel, Setting, listing, number_text, points_text, speedup_text
from ladderize.runtime.bench.document import BenchDocument

if TYPE_CHECKING:
    from ladderize.report.plot import ReportPlot

TEMPLATES = Path(__file__).parent / "templates"
# the beginnings of columns that hold no numbers
TEXT_COLUMNS = ("model", "layout", "adapted", "within", "not promoted", "failed")


@dataclass(frozen=True)
class ReportTable:
    """Rows with a text for every column: the first four are the model, how good, within the margin, and how fast.

    numbers: the columns that hold numbers.
    note: the text below it.
    """

    caption: str
    rows: list[dict[str, str]]
    numbers: list[str]
    note: str


@dataclass(frozen=True)
class ReportPage:
    """All that the templates show; sections: the plots by their title."""

    title: str
    answer: Answer
    models: ReportTable
    sections: dict[str, list["ReportPlot"]]
    setup: list[tuple[str, dict[str, str]]]
    remarks: list[str]

    @property
    def plots(self) -> list["ReportPlot"]:
        return [plot for plots in self.sections.values() for plot in plots]


@dataclass(frozen=True)
class ReportSummary(Record):
    """best: the model that is recommended. files: page, pictures and Markdown."""

    out: str
    headline: str
    best: str | None
    files: list[str]


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

    Raises UserError for documents that are corrupt, foreign, or do not belong together.
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


# ---- the table of all models, and the facts of machines and versions ----


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """Return the table with a row for each model, without empty columns.

    setting: the setting of the times; None: the first one that has any.
    """
    timed = [setting for setting in content.settings if any(setting in model.timings for model in content.models)]
    setting = setting or (timed[0] if timed else None)
    rows = [_model_row(model, setting, content.margin) for model in content.models]
    filled = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    shared: dict[str, list[str]] = {}
    for model in content.models:
        if model.timed_as is not None:
            shared.setdefault(model.timed_as.name, []).append(model.name)
    donors = "; ".join(f"{', '.join(names)} those of {timed}" for timed, names in shared.items())
    note = f"* Times of another model with the same layout, on which alone speed depends: {donors}." * bool(donors)
    caption = "All models, with 95 % intervals" + (f". Times: {setting.title}" if setting is not None else "")
    numbers = [name for name in filled if not name.startswith(TEXT_COLUMNS)]
    return ReportTable(caption, [{name: row[name] for name in filled} for row in rows], numbers, note)


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
        "not promoted": model.not_promoted or "",
        "failed": model.failure or "",
    }


def setup_facts(documents: FoundDocuments) -> list[tuple[str, dict[str, str]]]:
    """Return the names of documents, and the facts of their making: machine, versions, options.

    Documents with the same facts are one entry.
    """
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
