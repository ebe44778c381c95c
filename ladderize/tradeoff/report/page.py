"""``ladderize report``: from documents to one HTML page that needs nothing else, its pictures, and Markdown. Everything
that comes from a document is escaped."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ladderize
from ladderize.console import SILENT, Console, printable
from ladderize.errors import UsageError, UserError
from ladderize.figure import PALETTE, picture_spec, save_pictures, svg_picture
from ladderize.files.documents import check_writable
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.temporaries import replacement
from ladderize.tradeoff.report.accuracy_plots import recovery_plots, task_plots
from ladderize.tradeoff.report.answer import MEASURE_ACCURACY, MEASURE_SPEED, Answer, find_answer
from ladderize.tradeoff.report.documents import find_documents
from ladderize.tradeoff.report.join import ReportContent, join_documents
from ladderize.tradeoff.report.options import ReportOptions
from ladderize.tradeoff.report.plot import ReportPlot
from ladderize.tradeoff.report.sensitivity_plots import sensitivity_plots
from ladderize.tradeoff.report.speed_plots import speed_plots, time_plots
from ladderize.tradeoff.report.tables import Facts, layout_strips, models_table, setup_facts
from ladderize.tradeoff.report.tradeoff_plot import tradeoff_plots
from ladderize.tradeoff.report.words import ReportTable

TEMPLATES = Path(__file__).parent / "templates"
TITLE = "Accuracy against speed"
MEASURE_SENSITIVITY = "ladderize sensitivity DENSE --data FILE --mode spd --sync-tp-size N --out sensitivity.json"
RETRAIN = "ladderize adapt MODEL OUT --distill-from DENSE --data FILE --max-tokens N"


@dataclass(frozen=True)
class PageSection:
    """commands: what made the data of its plots. missing: where there are none, why, and which command makes it."""

    name: str
    title: str
    plots: list[ReportPlot]
    commands: list[str]
    missing: str


@dataclass(frozen=True)
class ReportPage:
    """All that the templates show."""

    title: str
    answer: Answer
    tradeoff: PageSection
    models: ReportTable
    models_intro: str
    strips: list[dict[str, Any]]
    sections: list[PageSection]
    setup: list[tuple[str, Facts]]
    remarks: list[str]
    version: str = ladderize.__version__

    @property
    def plots(self) -> list[ReportPlot]:
        return [plot for section in (self.tradeoff, *self.sections) for plot in section.plots]


@dataclass(frozen=True)
class ReportSummary(Record):
    """What was written, and the answer."""

    out: str
    headline: str
    best: str | None  # the model that is recommended
    numbers: list[dict[str, str]]
    files: list[str]  # page, Markdown, pictures


def report(
    paths: Sequence[str | Path],
    out: str | Path,
    options: ReportOptions | None = None,
    *,
    console: Console = SILENT,
) -> ReportSummary:
    """Write one HTML page about the trade-off between accuracy and speed.

    paths: folders of sweeps, or files and folders with results.json, bench.json, sensitivity.json and metrics.jsonl.
    Raises UserError for documents that are corrupt, foreign, or do not belong together.
    """
    options = options or ReportOptions()
    out = resolved(out)
    check_libraries()
    if not paths:
        raise UsageError("name the folder of a sweep, or files that eval and bench wrote")
    _check_places(out, options)
    with console.stage("reading"):
        found = find_documents([Path(path) for path in paths])
        if found.empty:
            raise UserError("nothing to report on; name the folder of a sweep, or files that eval and bench wrote")
        if out in found.seen:
            raise UserError(f"--out {out} is one of the documents that the report is made of; name another")
        content = join_documents(found, options)
    with console.stage("drawing"):
        answer = find_answer(content)
        page = build_page(content, answer, options.title)
        written = [_write(out, html_page(page))]
        pictures = _write_pictures(page, options.picture_folder)
        written += [path for paths in pictures.values() for path in paths]
        if options.markdown is not None:
            path = resolved(options.markdown)
            links = {name: [_link(one, path) for one in paths[::2]] for name, paths in pictures.items()}
            written.append(_write(path, markdown_page(page, links)))
    numbers = [vars(number) for number in answer.numbers]
    best = answer.best.model if answer.best is not None else None
    return ReportSummary(str(out), answer.headline, best, numbers, [str(path) for path in written])


def _check_places(out: Path, options: ReportOptions) -> None:
    if out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out} must end in .html")
    check_writable(out)
    if options.markdown is not None:
        if not (parent := resolved(options.markdown).parent).is_dir():
            raise UserError(f"--markdown {options.markdown}: the folder {parent} does not exist")
        check_writable(options.markdown)
    folder = options.picture_folder
    if folder is not None and resolved(folder).exists() and not resolved(folder).is_dir():
        raise UserError(f"--pictures {folder} is a file; name a folder")


def _write(path: Path, text: str) -> Path:
    with replacement(path) as file:
        file.write(text)
    return path


def _write_pictures(page: ReportPage, folder: Path | None) -> dict[str, list[Path]]:
    """name of a plot -> its pictures, PNG and SVG by turns."""
    if folder is None:
        return {}
    folder = resolved(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, list[Path]] = {}
    for plot in page.plots:
        for number, panel in enumerate(plot.panels, 1):
            stem = plot.name if len(plot.panels) == 1 else f"{plot.name}-{number}"
            written.setdefault(plot.name, []).extend(save_pictures(picture_spec([panel]), folder / stem))
    return written


def _link(picture: Path, file: Path) -> str:
    return quote(Path(os.path.relpath(picture, file.parent)).as_posix())


# ---- the page ----


def build_page(content: ReportContent, answer: Answer, title: str | None) -> ReportPage:
    """The sections in their order: what there is data for, and for the rest a sentence that says what makes it."""
    setting = answer.setting or next(iter(content.real_settings), None)
    reference, found = content.reference, content.found
    lacking = MEASURE_ACCURACY if content.real_settings else MEASURE_SPEED
    results, timing = found.commands("results"), found.commands("benches", "plans")
    sensitivities = found.commands("sensitivities", "points")
    tradeoff = PageSection(
        name="tradeoff",
        title="The trade-off",
        plots=tradeoff_plots(content, answer),
        commands=found.commands() or found.commands("results", "benches", "plans"),
        missing=f"There is no model with both a score and a time. `{lacking}` measures what is missing.",
    )
    untasked = f"No task was evaluated. `{MEASURE_ACCURACY}` does it."
    untimed = f"Nothing was timed. `{MEASURE_SPEED}` does it."
    unsplit = f"The communication was not measured. `{MEASURE_SPEED}` does it."
    unknown = f"The sensitivity of the blocks was not measured. `{MEASURE_SENSITIVITY}` does it."
    unadapted = f"Nothing was adapted here. `{RETRAIN}` wins accuracy back."
    sections = [
        PageSection("tasks", "Task by task", task_plots(content), results, untasked),
        PageSection("speed", "Speed", speed_plots(content), timing, untimed),
        PageSection("time", "Where the time goes", time_plots(content), timing, unsplit),
        PageSection("sensitivity", "Sensitivity", sensitivity_plots(found), sensitivities, unknown),
        PageSection("recovery", "Recovery", recovery_plots(content), found.commands(), unadapted),
    ]
    return ReportPage(
        title=title or (f"{TITLE}: {reference.name}" if reference is not None else TITLE),
        answer=answer,
        tradeoff=tradeoff,
        models=models_table(content, setting),
        models_intro="Select a heading to sort by it." + (f" Times: {setting.words}." if setting is not None else ""),
        strips=layout_strips(content),
        sections=sections,
        setup=setup_facts(found),
        remarks=content.remarks,
    )


def check_libraries() -> None:
    """Raise UserError where the extra ``report`` is not installed."""
    try:
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise UserError("a report needs jinja2 and vl-convert-python: pip install 'ladderize[report]'") from None


@cache
def _library() -> str:
    """vega-embed as a script; a second to make, and always the same."""
    import vl_convert

    return _for_script(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))


def html_page(page: ReportPage) -> str:
    """The page as text."""
    return _render(
        "page.html.j2",
        page=page,
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
        library=_library() if page.plots else "",
        palette=PALETTE,
        specs={plot.name: script_json([panel.spec for panel in plot.panels]) for plot in page.plots},
        pictures={plot.name: [svg_picture(picture_spec([panel])) for panel in plot.panels] for plot in page.plots},
    )


def markdown_page(page: ReportPage, pictures: dict[str, list[str]]) -> str:
    """For a README or a model card. pictures: name of a plot -> links to its pictures."""
    return _render("report.md.j2", page=page, pictures=pictures)


def script_json(value: object) -> str:
    """JSON that can stand in a script element: no text in it ends that, or begins a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _for_script(code: str) -> str:
    """Raise UserError where a library holds what would end its script element."""
    if "</script" in code.lower() or "<!--" in code:
        raise UserError("this version of vl-convert-python cannot be put in a page; install 1.9")
    return code


def markdown_text(text: object) -> str:
    """Text that means nothing to Markdown or HTML, on one line; what stands between backticks stays code."""
    parts = re.split(r"(?<!`)(`[^`<>&|]+`)(?!`)", " ".join(str(text).split()))
    return "".join(part if number % 2 else _escaped(part) for number, part in enumerate(parts))


def _escaped(plain: str) -> str:
    for character in "\\`*_[]|#":
        plain = plain.replace(character, "\\" + character)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code_parts(text: str) -> list[tuple[bool, str]]:
    """A sentence in parts: (whether it stands between backticks, the text)."""
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
        finalize=lambda value: printable(value) if type(value) is str else value,  # not what is HTML already
    )
    environment.filters |= {"md": markdown_text, "code": code_parts}
    return environment.get_template(name).render(**values)
