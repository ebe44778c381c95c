"""The command ``ladderize report``: one HTML page that needs nothing else, its pictures, and Markdown.

All text of documents is escaped.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ladderize
from ladderize.console import SILENT, Console, human_bytes, printable
from ladderize.errors import UsageError, UserError
from ladderize.eval.options import check_margin
from ladderize.eval.table import margin_text
from ladderize.files.documents import check_writable
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.temporaries import replacement
from ladderize.report.accuracy_plots import recovery_plots, task_plots
from ladderize.report.answer import MEASURE_ACCURACY, MEASURE_SPEED, Answer, find_answer
from ladderize.report.documents import FoundDocuments, find_documents
from ladderize.report.join import ReportContent, join_documents
from ladderize.report.models import ReportModel, Setting, perplexity_text, points_text, speedup_text
from ladderize.report.plot import (
    ReportPlot,
    ReportTable,
    TableCell,
    estimate_cell,
    make_table,
    number_cell,
    percent_cell,
)
from ladderize.report.sensitivity_plots import sensitivity_plots
from ladderize.report.speed_plots import speed_plots, time_plots
from ladderize.report.tradeoff_plot import tradeoff_plots
from ladderize.report.vega import PALETTE, save_pictures, svg_picture

TEMPLATES = Path(__file__).parent / "templates"
MEASURE_SENSITIVITY = "ladderize sensitivity DENSE --data FILE --sync-tp-size N --out sensitivity.json"
RETRAIN = "ladderize adapt MODEL OUT --distill-from DENSE --data FILE --max-tokens N"


@dataclass(frozen=True)
class PageSection:
    """A section of plots.

    missing: a sentence for a section without plots, with the command that makes their data.
    """

    name: str
    title: str
    plots: list[ReportPlot]
    missing: str


@dataclass(frozen=True)
class ReportPage:
    """All that the templates show."""

    title: str
    answer: Answer
    tradeoff: PageSection
    models: ReportTable
    models_intro: str
    sections: list[PageSection]
    setup: list[tuple[str, dict[str, str]]]
    remarks: list[str]
    version: str = ladderize.__version__

    @property
    def plots(self) -> list[ReportPlot]:
        return [plot for section in (self.tradeoff, *self.sections) for plot in section.plots]


@dataclass(frozen=True)
class ReportSummary(Record):
    """The answer, and the written files.

    best: the model that is recommended.
    files: page, Markdown and pictures.
    """

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
    out = _place(out, "--out", ".html", ".htm")
    card = _place(markdown, "--markdown", ".md", ".markdown") if markdown is not None else None
    if margin is not None:
        check_margin(margin)
    check_libraries()
    if not paths:
        raise UsageError("name the folder of a sweep, or files that eval and bench wrote")
    with console.stage("reading"):
        content = join_documents(find_documents([Path(path) for path in paths]), margin)
    with console.stage("drawing"):
        page = build_page(content)
        written = [_write(out, html_page(page))]
        if card is not None:
            pictures = _write_pictures(page, card.with_name(f"{card.stem}-pictures"))
            written += [path for paths in pictures.values() for path in paths]
            links = {name: [_link(one, card) for one in paths[::2]] for name, paths in pictures.items()}
            written.append(_write(card, markdown_page(page, links)))
    best = page.answer.best.model if page.answer.best is not None else None
    return ReportSummary(str(out), page.answer.headline, best, [str(path) for path in written])


def _place(path: str | Path, option: str, *endings: str) -> Path:
    path = resolved(path)
    if path.suffix.lower() not in endings:
        raise UsageError(f"{option} {path} must end in {endings[0]}")
    check_writable(path, option)
    return path


def _write(path: Path, text: str) -> Path:
    with replacement(path) as file:
        file.write(text)
    return path


def _write_pictures(page: ReportPage, folder: Path) -> dict[str, list[Path]]:
    """Write the pictures; return those of each plot by its name, PNG and SVG in turn."""
    folder.mkdir(exist_ok=True)
    written: dict[str, list[Path]] = {}
    for plot in page.plots:
        for number, panel in enumerate(plot.panels, 1):
            stem = plot.name if len(plot.panels) == 1 else f"{plot.name}-{number}"
            written.setdefault(plot.name, []).extend(save_pictures(panel, folder / stem))
    return written


def _link(picture: Path, file: Path) -> str:
    return quote(Path(os.path.relpath(picture, file.parent)).as_posix())


def check_libraries() -> None:
    """Raise UserError where the extra ``report`` is not installed."""
    try:
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise UserError("a report needs jinja2 and vl-convert-python: pip install 'ladderize[report]'") from None


# ---- what is on it ----


def build_page(content: ReportContent) -> ReportPage:
    """Return the page with its sections. A section without data has a sentence with the command that makes it."""
    answer, reference = find_answer(content), content.reference
    setting = answer.setting or next(iter(content.real_settings), None)
    lacking = MEASURE_ACCURACY if content.real_settings else MEASURE_SPEED
    neither = f"There is no model with both a score and a time. `{lacking}` measures what is missing."
    untimed = f"Nothing was timed. `{MEASURE_SPEED}` does it."
    unknown = f"The sensitivity of the layers was not measured. `{MEASURE_SENSITIVITY}` does it."
    untasked = f"No task was evaluated. `{MEASURE_ACCURACY}` does it."
    unadapted = f"Nothing was adapted here. `{RETRAIN}` wins accuracy back."
    return ReportPage(
        title=f"Accuracy against speed{f': {reference.name}' if reference is not None else ''}",
        answer=answer,
        tradeoff=PageSection("tradeoff", "The trade-off", tradeoff_plots(content, answer.setting), neither),
        models=models_table(content, setting),
        models_intro="Select a heading to sort by it." + (f" Times: {setting.words}." if setting is not None else ""),
        sections=[
            PageSection("tasks", "Task by task", task_plots(content), untasked),
            PageSection("speed", "Speed", speed_plots(content), untimed),
            PageSection("time", "Where the time goes", time_plots(content), untimed),
            PageSection("sensitivity", "Sensitivity", sensitivity_plots(content.found), unknown),
            PageSection("recovery", "Recovery", recovery_plots(content), unadapted),
        ],
        setup=_setup(content.found),
        remarks=content.remarks,
    )


def models_table(content: ReportContent, setting: Setting | None) -> ReportTable:
    """Return the table with a row for each model, without empty columns.

    setting: the setting of the times.
    """
    rows = [_model_row(one, setting, content.margin) for one in content.models]
    filled = {name for row in rows for name, cell in row.items() if cell not in ("", TableCell(""))}
    shared: dict[str, list[str]] = {}
    for one in content.models:
        if one.timed_as is not None:
            shared.setdefault(one.timed_as.name, []).append(one.name)
    words = "; ".join(f"{', '.join(names)} those of {timed}" for timed, names in shared.items())
    note = f"* Times of another model with the same layout, on which alone speed depends: {words}." if words else ""
    return make_table("All models", [{name: row[name] for name in row if name in filled} for row in rows], note)


def _model_row(one: ReportModel, setting: Setting | None, margin: float) -> dict[str, str | TableCell]:
    timing = one.timing(setting) if setting is not None else None
    row = timing.row if timing is not None else None
    kind = setting.kind if setting is not None else ""
    predictions = one.comparison.predictions if one.comparison is not None else None
    needed = one.samples_needed(margin)
    verdict = {"worse": "no: shown to be worse"}.get(one.verdict(margin), one.verdict(margin))
    star = " *" * (one.timed_as is not None)
    whole = timing.whole if timing is not None else None
    return {
        "model": one.name,
        "layout": one.layout_words,
        "adapted": one.adaptation,
        "points from dense (95 %)": estimate_cell(one.difference, points_text),
        f"within {margin_text(margin)}": verdict + (f": {needed:,} samples needed" if needed else ""),
        f"speed-up (95 %), {kind}": estimate_cell(whole, lambda value: speedup_text(value) + star),
        "perplexity (95 %)": estimate_cell(one.perplexity, perplexity_text),
        "accuracy": percent_cell(one.accuracy),
        "KL to dense, nats": estimate_cell(one.divergence, lambda kl: f"{kl.value:.4f}"),
        "same top token": percent_cell(predictions.same_top_share if predictions is not None else None),
        f"prefill ms, {kind}": number_cell(row.prefill_ms if row is not None else None, "{:.2f}"),
        f"decode ms, {kind}": number_cell(row.decode_ms_per_token if row is not None else None, "{:.2f}"),
        "peak memory": number_cell(row.peak_memory_bytes if row is not None else None, human_bytes),
        "not promoted": one.not_promoted or "",
        "failed": one.failure or "",
    }


def _setup(found: FoundDocuments) -> list[tuple[str, dict[str, str]]]:
    """Return the names of documents, and the facts of their making. Documents with the same facts are one entry."""
    together: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for path, facts in _facts(found):
        texts = {name: ", ".join(fact) if isinstance(fact, list) else str(fact) for name, fact in facts.items() if fact}
        together.setdefault(tuple(texts.items()), []).append(f"{path.parent.name}/{path.name}")
    return [
        (", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3), dict(facts))
        for facts, names in together.items()
    ]


def _facts(found: FoundDocuments) -> Iterator[tuple[Path, dict[str, object]]]:
    """Yield the facts of each document's making: machine, versions, options."""
    for results in found.results:
        options, model = results.document.options, results.document.models[0].model
        versions = {"torch": model.torch_version, "transformers": model.transformers_version}
        asked = {"tasks": options.tasks, "samples for each task": options.limit, "perplexity on": options.perplexity}
        facts = {"device": model.device, "dtype": model.dtype, **versions, **asked}
        yield results.path, {"ladderize": results.version, **facts}
    for bench in found.benches:
        document = bench.document
        machine = {
            name.replace("_", " "): fact for name, fact in vars(document.environment).items() if name != "settings"
        }
        link = f"emulated link {document.link.name}" if document.link is not None else document.backend
        rounds = f"{document.options.repeat}, after {document.options.warmup} to warm up"
        yield bench.path, {"ladderize": bench.version, **machine, "communication": link, "rounds": rounds}


