"""The kernels for GPUs in Triton's interpreter, by the tests of those for CPUs: `make test-triton`.

A GPU runs them for real: tests/test_gpu.py.
"""

import importlib
import os
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

if os.environ.get("TRITON_INTERPRET") != "1":  # Triton must have seen it when it was imported
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from ladderize.runtime.gpu_operations import GpuOperations
from ladderize.runtime.kv_cache import KVCache, NoCache
from ladderize.runtime.layers import JoinedLinears
from ladderize.runtime.native import triton_kernels
from ladderize.runtime.native.triton_kernels import attend_one
from ladderize.runtime.operations import Operations
from ladderize.runtime.step import additive
from tests import test_cpu_operations
from tests.groups import make_generator
from tests.helpers import FAMILIES, ROOT, make_model, random_ids
from tests.test_cpu_operations import (  # noqa: F401
    assert_as_good,
    some,
    test_mlp,
    test_norm,
    test_one_token,
    test_parts_of_a_prompt,
    test_prompts,
    test_what_is_no_number_stays_visible,
)


class Interpreted(GpuOperations):
    """On a CPU, with what it has on a GPU: a cache in the model's dtype, and additive masks."""

    def attention(self, weights, x, apart, step, cache):
        if isinstance(cache, NoCache):  # of training, which has PyTorch's operations on a GPU too
            return Operations.attention(self, weights, x, apart, step, cache)
        dtype = weights.column_parallel[0].weight.dtype
        own = KVCache(cache.keys.to(dtype), cache.values.to(dtype))
        mask = step.mask if step.mask is None or step.mask.dtype != torch.bool else additive(step.mask, dtype)
        near = {window: additive(seen, dtype) for window, seen in step.near.items()}
        output = super().attention(weights, x, apart, replace(step, mask=mask, near=near), own)
        cache.keys.copy_(own.keys)
        cache.values.copy_(own.values)
        return output


@pytest.fixture
def compiled(monkeypatch):
    def in_float32(query, keys, values, *more):
        """The interpreter's product takes bfloat16 for integers."""
        return attend_one(query.float(), keys.float(), values.float(), *more).to(query.dtype)

    def as_good(found, expected, exact):
        """It makes bfloat16 by cutting bits off: twice as far off as rounding, and always to one side."""
        if found.dtype != torch.bfloat16:
            return assert_as_good(found, expected, exact)
        off, theirs = ((one.float() - exact.float()).norm() for one in (found, expected))
        assert off <= 6 * theirs + 2**-5 * exact.float().norm()
        return None

    monkeypatch.setattr(triton_kernels, "attend_one", in_float32)
    monkeypatch.setattr(test_cpu_operations, "assert_as_good", as_good)
    return Interpreted(some(1, 7, 1000))


PRODUCTS = [getattr(torch.ops.aten, name).default for name in ("linear", "mm", "addmm", "bmm", "baddbmm")]


class Counted(TorchDispatchMode):
    def __init__(self, *functions):
        super().__init__()
        self.functions, self.count = functions, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in self.functions
        return function(*args, **kwargs or {})


def join(generator):
    """Give a model the weights that its loader makes for a GPU."""
    for own in generator.model.weights.sublayers:
        for name in ("column_parallel", "row_parallel"):
            if len(getattr(own, name)) > 1:
                setattr(own, name, JoinedLinears(getattr(own, name)))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("spd all 4", "llama"),
        ("delayed more ranks than kv heads", "llama"),
        ("same layer delayed with biases", "llama"),
        *(("every mode", family) for family in FAMILIES),
    ],
)
def test_virtual_ranks_are_computed_at_once(tmp_path, name, family):
    """Several of them on one GPU take as many products as one: four a layer."""
    make_model(name, model_type=family, head_dim=16, max_position_embeddings=128).save_pretrained(tmp_path)
    prompts, ids, found = [random_ids(some(3, 20)).tolist(), random_ids(some(5, 12)).tolist()], random_ids(2, 4), []
    with torch.inference_mode():
        for operations in (Operations(), Interpreted(8)):
            generator = make_generator(tmp_path, 2, 96, pack=False)
            generator.model.operations = operations
            if operations.name == "triton":
                join(generator)
            steps = [generator.prefill(prompts)]
            for token in ids.unbind(1):
                with Counted(*PRODUCTS) as products:
                    steps.append(generator.decode_one_token(token))
            found.append(torch.stack(steps))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert products.count == 4 * generator.model.shape.layers + 1  # and the output layer's


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_split_product_of_the_benchmark(rows, monkeypatch):
    """In every form, over sizes that no tile divides; a second product finds what the first has left behind."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    kernels = importlib.import_module("gpu_triton")
    width, inner = some(16, 37, 70), some(32, 100, 129)
    x, weights = torch.randn(rows, inner), torch.randn(2, width, inner)
    for padded in (1, 16) if rows == 1 else (16,):
        for splits in (1, 2, 3):
            product = kernels.SplitProduct(x, width, kernels.Tiling(16, some(16, 32), 1, 2, splits, padded))
            for weight in weights:
                torch.testing.assert_close(product(weight), x @ weight.T, rtol=1e-4, atol=1e-4)
            assert not product.arrivals.any()


def test_the_chain_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    x, out = torch.randn(2, 2048).unbind(0)
    importlib.import_module("gpu_triton").chain_link(x, out, programmatic=False)
    torch.testing.assert_close(out, x + 1)
