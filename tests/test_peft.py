"""LoRA in dropped layers, and weights that cannot be sliced: every path must give what the whole weights give."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ladderize.convert.remote_code import modeling_ladderized as modeling
from tests.helpers import make_model, random_ids
from tests.oracle import Oracle

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIGHT = {"rtol": 1e-4, "atol": 2e-4}  # an adapter moves logits by more than 1e-2


def with_lora(name, targets, **options):
    """A model with LoRA whose B is not zero, so that a path that forgets the adapter shows."""
    model = get_peft_model(make_model(name), LoraConfig(r=3, lora_alpha=6, target_modules=targets, **options))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, 0.3)
    return model.eval()


@pytest.fixture
def slow_calls(monkeypatch):
    """How often a projection had to be called once for each rank."""
    calls = []
    original = modeling.sliceable

    def spy(projection, inputs):
        parts = original(projection, inputs)
        if parts is None:
            calls.append(type(projection).__name__)
        return parts

    monkeypatch.setattr(modeling, "sliceable", spy)
    return calls


@pytest.mark.parametrize("options", [{}, {"bias": "all"}, {"use_dora": True}])
@pytest.mark.parametrize("name", ["ladder all", "spd all 4", "same layer with biases", "every mode"])
def test_merged_and_unmerged_are_equal(name, options, slow_calls):
    """Of one adapter on some projections, and of a second beside it."""
    model, ids = with_lora(name, PROJECTIONS[:: int(torch.randint(1, 4, ()))], **options), random_ids(2, 7)
    if not options:
        second = LoraConfig(r=2, target_modules=["o_proj", "gate_proj"], init_lora_weights=False)
        model.add_adapter("second", second)
        model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        unmerged = model(ids).logits
        with model.disable_adapter():
            without = model(ids).logits
        merged_model = model.merge_and_unload(adapter_names=None if options else ["default", "second"])
        merged = merged_model(ids).logits
    torch.testing.assert_close(unmerged, merged, **TIGHT)
    torch.testing.assert_close(merged, Oracle(merged_model.state_dict(), merged_model.config)(ids)[0], **TIGHT)
    assert (unmerged - without).abs().max() > 1e-2
    assert bool(slow_calls) == ("use_dora" in options and name != "ladder all")


def gradients(model, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    return {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", ["spd with biases", "delayed more ranks than kv heads"])
def test_calling_the_whole_module_is_exact(name, slow_calls):
    """What happens to quantised or hooked weights, forced upon ordinary ones: the same logits and gradients."""
    model, ids = with_lora(name, PROJECTIONS), random_ids(2, 6)
    slow = copy.deepcopy(model)
    for module in slow.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, slow(ids).logits, **TIGHT)
    assert {*slow_calls} == {"Linear"}
    fast_gradients, slow_gradients = gradients(model, ids), gradients(slow, ids)
    assert len(fast_gradients) == 4 * 7 * 2
    for key, gradient in fast_gradients.items():
        assert gradient.abs().sum() > 0, key
        torch.testing.assert_close(gradient, slow_gradients[key], **TIGHT)


class Closed(torch.Tensor):
    """A weight of int8 numbers and scales, as torchao's: floats to look at, which nothing but a product may read."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.numbers = torch.round(weight / self.scale).to(torch.int8)

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    def dequantize(self):
        return self.numbers * self.scale

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return function(args[0], args[1].dequantize(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(function)


@pytest.mark.parametrize("name", ["spd all 4", "delayed more ranks than kv heads", "every mode", "spd with biases"])
def test_a_weight_that_cannot_be_viewed_is_multiplied_whole(name, slow_calls):
    model, ids = make_model(name).requires_grad_(False), random_ids(2, 7)
    plain = copy.deepcopy(model)
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            module.weight = nn.Parameter(Closed(module.weight), requires_grad=False)
            other.weight.copy_(module.weight.dequantize())
    torch.testing.assert_close(model(ids).logits, Oracle(plain.state_dict(), plain.config)(ids)[0], **TIGHT)
    assert {*slow_calls} == {"Linear"}


def test_dropout_is_drawn_once_for_all_ranks():
    """With one mask for all ranks, equal inputs and equal weight rows give equal outputs on every rank."""
    torch.manual_seed(0)
    base = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        base.weight.copy_(base.weight[:8].repeat(4, 1))
    lora = LoraConfig(r=4, target_modules=["up_proj"], lora_dropout=0.5)
    holder = get_peft_model(nn.ModuleDict({"up_proj": base}), lora).train()
    layer = holder.base_model.model["up_proj"]
    with torch.no_grad():
        layer.lora_B["default"].weight.copy_(torch.randn(8, 4).repeat(4, 1))
        x = torch.randn(1, 3, 64).expand(4, 1, 3, 64)
        first, second = (modeling.column_parallel(layer, x, 4, 4).unflatten(-1, (4, 8)) for _ in range(2))
    for rank in range(1, 4):
        torch.testing.assert_close(first[..., rank, :], first[..., 0, :])
    assert (first - second).abs().max() > 1e-3  # it was drawn anew


def test_a_foreign_layer_is_refused():
    class TheirLinear(nn.Module):
        def forward(self, x):
            return x

    model = make_model("spd all 4")
    model.model.layers[2].mlp.up_proj = TheirLinear()
    with pytest.raises(RuntimeError, match="TheirLinear is sharded or replaced.*ladderize's plugin.*own runtime"):
        model(random_ids(1, 4))
