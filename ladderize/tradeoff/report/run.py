"""``ladderize report``: from documents to one page, its pictures, and Markdown."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from ladderize.console import SILENT, Console
from ladderize.errors import UsageError, UserError
from ladderize.figure import picture_spec, save_pictures
from ladderize.files.documents import check_writable
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.temporaries import replacement
from ladderize.tradeoff.report.answer import find_answer
from ladderize.tradeoff.report.documents import find_documents
from ladderize.tradeoff.report.join import join_documents
from ladderize.tradeoff.report.options import ReportOptions
from ladderize.tradeoff.report.page import ReportPage, build_page, check_libraries, html_page, markdown_page


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

    paths: folders of sweeps, or files and folders with results.json, bench.json, sensitivity.json and training curves.
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
