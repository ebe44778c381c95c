"""--spd auto: which layers a sensitivity file selects, and which files are refused."""

import json
import math

import numpy as np
import pytest
import yaml

from ladderize import convert_checkpoint
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import to_json
from ladderize.convert.recipe import Recipe, read_recipe, select
from ladderize.convert.sensitivity_file import classify, read_sensitivity
from ladderize.errors import UserError
from tests.helpers import SHAPE, fresh_rng, invoke, listing, one_sentence, save_llama

VALUES = (0.04, 0.3, -0.02, 12.0)  # the layers of the small model
DATA = {"file": "text.npy", "sha256": "d", "samples": 8, "seq_len": 16, "seed": 0}


def document(source=None, values=VALUES, kind="spd", **changes):
    """A sensitivity.json as ``ladderize sensitivity`` writes it."""
    costs = [
        {
            "layer": i,
            "kind": kind,
            "nats": math.log1p(value / 9.0),
            "sensitivity": value,
            "low": value - 0.01,
            "high": value + 0.01,
            "class": classify(value, 0.05, 10.0),
        }
        for i, value in enumerate(values)
    ]
    return {
        "model": "src",
        "fingerprint": fingerprint(read_checkpoint(source)) if source else "f",
        "layout": f"{len(values)} layers: dense",
        "parameters": 1,
        "num_layers": len(values),
        "data": DATA,
        "mode": "layers",
        "sync_tp_size": 4,
        "dtype": "float32",
        "aligned": None,
        "tau1": 0.05,
        "tau2": 10.0,
        "interval": 0.95,
        "dense_nll": math.log(9.0),
        "costs": costs,
    } | changes


@pytest.fixture
def measured(llama, tmp_path):
    (tmp_path / "s.json").write_text(to_json(document(llama)))
    return tmp_path / "s.json"


def converting(source, tmp_path, *options):
    """Drop what s.json selects."""
    return invoke("convert", source, tmp_path / "out", "--spd", "auto", "--sensitivity", tmp_path / "s.json", *options)


def chosen(tmp_path, values, **how):
    (tmp_path / "s.json").write_text(to_json(document(values=values)))
    return select(read_sensitivity(tmp_path / "s.json"), tmp_path / "s.json", "spd", **how)


# ---- the rules ----


@pytest.mark.parametrize(
    ("values", "fraction", "layers"),
    [
        (VALUES, 0.5, [0, 2]),
        (VALUES, 1, [0, 1, 2, 3]),
        (VALUES, 1.0, [0, 1, 2, 3]),
        (VALUES, 0.75, [0, 1, 2]),
        (VALUES, 0.01, [2]),  # at least one
        ((1, 1, 1, 1), 0.5, [0, 1]),
        ((2, 1, 2, 1, 2), 0.6, [0, 1, 3]),  # of equals the lower
        ((3, 2, 1, 0, 9), 0.3, [2, 3]),  # round(1.5) is 2
    ],
)
def test_by_fraction(tmp_path, values, fraction, layers):
    assert chosen(tmp_path, values, fraction=fraction).layers == layers


@pytest.mark.parametrize(
    ("values", "most", "layers"),
    [
        (VALUES, 0.04, [0, 2]),
        (VALUES, 0.039, [2]),
        (VALUES, 0.35, [0, 1, 2]),
        (VALUES, 1e9, [0, 1, 2, 3]),
        (VALUES, 1e-9, [2]),  # below 0 costs nothing
        ((-5.0, 1.0, 1.0), 1.0, [0, 1]),  # and pays for nothing either
        ((0.25, 0.25, 0.25), 0.5, [0, 1]),
        ((0.5, 0.6, 0.1), 0.15, [2]),  # the longest prefix
    ],
)
def test_by_budget(tmp_path, values, most, layers):
    assert chosen(tmp_path, values, max_increase=most).layers == layers
    percent = f"{1.0001 * most / 0.09}%"  # of the dense 9.0
    assert chosen(tmp_path, values, max_increase=percent).layers == layers


