"""Alignment: the least-squares solution against a slow one, what is chosen, what is kept, and dtypes."""

from itertools import takewhile
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import linear

from ladderize.adapt.layers import ridge as ridge_module
from ladderize.adapt.layers.align import RIDGES, LayerReport, align
from ladderize.adapt.layers.layer_files import Contender, LayerFiles, LayerJob, heldout_measures
from ladderize.adapt.layers.options import AlignOptions, layers_to_rewrite
from ladderize.adapt.layers.ridge import RankRows, affine, refit
from ladderize.adapt.layers.windows import Windows
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.convert.assignment import RankAssignment
from ladderize.convert.pipeline import convert_checkpoint
from ladderize.convert.plan import Changes
from ladderize.convert.recipe import Recipe
from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.modeling import ladderized_class
from tests.align_oracle import AlignOracle
from tests.groups import ALONE
from tests.helpers import (
    BIASES,
    FAMILIES,
    LAYOUTS,
    SHAPE,
    all_tensors,
    blocks_of,
    change_weights,
    fitting,
    listing,
    random_ids,
    save_llama,
)

CONVERTED = [name for name in LAYOUTS if name != "dense"]
TRAINED = 32  # of 40 windows


class Solved(NamedTuple):
    weights: dict  # of the whole model, by full name
    reports: list


def pair(folder, name, *, noise=0.0, dtype=torch.float32, **extra):
    """A random dense model and its conversion; noise: a retraining has moved every weight by about so much."""
    ladder, spd, ranks, more, *delayed = LAYOUTS[name]
    dense = save_llama(folder / "dense", dtype=dtype, seed=int(torch.randint(1 << 30, ())), **more, **extra)
    recipe = Recipe(ladder=ladder or None, spd=spd or None, delayed="".join(delayed) or None, sync_tp_size=ranks)
    convert_checkpoint(str(dense), folder / "student", recipe, verify=False)
    if noise:
        change_weights(folder / "student", lambda _, weight: weight + noise * torch.randn_like(weight))
    return dense, folder / "student"


def layers_to_align(layout, ranges):
    return layers_to_rewrite(AlignOptions("a.npy", layers=ranges), layout)


def solve(models, place, ids, *, ridge=1e-2, layers=None, dtype=torch.float32, dense_weights=None, random_share=0.0):
    teacher, own = (blocks_of(folder, dtype) for folder in models)
    stored = blocks_of(models[1], all_tensors(models[1])["model.norm.weight"].dtype)
    layers = layers_to_align(own.layout, layers)
    place.mkdir()
    files, windows = LayerFiles(place), Windows(ids[:TRAINED], ids[TRAINED:])
    dense_weights = dense_weights or blocks_of(models[0], stored.dtype).weights
    job = LayerJob(teacher, own, own.layout, layers, stored.weights, dense_weights, windows, ALONE, files)
    ridges = RIDGES if ridge is None else (ridge,)
    with patch.multiple("ladderize.adapt.layers.align", RANDOM_SHARE=random_share, RIDGES=ridges):
        align(job, AlignOptions("a.npy"))
    weights = all_tensors(models[1])
    for layer in layers:
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in files.weights(layer).items()}
    return Solved(weights, [files.report(LayerReport, layer) for layer in layers])


def oracle_of(models, *, ridge=1e-2):
    own = blocks_of(models[1])
    return AlignOracle(*map(all_tensors, models), own.model_config(own.layout), ridge, TRAINED)


def clear_windows(models, layers=None):
    """Random windows with which rounding does not decide what is kept, and the slow solution of them."""
    while True:
        ids, oracle = random_ids(40, 12), oracle_of(models)
        expected = oracle(ids, layers_to_align(blocks_of(models[1]).layout, layers))
        if oracle.closest > 1e-3:
            return ids, expected


def apart(one, other):
    return max((float((one[name] - other[name]).norm() / other[name].norm()) for name in other), default=0.0)


def solutions(solved):
    found = ((report.layer, entry) for report in solved.reports for entry in report.projections)
    return [(f"model.layers.{layer}.{entry.projection}.weight", entry.ridge is not None) for layer, entry in found]


def loaded(folder, layout, weights):
    blocks = blocks_of(folder)
    model = ladderized_class(blocks.family, "ForCausalLM")(blocks.model_config(layout)).eval()
    model.load_state_dict({"lm_head.weight": weights["model.embed_tokens.weight"], **weights})  # which may be tied
    return model


