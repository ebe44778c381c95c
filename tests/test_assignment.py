"""Heads and neurons on other ranks: what the converter writes, and what it refuses."""

from pathlib import Path

import pytest
import torch

from ladderize import convert_checkpoint, load
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import to_json
from ladderize.convert.assignment import RankAssignment
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from tests.helpers import (
    BIASES,
    SHAPE,
    all_tensors,
    edit_json,
    edit_tensors,
    listing,
    random_ids,
    random_ranks,
    refusal,
    save_llama,
)

HEADS, KV_HEADS = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
NEURONS = SHAPE["intermediate_size"]


def random_order(kv_heads: int, heads: int = HEADS) -> tuple[int, ...]:
    """Groups and the heads within them, neither as before where there is another order."""

    def other(count: int) -> list[int]:
        order = torch.randperm(count).tolist()
        return order if count == 1 or order != sorted(order) else other(count)

    group = heads // kv_heads
    return tuple(j * group + i for j in other(kv_heads) for i in other(group))


def mark_of(folder: Path) -> str:
    return fingerprint(read_checkpoint(folder))


def assignment_for(source: Path, layers=(0, 2), *, kv_heads: int = KV_HEADS, ranks: int = 4) -> RankAssignment:
    heads, neurons = {}, {}
    for layer in layers:
        heads[layer], neurons[layer] = random_order(kv_heads), random_ranks(ranks)
    return RankAssignment(ranks, mark_of(source), heads, neurons)


def permuted(
    tensors: dict[str, torch.Tensor], found: RankAssignment, kv_heads: int = KV_HEADS
) -> dict[str, torch.Tensor]:
    """The whole model's tensors with every head and neuron at its new place, one by one."""
    result = {name: tensor.clone() for name, tensor in tensors.items()}

    def place(name: str, new: int, old: int, size: int, axis: int = 0) -> None:
        if name in tensors:
            rows, values = result[name].transpose(0, axis), tensors[name].transpose(0, axis)
            rows[new * size : (new + 1) * size] = values[old * size : (old + 1) * size]

    for layer in found.heads:
        prefix, group = f"model.layers.{layer}.", HEADS // kv_heads
        size = len(tensors[f"{prefix}self_attn.q_proj.weight"]) // HEADS
        for new, old in enumerate(found.heads[layer]):
            for kind in ("weight", "bias"):
                place(f"{prefix}self_attn.q_proj.{kind}", new, old, size)
                place(f"{prefix}self_attn.k_proj.{kind}", new // group, old // group, size)
                place(f"{prefix}self_attn.v_proj.{kind}", new // group, old // group, size)
            place(f"{prefix}self_attn.o_proj.weight", new, old, size, axis=1)
    for layer, ranks in found.neurons.items():
        prefix = f"model.layers.{layer}.mlp."
        share = len(ranks) // found.sync_tp_size
        filled = [0] * found.sync_tp_size
        for old, rank in enumerate(ranks):
            new = rank * share + filled[rank]
            filled[rank] += 1
            for name in ("gate_proj.weight", "up_proj.weight", "gate_proj.bias", "up_proj.bias"):
                place(prefix + name, new, old, 1)
            place(f"{prefix}down_proj.weight", new, old, 1, axis=1)
    return result


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return load(folder)(ids).logits


@pytest.mark.parametrize(("shards", "chunk"), [(1, 4 << 20), (3, 128)])
@pytest.mark.parametrize(
    "extra", [BIASES, {"num_key_value_heads": 8}, {"num_key_value_heads": 1}, {"head_dim": 16}], ids=str
)
def test_the_dense_function_does_not_change(tmp_path, monkeypatch, extra, shards, chunk):
    """MHA, GQA, MQA, with biases: every tensor is moved, and logits differ by the order of a sum only."""
    monkeypatch.setattr("ladderize.checkpoint.writing.READ_AT_ONCE", chunk)  # many chunks to a head, and one
    source, kv_heads = save_llama(tmp_path / "src", shards=shards, **extra), extra.get("num_key_value_heads", KV_HEADS)
    found = assignment_for(source, range(4), kv_heads=kv_heads)
    report = convert_checkpoint(source, tmp_path / "out", Recipe(dense="all"), Changes(assignment=found), verify=False)
    assert report.weights["rewritten"] == len(report.weight_files_rewritten)
    written, expected = all_tensors(tmp_path / "out"), permuted(all_tensors(source), found, kv_heads)
    assert set(written) == set(expected)
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    moved = [name for name, tensor in all_tensors(source).items() if not torch.equal(written[name], tensor)]
    assert {name.split(".")[3] for name in moved} == {"self_attn", "mlp"}
    assert sum("q_proj.weight" in name for name in moved) == 4
    ids = random_ids(2, 9)
    torch.testing.assert_close(logits(tmp_path / "out", ids), logits(source, ids), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "0" * 64}, "the assignment was computed for another model"),
        ({"sync_tp_size": 2}, "is for sync_tp_size 2, but the layout has 4"),
        ({"heads": {"4": list(range(8))}}, "names layer 4, but the model has 4 layers"),
        ({"heads": {"1": [0] * 8}}, "does not fit layer 1: its order is not a permutation of the heads 0 to 7 in"),
        ({"heads": {"1": [0, 2, 1, 3, 4, 5, 6, 7]}}, "heads of each KV head stay together"),
        ({"neurons": {"1": "0 1 2 3"}}, f"not give each of the {NEURONS} neurons of the MLP a rank"),
        ({"neurons": {"1": " ".join(["0", "1", "2", "4"] * (NEURONS // 4))}}, "a rank from 0 to 3"),
    ],
)
def test_assignments_that_do_not_fit(llama, tmp_path, changes, message):
    path = tmp_path / "assignment_made_before.json"
    path.write_text(to_json(assignment_for(llama).to_dict() | changes))
    words = ("--spd", "all", "--sync-tp-size", "4", "--assignment", path)
    assert message in refusal("convert", llama, tmp_path / "out", *words)
    assert listing(tmp_path) == ["assignment_made_before.json", "src"]


def test_the_config_belongs_to_the_fingerprint(llama):
    """The same weights with another rope are another function; how a config says the same thing does not matter."""
    mine = mark_of(llama)
    edit_json(llama / "config.json", rope_parameters=None, rope_theta=10000, rope_scaling=None, head_dim=None)
    assert mark_of(llama) == mine
    edit_json(llama / "config.json", rope_theta=5e5)
    assert mark_of(llama) != mine


def test_fingerprints(tmp_path):
    """The same model in other shards and another layout has the same one; another value, dtype or seed has another."""
    source = save_llama(tmp_path / "src")
    load(source).save_pretrained(tmp_path / "sharded", max_shard_size="20kB")
    convert_checkpoint(tmp_path / "sharded", tmp_path / "spd", Recipe(spd="all", sync_tp_size=2), verify=False)
    assert mark_of(tmp_path / "spd") == mark_of(source)
    convert_checkpoint(source, tmp_path / "half", Recipe(ladder="all", dtype="bfloat16"), verify=False)
    assert mark_of(tmp_path / "half") != mark_of(source)
    assert mark_of(save_llama(tmp_path / "other", seed=1)) != mark_of(source)
    before = mark_of(source)  # of 97 rows the one in the middle, since they are more than 4 KiB
    edit_tensors(source, lambda tensors: tensors["model.embed_tokens.weight"][48, 0].add_(1))
    assert mark_of(source) != before
