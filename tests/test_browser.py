"""The browser harness tells the truth about a page: each fault that it looks for is seen where it is there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser as harness
from tests.browser import PHONE, Browser

pytestmark = pytest.mark.skipif(harness.missing() is not None, reason=str(harness.missing()))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with harness.browser() as started:
        yield started


def page(folder: Path, body: str) -> Path:
    file = folder / "page.html"
    file.write_text(f"<!doctype html><html lang=en><title>t</title><body>{body}", encoding="utf-8")
    return file


def test_requests_messages_and_boxes_that_are_too_wide_are_seen(browser: Browser, tmp_path: Path) -> None:
    late = "<script>setTimeout(() => { new Image().src = 'http://192.0.2.1/late.png' }, 60); undefined.x</script>"
    wide = "<div style='width:500px; height:9px'></div>"
    browser.show(page(tmp_path, f"<img src='http://192.0.2.1/dot.png'>{wide}{late}"), width=PHONE)
    names = {url.rpartition("/")[2] for url in browser.requests}
    assert names == {"page.html", "dot.png", "late.png"}
    assert any("undefined" in message for message in browser.messages)
    assert browser.width_needed() > PHONE
    file = page(tmp_path, f"<p style='color:#767676'>Text, <b>bold</b></p><div style='overflow-x:auto'>{wide}</div>")
    browser.show(file, width=PHONE)
    assert browser.requests == [file.as_uri()]
    assert browser.messages == []
    assert browser.faint_texts() == []
    assert browser.width_needed() == PHONE


@pytest.mark.parametrize(
    ("body", "ratio"),
    [
        ("<p style='color:#777'>Text</p>", 4.48),  # WCAG's own example of almost enough
        ("<div style='opacity:0.4'><p>Text</p></div>", 2.85),
        ("<svg><rect width=90 height=40 fill='#005'/><text y=20 fill='#000'>Text</text></svg>", 1.17),
        ("<style>@media (prefers-color-scheme: dark) { body { background: #111 } }</style><p>Text</p>", 1.11),
    ],
)
def test_faint_text_is_seen(browser: Browser, tmp_path: Path, body: str, ratio: float) -> None:
    browser.show(page(tmp_path, body), scheme="dark")
    (faint,) = browser.faint_texts()
    assert faint.text == "Text"
    assert faint.ratio == pytest.approx(ratio, abs=0.06)  # a half-transparent colour is rounded to 8 bits
