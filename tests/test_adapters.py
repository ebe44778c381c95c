"""LoRA that is shared out over ranks, against the whole matrices; the ranks are computed one after the other."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model

from ladderize.adapt.lora import LORA_TARGETS, initial_adapter
from ladderize.convert.remote_code.modeling_ladderized import column_parallel, row_parallel
from ladderize.layout import Layout
from ladderize.runtime.layers import AttentionWeights, Linear, MlpWeights, RMSNorm
from ladderize.runtime.loader import pair_rope_rows
from ladderize.runtime.shards import Shape, virtual_ranks
from ladderize.runtime.training.lora import PROJECTIONS, LoraPlan, TrainedLora

HIDDEN, INNER, HEADS, KV_HEADS, DIM, RANK, SCALING = 24, 32, 8, 2, 4, 3, 1.7
CONFIG = {
    "vocab_size": 50, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
}  # fmt: skip
SIZES = {  # out, in
    "q_proj": (HEADS * DIM, HIDDEN), "k_proj": (KV_HEADS * DIM, HIDDEN), "v_proj": (KV_HEADS * DIM, HIDDEN),
    "o_proj": (HIDDEN, HEADS * DIM), "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}  # fmt: skip
DROPPED = Layout.from_layers(2, spd=[1], sync_tp_size=4)
DENSE = Layout.dense(2)


def file_name(projection, half, layer=1):
    return f"base_model.model.model.layers.{layer}.{PROJECTIONS[projection][0]}.{projection}.lora_{half}.weight"


@pytest.fixture
def whole():
    """Random A and B of every projection of layer 1, with gradients."""
    matrices = {}
    for projection, (out, width) in SIZES.items():
        matrices[file_name(projection, "A")] = torch.randn(RANK, width, requires_grad=True)
        matrices[file_name(projection, "B")] = torch.randn(out, RANK, requires_grad=True)
    return matrices


def ranks_of(whole, tp_size, targets=LORA_TARGETS, dropout=0.0):
    """Every rank's adapters."""

    def values(name, shape):
        assert whole[name].shape == shape
        return whole[name].detach()

    plan = LoraPlan(RANK, SCALING, targets, [1], dropout)
    for rank in range(tp_size):
        shape = Shape.from_config(CONFIG, tp_size=tp_size, rank=rank)
        yield shape, TrainedLora(plan, shape, values, torch.device("cpu"))


