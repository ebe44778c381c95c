"""The page of ``ladderize report`` in a headless chromium, on a phone and on a desk, light and dark.

The browser and its driver are Debian's (`.ci/run` installs them). Selenium is told where they are, so that it never
downloads any.
"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement

from ladderize.layout import Layout
from ladderize.report.page import write_report
from tests.report_documents import bench_document, eval_document, layouts, write_document
from tests.warm import PATIENCE

missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"{' and '.join(missing)} not installed (apt-get install chromium chromium-driver)"
)

BAD = "<img src=http://192.0.2.1/x onerror=console.error(1)></script><script>console.error(2)</script>`${1}`"
SCRIPTS = Path(__file__).with_name("browser.js").read_text(encoding="utf-8")
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # CI is root, for whom chromium has no sandbox; the pages are ours
    "--disable-dev-shm-usage",  # /dev/shm of a container is small
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",  # whose width would be taken off the page's
)


class Browser:
    """requests, messages: what the last page asked for, and what it printed on the console."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def show(self, page: Path, width: int, scheme: str) -> None:
        """Open the file on a screen of this width (pixels) and wait until nothing changes any more."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": listed})
        self._read_logs()  # what the page before it left
        self.driver.get(page.resolve().as_uri())
        self.run("return settled()")
        self._read_logs()

    def run(self, script: str) -> Any:
        """Return what a script returns, with the functions of browser.js defined; a promise is waited for."""
        return self.driver.execute_script(SCRIPTS + script)

    def _read_logs(self) -> None:
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        self.requests = [params["request"]["url"] for params in sent]
        entries = self.driver.get_log("browser")
        self.messages = [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=shutil.which("chromedriver")))
    driver.set_script_timeout(PATIENCE)
    driver.set_page_load_timeout(PATIENCE)
    yield Browser(driver)
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of measured and emulated times of the four ends, a mixture of random layers, and a name that is none."""
    some = sorted(random.sample(range(1, 12), 5))
    mixed = Layout.from_layers(12, ladder=range(6, 12), spd=some, sync_tp_size=2)
    models = {**layouts(12), "a-mixture-with-a-long-name-of-its-own": mixed, BAD: Layout.from_layers(12, ladder=[3])}
    folder = tmp_path_factory.mktemp("report")
    faster = {name: random.uniform(0.9, 1.6) for name in models}
    write_document(folder / "results.json", eval_document(models, {name: random.uniform(-4, 0.3) for name in models}))
    write_document(folder / "bench.json", bench_document(models, faster, batches=(1, 4)))
    write_document(folder / "bench-emulated.json", bench_document(models, faster, emulated=True))
    write_report([folder], folder / "page.html")
    return folder / "page.html"


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (1280, "dark")])
def test_nothing_goes_wrong_and_everything_stands_out(browser: Browser, page: Path, width: int, scheme: str) -> None:
    """Texts by 4.5:1 or, where they are large, 3:1; shapes that carry data by 3:1 (WCAG 1.4.3 and 1.4.11). Nobody
    scrolls the page sideways. What documents say becomes no markup."""
    browser.show(page, width, scheme)

    def find(selector: str) -> list[WebElement]:
        return browser.driver.find_elements("css selector", selector)

    assert [url for url in browser.requests if not url.startswith("data:")] == [page.as_uri()]
    assert browser.messages == []
    browser.run("document.querySelectorAll('details').forEach((d) => { d.open = true })")
    assert browser.run("return faintTexts()") == []
    assert browser.run("return faintMarks()") == []
    assert (sum(browser.run("return behind(document.body)")[:3]) < 150) == (scheme == "dark")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert find("#answer .headline")[0].rect["y"] < 700  # the answer is on the first screen
    assert "script>`${1}`" in find("#models table")[0].text  # the last part of the path
    assert not find("img, script")
    heads = [head.text.replace("\n", " ") for head in find("#models thead th")[:4]]
    assert heads == ["model", "points from dense", "within 1 point", "measured speed-up"]
    for figure in find("figure"):  # a mark for each line of the data, described alike
        titles = {element.get_attribute("textContent") for element in figure.find_elements("css selector", "title")}
        listed = {element.text for element in figure.find_elements("css selector", "li")}
        assert {" ".join(str(title).split()) for title in titles} == {" ".join(line.split()) for line in listed}
    for element in find("figure, [role=region], nav"):
        assert element.accessible_name, element.get_attribute("outerHTML")[:200]
    for anchor in find("a[href^='#']"):
        assert find(anchor.get_dom_attribute("href") or ""), anchor.text
