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


def test_requests_messages_faint_text_and_boxes_that_are_too_wide_are_seen(browser: Browser, tmp_path: Path) -> None:
    faint = "<p style='color:#777'>Faint</p>"  # WCAG's own example of almost enough
    late = "<script>setTimeout(() => { new Image().src = 'http://192.0.2.1/late.png' }, 60); undefined.x</script>"
    wide = "<div style='width:500px; height:9px'></div>"
    browser.show(page(tmp_path, f"<img src='http://192.0.2.1/dot.png'>{faint}{wide}{late}"), width=PHONE)
    names = {url.rpartition("/")[2] for url in browser.requests}
    assert names == {"page.html", "dot.png", "late.png"}
    assert any("undefined" in message for message in browser.messages)
    assert browser.width_needed() > PHONE
    assert [(one.text, one.ratio) for one in browser.faint_texts()] == [("Faint", pytest.approx(4.48, abs=0.06))]
    file = page(tmp_path, f"<p style='color:#767676'>Text, <b>bold</b></p><div style='overflow-x:auto'>{wide}</div>")
    browser.show(file, width=PHONE)
    assert browser.requests == [file.as_uri()]
    assert browser.messages == []
    assert browser.faint_texts() == []
    assert browser.width_needed() == PHONE