def test_by_class_and_what_is_said(tmp_path):
    selection = chosen(tmp_path, VALUES)
    assert selection.layers == [0, 2]
    assert selection.estimated_ppl_increase == pytest.approx(0.02)
    assert selection.rule == "every block of class insensitive (at most tau1 = 0.05)"


@pytest.mark.parametrize("how", [{}, {"max_increase": 0.1}])
def test_nothing_selected_names_the_smallest(tmp_path, how):
    with pytest.raises(UserError, match=r"selects no block of .*: the smallest sensitivity is 0\.2 \(block 1\)"):
        chosen(tmp_path, (3.0, 0.2, 0.4), **how)


# ---- conversions ----


@pytest.mark.parametrize(
    ("options", "spd"),
    [
        ([], "0,2"),
        (["--spd-fraction", "0.75"], "0:3"),
        (["--max-ppl-increase", "4%"], "0:3"),  # of 9
        (["--sync-tp-size", "4"], "0,2"),
        (["--ladder", "2:", "--dtype", "bfloat16"], "0,2"),
    ],
)
def test_convert(llama, tmp_path, measured, options, spd):
    outcome, made = converting(llama, tmp_path, *options, "--no-verify", "--json"), tmp_path / "out"
    assert outcome.code == 0, outcome.stderr
    report, record = json.loads(outcome.stdout), yaml.safe_load((made / "ladderize.yaml").read_text())
    assert (record["recipe"]["spd"], record["recipe"]["sync_tp_size"]) == (spd, 4)
    assert set(record["recipe"]) <= {"ladder", "spd", "sync_tp_size", "dtype"}
    dropped = [row["block"] for row in report["selection"]["blocks"] if row["selected"]]
    assert [i for i, mode in enumerate(report["attention_sync"]) if mode == "dropped"] == dropped
    assert record["selection"] == report["selection"]
    assert record["selection"]["sensitivity"]["data"] == DATA
    measured.unlink()
    again = invoke("convert", llama, tmp_path / "b", "--recipe", made / "ladderize.yaml", "--no-verify", "--json")
    assert again.code == 0, again.stderr
    assert json.loads(again.stdout)["selection"] is None
    for name in ("config.json", "model.safetensors"):
        assert (made / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("more", [["--dry-run"], ["--no-verify"]])
def test_the_table(llama, tmp_path, measured, more):
    outcome = converting(llama, tmp_path, "--no-verify", *more)
    assert outcome.code == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert lines[0].split() == ["block", "sensitivity", "class", "selected"]
    assert lines[2].split() == ["0", "0.04", "insensitive", "yes"]
    assert lines[5].split() == ["3", "12", "extremely", "sensitive"]
    assert "+0.02 perplexity" in outcome.stdout
    assert "layout   4 layers: spd 0,2 (sync_tp_size 4)" in lines


def test_a_recipe_names_the_file_from_where_it_lies(llama, tmp_path, measured):
    (tmp_path / "recipes").mkdir()
    recipe = tmp_path / "recipes" / "r.yaml"
    recipe.write_text("spd: auto\nsensitivity: ../s.json\nspd_fraction: 1\n")
    assert read_recipe(recipe) == Recipe(
        spd="auto", sensitivity=str(tmp_path / "recipes" / ".." / "s.json"), spd_fraction=1
    )
    assert convert_checkpoint(llama, tmp_path / "out", read_recipe(recipe), dry_run=True).layout.endswith(
        "spd 0:4 (sync_tp_size 4)"
    )


@pytest.mark.parametrize(
    ("options", "ladder"),
    [([], "0,2"), (["--ladder-fraction", "0.75"], "0:3"), (["--max-ppl-increase", "0.35"], "0:3")],
)
def test_ladder_layers_are_chosen_too(llama, tmp_path, options, ladder):
    (tmp_path / "s.json").write_text(to_json(document(llama, kind="ladder", sync_tp_size=None)))
    command = ["convert", llama, tmp_path / "a", "--ladder", "auto", "--sensitivity", tmp_path / "s.json"]
    outcome = invoke(*command, *options, "--spd", "1", "--sync-tp-size", 2, "--no-verify", "--json")
    assert outcome.code == 0, outcome.stderr
    record = yaml.safe_load((tmp_path / "a" / "ladderize.yaml").read_text())
    assert record["recipe"] == {"ladder": ladder, "spd": "1", "sync_tp_size": 2}


def test_what_sensitivity_measures_convert_takes(llama, tmp_path):
    """One file for both kinds of layers; the paper's sweep tells of dropped ones alone."""
    np.save(tmp_path / "ids.npy", fresh_rng().integers(3, SHAPE["vocab_size"], (6, 16)))
    layers, sweep = tmp_path / "layers.json", tmp_path / "sweep.json"
    measure = ("sensitivity", llama, "--data", tmp_path / "ids.npy", "--sync-tp-size", 2)
    assert invoke(*measure, "--out", layers).code == 0
    assert invoke(*measure, "--mode", "sweep", "--out", sweep).code == 0
    for kind, file in (("ladder", layers), ("spd", layers), ("spd", sweep)):
        command = ["convert", llama, tmp_path / f"{kind}-{file.stem}", f"--{kind}", "auto", "--sensitivity", file]
        outcome = invoke(*command, f"--{kind}-fraction", "0.5", "--no-verify")
        assert outcome.code == 0, outcome.stderr
    refused = invoke("convert", llama, tmp_path / "no", "--ladder", "auto", "--sensitivity", sweep)
    assert "has costs of spd layers, none of ladder; measure them with" in one_sentence(refused)


# ---- refused ----

AUTO = ["--spd", "auto", "--sensitivity", "s.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--spd", "auto"], "--spd auto needs --sensitivity FILE"),
        (["--spd", "auto", "--sync-tp-size", "4"], "needs --sensitivity"),
        (
            ["--spd", "all", "--sync-tp-size", "4", "--sensitivity", "s.json"],
            "--sensitivity has no effect without --spd auto or --ladder auto",
        ),
        (["--ladder", "all", "--spd-fraction", "0.5"], "--spd-fraction has no effect without --spd auto"),
        (
            ["--ladder", "all", "--max-ppl-increase", "0.5"],
            "--max-ppl-increase has no effect without --spd auto or --ladder auto",
        ),
        ([*AUTO, "--spd-fraction", "0.5", "--max-ppl-increase", "1"], "give one of them"),
        *(
            ([*AUTO, "--spd-fraction", value], "--spd-fraction must be a")
            for value in ("0", "-1", "1.01", "nan", "inf")
        ),
        *(
            ([*AUTO, "--max-ppl-increase", value], f"--max-ppl-increase {value} is not an increase of")
            for value in ("0", "-1", "nan", "inf", "-2%", "a lot")
        ),
        ([*AUTO, "--dense"], "does not go with"),
        ([*AUTO, "--ladder", "auto"], "--spd auto and --ladder auto cannot be combined"),
        ([*AUTO, "--ladder-fraction", "0.5"], "--ladder-fraction has no effect without --ladder auto"),
        (["--ladder", "auto"], "--ladder auto needs --sensitivity FILE"),
        (["--ladder", "auto", "--sensitivity", "s.json", "--spd-fraction", "1"], "without --spd auto"),
    ],
)
def test_options_that_argv_decides(llama, tmp_path, options, message):
    outcome = invoke("convert", llama, tmp_path / "out", "--no-verify", *options)
    assert (outcome.code, message in one_sentence(outcome)) == (2, True), outcome.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spd: auto", "needs --sensitivity"),
        ("spd: auto\nsensitivity: 5", "sensitivity is 5, but must be of type str"),
        ("spd: auto\nsensitivity: s.json\nspd_fraction: '0.5'", "spd_fraction is '0.5', but must be of type float"),
        ("spd: auto\nsensitivity: s.json\nmax_ppl_increase: true", "is True, but must be of type float"),
        ("spd: auto\nsensitivity: nowhere.json", "no such file"),
        ("spd: 'auto,2'\nsync_tp_size: 4", "'auto' is not a range"),
    ],
)
def test_wrong_recipes(llama, tmp_path, measured, text, message):
    (tmp_path / "r.yaml").write_text(text)
    outcome = invoke("convert", llama, tmp_path / "out", "--recipe", tmp_path / "r.yaml", "--no-verify")
    assert (outcome.code, message in one_sentence(outcome)) == (1, True), outcome.stderr


