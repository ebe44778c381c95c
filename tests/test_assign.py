"""The assignment of heads and neurons to virtual ranks: against brute force and plain loops, and by the command."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from ladderize import convert_checkpoint, load
from ladderize.adapt.layers import assign
from ladderize.adapt.layers.assign import ApartBlock, BlockTokens, cheapest_ranks
from ladderize.adapt.layers.layer_files import Contender, heldout_measures
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import projection_of
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import to_json
from ladderize.convert.assignment import RankAssignment, read_assignment
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.layout import Layout
from tests.groups import ALONE
from tests.helpers import (
    BIASES,
    FAMILIES,
    NORMED_SUMS,
    SHAPE,
    all_tensors,
    blocks_of,
    edit_json,
    edit_tensors,
    fresh_rng,
    invoke_well,
    listing,
    random_ids,
    random_ranks,
    refusal,
    save_llama,
)

HEADS, KV_HEADS = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
NEURONS, LAYERS = SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
MODELS = {  # what a model has beside SHAPE, its KV heads, and the ranks
    "mha": ({"num_key_value_heads": 8}, 8, 2),
    "gqa": ({}, 4, 2),
    "as many ranks as kv heads": ({}, 4, 4),
    "more ranks than kv heads": ({}, 4, 8),
    "biases": (BIASES, 4, 2),
    **{name: ({"model_type": name, "num_key_value_heads": 4}, 4, 2) for name in FAMILIES if name not in NORMED_SUMS},
}


def random_blocks(tmp_path, extra):
    folder = save_llama(tmp_path / "dense", seed=int(torch.randint(1 << 30, ())), **extra)
    return blocks_of(folder)


def apart_layout(layers, ranks):
    return Layout.from_layers(layers, spd=range(layers), sync_tp_size=ranks)


@pytest.mark.parametrize(("neurons", "ranks"), [(12, 2), (12, 3), (40, 4), (64, 8), (6, 6), (5, 1)])
def test_neurons_go_where_scipy_puts_them(neurons, ranks):
    rng = fresh_rng()
    for spread in (0.01, 1.0, 30.0):
        costs = np.exp(rng.normal(size=(neurons, 1)) * spread) * rng.random((neurons, ranks))
        if rng.random() < 0.3:
            costs[rng.random(neurons) < 0.5] = 0.0  # neurons that never act
        found = cheapest_ranks(costs)
        assert np.bincount(found, minlength=ranks).tolist() == [neurons // ranks] * ranks
        repeated = costs.repeat(neurons // ranks, axis=1)
        rows, columns = linear_sum_assignment(repeated)
        assert costs[range(neurons), found].sum() == pytest.approx(repeated[rows, columns].sum(), rel=1e-9, abs=1e-300)


def block_of(blocks, layer, ranks, units, tokens=24, windows=3):
    module = blocks.layer(layer, apart_layout(blocks.num_layers, ranks))
    states = [torch.randn(1, tokens, SHAPE["hidden_size"]) for _ in range(windows)]
    return ApartBlock(module, ranks, units), assign.block_tokens(blocks, module, states), states


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_costs_and_errors_are_those_of_real_layers(tmp_path, name):
    """Layers of the model class, whose weights lie as assigned; the costs from their MLP's inner activations."""
    extra, kv_heads, ranks = MODELS[name]
    blocks, rng = random_blocks(tmp_path, extra), fresh_rng()
    units = kv_heads if kv_heads % ranks == 0 else ranks
    block, tokens, states = block_of(blocks, 1, ranks, units)
    layout, dense = apart_layout(LAYERS, ranks), Layout.dense(LAYERS)
    members = tuple(tuple(sorted(own)) for own in rng.permutation(units).reshape(ranks, -1).tolist())
    if units != kv_heads:
        members = block.members
    neurons = rng.permutation(NEURONS) % ranks
    heads = np.arange(HEADS).reshape(units, -1)[np.concatenate(members)].flatten().tolist()
    found = RankAssignment(ranks, "", {1: tuple(heads)}, {1: tuple(neurons.tolist())})
    plain = blocks.layer(1, dense)
    moved = blocks.layer(1, layout, found.permuted(1, blocks.weights(1), blocks.config))
    difference = torch.cat([blocks.run(moved, state) - blocks.run(plain, state) for state in states])
    assert block.error(tokens, members, neurons) == pytest.approx(float(difference.square().mean()), rel=1e-3)

    costs = block.costs(tokens, members)
    sample = torch.from_numpy(np.sort(rng.choice(NEURONS, 5, replace=False)))
    np.testing.assert_allclose(block.costs(tokens, members, sample), costs[sample], rtol=1e-4)
    heads, mlp = blocks.layer(1, layout), plain.mlp
    width, scale = HEADS // units * heads.self_attn.head_dim, blocks.decoder.residual_scale
    expected = np.zeros((NEURONS, ranks))
    for state in states:
        bias, length = heads.self_attn.o_proj.bias, state.shape[1]
        around = blocks.position_embeddings(1, length), blocks.mask(1, length)
        inputs, _ = heads.self_attn(heads.input_layernorm(state), *around)

        def inner(units, state=state, inputs=inputs, bias=bias):
            kept = torch.zeros_like(inputs)
            for unit in units:
                kept[..., unit * width : (unit + 1) * width] = inputs[..., unit * width : (unit + 1) * width]
            added = torch.nn.functional.linear(kept, heads.self_attn.o_proj.weight, bias) * scale
            x = plain.post_attention_layernorm(state + added)
            gate, up = (projection_of(plain, f"mlp.{name}_proj")(x) for name in ("gate", "up"))
            return (plain.activation(gate) * up)[0]

        full = inner(range(units))
        for rank, own in enumerate(members):
            lost = (full - inner(own)).square().mean(0) / len(states)
            expected[:, rank] += (lost * (mlp.down_proj.weight * scale).square().sum(0)).numpy()
    np.testing.assert_allclose(costs, expected, rtol=2e-3, atol=1e-5 * expected.max())