def divergence(dense, model, ids):
    with torch.no_grad():
        p, q = (each(ids).logits.double().log_softmax(-1) for each in (dense, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "model_type", "layers"),
    [
        *((name, "llama", None) for name in CONVERTED),
        *(("every mode", name, None) for name in FAMILIES),
        ("ladder gaps", "llama", "1:3"),
    ],
)
def test_the_weights_are_the_slow_ones(tmp_path, name, model_type, layers):
    """Layers that are not chosen are passed through."""
    models = pair(
        tmp_path, fitting(name, model_type), noise=0.02 if model_type == "llama" else 0.0, model_type=model_type
    )
    ids, expected = clear_windows(models, layers)
    solved, before = solve(models, tmp_path / "work", ids, layers=layers), all_tensors(models[1])
    assert apart(solved.weights, expected) < 2e-3
    assert apart(before, expected) > 0.3
    chosen = set(layers_to_align(blocks_of(models[1]).layout, layers))
    assert chosen == {report.layer for report in solved.reports}
    changed = {int(name.split(".")[2]) for name in before if not torch.equal(before[name], solved.weights[name])}
    assert changed <= chosen


@pytest.mark.parametrize("extra", [{}, BIASES], ids=["plain", "biases"])
def test_an_assigned_model_is_aligned_alike(tmp_path, extra):
    """The dense model is put in the student's order; where no rank reads apart the order changes nothing."""
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    dense, plain = pair(tmp_path, "ladder all", **extra)
    groups, layers = torch.arange(heads).view(kv_heads, -1), range(SHAPE["num_hidden_layers"])
    orders = {layer: tuple(groups[torch.randperm(kv_heads)].flip(1).flatten().tolist()) for layer in layers}
    ranks = {layer: tuple((torch.randperm(SHAPE["intermediate_size"]) % 4).tolist()) for layer in layers}
    found = RankAssignment(4, fingerprint(open_checkpoint(str(dense))), orders, ranks)
    mapped = tmp_path / "mapped"
    convert_checkpoint(str(dense), mapped, Recipe(ladder="all"), Changes(assignment=found), verify=False)

    def moved(layer):
        blocks = blocks_of(dense)
        return found.permuted(layer, blocks.weights(layer), blocks.config)

    ids, _ = clear_windows((dense, plain))
    one = solve((dense, plain), tmp_path / "one", ids)
    other = solve((dense, mapped), tmp_path / "other", ids, dense_weights=moved)
    layout = blocks_of(plain).layout
    models = [loaded(plain, layout, weights) for weights in (one.weights, other.weights)]
    with torch.no_grad():
        assert torch.allclose(models[0](ids).logits, models[1](ids).logits, rtol=1e-3, atol=1e-3)
    assert apart(other.weights, one.weights) > 0.3


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_every_projection_gets_the_ridge_that_serves_held_out_tokens(stored, monkeypatch):
    """Two projections on the same inputs, one with much to learn from clean targets, the other from noise: what is
    chosen of each is what trying all by hand gives, and takes away as much of the error as the best but for 2 %."""
    monkeypatch.setattr(ridge_module, "GRAM_ROWS", 5)  # several blocks, the last of them narrower
    ridges = (10.0, 1e-1, 1e-5)
    projections = [torch.nn.Linear(12, 3), torch.nn.Linear(12, 3)]
    for projection in projections:
        projection.to(stored).float()
    with torch.no_grad():
        prior = affine(projections).clone()
    truth = prior + torch.tensor([1.0, 1.0, 1.0, 0.02, 0.02, 0.02])[:, None] * torch.randn(6, 13)
    noise = torch.tensor([0.01, 0.01, 0.01, 2.0, 2.0, 2.0])

    def drawn(tokens):
        x = torch.cat([torch.randn(tokens, 12), torch.ones(tokens, 1)], 1)
        return x, linear(x, truth) + noise * torch.randn(tokens, 6)

    def by_hand(own):
        """The weights and the errors of every ridge, the best of them, and by how much the choice was clear."""
        tried = {None: prior[own]}
        for ridge in ridges:
            gram = (x.T @ x).double()
            penalty = ridge * gram.diagonal().mean()
            left = gram + penalty * torch.eye(13, dtype=torch.float64)
            whole = torch.linalg.solve(left, ((y.T @ x).double() + penalty * prior).T).T
            tried[ridge] = whole[own].to(stored).float()
        x_other, y_other = heldout[0], heldout[1][:, own]
        power = y_other.square().sum()
        errors = {r: float((linear(x_other, w) - y_other).square().sum() / power) for r, w in tried.items()}
        best, margins = None, []
        for ridge in ridges:  # the strongest first
            margins.append((errors[None] - errors[ridge] - 1.02 * (errors[None] - errors[best])) / errors[None])
            if margins[-1] > 0:
                best = ridge
        return tried, errors, best, min(map(abs, margins))

    expected = []
    # of few tokens the first projection may by chance learn best with a ridge, and rounding may decide a choice
    while not expected or expected[0][2] != 1e-5 or min(margin for *_, margin in expected) < 1e-3:
        (x, y), heldout = drawn(20), drawn(2000)
        expected = [by_hand(slice(first, first + 3)) for first in (0, 3)]
    rows = RankRows(prior)
    rows.add(x, y)
    judged = [([heldout[0]], heldout[1])]
    dtypes = {f"{name}.{kind}": stored for name in "ab" for kind in ("weight", "bias")}
    reports = refit(["a", "b"], projections, [rows], judged, ridges, ALONE, dtypes)
    for report, projection, (tried, errors, best, _) in zip(reports, projections, expected, strict=True):
        assert report.ridge == best
        assert errors[None] - errors[best] >= (errors[None] - min(errors.values())) / 1.02
        assert report.error_before == pytest.approx(errors[None], rel=1e-4)
        assert report.error_after == pytest.approx(errors[best], rel=1e-4, abs=1e-5 * errors[None])  # float32 sums
        with torch.no_grad():
            assert torch.allclose(affine([projection]), tried[best], rtol=1e-2, atol=1e-4)
    assert reports[0].ridge == 1e-5
    assert reports[1].ridge in (None, 10.0)


