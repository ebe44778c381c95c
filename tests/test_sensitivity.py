"""S against a recomputation with whole models, the cached prefix, resuming, and what is refused."""

import json
import math
import random
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from ladderize.blocks import Blocks, open_checkpoint, read_windows
from ladderize.console import Console
from ladderize.convert.remote_code.modeling_ladderized_llama import LadderizedLlamaForCausalLM
from ladderize.convert.sensitivity_file import (
    MODES,
    SensitivityDocument,
    block_sensitivities,
    classify,
    column_layouts,
    default_tau1,
)
from ladderize.errors import UserError
from ladderize.eval.backends.hf import score_windows
from ladderize.eval.options import SensitivityOptions
from ladderize.eval.sensitivity_plot import draw_sensitivity, value_ticks
from ladderize.eval.suffixes import Suffixes
from ladderize.workflows.sensitivity import SensitivityFolder, measure_sensitivity
from tests import warm
from tests.helpers import BIASES, SHAPE, edit_json, fresh_rng, invoke, listing, one_sentence, save_llama

LAYERS = SHAPE["num_hidden_layers"]
RANKS = {"spd": 4, "each": 4, "ladder": None, "each-ladder": None}


def whole_model_table(folder, layouts, windows):
    """Every column by loading weights into a whole model of that layout."""
    blocks = Blocks(open_checkpoint(str(folder)), torch.float32, torch.device("cpu"))
    state = dict(zip(names := list(blocks.checkpoint.tensors), blocks.read(names), strict=True))
    columns = []
    for layout in layouts:
        model = LadderizedLlamaForCausalLM(blocks.model_config(layout)).eval()
        model.load_state_dict(state)
        columns.append(score_windows(model, list(windows), batch_size=5).nll)
    return np.stack(columns, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extra", [{}, BIASES], ids=["plain", "biases"])
def test_against_whole_models(tmp_path, ids, mode, extra):
    folder = save_llama(tmp_path / "m", seed=int(torch.randint(1 << 30, ())), **extra)
    options = SensitivityOptions(str(ids), mode, RANKS[mode], samples=12, seed=3, batch_size=5)
    document = measure_sensitivity(str(folder), options, console=Console())
    windows = read_windows(open_checkpoint(str(folder)), str(ids), seq_len=None, samples=12, seed=3)
    table = whole_model_table(folder, column_layouts(mode, LAYERS, RANKS[mode]), windows)
    np.testing.assert_allclose(np.array(document.nll), table, rtol=1e-5)
    ppl = np.exp(table.sum(0) / (12 * 15))
    np.testing.assert_allclose(document.perplexity, ppl, rtol=1e-5)
    expected = [ppl[i] - ppl[LAYERS if mode.startswith("each") else i + 1] for i in range(LAYERS)]
    np.testing.assert_allclose(
        [entry.sensitivity for entry in document.blocks], expected, rtol=1e-4, atol=1e-4 * ppl.max()
    )
    assert len({round(value, 9) for value in document.perplexity}) == LAYERS + 1  # every column is another model


def test_columns_are_what_the_paper_says():
    sweep = column_layouts("spd", 3, 2)
    assert [layout.spd_layers for layout in sweep] == [[0, 1, 2], [1, 2], [2], []]
    assert [layout.spd_layers for layout in column_layouts("each", 3, 2)] == [[0], [1], [2], []]
    assert [layout.ladder_layers for layout in column_layouts("ladder", 3, None)] == [[0, 1, 2], [1, 2], [2], []]
    assert [layout.ladder_layers for layout in column_layouts("each-ladder", 3, None)] == [[0], [1], [2], []]


@pytest.mark.parametrize("mode", ["spd", "ladder"])
def test_half_of_the_forwards_are_run(llama, ids, mode, monkeypatch):
    """The layers before the first changed one run once for all columns: half of L forwards, where L + 1 would be."""
    blocks = Blocks(open_checkpoint(str(llama)), torch.float32, torch.device("cpu"))
    calls, run = [], blocks.run
    monkeypatch.setattr(blocks, "run", lambda layer, state: calls.append(layer) or run(layer, state))
    Suffixes(blocks, column_layouts(mode, LAYERS, RANKS[mode]))(torch.from_numpy(np.load(ids)))
    assert len(calls) == LAYERS + LAYERS * (LAYERS + 1) // 2


def test_intervals_come_from_windows():
    def blocks_of(table):
        return block_sensitivities(table, 10, "spd", tau1=0.05, tau2=10.0)[1]

    for entry in blocks_of(np.tile([30.0, 20.0, 10.0], (8, 1))):
        assert entry.low == pytest.approx(entry.sensitivity) == pytest.approx(entry.high)
    rng = fresh_rng()
    few = np.array([30.0, 20.0, 10.0]) + rng.normal(size=(16, 3))
    widths = []
    for table in (few, np.tile(few, (16, 1))):  # what sixteen times as many windows of the same spread tell
        blocks = blocks_of(table)
        assert all(entry.low < entry.sensitivity < entry.high for entry in blocks)
        widths.append(blocks[0].high - blocks[0].low)
    assert widths[1] == pytest.approx(widths[0] / 4, rel=0.25)


def test_classes_and_their_thresholds(llama, ids):
    assert [classify(s, 0.05, 10.0) for s in (-1.0, 0.05, 0.051, 10.0, 10.1)] == [
        "insensitive",
        "insensitive",
        "sensitive",
        "sensitive",
        "extremely sensitive",
    ]
    assert default_tau1(29 * 10**9) == 0.05
    assert default_tau1(30 * 10**9) == 0.02
    for given, expected in ((None, 0.05), (0.3, 0.3)):
        options = SensitivityOptions(str(ids), "spd", 2, samples=2, tau1=given)
        document = measure_sensitivity(str(llama), options, console=Console())
        assert (document.tau1, document.tau2) == (expected, 10.0)
        for entry in document.blocks:
            assert entry.sensitivity_class == classify(entry.sensitivity, expected, 10.0)


def test_the_command(llama, ids, tmp_path):
    out = tmp_path / "s.json"
    command = ["sensitivity", llama, "--sync-tp-size", 4, "--data", ids, "--samples", 12, "--out", out]
    shown = invoke(*command, "--plot", tmp_path / "s")
    assert shown.code == 0, shown.stderr
    assert shown.stdout.count("sensitive") >= LAYERS
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "s.svg").read_text()
    document = json.loads(out.read_text())
    assert document["complete"] is True
    assert document["data"]["samples"] == 12
    printed = invoke(*command, "--json")  # the same command reads what is there
    assert json.loads(printed.stdout) == document
    others = {
        "--seed": (5, "data"),
        "--mode": ("each", "mode"),
        "--dtype": ("bfloat16", "dtype"),
        "--seq-len": (8, "data"),
    }
    for option, (value, what) in others.items():
        assert f"holds a measurement with another {what}" in one_sentence(invoke(*command, option, value))
    assert json.loads(out.read_text()) == document
    assert invoke(*command, "--seed", 5, "--overwrite", "--json").code == 0
    assert json.loads(out.read_text())["data"]["seed"] == 5


