"""Sizes that nobody means, or that this machine does not hold: one sentence before any work, not a killed process."""

import pytest

from tests.helpers import invoke, listing, one_sentence

BILLION, TRILLION = 10**9, 10**12


def command(name, place, out):
    data = ["--data", place / "ids.npy", "--device", "cpu"]
    blocks = ["--method", "blocks", "--distill-from", place / "dense"]
    return {
        "adapt": ["adapt", place / "spd", out, *data],
        "blocks": ["adapt", place / "spd", out, *blocks, *data],
        "spd": ["spd", place / "dense", out, "--sync-tp-size", 2, *data],
        "sensitivity": ["sensitivity", place / "dense", *data, "--sync-tp-size", 2, "--out", f"{out}.json"],
        "eval": ["eval", place / "dense", "--perplexity", place / "ids.npy"],
        "generate": ["generate", place / "dense", "--from-bos", "--out", f"{out}.jsonl", "--max-new-tokens", 8],
    }[name]


@pytest.mark.parametrize(
    ("name", "more", "expected"),
    [
        ("blocks", [], " needs "),
        ("sensitivity", [], "measuring sensitivity with all weights in memory needs"),
        ("generate", ["--num-samples", 64], "a KV cache for 64 texts of 9 tokens needs"),
    ],
)
def test_what_this_machine_does_not_hold(place, tmp_path, monkeypatch, name, more, expected):
    monkeypatch.setattr("ladderize.memory.available_bytes", lambda device: 10_000)
    message = one_sentence(invoke(*command(name, place, tmp_path / "out"), *more))
    assert expected in message
    assert "10 kB are free" in message
    assert listing(tmp_path) == []
