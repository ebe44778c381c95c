"""What this machine does not hold: one sentence before any work, not a killed process."""

import pytest

from tests.helpers import invoke, listing, one_sentence


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks", " needs "),
        ("sensitivity", "measuring sensitivity with all weights in memory needs"),
        ("generate", "a KV cache for 64 texts of 9 tokens needs"),
    ],
)
def test_what_this_machine_does_not_hold(place, tmp_path, monkeypatch, name, expected):
    out, data = tmp_path / "out", ["--data", place / "ids.npy", "--device", "cpu"]
    sampled = ["--from-bos", "--num-samples", 64, "--max-new-tokens", 8]
    words = {
        "blocks": ["adapt", place / "spd", out, "--method", "blocks", "--distill-from", place / "dense", *data],
        "sensitivity": ["sensitivity", place / "dense", *data, "--sync-tp-size", 2, "--out", f"{out}.json"],
        "generate": ["generate", place / "dense", *sampled, "--out", f"{out}.jsonl"],
    }
    monkeypatch.setattr("ladderize.memory.available_bytes", lambda device: 10_000)
    message = one_sentence(invoke(*words[name]))
    assert expected in message
    assert "10 kB are free" in message
    assert listing(tmp_path) == []
