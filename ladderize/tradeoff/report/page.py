"""The page: one HTML file that needs nothing else. Everything that comes from a document is escaped."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.tradeoff.report.content.answer import Answer
from ladderize.tradeoff.report.content.setup import SetupFact
from ladderize.tradeoff.report.content.strips import LayoutStrip
from ladderize.tradeoff.report.content.tables import ReportTable
from ladderize.tradeoff.report.plots.base import PALETTE, PlotPanel, ReportPlot, picture_spec

TEMPLATES = Path(__file__).parent / "templates"
NEEDED = "a report needs jinja2 and vl-convert-python: pip install 'ladderize[report]'"


@dataclass(frozen=True)
class PageSection:
    """intro: what to know first; missing: why there is nothing, and which command makes it."""

    name: str
    title: str
    intro: str = ""
    plots: tuple[ReportPlot, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class ReportPage:
    """All that the templates show."""

    title: str
    answer: Answer
    tradeoff: PageSection
    models: ReportTable
    models_intro: str
    strips: list[LayoutStrip]
    sections: list[PageSection]
    setup: list[SetupFact]
    remarks: list[str]
    version: str

    @property
    def plots(self) -> list[ReportPlot]:
        return [plot for section in (self.tradeoff, *self.sections) for plot in section.plots]


def check_libraries() -> None:
    """Raise UserError where the extra ``report`` is not installed."""
    try:
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError:
        raise UserError(NEEDED) from None


def html_page(page: ReportPage) -> str:
    """The page as text."""
    import vl_convert

    return _render(
        "page.html.j2",
        page=page,
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
        library=_for_script(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")) if page.plots else "",
        palette=PALETTE,
        specs={plot.name: script_json([panel.spec for panel in plot.panels]) for plot in page.plots},
        pictures={plot.name: [svg_picture(panel) for panel in plot.panels] for plot in page.plots},
    )


def markdown_page(page: ReportPage, pictures: dict[str, list[str]]) -> str:
    """For a README or a model card. pictures: name of a plot -> links to its pictures."""
    return _render("report.md.j2", page=page, pictures=pictures)


def svg_picture(panel: PlotPanel) -> str:
    """One plot as SVG, in the light colours."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(picture_spec(panel), allowed_base_urls=[]))


def png_picture(panel: PlotPanel) -> bytes:
    """The same as PNG, for dense screens."""
    import vl_convert

    return bytes(vl_convert.vegalite_to_png(picture_spec(panel), scale=2, allowed_base_urls=[]))


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
    """Text that means nothing to Markdown or HTML, on one line."""
    plain = " ".join(str(text).split())
    for character in "\\`*_[]|#":
        plain = plain.replace(character, "\\" + character)
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _render(name: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["md"] = markdown_text
    environment.filters["code"] = code_parts
    return environment.get_template(name).render(**values)


def code_parts(text: str) -> list[tuple[bool, str]]:
    """A sentence in parts: (whether it stands between backticks, the text)."""
    return [(number % 2 == 1, part) for number, part in enumerate(text.split("`"))]