def partitions(units, size):
    """Every split of units into groups of one size, each once."""
    if not units:
        yield []
        return
    first, *rest = units
    for others in itertools.combinations(rest, size - 1):
        for more in partitions([unit for unit in rest if unit not in others], size):
            yield [(first, *others), *more]


@torch.no_grad()
def test_heads_are_chosen_as_by_brute_force(tmp_path):
    """4 KV groups on 2 ranks: from each of the 3 splits one exchange leads to each other one."""
    blocks = random_blocks(tmp_path, {})
    block, tokens, _ = block_of(blocks, 2, 2, 4)

    def cost(members):
        costs = block.costs(tokens, members)
        return costs[range(NEURONS), cheapest_ranks(costs)].sum()

    found = assign.choose_heads(block, tokens, neurons=True)
    assert cost(found) == pytest.approx(min(map(cost, partitions(range(4), 2))), rel=1e-6)

    # with neurons that stay, it matters which rank has which
    def staying(members):
        return block.costs(tokens, members)[range(NEURONS), block.neuron_ranks].sum()

    found = assign.choose_heads(block, tokens, neurons=False)
    orders = (order for split in partitions(range(4), 2) for order in itertools.permutations(split))
    assert staying(found) == pytest.approx(min(map(staying, orders)), rel=1e-6)


@torch.no_grad()
def test_nothing_is_worse_than_as_the_model_lies(tmp_path):
    """Also where the tokens to choose by say nothing about the held-out ones."""
    blocks = random_blocks(tmp_path, {})
    block, held, _ = block_of(blocks, 1, 2, 4)
    misleading = BlockTokens(torch.randn(3, SHAPE["hidden_size"]) * 30, torch.randn(3, HEADS * 4) * 30)
    for fit in (misleading, held):
        for heads, neurons in ((True, True), (True, False), (False, True)):
            members, ranks, report = assign.assign_block(block, fit, held, heads=heads, neurons=neurons)
            assert report.error_before == block.error(held, block.members, block.neuron_ranks)
            assert report.error_after == block.error(held, members, ranks) <= report.error_before
            assert heads or members == block.members
            assert neurons or (ranks == block.neuron_ranks).all()


@pytest.mark.parametrize("name", MODELS)
def test_an_assigned_model(tmp_path, name):
    """Dense it computes what it did; with its layout something else, which round trips keep. A layer whose MLP sees
    every head stays."""
    extra, kv_heads, ranks = MODELS[name]
    blocks = random_blocks(tmp_path, extra)
    layout = Layout.from_layers(LAYERS, delayed=[2, 3], spd=[0], sync_tp_size=ranks)
    windows = Windows(random_ids(96, 16), random_ids(48, 16))  # enough that something is gained on held-out ones, too
    found = assign.assign_layers(blocks, layout, ("heads", "neurons"), windows)
    assert sorted(found.neurons) == [0, 2, 3] == sorted(found.report)
    assert sorted(found.heads) == ([0, 2, 3] if kv_heads % ranks == 0 else [])
    assert all(report.error_after <= report.error_before for report in found.report.values())
    assert found.moved(found.neurons)
    found.check(blocks.config)
    dense, out, back, again = (tmp_path / each for each in ("dense", "out", "back", "again"))
    convert_checkpoint(dense, out, layout, Changes(assignment=found), verify=False)
    convert_checkpoint(out, back, Layout.dense(LAYERS), verify=False)
    convert_checkpoint(back, again, layout, verify=False)
    convert_checkpoint(dense, tmp_path / "plain", layout, verify=False)
    assert read_assignment(back / "assignment.json") == found == read_assignment(again / "assignment.json")
    ids = random_ids(2, 12)
    with torch.no_grad():
        logits = {each.name: load(each)(ids).logits for each in (dense, out, back, again, tmp_path / "plain")}
    torch.testing.assert_close(logits["back"], logits["dense"], rtol=1e-4, atol=2e-4)
    assert torch.equal(logits["again"], logits["out"])
    assert not torch.allclose(logits["out"], logits["plain"], rtol=1e-3, atol=1e-3)


