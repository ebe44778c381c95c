"""Ranges of layers, layouts, and recipes of them; and where a mode is named."""

import ast
import random
import re
from contextlib import nullcontext

import pytest

from ladderize.convert.recipe import RANGE_KEYS, Recipe
from ladderize.layout import APART, Layout, LayoutError, RangeSyntaxError, format_ranges, parse_ranges
from tests.helpers import ROOT, random_layout

# what a new mode changes is named in CONTRIBUTING.md; these name a method, a choice or an outcome of that name
NO_MODE = {"rewrite.py", "recover.py", "plan.py"}


RANGES = {
    "2:5": [2, 3, 4], ":3": [0, 1, 2], "-3:": [5, 6, 7], "5": [5], "-1": [7], "all": list(range(8)),
    "4,6:8": [4, 6, 7], " 1 , 0:2 ": [0, 1], ":": list(range(8)), ":-6": [0, 1],
}  # fmt: skip


@pytest.mark.parametrize(("text", "layers"), RANGES.items())
def test_ranges(text, layers):
    assert parse_ranges(text, 8) == layers
    assert parse_ranges(format_ranges(layers), 8) == layers


@pytest.mark.parametrize("text", ["", "1:2:3", "a", "1:b", "1,,2", "-", "1:-", "0x1", "1.5"])
def test_ranges_wrong_for_every_model(text):
    with pytest.raises(RangeSyntaxError):
        parse_ranges(text, 8)


@pytest.mark.parametrize("text", ["6:9", "8", "-9", "-9:", "0:100", "5:2", "3:3"])
def test_ranges_are_never_clipped(text):
    with pytest.raises(LayoutError, match="out of range for a model of 8 layers"):
        parse_ranges(text, 8)


def test_named_layers_compile_to_sync_points():
    layout = Layout.from_layers(5, ladder=[0, 3], spd=[2, 3], sync_tp_size=2)
    assert layout.attention_sync == ("overlapped", "blocking", "dropped", "dropped", "blocking")
    assert layout.mlp_sync == ("blocking", "blocking", "overlapped", "blocking", "blocking")
    assert [layout.layer_name(i) for i in range(5)] == ["ladder", "dense", "spd", "spd+ladder", "dense"]
    assert str(layout) == "5 layers: ladder 0,3, spd 2:4 (sync_tp_size 2)"
    # of single sync points
    layout = Layout(("blocking", "overlapped", "blocking"), ("blocking", "overlapped", "blocking"))
    assert [layout.layer_name(i) for i in range(3)] == ["dense", "attention overlapped", "entering MLP overlapped"]
    assert str(layout) == "3 layers: attention overlapped 1, entering MLP overlapped 2"


def test_every_layout_has_a_recipe():
    for _ in range(200):
        layout = random_layout(3)
        assert Recipe.from_layout(layout).layout(random_layout(3)) == layout


NAMES = {  # options of a layer, and the modes of its attention sync and of the MLP sync entering it
    "dense": ("blocking", "blocking"),
    "ladder": ("overlapped", "overlapped"),
    "dense ladder": ("overlapped", "overlapped"),  # it clears first
    "delayed": ("delayed", "delayed"),
    "spd": ("dropped", "blocking"),
    "spd ladder": ("dropped", "overlapped"),
    "spd delayed": ("dropped", "delayed"),
}


def composed(source: Layout, names: list[str], ranks: int | None) -> Layout | str:
    """What named layers make of a source, sync point by sync point, or what is wrong with them."""
    layers = range(source.num_layers)
    before = {("attention", layer): source.attention_sync[layer] for layer in layers}
    before |= {("entering", layer): source.mlp_sync[layer - 1] for layer in layers if layer}
    after, staying = dict(before), set()
    for (point, layer), mode in before.items():
        if names[layer]:
            after[point, layer] = NAMES[names[layer]][point != "attention"]
        elif mode in APART:
            staying.add(layer)
    apart = {*APART} & {*after.values()}
    size = (ranks or source.sync_tp_size) if apart else None
    if apart and size is None:
        return "need sync_tp_size"
    if staying and size != source.sync_tp_size:
        return f"{size} is not the source's, 4, for which layers {format_ranges(staying)} were"
    attention = tuple(after["attention", layer] for layer in layers)
    return Layout(attention, (*(after["entering", layer] for layer in layers if layer), "blocking"), size)


def test_layers_that_are_not_named_stay():
    for _ in range(1000):
        source = random_layout(random.randint(1, 5))
        names = random.choices([*NAMES, "", "", ""], k=source.num_layers)
        options = {option: [i for i, name in enumerate(names) if option in name.split()] for option in RANGE_KEYS}
        ranges = {option: ",".join(map(str, layers)) for option, layers in options.items() if layers}
        ranks = random.choice([None, 2, 4]) if ranges.keys() & {"delayed", "spd"} else None
        recipe, expected = Recipe(**ranges, sync_tp_size=ranks), composed(source, names, ranks)
        if isinstance(expected, Layout):
            assert recipe.layout(source) == expected, (source, names, ranks)
        else:
            with pytest.raises(LayoutError, match=expected):
                recipe.layout(source)


@pytest.mark.parametrize("named", [{"ladder": range(6, 9)}, {"delayed": [8]}, {"spd": [-1, 0]}])
def test_named_layers_that_the_model_lacks(named):
    with pytest.raises(LayoutError, match=rf"{next(iter(named))}: \S+ is out of range for a model of 8 layers"):
        Layout.from_layers(8, **named, sync_tp_size=2)


NO_LAYERS = [(value, None) for value in (5, -1, [4], "2", None, [0.5], True)]


@pytest.mark.parametrize(("value", "ladder"), [(2, [2, 3]), ([0, 3], [0, 3]), (0, []), ([], []), *NO_LAYERS])
def test_authors_format(value, ladder):
    config = {"model_type": "llamaLadder", "num_hidden_layers": 4, "ladder_layers": value}
    with pytest.raises(LayoutError, match="ladder_layers") if ladder is None else nullcontext():
        assert Layout.from_config(config) == Layout.from_layers(4, ladder=ladder)


@pytest.mark.parametrize(
    ("attention", "mlp", "ranks", "message"),
    [
        (["blocking"], ["overlapped"], None, "last layer's MLP"),
        (["blocking"] * 2, ["dropped", "blocking"], 2, "caches would differ by rank"),
        (["dropped"], ["blocking"], None, "need sync_tp_size"),
        (["blocking"], ["blocking"], 2, "no effect"),
        (["blocking"], ["blocking"] * 2, None, "one per layer"),
        (["lazy"], ["blocking"], None, "'lazy'"),
        ([], [], None, "one per layer"),
    ],
)
def test_impossible_layouts(attention, mlp, ranks, message):
    with pytest.raises(LayoutError, match=message):
        Layout(tuple(attention), tuple(mlp), ranks)


def test_a_new_mode_touches_no_other_file_than_contributing_says():
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    section = contributing.partition("## How to add a mode")[2].partition("\n## ")[0]
    listed = {path.rpartition("/")[2] for path in re.findall(r"`([\w/]+\.py)`", section)}
    names = {"OVERLAPPED", "DELAYED", "DROPPED"}
    words = {"overlapped", "delayed", "dropped", "ladder", "spd", "spd+ladder"}
    found = set()
    for path in (ROOT / "ladderize").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if getattr(node, "id", None) in names or (isinstance(node, ast.Constant) and node.value in words):
                found.add(path.name)
    assert found - NO_MODE <= listed