def test_fewer_windows_than_asked_for_are_all_taken(llama, ids, tmp_path):
    command = ["sensitivity", llama, "--data", ids, "--sync-tp-size", 2, "--json", "--samples"]
    more, all_there = (invoke(*command, count, "--out", tmp_path / f"{count}.json") for count in (13, 12))
    assert "gives 12 windows of 16 tokens, fewer than the 13 of --samples: all are taken" in more.stderr
    assert "all are taken" not in all_there.stderr
    assert json.loads(more.stdout) == json.loads(all_there.stdout)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--sync-tp-size", "3"], 1, "sync-tp-size 3 does not divide the 8 attention heads"),
        ([], 2, "--mode spd needs --sync-tp-size N"),
        (["--mode", "ladder", "--sync-tp-size", "2"], 2, "--sync-tp-size has no effect"),
        (["--mode", "sweep"], 2, "'sweep' is not one of 'spd', 'ladder', 'each', 'each-ladder'"),
        (["--sync-tp-size", "2", "--seq-len", "65"], 1, "--seq-len 65 is over the model's 64 positions"),
        (["--sync-tp-size", "2", "--tau1", "3", "--tau2", "1"], 2, "--tau1 3 is above --tau2 1"),
        (["--sync-tp-size", "2", "--tau1", "-inf"], 2, "--tau1 must be a finite number, not -inf"),
        (["--sync-tp-size", "2", "--dtype", "int8"], 2, "'int8' is not one of"),
        (["--mode", "points", "--tau1", "0.1"], 2, "--tau1 has no effect with --mode points"),
        (["--mode", "points", "--tau2", "10"], 2, "--tau2 has no effect with --mode points"),
        (["--mode", "each-ladder", "--pairs"], 2, "--pairs has no effect without --mode points"),
        (["--mode", "points", "--sync-tp-size", "3"], 1, "sync-tp-size 3 does not divide the 8 attention heads"),
    ],
)
def test_what_is_refused(llama, ids, tmp_path, options, code, message):
    outcome = invoke("sensitivity", llama, "--data", ids, "--out", tmp_path / "s.json", "--samples", 4, *options)
    assert message in one_sentence(outcome)
    assert outcome.code == code
    assert not (tmp_path / "s.json").exists()