@pytest.fixture
def data(tmp_path):
    np.save(tmp_path / "ids.npy", random_ids(200, 16).numpy())
    return tmp_path / "ids.npy"


SPD = ("--spd", "1:3", "--sync-tp-size", 2)


def test_convert(llama, tmp_path, data):
    out, words = tmp_path / "out", (*SPD, "--assign", "heads,neurons", "--data", data)
    invoke_well("convert", llama, out, *words, "--dry-run")
    assert not out.exists()
    report = json.loads(invoke_well("convert", llama, out, *words, "--json").stdout)
    found = read_assignment(out / "assignment.json")
    assert report["moved_neurons"] == found.moved(found.neurons) != []
    assert sorted(found.neurons) == sorted(found.heads) == [1, 2]
    assert report["moved_heads"] == found.moved(found.heads)
    assert report["verified"]["forward"] == "finite"
    # by the file that it wrote, the same model
    invoke_well("convert", llama, tmp_path / "again", *SPD, "--assignment", out / "assignment.json", "--no-verify")
    invoke_well("convert", llama, tmp_path / "third", "--recipe", out / "ladderize.yaml", "--no-verify")
    for name in ("model.safetensors", "config.json", "assignment.json"):
        assert len({(tmp_path / each / name).read_bytes() for each in ("out", "again", "third")}) == 1
    # by the recipe of a model that was made of it, too
    invoke_well("convert", out, tmp_path / "next", *SPD, "--ladder", 3, "--no-verify")
    invoke_well("convert", llama, tmp_path / "same", "--recipe", tmp_path / "next" / "ladderize.yaml", "--no-verify")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "next" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    # for another number of ranks the order is as good as any, and the recipe does not name it
    other = ("--spd", "1:3", "--sync-tp-size", 4, "--no-verify")
    invoke_well("convert", out, tmp_path / "four", *other)
    invoke_well("convert", llama, tmp_path / "fresh", "--recipe", tmp_path / "four" / "ladderize.yaml", "--no-verify")
    twice = refusal("convert", out, tmp_path / "twice", "--recipe", out / "ladderize.yaml", "--no-verify")
    assert "lies in the order of its own assignment.json" in twice


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((*SPD, "--assign", "heads"), 2, "--assign has no effect without --data"),
        ((*SPD, "--data", "{data}"), 2, "--data has no effect without --assign"),
        (("--ladder", "all", "--assign", "heads", "--data", "{data}"), 1, "neither delays nor drops"),
        ((*SPD, "--assign", "neurons", "--data", "{few}"), 1, f"32 tokens to assign the {NEURONS} neurons"),
        (("--spd", "1", "--sync-tp-size", "8", "--assign", "heads", "--data", "{data}"), 1, "8 ranks share 4 KV heads"),
    ],
)
def test_what_is_refused(llama, tmp_path, data, options, code, message):
    np.save(tmp_path / "few.npy", random_ids(3, 16).numpy())
    files = {"data": data, "few": tmp_path / "few.npy"}
    before, words = listing(tmp_path), (str(word).format(**files) for word in options)
    assert message in refusal("convert", llama, tmp_path / "out", *words, code=code)
    assert listing(tmp_path) == before


def test_sources_that_are_refused(llama, tmp_path, data):
    """Each lies in an order, or has weights, that an assignment of the dense model would not fit."""
    words = ("--assign", "heads,neurons", "--data", data)
    invoke_well("convert", llama, tmp_path / "assigned", *SPD, *words, "--no-verify")
    invoke_well("convert", tmp_path / "assigned", tmp_path / "back", "--dense", "all", "--no-verify")
    invoke_well("convert", llama, tmp_path / "spd", *SPD, "--no-verify")
    align = ("--method", "align", "--distill-from", llama, "--data", data, "--no-verify", "--write", "last")
    invoke_well("adapt", tmp_path / "spd", tmp_path / "aligned", *align)
    invoke_well("convert", tmp_path / "aligned", tmp_path / "dense again", "--dense", "all", "--no-verify")
    broken = save_llama(tmp_path / "broken")
    edit_tensors(broken, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][0].fill_(torch.nan))
    before = listing(tmp_path)
    for source, message in {
        "assigned": "has an assignment.json already",
        "back": "has an assignment.json already",
        "aligned": "was adapted to another layout",
        "dense again": "was adapted to another layout",
        "broken": "is NaN or infinite",
    }.items():
        assert message in refusal("convert", tmp_path / source, tmp_path / "out", *SPD, *words)
    assert listing(tmp_path) == before
    # a model that was converted without a change of weights is still the dense one
    invoke_well("convert", tmp_path / "spd", tmp_path / "out", *words, "--no-verify")
    invoke_well("convert", llama, tmp_path / "other", *SPD, *words, "--no-verify")
    assert (tmp_path / "out" / "assignment.json").read_bytes() == (tmp_path / "other" / "assignment.json").read_bytes()


