"""``adapt --dry-run``: what a training takes, of checkpoints whose weights nobody reads."""

import json
import re

import numpy as np
import pytest

from ladderize.console import human_bytes
from ladderize.layout import Layout
from ladderize.runtime.shards import read_shape
from tests.helpers import ROOT, invoke, invoke_well, listing, one_sentence, save_sparse
from tests.retrain.commands import arguments


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """An 8B without weights, the same with ladder on its upper half and on all layers, and data."""
    folder = tmp_path_factory.mktemp("large")
    config = read_shape("8b")
    save_sparse(folder / "dense", config)
    for name, layers in (("upper half", range(16, 32)), ("all", range(32))):
        save_sparse(folder / name, config, Layout.from_layers(32, ladder=layers))
    np.save(folder / "ids.npy", np.random.randint(0, 1000, (40, 2048)))
    return folder


def dry_run(large, model, *more):
    data = ["--data", large / "ids.npy", "--distill-from", large / "dense", "--seq-len", 2048]
    outcome = invoke_well("adapt", large / model, "--dry-run", "--device-memory", "80GB", *data, *more, "--json")
    return json.loads(outcome.stdout)


def rows_of_the_page():
    page = (ROOT / "docs" / "adapt.md").read_text(encoding="utf-8")
    table = page.split("### What it takes\n")[1].split("\n#")[0]
    return re.findall(r"^\| `(\w+)` \| ([\w ,]+) \| ([\d.]+) GB, (.*) \| (yes|no: two) \|$", table, re.MULTILINE)


def test_the_figures_of_the_page(large):
    rows = rows_of_the_page()
    assert len(rows) == 6
    for method, layers, memory, how, fits in rows:
        budget = ["--max-tokens", "50M", "--batch-size", 64] if method in ("full", "lora") else []
        found = dry_run(large, "all" if layers == "all" else "upper half", "--method", method, *budget)
        if budget:
            first, two = found["ways"][0], [way for way in found["ways"] if way["processes"] == 2]
            assert first["fits"] == (fits == "yes")
            assert all(way["fits"] for way in two)
            assert how.startswith(f"{first['cut']['micro_batch_size']} row")
            assert ("checkpointing" in how) == first["cut"]["gradient_checkpointing"]
            assert first["memory_bytes"] == sum(first["memory_parts"].values())
            found = first
        assert human_bytes(found["memory_bytes"]) == f"{memory} GB"


def test_what_does_not_fit_is_not_aligned_first(place, tmp_path, monkeypatch):
    monkeypatch.setattr("ladderize.adapt.retrain.forecast.available_bytes", lambda device: 500_500_000)
    more = ("--align", "--distill-from", place / "dense")
    message = one_sentence(invoke(*arguments(place, tmp_path / "out", *more, model="upper")))
    assert re.search(r"this needs about 50\d MB for each process, with --micro-batch-size 1 --gradient-ch", message)
    assert "are free; --dry-run shows what would fit" in message
    assert listing(tmp_path) == []


def test_what_a_dry_run_says(place, tmp_path):
    given = [*arguments(place, None, model="upper", steps=3), "--device-memory", "600MB"]
    assert "--device-memory has no effect without --dry-run" in one_sentence(invoke(*given))
    here = invoke(*given[:-2], "--dry-run")
    assert "--tp-size" not in here.stdout  # processes on a CPU share its memory
    said = json.loads(invoke_well(*given[:-2], "--dry-run", "--json").stdout)
    assert len({way["seconds"] for way in said["ways"] if way["how"].startswith(("as asked", "2 proc"))}) == 1
    assert all(way["seconds"] > 0 for way in said["ways"])
    assert "operations per second, without communication" in " ".join(here.stdout.split())
    assert re.search("^how .* time$", here.stdout, re.MULTILINE)
    outcome = invoke_well(*given, "--dry-run", "--distill-from", place / "dense")
    assert outcome.stdout.startswith("full, layers 2:4: ")
    assert "about 3 steps of 4 rows of 48 tokens" in outcome.stdout
    lines = outcome.stdout.splitlines()
    for words in ("as asked: 1 process", "--tp-size 2", "--tp-size 4", "FSDP2 over 8 processes", "--method lora"):
        assert any(line.startswith(words) and " yes " in line for line in lines), words


def test_small_files_are_read_and_others_said_not_to_be(place, tmp_path, monkeypatch):
    lines = ['{"input_ids": [3, 4, 5]}'] * 6
    lines[3] = '{"input_ids": [3, 4'
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join(lines))
    given = arguments(place, None, "--data", bad, "--dry-run", model="upper")
    message = one_sentence(invoke(*given))
    assert "bad.jsonl, line 4: is not JSON" in message
    assert "repair it, or skip such rows with --skip-bad-rows" in message
    assert "Not read" not in invoke_well(*given, "--skip-bad-rows").stdout
    good = arguments(place, None, "--data", place / "ids.npy", "--eval-data", bad, "--dry-run", model="upper")
    assert "bad.jsonl, line 4: is not JSON" in one_sentence(invoke(*good))
    monkeypatch.setattr("ladderize.adapt.retrain.forecast.MOST_READ", bad.stat().st_size - 1)
    unread = [f"--data {place / 'ids.npy'}", f"--eval-data {bad}"]
    assert f"Not read, and so not checked: {', '.join(unread)}." in invoke_well(*good).stdout
    assert json.loads(invoke_well(*good, "--json").stdout)["unread"] == unread
    hub = arguments(place, None, "--data", "hub:o/n:train", "--dry-run", model="upper")
    assert "--data hub:o/n:train, --eval-data" in invoke_well(*hub).stdout