def test_data_that_tokenises_to_nothing_and_a_model_of_nan(llama, ids, tmp_path):
    arguments = ["--out", tmp_path / "s.json", "--sync-tp-size", "2", "--samples", "4"]
    (tmp_path / "empty.npy").write_bytes(b"")
    np.save(tmp_path / "none.npy", np.zeros((0,), dtype=np.int64))
    for name in ("empty.npy", "none.npy", "missing.npy"):
        assert name in one_sentence(invoke("sensitivity", llama, "--data", tmp_path / name, *arguments))
    (tmp_path / "t.txt").write_text("")
    assert "no tokenizer" in one_sentence(invoke("sensitivity", llama, "--data", tmp_path / "t.txt", *arguments))
    blocks = Blocks(open_checkpoint(str(llama)), torch.float32, torch.device("cpu"))
    from safetensors.torch import save_file

    tensors = dict(zip(names := list(blocks.checkpoint.tensors), blocks.read(names), strict=True))
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = math.nan
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    assert "is NaN or infinite" in one_sentence(invoke("sensitivity", llama, "--data", ids, *arguments))


def test_a_converted_model_has_no_sensitivity(llama, ids, tmp_path):
    assert invoke("convert", llama, tmp_path / "ladder", "--ladder", "2:", "--no-verify").code == 0
    how = ("--data", ids, "--out", tmp_path / "s.json", "--mode", "ladder", "--samples", 4)
    assert "is not dense" in one_sentence(invoke("sensitivity", tmp_path / "ladder", *how))


def test_the_figures_of_the_design(stories, tmp_path):
    """The trained model beside the repository: perplexities that were measured elsewhere."""
    command = ["sensitivity", stories, "--data", f"{stories}-samples.npz:heldout", "--samples", 64, "--json"]
    spd = json.loads(invoke(*command, "--sync-tp-size", 4, "--out", tmp_path / "a.json").stdout)["perplexity"]
    ladder = json.loads(invoke(*command, "--mode", "ladder", "--out", tmp_path / "b.json").stdout)["perplexity"]
    assert [round(value, 2) for value in (spd[5], spd[0])] == [3.62, 8.05]
    assert [ladder[4], ladder[2], ladder[0]] == pytest.approx([4.176, 5.761, 13.40], abs=1e-3)


def test_a_table_that_is_none_is_not_gone_on_from(llama, ids, tmp_path):
    out = tmp_path / "s.json"
    command = ["sensitivity", llama, "--sync-tp-size", 4, "--data", ids, "--samples", 12, "--out", out]
    assert invoke(*command).code == 0
    for rows in (None, [[1.0] * 4], [[1.0] * 5] * 13, [["1"] * 5], [[1.0, None, 1.0, 1.0, 1.0]], {"a": 1}):
        edit_json(out, nll=rows)
        assert "--out holds no table of at most 12 rows of 5" in one_sentence(invoke(*command)), rows
    out.write_text("{cut off")
    assert "name another file, or pass --overwrite" in one_sentence(invoke(*command))


