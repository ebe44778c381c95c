"""The pictures of docs/layouts.md and docs/domino.md are what the code does: docs/timeline.py records it."""

import re
from collections import Counter
from html import unescape
from itertools import pairwise
from types import ModuleType

import pytest

from tests.helpers import ROOT

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    """docs/draw_layouts.py, with the timelines of each picture as it would draw them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import draw_layouts  # type: ignore[import-not-found]
    return draw_layouts


@pytest.fixture(scope="module")
def timelines(drawing):
    return {
        (picture.name, row.title): drawing.record(row.layout, row.schedule, backward=picture.backward)
        for picture in (drawing.LAYOUTS, drawing.DOMINO)
        for row in picture.rows
    }


@pytest.mark.parametrize("name", ["LAYOUTS", "DOMINO"])
def test_the_picture_is_what_the_code_does(drawing, timelines, name):
    """The boxes of the SVG in docs/ are those that a run makes now."""
    picture = getattr(drawing, name)
    svg = (ROOT / "docs" / f"{picture.name}.svg").read_text(encoding="utf-8")
    titles = {row.title for row in picture.rows}
    drawn = [unescape(found) for found in re.findall(r'<g id="([^"]*\|[^"]*)"', svg)]
    assert titles == {box.split("|")[0] for box in drawn}
    for row in picture.rows:
        timeline = timelines[picture.name, row.title]
        now = [drawing.name(row, event) for event in (*timeline.spans, *timeline.messages)]
        own = [box for box in drawn if box.startswith(f"{row.title}|")]
        assert Counter(own) == Counter(now), f"{row.title}: run docs/draw_layouts.py, and look at the picture"


def test_every_product_is_there_once(drawing, timelines):
    """Forward, gradients of activations and gradients of weights take the same time for the whole batch, however it is
    cut."""
    for (picture, title), timeline in timelines.items():
        times: Counter[tuple[str, str]] = Counter()
        for span in timeline.spans:
            times[span.kind, span.label[:2]] += span.end - span.start
        for sub_module, length in (("A0", 1), ("M0", 1.7), ("A1", 1), ("M1", 1.7)):
            where = f"{picture}, {title}, {sub_module}"
            assert times[drawing.FORWARD, sub_module] == pytest.approx(length), where
            if picture == "domino":
                assert times[drawing.WEIGHT, sub_module] == pytest.approx(length), where
                assert times[drawing.INPUT, sub_module] == pytest.approx(length), where


def test_nothing_happens_twice_at_a_time(timelines):
    for timeline in timelines.values():
        for events in (timeline.spans, timeline.messages):
            assert all(one.end <= other.start + 1e-9 for one, other in pairwise(events))
