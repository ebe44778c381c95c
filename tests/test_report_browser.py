"""The page of ``ladderize report`` as a reader meets it: in a real browser, on a phone, on a desk, light and dark."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ladderize.layout import Layout
from ladderize.report.page import write_report
from tests import browser as harness
from tests.browser import DESKTOP, PHONE, Browser
from tests.report_documents import bench_document, eval_document, layouts, write_document

pytestmark = pytest.mark.skipif(harness.missing() is not None, reason=str(harness.missing()))

BAD = "<img src=http://192.0.2.1/x onerror=console.error(1)></script><script>console.error(2)</script>`${1}`"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with harness.browser() as started:
        yield started


@pytest.fixture(scope="module")
def models() -> dict[str, Layout]:
    """The layouts of the page: the four ends, a mixture of random layers, and a name that is no name."""
    layers = 12
    some = sorted(random.sample(range(1, layers), 5))
    mixed = Layout.from_layers(layers, ladder=range(6, layers), spd=some, sync_tp_size=2)
    return {
        **layouts(layers),
        "a-mixture-with-a-long-name-of-its-own": mixed,
        BAD: Layout.from_layers(layers, ladder=[3]),
    }


@pytest.fixture(scope="module")
def page(models: dict[str, Layout], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of measured and emulated times."""
    folder = tmp_path_factory.mktemp("report")
    points = {name: random.uniform(-4, 0.3) for name in models}
    faster = {name: random.uniform(0.9, 1.6) for name in models}
    write_document(folder / "results.json", eval_document(models, points))
    write_document(folder / "bench.json", bench_document(models, faster, batches=(1, 4)))
    emulated = bench_document(models, {name: 1 + 1.3 * (x - 1) for name, x in faster.items()}, emulated=True)
    write_document(folder / "emulated.json", emulated)
    names = ("results.json", "bench.json", "emulated.json")
    write_report([folder / name for name in names], folder / "page.html")
    return folder / "page.html"


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (PHONE, "dark"), (DESKTOP, "light"), (DESKTOP, "dark")])
def test_nothing_goes_wrong_and_everything_stands_out(browser: Browser, page: Path, width: int, scheme: str) -> None:
    """Texts by 4.5:1 or, where they are large, 3:1; shapes that carry data by 3:1 (WCAG 1.4.3 and 1.4.11). Nobody
    scrolls the page sideways. What documents say becomes no markup."""
    browser.show(page, width=width, scheme=scheme)
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.as_uri()]
    assert browser.messages == []
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    assert browser.faint_texts() == []
    assert browser.run("return faintMarks()") == []
    assert (sum(browser.run("return behind(document.body)")[:3]) < 150) == (scheme == "dark")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.find("#answer .headline")[0].rect["y"] < 700  # the answer is on the first screen
    assert "script>`${1}`" in browser.find("#models table")[0].text  # the last part of the path
    assert not browser.find("img, script")


def test_every_plot_has_marks_with_words_and_the_data_beneath_it(
    browser: Browser, page: Path, models: dict[str, Layout]
) -> None:
    browser.show(page, width=PHONE)
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    figures = browser.find("figure")
    assert len(figures) > 3
    for figure in figures:
        name = figure.get_attribute("id")
        words = browser.run("return [...arguments[0].querySelectorAll('title')].map((one) => one.textContent)", figure)
        listed = [row.text for row in figure.find_elements("css selector", "li")]
        assert {" ".join(one.split()) for one in words} == {" ".join(one.split()) for one in listed}, name
        assert all(any(model in one for one in words) for model in models if model not in ("dense", BAD)), name


def test_headings_landmarks_and_names(browser: Browser, page: Path) -> None:
    browser.show(page)
    assert browser.find("html")[0].get_attribute("lang") == "en"
    assert browser.driver.title
    levels = [int(head.tag_name[1]) for head in browser.find("h1, h2, h3, h4, h5, h6")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    ids = [element.get_attribute("id") for element in browser.find("[id]")]
    assert len(ids) == len(set(ids))
    for element in browser.find("figure, [role=region], nav"):
        assert element.accessible_name, element.get_attribute("outerHTML")[:200]
    for anchor in browser.find("a[href^='#']"):
        assert browser.find(anchor.get_dom_attribute("href") or ""), anchor.text