# ---- rendering ----


@cache
def _library() -> str:
    """Return vega-embed as a script. It takes a second, so it is cached. Raises UserError if it cannot be put in a
    page."""
    import vl_convert

    code = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    if "</script" in code.lower() or "<!--" in code:
        raise UserError("this version of vl-convert-python cannot be put in a page; install 1.9")
    return str(code)


def html_page(page: ReportPage) -> str:
    """Return the page as HTML."""
    return _render(
        "page.html.j2",
        page=page,
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
        library=_library() if page.plots else "",
        palette=PALETTE,
        specs={plot.name: script_json([panel.spec for panel in plot.panels]) for plot in page.plots},
        pictures={plot.name: [svg_picture(panel) for panel in plot.panels] for plot in page.plots},
    )


def markdown_page(page: ReportPage, pictures: dict[str, list[str]]) -> str:
    """Return the page as Markdown for a README or a model card.

    pictures: links to the pictures of each plot, by its name.
    """
    return _render("report.md.j2", page=page, pictures=pictures)


def script_json(value: object) -> str:
    """Return JSON for a script element: no text in it can end the element, or begin a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def markdown_text(text: object) -> str:
    """Return text on one line, escaped for Markdown and HTML. Text between backticks stays code."""
    parts = re.split(r"(?<!`)(`[^`<>&|]+`)(?!`)", " ".join(str(text).split()))
    return "".join(part if number % 2 else _escaped(part) for number, part in enumerate(parts))


def _escaped(plain: str) -> str:
    for character in "\\`*_[]|#":
        plain = plain.replace(character, "\\" + character)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code_parts(text: str) -> list[tuple[bool, str]]:
    """Return a sentence in parts: True for one between backticks, and its text."""
    return [(number % 2 == 1, part) for number, part in enumerate(text.split("`"))]


def _render(name: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # not Markup, which is HTML already
    )
    environment.filters |= {"md": markdown_text, "code": code_parts}
    return environment.get_template(name).render(**values)
