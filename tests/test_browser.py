"""What the browser harness tells of a page is true: each fault that it looks for is seen where it is there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import browser as harness
from tests.browser import PHONE, Browser

pytestmark = pytest.mark.skipif(harness.missing() is not None, reason=str(harness.missing()))

PLOT = '<figure><svg width="90" height="90"><g class="mark-symbol role-mark">{}</g></svg></figure>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with harness.browser() as started:
        yield started


def page(folder: Path, body: str, head: str = "") -> Path:
    file = folder / "page.html"
    file.write_text(f"<!doctype html><html lang=en><title>t</title>{head}<body>{body}", encoding="utf-8")
    return file


def test_a_clean_page_asks_for_itself_only_and_says_nothing(browser: Browser, tmp_path: Path) -> None:
    file = page(tmp_path, "<p>Text, <b>bold</b></p><img alt='' src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>")
    browser.show(file, width=PHONE)
    assert [url for url in browser.requests if not url.startswith("data:")] == [file.as_uri()]
    assert browser.messages == []
    assert browser.faint_texts() == []
    assert browser.width_needed() == PHONE


@pytest.mark.parametrize(
    "body",
    [
        "<img src='http://192.0.2.1/dot.png'>",
        "<script>fetch('https://192.0.2.1/')</script>",
        "<style>@font-face{font-family:f;src:url(http://192.0.2.1/f.woff2)} p{font-family:f}</style><p>Text</p>",
        "<script>setTimeout(() => { new Image().src = 'http://192.0.2.1/late.png' }, 60)</script>",
        "<script src='beside.js'></script>",
    ],
)
def test_a_request_is_seen(browser: Browser, tmp_path: Path, body: str) -> None:
    file = page(tmp_path, body)
    browser.show(file)
    assert [url for url in browser.requests if url != file.as_uri()]


@pytest.mark.parametrize("script", ["console.error('no')", "console.warn('no')", "undefined.x", "Promise.reject('no')"])
def test_a_message_on_the_console_is_seen(browser: Browser, tmp_path: Path, script: str) -> None:
    browser.show(page(tmp_path, f"<script>{script}</script>"))
    assert len(browser.messages) == 1


@pytest.mark.parametrize(
    ("body", "ratio"),
    [
        ("<p style='color:#777'>Text</p>", 4.48),  # WCAG's own example of almost enough
        ("<p style='color:rgb(0 0 0 / 50%)'>Text</p>", 3.95),
        ("<div style='background:#000'><p style='color:#444; background:transparent'>Text</p></div>", 2.16),
        ("<div style='opacity:0.4'><p>Text</p></div>", 2.85),
        ("<svg><text y=20 fill='#999'>Text</text></svg>", 2.85),
        ("<svg><rect width=90 height=40 fill='#005'/><text y=20 fill='#000'>Text</text></svg>", 1.17),
        ("<h1 style='color:#999'>Text</h1>", 2.85),
    ],
)
def test_faint_text_is_seen(browser: Browser, tmp_path: Path, body: str, ratio: float) -> None:
    browser.show(page(tmp_path, body))
    (faint,) = browser.faint_texts()
    assert faint.text == "Text"
    assert faint.ratio == pytest.approx(ratio, abs=0.06)  # a half-transparent colour is rounded to 8 bits


@pytest.mark.parametrize(
    "body",
    [
        "<p style='color:#767676'>Text</p>",
        "<h1 style='color:#888'>Text</h1>",  # large: 3 is enough
        "<svg><rect width=90 height=40 fill='#005'/><text y=20 fill='#fff'>Text</text></svg>",
        "<p style='display:none; color:#eee'>Text</p>",
    ],
)
def test_text_that_stands_out_is_not_faint(browser: Browser, tmp_path: Path, body: str) -> None:
    browser.show(page(tmp_path, body))
    assert browser.faint_texts() == []


def test_a_dark_scheme_reaches_the_page(browser: Browser, tmp_path: Path) -> None:
    style = "<style>@media (prefers-color-scheme: dark) { body { background: #111 } }</style>"
    file = page(tmp_path, "<p>Text</p>", style)
    browser.show(file, scheme="light")
    assert browser.faint_texts() == []
    browser.show(file, scheme="dark")
    assert [faint.text for faint in browser.faint_texts()] == ["Text"]


def test_a_box_that_is_too_wide_is_seen(browser: Browser, tmp_path: Path) -> None:
    wide = "<div id=wide style='width:500px; height:9px'></div>"
    browser.show(page(tmp_path, wide), width=PHONE)
    assert browser.width_needed() > PHONE
    assert browser.run("return tooWide()") == ["div#wide"]
    browser.show(page(tmp_path, f"<div style='overflow-x:auto'>{wide}</div>"), width=PHONE)
    assert browser.width_needed() == PHONE
    assert browser.run("return tooWide()") == []


def test_marks_of_a_plot_are_counted(browser: Browser, tmp_path: Path) -> None:
    browser.show(page(tmp_path, PLOT.format("") + PLOT.format("<path d='M10,10h9v9h-9z'/><path d='M40,10h9v9h-9z'/>")))
    assert browser.run("return [...document.querySelectorAll('figure')].map((f) => marksOf(f).length)") == [0, 2]


def test_the_order_of_the_tab_key(browser: Browser, tmp_path: Path) -> None:
    body = "<a href='#x'>One</a><button>Two</button><span tabindex=0 id=s style='outline:none'>Three</span>"
    browser.show(page(tmp_path, body))
    assert browser.tab_stops(9) == (["a One", "button Two", "span#s Three"], ["span#s Three"])