@torch.no_grad()
def test_ranks_are_matched_as_by_brute_force(tmp_path):
    """After a delayed MLP: what each set of heads misses on each rank, from real layers, head by head."""
    blocks, ranks = random_blocks(tmp_path, {"num_key_value_heads": 8}), 4
    layout = Layout.from_layers(LAYERS, delayed=range(LAYERS), sync_tp_size=ranks)
    rng = fresh_rng()
    heads = {layer: tuple(rng.permutation(HEADS).tolist()) for layer in range(LAYERS)}
    neurons = {layer: tuple((rng.permutation(NEURONS) % ranks).tolist()) for layer in range(LAYERS)}
    found, ids = RankAssignment(ranks, "", heads, neurons), random_ids(5, 12)
    matched = assign.matched_labels(blocks, layout, found, ids)
    assert (matched.heads[0], matched.neurons[0]) == (heads[0], neurons[0])  # nothing is delayed before it
    dense, state, width, visible = Layout.dense(LAYERS), blocks.embed(ids), HEADS // ranks, ()
    for layer in range(LAYERS):
        weights = blocks.weights(layer)
        plain = blocks.layer(layer, dense, weights)
        if layer:
            lost = np.zeros((ranks, ranks))
            for rank, stream in enumerate(visible):
                whole, own = (heads_of_layer(blocks, plain, layer, each) for each in (state, stream))
                for old in range(ranks):  # the heads that rank ``old`` has so far
                    columns = torch.zeros(HEADS, 1)
                    columns[list(heads[layer][old * width : (old + 1) * width])] = 1
                    missed = ((own - whole).unflatten(-1, (HEADS, -1)) * columns).flatten(-2)
                    added = missed @ plain.self_attn.o_proj.weight.T
                    lost[old, rank] = float((added.square().mean(-1) / state.square().mean(-1)).sum())
            best = min(itertools.permutations(range(ranks)), key=lambda labels: lost[range(ranks), labels].sum())
            for old, new in enumerate(best):
                of_rank = heads[layer][old * width : (old + 1) * width]
                assert matched.heads[layer][new * width : (new + 1) * width] == of_rank
                assert [r == new for r in matched.neurons[layer]] == [r == old for r in neurons[layer]]
        moved = matched.permuted(layer, weights, blocks.config)
        if layout.mlp_sync[layer] == "delayed":
            _, visible = blocks.run(blocks.layer(layer, layout, moved), state)
        state = blocks.run(plain, state)


def heads_of_layer(blocks, layer, index, stream):
    """The inputs of o_proj: what it gives when it is the identity."""
    attention, tokens = layer.self_attn, stream.shape[1]
    kept, width = attention.o_proj, attention.o_proj.in_features
    attention.o_proj = torch.nn.Identity(width)
    rope, mask = blocks.position_embeddings(index, tokens), blocks.mask(index, tokens)
    output, _ = attention(layer.input_layernorm(stream), position_embeddings=rope, attention_mask=mask)
    attention.o_proj = kept
    return output


def test_matched_ranks_are_kept_where_they_help(tmp_path, monkeypatch):
    blocks, ids = random_blocks(tmp_path, {}), random_ids(6, 12)
    layout = Layout.from_layers(LAYERS, delayed=range(LAYERS), sync_tp_size=2)
    heads = {layer: tuple(range(HEADS)) for layer in range(LAYERS)}
    found = RankAssignment(2, "", heads, {layer: random_ranks(2) for layer in range(LAYERS)})
    other = assign.relabelled(found, 2, [1, 0])

    def divergence(own):
        dense = Contender(blocks, Layout.dense(LAYERS), blocks.weights)
        moved = Contender(blocks, layout, lambda layer: own.permuted(layer, blocks.weights(layer), blocks.config))
        return heldout_measures({"dense": dense, "own": moved}, ids, ALONE)[1]["own"]

    nearer, farther = sorted((found, other), key=divergence)
    for start, matched in ((nearer, farther), (farther, nearer)):
        monkeypatch.setattr(assign, "matched_labels", lambda *_, own=matched: own)
        assert assign.better_labels(blocks, layout, start, ids, ids) == nearer


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
