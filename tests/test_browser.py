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


def test_a_clean_page_asks_for_itself_only_and_says_nothing(browser: Browser, tmp_path: Path) -> None:
    image = "<img alt='' src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>"
    file = page(tmp_path, f"<p style='color:#767676'>Text, <b>bold</b></p><h1 style='color:#888'>Large</h1>{image}")
    browser.show(file, width=PHONE)
    assert [url for url in browser.requests if not url.startswith("data:")] == [file.as_uri()]
    assert browser.messages == []
    assert browser.faint_texts() == []
    assert browser.width_needed() == PHONE


def test_requests_and_messages_are_seen(browser: Browser, tmp_path: Path) -> None:
    late = "<script>setTimeout(() => { new Image().src = 'http://192.0.2.1/late.png' }, 60); undefined.x</script>"
    browser.show(page(tmp_path, f"<img src='http://192.0.2.1/dot.png'><script src='beside.js'></script>{late}"))
    names = {url.rpartition("/")[2] for url in browser.requests}
    assert names == {"page.html", "dot.png", "beside.js", "late.png"}
    assert any("undefined" in message for message in browser.messages)
    browser.show(page(tmp_path, "<script>Promise.reject('no')</script>"))
    assert len(browser.messages) == 1


@pytest.mark.parametrize(
    ("body", "ratio"),
    [
        ("<p style='color:#777'>Text</p>", 4.48),  # WCAG's own example of almost enough
        ("<p style='color:rgb(0 0 0 / 50%)'>Text</p>", 3.95),
        ("<div style='background:#000'><p style='color:#444; background:transparent'>Text</p></div>", 2.16),
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


def test_a_box_that_is_too_wide_is_seen(browser: Browser, tmp_path: Path) -> None:
    wide = "<div id=wide style='width:500px; height:9px'></div>"
    browser.show(page(tmp_path, wide), width=PHONE)
    assert browser.width_needed() > PHONE
    assert browser.run("return tooWide()") == ["div#wide"]
    browser.show(page(tmp_path, f"<div style='overflow-x:auto'>{wide}</div>"), width=PHONE)
    assert browser.width_needed() == PHONE
    assert browser.run("return tooWide()") == []


def test_the_order_of_the_tab_key(browser: Browser, tmp_path: Path) -> None:
    body = "<a href='#x'>One</a><button>Two</button><span tabindex=0 id=s style='outline:none'>Three</span>"
    browser.show(page(tmp_path, body))
    assert browser.tab_stops(9) == (["a One", "button Two", "span#s Three"], ["span#s Three"])
