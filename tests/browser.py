"""A headless chromium that shows a local page and tells what a reader would meet: console messages, requests, text that
is too faint, boxes wider than the screen.

The browser and its driver are Debian's (`.ci/run` installs them). Selenium is told where they are, so that it never
downloads any.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webelement import WebElement

from tests.warm import PATIENCE

Scheme = Literal["light", "dark"]
PHONE, DESKTOP = 390, 1280
SHARED = Path(__file__).with_name("browser.js")


def missing() -> str | None:
    """Why no browser can be started here, or None."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (apt-get install chromium chromium-driver)" if absent else None


@dataclass(frozen=True)
class Faint:
    """Text that stands out too little. ratio: WCAG's contrast with what is behind it, 1 to 21; needed: at least."""

    text: str
    element: str
    colour: str
    behind: str
    ratio: float
    needed: float


class Browser:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.requests: list[str] = []
        self.messages: list[str] = []

    def show(self, page: Path, *, width: int = DESKTOP, scheme: Scheme = "light") -> None:
        """Open the file as a reader of this screen width (pixels) and colour scheme does, and wait until nothing
        changes any more. What it asks for and what it prints on the console is in `requests` and `messages` then."""
        self._command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        listed = [{"name": name, "value": value} for name, value in features.items()]
        self._command("Emulation.setEmulatedMedia", media="", features=listed)
        self._drain()  # what the page before it left
        self.requests, self.messages = [], []
        self.driver.get(page.resolve().as_uri())
        self.run("return settled()")
        self._drain()

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns, with the functions of browser.js defined; a promise is waited for."""
        return self.driver.execute_script(SHARED.read_text(encoding="utf-8") + script, *arguments)

    def find(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements("css selector", selector)

    def faint_texts(self) -> list[Faint]:
        return [Faint(**found) for found in self.run("return faintTexts()")]

    def _command(self, name: str, **arguments: Any) -> None:
        self.driver.execute_cdp_cmd(name, arguments)

    def _drain(self) -> None:
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])
        self.messages += [
            f"{entry['level']}: {entry['message']}"
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that ends with the block. Raises what selenium raises where it cannot be started."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new",
        "--no-sandbox",  # CI is root, for whom chromium has no sandbox; the pages are ours
        "--disable-dev-shm-usage",  # /dev/shm of a container is small
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--hide-scrollbars",  # whose width would be taken off the page's
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(PATIENCE)
        driver.set_page_load_timeout(PATIENCE)
        yield Browser(driver)
    finally:
        driver.quit()