def test_a_killed_command_goes_on_and_nobody_works_beside_it(llama, ids, tmp_path, monkeypatch):
    """Wherever it was killed, also before the first batch was done: a model's likelihood is not computed twice."""
    out = tmp_path / "s.json"
    command = ["sensitivity", llama, "--sync-tp-size", 4, "--data", ids, "--samples", 12, "--batch-size", 2]
    assert invoke(*command, "--out", tmp_path / "whole.json").code == 0
    done, every, original = [], 6 * (LAYERS + 1), Suffixes.walk

    def walk(self, batch, members):
        for found in original(self, batch, members):
            if len(done) in stops:
                stops.remove(len(done))
                raise UserError("stopped")
            done.append(found)
            yield found

    first = random.randint(1, random.choice([LAYERS, every - 2]))
    stops = [first, random.randint(first + 1, every - 1)]
    monkeypatch.setattr("ladderize.eval.suffixes.SAVE_SECONDS", -1.0)
    monkeypatch.setattr(Suffixes, "walk", walk)
    folder = out.with_name("s.json.ladderize-work")
    stopped = invoke(*command, "--out", out)
    assert "stopped" in one_sentence(stopped)
    assert f"what is measured is kept in {folder} until" in stopped.stderr
    assert not out.exists()
    nll = json.loads((folder / "table.json").read_text())["nll"]
    assert sum(value is not None for row in nll for value in row) == 2 * len(done)
    assert "holds a measurement with another mode" in one_sentence(invoke(*command, "--out", out, "--mode", "each"))
    with SensitivityFolder(folder, {}):
        assert "another run is using" in one_sentence(invoke(*command, "--out", out))
    windows, models = 2 * (len(done) // (LAYERS + 1)), len(done) % (LAYERS + 1)
    assert "stopped" in one_sentence(resumed := invoke(*command, "--out", out))
    more = f" and {models} of {LAYERS + 1} models on those that follow" if models else ""
    assert f"resuming after {windows} of 12 windows{more}\n" in resumed.stderr
    assert invoke(*command, "--out", out).code == 0
    assert len(done) == every
    assert json.loads(out.read_text()) == json.loads((tmp_path / "whole.json").read_text())
    assert not folder.exists()


def test_two_processes_go_on_with_the_table_of_one(llama, ids, tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    command = ["sensitivity", llama, "--sync-tp-size", 4, "--data", ids, "--samples", 12, "--batch-size", 2]
    assert invoke(*command, "--out", one).code == 0
    expected = json.loads(one.read_text())
    two.write_text(json.dumps({**expected, "complete": False, "nll": expected["nll"][:3]}))
    command += ["--out", two, "--plot", tmp_path / "s", "--json"]
    result = warm.run_group([sys.executable, "-m", "ladderize", *command])  # five batches in three rounds
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("resuming after 3 of 12 windows") == 1
    assert "on 2 processes (cpu)" in result.stderr
    found = json.loads(two.read_text())
    assert json.loads(result.stdout) == found
    for name in ("nll", "perplexity"):
        np.testing.assert_allclose(found.pop(name), expected.pop(name), rtol=1e-6)
    assert found | {"blocks": []} == expected | {"blocks": []}  # follow from the table
    assert listing(tmp_path) == ["ids.npy", "one.json", "s.png", "s.svg", "src", "two.json"]


def test_a_home_folder_is_understood_everywhere(llama, ids, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    command = ["sensitivity", llama, "--data", ids, "--samples", 12, "--out", "~/s.json"]
    assert invoke(*command, "--sync-tp-size", 4).code == 0
    assert "with another sync_tp_size" in one_sentence(invoke(*command, "--sync-tp-size", 2))


def test_ticks_of_the_picture_stay_apart():
    assert value_ticks(-0.01, 12.0, 0.05) == pytest.approx([0, 0.1, 1, 10])  # nothing below 0 for a tiny bar
    assert value_ticks(-0.8, 3.0, 0.05) == pytest.approx([-0.1, 0, 0.1, 1])
    assert len(value_ticks(0.0, 1e30, 0.02)) <= 8


def test_a_tiny_negative_value_takes_little_of_the_picture(llama, ids, tmp_path):
    command = ["sensitivity", llama, "--sync-tp-size", 4, "--data", ids, "--samples", 12, "--out", tmp_path / "s.json"]
    assert invoke(*command).code == 0
    document = SensitivityDocument.from_dict(json.loads((tmp_path / "s.json").read_text()), "s.json")
    values = [8.0, -0.001, 0.02, 0.4]
    blocks = [
        replace(block, sensitivity=value, low=value - 0.001, high=value + 0.001)
        for block, value in zip(document.blocks, values, strict=True)
    ]
    _, drawn = draw_sensitivity(replace(document, blocks=blocks), tmp_path / "s")
    (zero,) = re.findall(r'text-anchor="end" transform="translate\([^,]*,([.\d]+)\)"[^>]*>0<', drawn.read_text())
    assert 0.9 * 280 < float(zero) < 290  # of 280 pixels, from above; the label is a little below its place
