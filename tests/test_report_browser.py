"""The page of ``ladderize report`` as a reader meets it: in a real browser, on a phone, on a desk, light and dark."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.remote.webelement import WebElement

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


# of the names and the marks of a plot, with what lies on what
ON_EACH_OTHER = """
const boxes = (selector) => [...arguments[0].querySelectorAll(selector)].map((one) => one.getBoundingClientRect());
const [marks, names] = [boxes(".mark-symbol.role-mark path[aria-label]"), boxes(".mark-text.role-mark text")];
const firsts = names.filter((_, i) => i < names.length / 2);  // each name has a halo of the same text beneath it
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
const pairs = firsts.flatMap((a, i) => [...marks, ...firsts.slice(i + 1)].filter((b) => meet(a, b)));
return [marks.length, firsts.length, pairs.length];
"""


@pytest.mark.parametrize("count", [2, 10, 30])
def test_names_lie_on_no_mark_and_on_no_name(browser: Browser, tmp_path: Path, count: int) -> None:
    """Nearly all models of the front have names, whole ones, and no other model has."""
    layers = 24
    names = [f"{kind}-{upper}{way}" for upper in range(1, 9) for kind in ("spd", "ladder") for way in ("", "+align")]
    chosen = random.sample(names, count - 1)
    models = {"dense": Layout.dense(layers), **dict.fromkeys(chosen, Layout.from_layers(layers, ladder=[3]))}
    points = {name: -random.expovariate(0.3) for name in chosen}
    faster = {name: random.uniform(1.0, 1.5) for name in chosen}
    write_document(tmp_path / "results.json", eval_document(models, points))
    write_document(tmp_path / "bench.json", bench_document(models, faster))
    write_report([tmp_path], tmp_path / "page.html")
    browser.show(tmp_path / "page.html")
    (plot,) = browser.find("#plot-tradeoff svg")
    front = [one for one in plot.find_elements("css selector", "title") if "on the Pareto front" in str(title_of(one))]
    texts = {one.text for one in plot.find_elements("css selector", ".mark-text.role-mark text")}
    marks, named, pairs = browser.run(ON_EACH_OTHER, plot)
    assert (marks, pairs) == (count, 0)
    assert texts <= {str(title_of(one)).partition(" (")[0].partition(";")[0] for one in front}
    assert named >= 0.8 * len(front)


def title_of(element: WebElement) -> str | None:
    return element.get_attribute("textContent")


def test_a_narrow_screen_shows_the_answer_of_each_model(browser: Browser, page: Path) -> None:
    browser.show(page, width=500)
    heads = browser.find("#models thead th")[:4]
    assert [head.text.replace("\n", " ") for head in heads] == [
        "model", "points from dense", "within 1 point", "measured speed-up",
    ]  # fmt: skip
    assert heads[-1].rect["x"] + heads[-1].rect["width"] <= 500


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
