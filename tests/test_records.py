"""Typed documents: there and back, and what is refused on the way."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from ladderize.errors import UserError
from ladderize.files.records import Record


@dataclass(frozen=True)
class Inner(Record):
    LEFT_OUT: ClassVar = ("note",)

    kind: str
    share: float | None = None
    note: str | None = None


@dataclass(frozen=True)
class Outer(Record):
    name: str
    count: int
    path: Path
    inner: Inner
    rows: list[Inner] = field(default_factory=list)
    pair: tuple[int, float] = (1, 2.0)
    by_layer: dict[int, tuple[int, ...]] = field(default_factory=dict)
    by_name: dict[str, float] = field(default_factory=dict)


DOCUMENT = {
    "name": "a", "count": 3, "path": "x/y", "inner": {"kind": "spd", "share": None},
    "rows": [{"kind": "b", "share": 0.5}],
    "pair": [4, 5.0], "by_layer": {"7": [1, 2]}, "by_name": {"x": 1.0},
}  # fmt: skip


def test_there_and_back():
    outer = Outer.from_dict(DOCUMENT | {"from a later version": 1}, "file.json")
    assert outer == Outer("a", 3, Path("x/y"), Inner("spd"), [Inner("b", 0.5)], (4, 5.0), {7: (1, 2)}, {"x": 1.0})
    assert outer.to_dict() == DOCUMENT
    assert Inner("spd", note="n").to_dict() == {"kind": "spd", "share": None, "note": "n"}
    assert Outer.from_dict({**DOCUMENT, "pair": [4, 5]}, "f").pair == (4, 5.0)  # JSON writes 5.0 as 5 where it likes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "file.json: name is 3, but must be of type str"),
        ({"count": True}, "file.json: count is True, but must be of type int"),
        ({"inner": {}}, "file.json: inner has no kind"),
        ({"rows": [{"kind": "b", "share": "much"}]}, "file.json: rows[0]: share is 'much', but must be of type float"),
        ({"pair": [1]}, "file.json: pair has 1 entries, but must have 2"),
        ({"pair": [1, 10**400]}, f"file.json: pair[1] is 1{'0' * 59}..., which is out of the range of a float"),
        ({"by_layer": {"1": ["x"]}}, "file.json: by_layer.1[0] is 'x', but must be of type int"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(UserError) as error:
        Outer.from_dict(DOCUMENT | change, "file.json")
    assert str(error.value) == message
