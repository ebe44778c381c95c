"""The pictures of docs/layouts.md and docs/domino.md are what the code does: docs/timeline.py records it."""

import re
from collections import Counter
from html import unescape
from types import ModuleType

import pytest

from tests.helpers import ROOT

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import draw_layouts  # type: ignore[import-not-found]
    return draw_layouts


@pytest.mark.parametrize("name", ["LAYOUTS", "DOMINO"])
def test_the_picture_is_what_the_code_does(drawing, name):
    picture = getattr(drawing, name)
    svg = (ROOT / "docs" / f"{picture.name}.svg").read_text(encoding="utf-8")
    titles = {row.title for row in picture.rows}
    drawn = [unescape(found) for found in re.findall(r'<g id="([^"]*\|[^"]*)"', svg)]
    assert titles == {box.split("|")[0] for box in drawn}
    for row in picture.rows:
        timeline = drawing.record(row.layout, row.schedule, backward=picture.backward)
        now = [drawing.name(row, event) for event in (*timeline.spans, *timeline.messages)]
        own = [box for box in drawn if box.startswith(f"{row.title}|")]
        assert Counter(own) == Counter(now), f"{row.title}: run docs/draw_layouts.py, and look at the picture"
