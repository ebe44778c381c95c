"""The page of ``ladderize report`` as a reader meets it: in a real browser, on a phone, on a desk, light and dark."""

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from ladderize.layout import Layout
from ladderize.report.page import write_report
from tests import browser as harness
from tests.browser import DESKTOP, PHONE, Browser
from tests.report_documents import bench_document, eval_document, layouts, write_document

pytestmark = pytest.mark.skipif(harness.missing() is not None, reason=str(harness.missing()))

MARK = "[role=graphics-symbol][aria-label]:not([class*=role-axis])"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with harness.browser() as started:
        yield started


@pytest.fixture(scope="module")
def models() -> dict[str, Layout]:
    """The layouts of the page: the four ends, and a mixture of random layers."""
    layers = 12
    some = sorted(random.sample(range(1, layers), 5))
    mixed = Layout.from_layers(layers, ladder=range(6, layers), spd=some, sync_tp_size=2)
    return {**layouts(layers), "a-mixture-with-a-long-name-of-its-own": mixed}


@pytest.fixture(scope="module")
def page(models: dict[str, Layout], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of measured and emulated times at three batch sizes."""
    folder = tmp_path_factory.mktemp("report")
    points = {name: random.uniform(-4, 0.3) for name in models}
    faster = {name: random.uniform(0.9, 1.6) for name in models}
    write_document(folder / "results.json", eval_document(models, points))
    write_document(folder / "bench.json", bench_document(models, faster, batches=(1, 4, 16)))
    emulated = bench_document(models, {name: 1 + 1.3 * (x - 1) for name, x in faster.items()}, emulated=True)
    write_document(folder / "emulated.json", emulated)
    names = ("results.json", "bench.json", "emulated.json")
    write_report([folder / name for name in names], folder / "page.html")
    return folder / "page.html"


def show(browser: Browser, page: Path, **how: Any) -> None:
    """Open the page and wait until all its plots are drawn."""
    browser.show(page, ready="html[data-ready]", **how)


def rows_of(browser: Browser, table: WebElement) -> list[list[str]]:
    """The text that is seen in each cell, of all rows at once: a request for every cell takes seconds."""
    script = (
        "return [...arguments[0].tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"
    )
    return browser.run(script, table)


# ---- what a reader must not meet ----


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_goes_wrong_and_everything_stands_out(browser: Browser, page: Path, width: int, scheme: str) -> None:
    """Texts by 4.5:1 or, where they are large, 3:1; shapes that carry data by 3:1 (WCAG 1.4.3 and 1.4.11)."""
    show(browser, page, width=width, scheme=scheme)
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.as_uri()]
    assert browser.messages == []
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    assert browser.faint_texts() == []
    assert browser.run("return faintMarks()") == []
    assert (sum(browser.run("return behind(document.body)")[:3]) < 150) == (scheme == "dark")


@pytest.mark.parametrize("width", [320, DESKTOP])
def test_nobody_scrolls_sideways(browser: Browser, page: Path, width: int) -> None:
    show(browser, page, width=width)
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    assert browser.run("return tooWide()") == []
    assert browser.width_needed() <= width
    assert browser.find("#answer .headline")[0].rect["y"] < 700  # the answer is on the first screen


# ---- the plots ----


def test_every_plot_has_marks_and_the_data_beneath_it(browser: Browser, page: Path) -> None:
    show(browser, page, width=PHONE)
    figures = browser.find("figure.plot")
    assert len(figures) >= 3
    for figure in figures:
        name = figure.get_attribute("id")
        assert browser.run("return marksOf(arguments[0]).length", figure) >= 4, name
        assert figure.find_element("css selector", "figcaption").text, name
        details = figure.find_element("css selector", "details.data")
        details.find_element("css selector", "summary").click()
        assert len([row for row in details.find_elements("css selector", "li") if row.text]) >= 2, name


def test_every_mark_of_the_trade_off_tells_its_model_and_kind(
    browser: Browser, page: Path, models: dict[str, Layout]
) -> None:
    """To the keyboard and to the mouse; kinds of times differ in shape and word."""
    show(browser, page)
    status = browser.find("#plot-tradeoff [role=status]")[0]
    shapes: dict[str, set[str]] = {kind: set() for kind in ("measured", "emulated")}
    reached: set[str] = set()
    choice = browser.find("#plot-tradeoff select[data-parameter=setting]")[0]
    for option in choice.find_elements("css selector", "option"):
        option.click()
        browser.run("return settled()")
        (kind,) = (kind for kind in shapes if kind in option.text)
        marks = browser.find(f"#plot-tradeoff {MARK}")
        for mark in marks:
            label = mark.get_attribute("aria-label") or ""
            assert shapes.keys() & set(re.findall(r"\w+", label)) == {kind}
            shapes[kind].add(re.sub(r"[-\d.]+", "0", mark.get_attribute("d") or ""))
            reached |= {name for name in models if name in label}
        browser.focus(marks[0])
        assert status.text.split() == (marks[0].get_attribute("aria-label") or "").split()
        browser.hover(marks[0])  # another mark, or a name, may lie on it
        assert any(status.text.split() == (mark.get_attribute("aria-label") or "").split() for mark in marks)
    assert reached == set(models)
    assert all(shapes.values())
    assert all(not one & other for one, other in itertools.combinations(shapes.values(), 2))


# ---- the tables ----


def test_a_table_sorts_by_every_column(browser: Browser, page: Path) -> None:
    """By the mouse, by Enter and by the space bar."""
    show(browser, page)
    (table,) = browser.find("table.sortable")
    before = sorted(rows_of(browser, table))
    ways = itertools.cycle(["click", Keys.ENTER, Keys.SPACE])
    for column, button in enumerate(table.find_elements("css selector", "thead button")):
        for direction in ("ascending", "descending"):
            way = next(ways)
            if way == "click":
                button.click()
            else:
                browser.focus(button)
                browser.press(way)
            sorts, keys = browser.run(
                "return [[...arguments[0].tHead.rows[0].cells].map((head) => head.ariaSort),"
                " [...arguments[0].tBodies[0].rows].map((row) => {"
                " const cell = row.cells[arguments[1]]; return cell.dataset.value ?? cell.textContent.trim() })]",
                table,
                column,
            )
            assert [place for place, value in enumerate(sorts) if value != "none"] == [column]
            assert sorts[column] == direction
            assert sorted(rows_of(browser, table)) == before
            known = [key for key in keys if key != ""]
            assert keys == known + [""] * (len(keys) - len(known)), "what is not known comes last"
            numbers = all(is_number(key) for key in known)
            values = [float(key) if numbers else key.casefold() for key in known]
            assert values == sorted(values, reverse=direction == "descending"), (column, direction)


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# ---- for everybody ----


def test_headings_landmarks_and_names(browser: Browser, page: Path) -> None:
    show(browser, page)
    assert browser.find("html")[0].get_attribute("lang") == "en"
    assert browser.driver.title
    levels = [int(head.tag_name[1]) for head in browser.find("h1, h2, h3, h4, h5, h6")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert len(browser.find("main")) == 1
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")  # what is hidden has no name
    ids = [element.get_attribute("id") for element in browser.find("[id]")]
    assert len(ids) == len(set(ids))
    for element in browser.find("figure.plot, .chart [role=graphics-document], [role=region], button, select, nav"):
        assert element.accessible_name, element.get_attribute("outerHTML")[:200]
    for anchor in browser.find("a[href^='#']"):
        assert browser.find(anchor.get_dom_attribute("href") or ""), anchor.text


def test_the_tab_key_reaches_everything_that_can_be_used(browser: Browser, page: Path) -> None:
    show(browser, page)
    wanted = browser.run("return usable().map(described)")
    stops, unseen = browser.tab_stops(len(wanted) + 20)
    assert stops[0].startswith("a Skip")
    assert not set(wanted) - set(stops)
    assert unseen == []


def test_a_printed_page_is_light_and_shows_the_data(browser: Browser, page: Path) -> None:
    show(browser, page, scheme="dark", media="print")
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.faint_texts() == []
    assert sum(browser.run("return behind(document.body)")[:3]) > 600
    assert all(details.get_attribute("open") for details in browser.find("details"))
    assert not [e for e in browser.find("nav, .status, .choices") if e.is_displayed()]
    assert browser.printed_pages() >= 2
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert not browser.find("details.data[open]")


def test_without_javascript_there_are_pictures(browser: Browser, page: Path) -> None:
    with browser.without_scripts():
        browser.show(page)
        figures = browser.find("figure.plot")
        assert figures
        for figure in figures:
            assert figure.find_elements("css selector", "noscript svg")


# ---- text that documents bring ----


def test_a_name_cannot_become_markup(browser: Browser, tmp_path: Path) -> None:
    bad = "<img src=http://192.0.2.1/x onerror=console.error(1)></script><script>console.error(2)</script>`${1}`"
    models = {"dense": Layout.dense(4), bad: Layout.from_layers(4, ladder=range(4))}
    write_document(tmp_path / "results.json", eval_document(models, {bad: -0.2}))
    write_document(tmp_path / "bench.json", bench_document(models, {bad: 1.2}))
    page = tmp_path / "page.html"
    write_report([tmp_path / "results.json", tmp_path / "bench.json"], page)
    show(browser, page)
    assert browser.requests == [page.as_uri()] or browser.requests == [page.as_uri(), "data:,"]
    assert browser.messages == []
    assert "script>`${1}`" in browser.find("#models table")[0].text  # the last part of the path
    assert not browser.find("img")
