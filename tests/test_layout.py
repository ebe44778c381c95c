import pytest

from ladderize.convert.recipe import Recipe
from ladderize.layout import Layout, LayoutError, RangeSyntaxError, format_ranges, parse_ranges
from tests.helpers import random_layout


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("2:5", [2, 3, 4]),
        (":3", [0, 1, 2]),
        ("-3:", [5, 6, 7]),
        ("5", [5]),
        ("-1", [7]),
        ("all", list(range(8))),
        ("4,6:8", [4, 6, 7]),
        (" 1 , 0:2 ", [0, 1]),
        (":", list(range(8))),
        (":-6", [0, 1]),
    ],
)
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


def test_a_single_overlapped_sync_point_is_named():
    layout = Layout(("blocking", "overlapped", "blocking"), ("overlapped", "blocking", "blocking"))
    assert [layout.layer_name(i) for i in range(3)] == ["dense", "ladder", "dense"]
    layout = Layout(("blocking", "overlapped", "blocking"), ("blocking", "overlapped", "blocking"))
    assert [layout.layer_name(i) for i in range(3)] == ["dense", "attention overlapped", "entering MLP overlapped"]
    assert str(layout) == "3 layers: attention overlapped 1, entering MLP overlapped 2"


def test_every_layout_has_a_recipe():
    for _ in range(200):
        layout = random_layout(3)
        assert Recipe.from_layout(layout).layout(Layout.dense(3)) == layout


@pytest.mark.parametrize(("value", "ladder"), [(2, [2, 3]), ([0, 3], [0, 3]), (0, []), ([], [])])
def test_authors_format(value, ladder):
    layout = Layout.from_config({"model_type": "llamaLadder", "num_hidden_layers": 4, "ladder_layers": value})
    assert layout == Layout.from_layers(4, ladder=ladder)


@pytest.mark.parametrize("value", [5, -1, [4], "2", None, [0.5], True])
def test_authors_format_nonsense(value):
    with pytest.raises(LayoutError, match="ladder_layers"):
        Layout.from_config({"model_type": "llamaLadder", "num_hidden_layers": 4, "ladder_layers": value})


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