def test_what_the_data_do_not_say_is_kept(tmp_path):
    """Tokens of half of the vocabulary: the aligned model is no worse than the converted one on the other half."""
    models = pair(tmp_path, "spd all 4")
    layout = blocks_of(models[1]).layout
    dense = loaded(models[0], Layout.dense(layout.num_layers), all_tensors(models[0]))
    half = SHAPE["vocab_size"] // 2
    solved = solve(models, tmp_path / "work", torch.randint(3, half, (40, 12)), ridge=None)
    converted, aligned = (loaded(models[1], layout, weights) for weights in (all_tensors(models[1]), solved.weights))
    for low, high, share in ((3, half, 0.9), (half, SHAPE["vocab_size"], 1.0)):
        ids = torch.randint(low, high, (40, 12))
        assert divergence(dense, aligned, ids) < share * divergence(dense, converted, ids)


def test_the_divergence_is_of_the_models_own_norms_and_heads(tmp_path):
    """A retraining of all may have changed those of the converted model."""
    models, ids = pair(tmp_path, "ladder last half"), random_ids(6, 12)
    change_weights(models[1], lambda name, x: 1.5 * x if name == "model.norm.weight" else x)
    opened = {str(folder): blocks_of(folder) for folder in models}
    contenders = {name: Contender(blocks, blocks.layout, blocks.weights) for name, blocks in opened.items()}
    _, found = heldout_measures(contenders, ids, ALONE)
    dense, model = (loaded(folder, opened[str(folder)].layout, all_tensors(folder)) for folder in models)
    assert found[str(models[1])] == pytest.approx(divergence(dense, model, ids[:, :-1]), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_rounded_once(tmp_path, stored, dtype):
    """Computing in bfloat16 does not make bfloat16 of weights that are stored wider; what is kept stays to the bit."""
    models = pair(tmp_path, "ladder last half", dtype=stored)
    ids = random_ids(40, 12)
    solved = solve(models, tmp_path / "work", ids, dtype=dtype)
    before = all_tensors(models[1])
    written = {name for name, kept in solutions(solved) if kept}
    assert len(written) > 2  # of up to 14; how many help is a matter of the draw
    assert {name for name in before if not torch.equal(before[name], solved.weights[name])} == written
    assert all(solved.weights[name].dtype == stored for name in before)
    new = (solved.weights[name] for name in written)
    narrow = [weight for weight in new if torch.equal(weight.bfloat16().float(), weight.float())]
    assert bool(narrow) == (stored == torch.bfloat16)
    exact = solve(models, tmp_path / "exact", ids)
    # only up to where a solution is kept in one dtype and not in the other: what comes after reads another stream
    alike = list(takewhile(lambda pair: pair[0] == pair[1], zip(solutions(solved), solutions(exact), strict=True)))
    one, other = ({name: of.weights[name].float() for (name, _), _ in alike} for of in (solved, exact))
    assert apart(one, other) < (0.1 if torch.bfloat16 in (stored, dtype) else 1e-7)


WEIGHTS = "the error of {} in layer 3 is NaN or infinite; check the model's weights, or compute in float32"
STATES = "the residual stream of the {} model is NaN or infinite; check the model's weights"


@pytest.mark.parametrize(
    ("model", "place", "message"),
    [
        ("converted", "layers.3.self_attn.v_proj", WEIGHTS.format("self_attn.[qv]_proj")),
        ("dense", "layers.3.mlp.down_proj", STATES.format("dense")),
        ("converted", "layers.3.mlp.down_proj", WEIGHTS.format("mlp.down_proj")),
        ("converted", "embed_tokens", STATES.format("converted")),
    ],
)
def test_what_is_no_number_is_said(tmp_path, model, place, message):
    """Also where torch's attention would compute on as if nothing were wrong."""
    models = pair(tmp_path, "ladder last half")

    def spoilt(name, weight):
        return weight.index_fill(0, torch.tensor([0]), torch.nan) if place in name else weight

    change_weights(models[model == "converted"], spoilt)
    ids = random_ids(40, 12)
    ids[:, 0] = 0  # reads the first row of the embedding
    with pytest.raises(UserError, match=message):
        solve(models, tmp_path / "work", ids)
    assert listing(tmp_path / "work") == (["layer-00002.safetensors"] if "layers.3" in place else [])