def own_weights(shape, layout, value=torch.zeros):
    """One rank's weights of layer 1: zeros, so that what LoRA adds is all that there is."""
    virtual = virtual_ranks(layout, 1, shape.tp_size)
    query, kv = (b - a for a, b in (shape.query_rows(), shape.kv_rows()))
    norm = RMSNorm(torch.ones(HIDDEN), 1e-6)
    attention = AttentionWeights(
        norm, Linear(value(query + 2 * kv, HIDDEN)), [Linear(value(HIDDEN, query // virtual))] * virtual, None
    )
    mlp = MlpWeights(
        norm,
        [Linear(value(2 * shape.own_inner // virtual, HIDDEN))] * virtual,
        Linear(value(HIDDEN, shape.own_inner)),
        None,
    )
    return attention, mlp


def added(whole, projection, x):
    """What LoRA adds to the whole product."""
    return F.linear(F.linear(x, whole[file_name(projection, "A")]), whole[file_name(projection, "B")]) * SCALING


def rows_of(whole, projection, x, bounds):
    """The outputs of ``added`` that are one rank's, in the runtime's order."""
    own = added(whole, projection, x)[..., slice(*bounds)]
    return pair_rope_rows(own.movedim(-1, 0), DIM).movedim(0, -1) if projection in ("q_proj", "k_proj") else own


def check_gradients(whole, ranks):
    """Sums of partial gradients, and the ranks' own parts, are those of the whole matrices."""
    expected = {name: tensor.grad for name, tensor in whole.items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for _, lora in ranks:
        partial = {id(parameter) for parameter in lora.partial_parameters()} | {id(b) for b, _ in lora.copied_rows()}
        for name, piece in lora.pieces().items():
            ((parameter, _),) = piece.parts
            full = found[name]
            places = torch.empty(parameter.shape, dtype=torch.long)  # of each number of this rank in the whole matrix
            piece.assign(lambda _, places=places: places, torch.arange(full.numel()).view_as(full))
            if id(parameter) not in partial:  # complete where it is
                torch.testing.assert_close(parameter.grad, expected[name].view(-1)[places], rtol=1e-4, atol=1e-4)
            full.view(-1).index_add_(0, places.reshape(-1), parameter.grad.reshape(-1))
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name} {text}"
        )


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_what_the_ranks_add_is_what_the_whole_matrices_add(whole, tp_size):
    ranks = list(ranks_of(whole, tp_size))
    x, heads, inner = torch.randn(3, 5, HIDDEN), torch.randn(3, 5, HEADS * DIM), torch.randn(3, 5, INNER)
    o = down = loss = expected_loss = 0
    for shape, lora in ranks:
        attention, mlp = own_weights(shape, DENSE)
        attention, mlp = lora.attention(1, attention, torch.float32), lora.mlp(1, mlp, torch.float32)
        pairs = [
            (
                attention.qkv(x),
                [("q_proj", shape.query_rows()), ("k_proj", shape.kv_rows()), ("v_proj", shape.kv_rows())],
            ),
            (mlp.gate_up[0](x), [("gate_proj", shape.inner_rows()), ("up_proj", shape.inner_rows())]),
        ]
        for got, parts in pairs:
            right = torch.cat([rows_of(whole, name, x, bounds) for name, bounds in parts], -1)
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
            weight = torch.randn(right.shape)
            loss, expected_loss = loss + (weight * got).sum(), expected_loss + (weight * right).sum()
        o = o + torch.cat(list(attention.o[0].products(heads[..., slice(*shape.query_rows())], 3)), -1)
        down = down + mlp.down(inner[..., slice(*shape.inner_rows())])
    for got, right in ((o, added(whole, "o_proj", heads)), (down, added(whole, "down_proj", inner))):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)
        weight = torch.randn(right.shape)
        loss, expected_loss = loss + (weight * got).sum(), expected_loss + (weight * right).sum()
    loss.backward()
    expected_loss.backward()
    check_gradients(whole, ranks)


def hf_projection(whole, projection, dropout):
    """The projection as PEFT makes it, with zeros for the weights that LoRA is added to."""
    out, width = SIZES[projection]
    model = torch.nn.ModuleDict({projection: torch.nn.Linear(width, out, bias=False)})
    torch.nn.init.zeros_(model[projection].weight)
    config = LoraConfig(r=RANK, lora_alpha=RANK * SCALING, lora_dropout=dropout, target_modules=[projection])
    layer = inject_adapter_in_model(config, model)[projection].train()
    for half, matrix in (("A", layer.lora_A), ("B", layer.lora_B)):
        matrix["default"].weight = torch.nn.Parameter(whole[file_name(projection, half)].detach().clone())
    return layer


@pytest.mark.parametrize(("tp_size", "dropout"), [(1, 0.0), (2, 0.0), (4, 0.0), (1, 0.4), (2, 0.4), (4, 0.4)])
def test_dropped_layers_with_dropout_are_the_hf_model_s(whole, tp_size, dropout):
    """Virtual ranks that a process computes apart; every rank draws what the HF model draws."""
    heads, streams = torch.randn(3, 5, HEADS * DIM), torch.randn(4, 3, 5, HIDDEN)
    layers = {name: hf_projection(whole, name, dropout) for name in ("o_proj", "gate_proj", "up_proj")}
    torch.manual_seed(7)
    partials, _ = row_parallel(layers["o_proj"], heads, 4)
    gate, up = (column_parallel(layers[name], streams, 4) for name in ("gate_proj", "up_proj"))
    after = torch.rand(1)
    weights = [torch.randn_like(partials), torch.randn_like(gate), torch.randn_like(up)]
    sum((weight * value).sum() for weight, value in zip(weights, (partials, gate, up), strict=True)).backward()
    for name, layer in layers.items():
        for half, matrix in (("A", layer.lora_A), ("B", layer.lora_B)):
            whole[file_name(name, half)].grad = matrix["default"].weight.grad

    ranks = list(ranks_of(whole, tp_size, tuple(layers), dropout))
    loss = 0
    for shape, lora in ranks:
        torch.manual_seed(7)
        first, virtual = shape.rank * 4 // tp_size, 4 // tp_size
        attention, mlp = own_weights(shape, DROPPED)
        attention, mlp = lora.attention(1, attention, torch.float32), lora.mlp(1, mlp, torch.float32)
        own = heads[..., slice(*shape.query_rows())].chunk(virtual, -1)
        found = [o(part) for o, part in zip(attention.o, own, strict=True)]
        for k, partial in enumerate(found):
            torch.testing.assert_close(partial, partials[first + k].detach(), rtol=1e-4, atol=1e-4)
            loss = loss + (partial * weights[0][first + k]).sum()
        for k, gate_up in enumerate(mlp.gate_up):
            rows = slice((first + k) * INNER // 4, (first + k + 1) * INNER // 4)
            for got, right, weight in zip(
                gate_up(streams[first + k]).chunk(2, -1), (gate, up), weights[1:], strict=True
            ):
                torch.testing.assert_close(got, right[..., rows].detach(), rtol=1e-4, atol=1e-4)
                loss = loss + (got * weight[..., rows]).sum()
        assert torch.equal(torch.rand(1), after)  # all ranks have drawn as much as the HF model
    loss.backward()
    used = {name: tensor for name, tensor in whole.items() if name.split(".")[-3] in layers}
    check_gradients(used, ranks)


@pytest.mark.parametrize("targets", [("k_proj",), ("up_proj", "o_proj"), ("down_proj",)])
def test_projections_without_lora_are_left_alone(whole, targets):
    x = torch.randn(2, HIDDEN)
    for shape, lora in ranks_of(whole, 2, targets=targets):
        attention, mlp = own_weights(shape, DENSE, torch.randn)
        assert lora.attention(0, attention, torch.float32) == attention  # a layer without any
        assert lora.mlp(0, mlp, torch.float32) == mlp
        more, other = lora.attention(1, attention, torch.float32), lora.mlp(1, mlp, torch.float32)
        if targets == ("k_proj",):
            difference = more.qkv(x) - attention.qkv(x)
            query = shape.own_heads * DIM
            assert not difference[:, :query].any()
            assert difference[:, query : query + DIM].all()
            assert not difference[:, query + DIM :].any()
            assert more.o == attention.o
            assert other == mlp
        elif "up_proj" in targets:
            difference = other.gate_up[0](x) - mlp.gate_up[0](x)
            assert not difference[:, : INNER // 2].any()
            assert difference[:, INNER // 2 :].any()
            assert more.qkv is attention.qkv
            assert other.down is mlp.down
        assert len(list(lora.parameters())) == 2 * len(targets)


def test_validation_drops_nothing_and_products_have_the_dtype_of_the_stream(whole):
    (shape, lora) = next(ranks_of(whole, 1, dropout=0.5))
    lora.eval()
    attention, _ = own_weights(shape, DENSE, lambda *size: torch.zeros(size, dtype=torch.bfloat16))
    heads = torch.randn(4, HEADS * DIM).bfloat16()
    got = lora.attention(1, attention, torch.bfloat16).o[0](heads)
    assert got.dtype == torch.bfloat16
    right = added(whole, "o_proj", heads.float())
    error = (got.float() - right).detach()
    assert float(error.norm() / right.detach().norm()) < 0.02
    got.float().sum().backward()
    assert lora.projections[1, "o_proj"].a.grad.dtype == torch.float32


def test_the_start_is_the_one_of_one_process():
    def values(name, shape):
        name = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        return initial_adapter(name, torch.Size(shape), 5)

    lora = TrainedLora(
        LoraPlan(RANK, SCALING, LORA_TARGETS, [0, 1]),
        Shape.from_config(CONFIG, tp_size=1, rank=0),
        values,
        torch.device("cpu"),
    )
    assert len(lora.projections) == 2 * len(LORA_TARGETS)
    for projection in lora.projections.values():
        assert projection.a.any()
        assert not projection.b.any()
