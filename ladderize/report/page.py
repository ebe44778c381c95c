"""The command ``ladderize report``: one HTML page that needs nothing else, its pictures, and Markdown.

All text of documents is escaped. The page runs no script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import ladderize
from ladderize.console import SILENT, Console, printable
from ladderize.errors import UsageError, UserError
from ladderize.eval.options import check_margin
from ladderize.files.documents import check_writable
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.temporaries import replacement
from ladderize.report.answer import Answer, find_answer
from ladderize.report.documents import find_documents
from ladderize.report.join import ReportContent, join_documents
from ladderize.report.tables import ReportTable, models_table, setup_facts

if TYPE_CHECKING:
    from ladderize.report.plot import ReportPlot

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class ReportPage:
    """All that the templates show.

    sections: the title and the plots of each.
    """

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
        page = build_page(join_documents(find_documents([Path(path) for path in paths]), margin))
    with console.stage("drawing"):
        from ladderize.report.plot import draw

        drawings = {plot.name: [draw(panel) for panel in plot.panels] for plot in page.plots}
        css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
        written = [_write(out, "page.html.j2", page=page, drawings=drawings, css=css)]
        if card is not None:
            folder = card.with_name(f"{card.stem}-pictures")
            folder.mkdir(exist_ok=True)
            pictures = {name: _write_pictures(panels, folder / name) for name, panels in drawings.items()}
            written += [path for paths in pictures.values() for path in paths]
            links = {
                name: [quote(f"{folder.name}/{one.name}") for one in paths[::2]] for name, paths in pictures.items()
            }
            written.append(_write(card, "report.md.j2", page=page, pictures=links))
    best = page.answer.best.model if page.answer.best is not None else None
    return ReportSummary(str(out), page.answer.headline, best, [str(path) for path in written])


def _place(path: str | Path, option: str, *endings: str) -> Path:
    path = resolved(path)
    if path.suffix.lower() not in endings:
        raise UsageError(f"{option} {path} must end in {endings[0]}")
    check_writable(path, option)
    return path


def _write_pictures(panels: list[str], stem: Path) -> list[Path]:
    """Write the pictures of a plot; return them, PNG and SVG in turn. Several are numbered."""
    from ladderize.report.plot import save_pictures

    stems = [stem] if len(panels) == 1 else [Path(f"{stem}-{number}") for number in range(1, len(panels) + 1)]
    return [path for panel, one in zip(panels, stems, strict=True) for path in save_pictures(panel, one)]


def check_libraries() -> None:
    """Raise UserError where the extra ``report`` is not installed."""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise UserError(
            "a report needs altair, jinja2 and vl-convert-python: pip install altair jinja2 vl-convert-python"
        ) from None


def build_page(content: ReportContent) -> ReportPage:
    """Return the page, without the sections of what was not measured."""
    from ladderize.report.accuracy_plots import recovery_plots, retraining_plots, sensitivity_plots, task_plots
    from ladderize.report.speed_plots import speed_plots, time_plots, tradeoff_plots

    answer, reference = find_answer(content), content.models[0] if content.models else None
    # the last two parts of its path: the folder of a model may be called ``dense``
    of_model = f": {Path(*Path(reference.model).parts[-2:])}" if reference is not None else ""
    sections = {
        "The trade-off": tradeoff_plots(content, answer.setting),
        "Task by task": task_plots(content),
        "Speed": speed_plots(content),
        "Where the time goes": time_plots(content),
        "Sensitivity": sensitivity_plots(content.documents),
        "Recovery": [*recovery_plots(content), *retraining_plots(content.documents)],
    }
    return ReportPage(
        title=f"Accuracy against speed{of_model}",
        answer=answer,
        models=models_table(content, answer.setting),
        sections={title: plots for title, plots in sections.items() if plots},
        setup=setup_facts(content.documents),
        remarks=content.remarks,
    )


# ---- rendering ----


def _write(path: Path, template: str, **values: Any) -> Path:
    """Write a page of a template."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: printable(value) if type(value) is str else value,  # not Markup, which is HTML already
    )
    environment.filters["md"] = markdown_text
    text = environment.get_template(template).render(version=ladderize.__version__, **values)
    with replacement(path) as file:
        file.write(text)
    return path


def markdown_text(text: object) -> str:
    """Return text on one line, escaped for Markdown and HTML."""
    plain = " ".join(str(text).split())
    for character in "\\`*_[]|#":
        plain = plain.replace(character, "\\" + character)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