def cost(**changes):
    good = document()["costs"]
    return {"costs": [good[0], good[1] | changes, *good[2:]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"costs": document(kind="ladder")["costs"]}, "has costs of ladder layers, none of spd"),
        ({"mode": "points"}, "mode is 'points', but must be one of layers, sweep"),
        ({"mode": []}, "mode is []"),
        ({"schema_version": 7}, "has schema_version 7"),
        ({"fingerprint": "0" * 64}, "was measured on another model"),
        ({"fingerprint": None}, "fingerprint is None"),
        ({"fingerprint": ""}, "was measured on another model"),
        ({"sync_tp_size": None}, "has costs of dropped layers and no sync_tp_size"),
        ({"sync_tp_size": True}, "sync_tp_size is True"),
        ({"sync_tp_size": 0}, "has costs of dropped layers and no sync_tp_size"),
        ({"sync_tp_size": 3}, "3 does not divide the 8 attention heads"),
        ({"tau1": None}, "tau1 is None"),
        ({"costs": None}, "costs is None, but must be a list"),
        ({"costs": [1, 2, 3, 4]}, "costs[0] is 1, but must be an object"),
        ({"costs": []}, "has not one finite cost for each layer of each kind, in order"),
        (document(values=VALUES[:3]), "is of 3 layers, but the model has 4"),
        (cost(layer=2), "has not one finite cost for each layer of each kind, in order"),
        (cost(layer=True), "costs[1]: layer is True, but must be of type int"),
        (cost(sensitivity=None), "costs[1]: sensitivity is None, but must be of type float"),
        (cost(nats="0.1"), "costs[1]: nats is '0.1', but must be of type float"),
        (cost(sensitivity=10**400), "which is out of the range of a float"),
        (cost(**{"class": "tame"}), "class is 'tame', but must be one of"),
    ],
)
def test_files_that_do_not_fit(llama, tmp_path, changes, message):
    (tmp_path / "s.json").write_text(json.dumps({"schema_version": 1} | document(llama) | changes))
    outcome = converting(llama, tmp_path)
    assert (outcome.code, message in one_sentence(outcome)) == (1, True), outcome.stderr
    assert listing(tmp_path) == ["s.json", "src"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list"),
        ("", "is not valid JSON"),
        ('{"a": Infinity}', "holds Infinity"),
    ],
)
def test_files_that_are_none(tmp_path, text, message):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_sensitivity(tmp_path / "s.json")


def test_infinity_by_overflow(llama, tmp_path, measured):
    measured.write_text(measured.read_text().replace("12.0", "1e999"))
    with pytest.raises(UserError, match="holds 1e999, which is not a number"):
        read_sensitivity(measured)


def test_another_sync_tp_size(llama, tmp_path, measured):
    outcome = converting(llama, tmp_path, "--sync-tp-size", "2")
    assert "was measured with sync_tp_size 4, so it does not apply to --sync-tp-size 2" in one_sentence(outcome)
    assert outcome.code == 1


def test_a_source_that_is_not_dense(llama, tmp_path, measured):
    convert_checkpoint(llama, tmp_path / "ladder", Recipe(ladder="2:"), verify=False)
    outcome = converting(tmp_path / "ladder", tmp_path)
    assert "the source is not dense (4 layers: ladder 2:4)" in one_sentence(outcome)


def test_another_fine_tune(tmp_path, llama, measured):
    other = save_llama(tmp_path / "other", seed=5)
    outcome = converting(other, tmp_path)
    assert f"was measured on another model than {other}" in one_sentence(outcome)
