"""The kernels that are compiled for the CPU, against the same operations by PyTorch, on fresh random numbers.

tests/test_runtime.py runs them on every layout and family.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ladderize.families.base import GELU, ROPE, SILU, Decoder
from ladderize.runtime.cpu_operations import CpuOperations
from ladderize.runtime.kv_cache import KVCache, NoCache, PartsCache
from ladderize.runtime.layers import Linear, RMSNorm, Sublayer, pack_weight
from ladderize.runtime.native.library import Packed, kernels
from ladderize.runtime.operations import Operations
from ladderize.runtime.spec import choose_operations
from ladderize.runtime.step import Step
from tests import warm
from tests.groups import ALONE
from tests.helpers import ROOT

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def compiled(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield CpuOperations(kernels())
    torch.set_num_threads(before)


def some(*choices):
    return choices[int(torch.randint(len(choices), ()))]


def assert_as_good(found, expected, exact):
    """As near as PyTorch's result to what float32 gives; in float32 that is PyTorch's itself."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found, expected, exact = (tensor.float() for tensor in (found, expected, exact))
    off, theirs, size = (found - exact).norm(), (expected - exact).norm(), exact.norm()
    # a unit in the last place of bfloat16 is 2 ** -8 of a number or more, and softmax makes more of it
    assert off <= 3 * theirs + (1e-5 if theirs == 0 else 2**-6) * size, (off, theirs, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(compiled, dtype):
    width = some(1, 24, 96, 250)
    norm = RMSNorm(torch.randn(width).to(dtype), 1e-3)
    x = (torch.randn(3, 5, width) * some(1e-3, 1.0, 1e3)).to(dtype)
    exact = RMSNorm(norm.weight.float(), 1e-3)(x.float())
    assert_as_good(compiled.norm(norm, x), norm(x), exact)
    assert_as_good(compiled.norm(norm, x[:, ::2]), norm(x)[:, ::2], exact[:, ::2])


def wide(weights):
    """The same weights in float32."""

    def linear(own):
        return Linear(own.weight.float(), None if own.bias is None else own.bias.float())

    norm = RMSNorm(weights.norm.weight.float(), weights.norm.eps)
    return replace(weights, norm=norm, column_parallel=[*map(linear, weights.column_parallel)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlp(compiled, dtype):
    hidden, inner, virtual = 40, some(3, 16, 70), some(1, 2, 4)
    linears = [Linear((torch.randn(2 * inner, hidden) * hidden**-0.5).to(dtype)) for _ in range(virtual)]
    shape = SimpleNamespace(decoder=Decoder((None,), (ROPE,), activation=some(SILU, GELU)))
    weights = Sublayer(0, shape, RMSNorm(torch.randn(hidden).to(dtype), 1e-5), linears, [], None)
    x = torch.randn(2, 3, hidden).to(dtype)
    carry = [torch.randn_like(x) for _ in range(virtual)]
    alone = replace(weights, column_parallel=linears[:1])
    for own, carried in ((weights, carry), (alone, None)):
        exact = Operations().mlp(wide(own), x.float(), carried and [each.float() for each in carried])
        assert_as_good(compiled.mlp(own, x, carried), Operations().mlp(own, x, carried), exact)


def attention_case(dtype, *, dim, norms=False, rope=True, window=None):
    """Weights and a shape with random heads."""
    kv_heads, hidden = some(1, 2, 3), 48
    heads = kv_heads * some(1, 2, 3, 5)
    rows = (heads + 2 * kv_heads) * dim
    norm = RMSNorm(torch.randn(hidden).to(dtype), 1e-5)
    qkv = Linear((torch.randn(rows, hidden) * 2 * hidden**-0.5).to(dtype), torch.randn(rows).to(dtype))
    decoder = Decoder((window,) * 2, (ROPE if rope else None,) * 2, attention_scale=some(None, 0.2))
    shape = SimpleNamespace(own_heads=heads, own_kv_heads=kv_heads, head_dim=dim, decoder=decoder, eps=1e-5)
    of_heads = [torch.randn(dim) for _ in range(2 * norms)]
    return Sublayer(1, shape, norm, [qkv], [], None, *of_heads), shape, hidden


def turns(rows, tokens, dim):
    angles = torch.randn(rows, tokens, 1, dim // 2)
    return torch.polar(torch.ones_like(angles), angles)


def random_cache(batch, kv_heads, columns, dim, dtype):
    """In the dtype of the pass, or in another one, which the kernels do not read where it lies."""
    size, kept = (2, batch, kv_heads, columns, dim), some(dtype, dtype, torch.float32)
    return KVCache(torch.randn(size).to(kept), torch.randn(size).to(kept))


def compare(compiled, case, x, step, cache, dtype):
    weights, _, _ = case
    caches = [
        KVCache(cache.keys.to(kind, copy=True), cache.values.to(kind, copy=True))
        for kind in (cache.keys.dtype, cache.keys.dtype, torch.float32)
    ]
    runs = (compiled, weights, x), (Operations(), weights, x), (Operations(), wide(weights), x.float())
    found = [by.attention(own, read, None, step, into) for (by, own, read), into in zip(runs, caches, strict=True)]
    assert_as_good(*found)
    assert_as_good(*(each.keys for each in caches))
    assert_as_good(*(each.values for each in caches))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "head norms"])
@pytest.mark.parametrize("dim", [6, 64, 80])
def test_one_token(compiled, dtype, norms, dim):
    case = attention_case(dtype, dim=dim, norms=norms, rope=some(True, False))
    batch, length = some(1, 3), some(1, 5, 64, 65, 200)
    cache = random_cache(batch, case[1].own_kv_heads, length + 3, dim, dtype)
    x = torch.randn(batch, 1, case[2]).to(dtype)
    seen = torch.rand(batch, 1, 1, length) < 0.7
    seen[..., -1] = True
    seen[0] &= some(True, False)  # this row may see nothing
    for mask in (None, seen, seen[:1]):
        compare(compiled, case, x, Step(turns(1, 1, dim), length - 1, length, mask), cache, dtype)
    # a column that the host does not know, each row's own angles, and a cache of more rows
    columns = torch.randint(length, (1,))
    mask = (torch.arange(length) <= columns)[None, None, None]
    compare(compiled, case, x, Step(turns(batch, 1, dim), columns, length, mask), cache, dtype)
    larger = random_cache(batch + 2, case[1].own_kv_heads, length, dim, dtype).batch_rows(1, batch + 1)
    compare(compiled, case, x, Step(turns(1, 1, dim), length - 1, length), larger, dtype)
    # a step whose first columns are hidden from it, by more than the kernel looks at together
    mask = (torch.arange(length) >= length // 2)[None, None, None]
    compare(compiled, case, x, Step(turns(1, 1, dim), length - 1, length, mask), cache, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("dim", [6, 32, 96])
def test_prompts(compiled, dtype, window, dim):
    case = attention_case(dtype, dim=dim, rope=some(True, False), window=window)
    batch, tokens = some(1, 3), some(2, 9, 64, 67, 130, 290)
    windows = [] if window is None else [window]
    cache = random_cache(batch, case[1].own_kv_heads, tokens + 3, dim, dtype)
    x = torch.randn(batch, tokens, case[2]).to(dtype)
    padding = torch.randint(tokens, (batch, 1, 1, 1))
    places = torch.arange(tokens)
    mask = (places[:, None] >= places) & (places >= padding) | torch.eye(tokens, dtype=torch.bool)
    mask[..., 0, :] &= some(True, False)  # these tokens may see nothing
    for step in (
        Step(turns(1, tokens, dim), 0, 0, causal=True),
        Step(turns(1, tokens, dim), 0, 0),
        Step(turns(batch, tokens, dim), 0, 0, mask),
    ):
        compare(compiled, case, x, step.with_windows(windows, tokens), cache, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [6, 32])
def test_parts_of_a_prompt(compiled, dtype, dim):
    """What came before is read from the cache, or from what a pass without one keeps of its parts."""
    case = attention_case(dtype, dim=dim)
    before, tokens = some(1, 20, 64), some(2, 13, 70)
    length = before + tokens
    x = torch.randn(1, length, case[2]).to(dtype)
    factors = turns(1, length, dim)
    places = torch.arange(length)
    later = (places <= places[before:, None])[None, None]
    steps = Step(factors[:, :before], 0, before, causal=True), Step(factors[:, before:], before, length, later)
    cache = random_cache(1, case[1].own_kv_heads, length, dim, dtype)
    for step, part in zip(steps, (x[:, :before], x[:, before:]), strict=True):
        compare(compiled, case, part, step, cache, dtype)
    weights, _, _ = case
    kinds = (compiled, weights, x), (Operations(), weights, x), (Operations(), wide(weights), x.float())
    runs = [(*kind, PartsCache(kind[2].dtype, CPU)) for kind in kinds]
    for step, part in zip(steps, (slice(before), slice(before, None)), strict=True):
        assert_as_good(*(by.attention(own, read[:, part], None, step, kept) for by, own, read, kept in runs))
    whole = Step(factors, 0, 0, causal=True)
    assert_as_good(*(by.attention(own, read, None, whole, NoCache(read.dtype, CPU)) for by, own, read, _ in runs))


@dataclass
class Engine:
    """Operations by some of the instructions that a CPU may have."""

    operations: CpuOperations
    width: int  # outputs of a block

    def linear(self, weight, bias=None):
        linear = Linear(weight, bias)
        linear.weight = pack_weight(weight, self.width)
        linear.packed = Packed(linear.weight.data_ptr(), *weight.shape)
        return linear


PROCESSOR = Path("/proc/cpuinfo").read_text()
HEADER = ROOT / "tests" / "simulated_tiles.h"
COMPILERS = {
    "tiles": "g++" if "amx_bf16" in PROCESSOR else f"g++ -include {HEADER}",
    "AVX512-bf16": "g++ -mno-amx-bf16",
    "AVX512": "g++ -mno-amx-bf16 -mno-avx512bf16",
    "AVX2": "g++ -mno-amx-bf16 -mno-avx512f",
}


@pytest.fixture(scope="module", params=COMPILERS)
def engine(request, tmp_path_factory):
    """Tiles are simulated where the CPU has none."""
    if request.param == "tiles" and "avx512f" not in PROCESSOR:
        pytest.skip("what lies around the tiles needs AVX512")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", COMPILERS[request.param])
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("kernels")))  # the header has no part in a name
        library = kernels.__wrapped__()
    return Engine(CpuOperations(library), library.ladderize_width())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [5, 31, 32, 256, 257, 600])
def test_prompts_by_blocks(engine, monkeypatch, tokens, threads):
    """Long ones, too, whose last columns nothing may read: they are no numbers."""
    engine.operations.threads = threads
    monkeypatch.delattr("ladderize.runtime.cpu_operations.attend")
    case = attention_case(torch.bfloat16, dim=some(32, 64, 128))
    empty = torch.full((2, 2, case[1].own_kv_heads, tokens + 5, case[1].head_dim), torch.nan).bfloat16()
    x, step = torch.randn(2, tokens, case[2]).bfloat16(), Step(turns(1, tokens, case[1].head_dim), 0, 0, causal=True)
    runs = (engine.operations, case[0], x), (Operations(), case[0], x), (Operations(), wide(case[0]), x.float())
    found = []
    for by, weights, read in runs:
        cache = KVCache(*(empty.to(read.dtype, copy=True) for _ in range(2)))
        found.append(by.attention(weights, read, None, step, cache))
    assert_as_good(*found)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(engine, dtype, biased, threads):
    operations = engine.operations
    operations.threads = threads
    outputs, depth = some(5, 32, 33, 64, 100, 1000), some(5, 32, 64, 90, 352)
    weight = (torch.randn(outputs, depth) * depth**-0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    linear, plain = engine.linear(weight, bias), Linear(weight, bias)
    for rows in (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, some(64, 65, 100, 300)):
        x = torch.randn(2, rows, depth).to(dtype)[1:]
        exact = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
        assert_as_good(operations.product(linear, x), plain(x), exact)
    assert operations.product(linear, torch.empty(0, depth, dtype=dtype)).shape == (0, outputs)
    x = torch.randn(3, 2, depth).to(dtype)
    x[1] = torch.nan
    assert operations.product(linear, x[:, 0]).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_products(engine, monkeypatch, dtype, biased, threads):
    """Where up begins within a block, gate and up meet behind the product."""
    operations = engine.operations
    operations.threads, behind = threads, []
    gated = operations.gated
    monkeypatch.setattr(operations, "gated", lambda *arguments: (behind.append(rows), gated(*arguments))[1])
    depth = some(32, 64, 352)
    for inner in (some(32, 64, 96, 1088), 40):
        weight = (torch.randn(2 * inner, depth) * depth**-0.5).to(dtype)
        bias = torch.randn(2 * inner).to(dtype) if biased else None
        linear = engine.linear(weight, bias)
        wide = Linear(weight.float(), None if bias is None else bias.float())
        for rows in (1, 5, 8, 17, 33, some(100, 600)):
            x = torch.randn(2, rows, depth).to(dtype)[1:]
            exact = Operations().gated_product(wide, x.float(), SILU)
            plain = Operations().gated_product(Linear(weight, bias), x, SILU)
            behind.clear()
            assert_as_good(operations.gated_product(linear, x, SILU), plain, exact)
            assert behind == [rows] * (inner == 40)
    torch.testing.assert_close(operations.gated_product(linear, x, GELU), operations.gated(linear(x), GELU))


def test_gates_of_any_size(engine):
    """The gate is x itself, and up is 1."""
    x = torch.tensor([[-1e4, -100, -88, -20, -1, 0, 1, 20, 88, 100, 1e4]])
    weight, bias = torch.cat((torch.eye(64), torch.zeros(64, 64))), torch.cat((torch.zeros(64), torch.ones(64)))
    x = torch.nn.functional.pad(x, (0, 64 - x.shape[1]))
    for dtype in DTYPES:
        linear = engine.linear(weight.to(dtype), bias.to(dtype))
        expected = torch.nn.functional.silu(x.to(dtype).float()).to(dtype)
        torch.testing.assert_close(engine.operations.gated_product(linear, x.to(dtype), SILU), expected)


def test_products_that_no_cache_holds(engine):
    """They are multiplied in parts of the rows and of a large depth, and go to memory past the caches, but for
    outputs that fill no line."""
    depth, rows = some(2048, 4096, 4128, 5600), some(600, 640, 701)
    for outputs in (1024, 1000):
        weight, x = torch.randn(outputs, depth) * depth**-0.5, torch.randn(rows, depth)
        weight, x = weight.bfloat16(), x.bfloat16()
        exact = torch.nn.functional.linear(x.float(), weight.float())
        plain = torch.nn.functional.linear(x, weight)
        assert_as_good(engine.operations.product(engine.linear(weight), x), plain, exact)
    weight, x = torch.randn(1088, depth).bfloat16() / depth**0.5, torch.randn(1200, depth).bfloat16()
    exact = Operations().gated_product(Linear(weight.float()), x.float(), SILU)
    plain = Operations().gated_product(Linear(weight), x, SILU)
    assert_as_good(engine.operations.gated_product(engine.linear(weight), x, SILU), plain, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights(dtype):
    """Word by word, and back; where a rank lacks the kernels, PyTorch multiplies them."""
    width, outputs, depth = some(16, 32), some(1, 32, 70), some(1, 32, 45)
    pair, line = 4 // dtype.itemsize, 64 // dtype.itemsize
    weight, bias = torch.randn(outputs, depth).to(dtype), torch.randn(outputs).to(dtype)
    packed = pack_weight(weight, width).flatten()
    whole = -(-depth // line) * line
    assert packed.numel() == -(-outputs // width) * width * whole
    expected = torch.zeros_like(packed)
    for output in range(outputs):
        for i in range(depth):
            block = output // width * width * whole
            expected[block + i // pair * width * pair + output % width * pair + i % pair] = weight[output, i]
    assert torch.equal(packed, expected)
    linear, x = Linear(weight, bias, pack=True), torch.randn(3, depth).to(dtype)
    assert linear.packed is not None
    assert torch.equal(linear(x), Linear(weight, bias)(x))


def test_weights_that_no_kernel_multiplies(compiled):
    half, plain = Linear(torch.randn(64, 64).half(), pack=True), Linear(torch.randn(64, 64))
    for linear in (half, plain):
        x = torch.randn(2, 64).to(linear.weight.dtype)
        assert linear.packed is None
        assert torch.equal(compiled.product(linear, x), linear(x))


def test_wrong_input_of_a_product(compiled):
    linear = Linear(torch.randn(64, 64), pack=True)
    for x in (torch.randn(2, 32), torch.randn(2, 64).bfloat16()):
        with pytest.raises(ValueError, match="for a weight of torch.float32, depth 64"):
            compiled.product(linear, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_visible(compiled, dtype):
    bad = some(float("nan"), float("inf"), float("-inf"))
    x = torch.randn(1, 3, 48).to(dtype)
    x[0, 1, 5] = bad
    normed = compiled.norm(RMSNorm(torch.ones(48, dtype=dtype), 1e-5), x)
    assert not normed[0, 1].isfinite().all()
    assert normed[0, 0].isfinite().all()
    case = attention_case(dtype, dim=16)
    cache = random_cache(1, case[1].own_kv_heads, 3, 16, dtype)
    seen = compiled.attention(case[0], x, None, Step(turns(1, 3, 16), 0, 0, causal=True), cache)
    assert not seen[0, 1].isfinite().all()
    assert not seen[0, 2].isfinite().all()
    case = attention_case(dtype, dim=16)
    cache = random_cache(1, case[1].own_kv_heads, 3, 16, dtype)
    cache.keys[1, 0, :, 1] = bad
    seen = compiled.attention(case[0], x[:, :1], None, Step(turns(1, 1, 16), 2, 3), cache)
    if bad != bad:  # an infinite score may weigh nothing
        assert not seen.isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_any_number(compiled, dtype):
    gate = torch.tensor([0.0, -0.0, 1e-30, 5.0, 87.0, -87.0, -88.5, -100.0, -1e37, 3e38, float("-inf"), float("nan")])
    up = torch.ones_like(gate)
    found = compiled.gated(torch.cat((gate, up)).to(dtype), SILU)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate).to(dtype), equal_nan=True, rtol=2e-6, atol=1e-35)


@pytest.fixture
def fresh_library(monkeypatch):
    """As in a process that has compiled nothing yet."""
    kernels.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    kernels.cache_clear()


def test_no_compiler(fresh_library, tmp_path):
    assert isinstance(choose_operations(ALONE, torch.bfloat16), CpuOperations)
    kernels.cache_clear()
    fresh_library.setenv("CXX", "false")
    fresh_library.setenv("XDG_CACHE_HOME", str(tmp_path))
    operations = choose_operations(ALONE, torch.bfloat16)
    assert type(operations) is Operations
    assert "false cannot compile kernels.cpp: exit code 1" in operations.note
    assert not list((tmp_path / "ladderize").iterdir())
    kernels.cache_clear()
    fresh_library.delenv("CXX")
    fresh_library.setenv("PATH", str(tmp_path))
    assert "no C++ compiler was found (g++, clang++)" in choose_operations(ALONE, torch.bfloat16).note


@pytest.fixture(scope="module")
def compiles_once(tmp_path_factory):
    """Variables of a compiler that keeps what it has made."""
    kept = tmp_path_factory.mktemp("compiled")
    return {"CXX": str(ROOT / "tests" / "vllm" / "kept_g++"), "LADDERIZE_TEST_KERNELS": str(kept)}


def test_kept_where_only_the_user_can_write(fresh_library, compiles_once, tmp_path):
    for name, value in (compiles_once | {"XDG_CACHE_HOME": str(tmp_path)}).items():
        fresh_library.setenv(name, value)
    kernels()
    (kept,) = (tmp_path / "ladderize").iterdir()
    assert kept.suffix == ".so"
    assert not (tmp_path / "ladderize").stat().st_mode & 0o077
    changed = kept.stat().st_mtime_ns
    kernels.cache_clear()
    kernels()
    assert kept.stat().st_mtime_ns == changed
    damaged = tmp_path / "other" / "ladderize" / kept.name  # as after a power cut
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    kernels.cache_clear()
    fresh_library.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    kernels()
    assert damaged.stat().st_size
    fresh_library.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept.unlink()
    (tmp_path / "ladderize").chmod(0o777)  # somebody else could put a library there
    kernels.cache_clear()
    kernels()
    assert not list((tmp_path / "ladderize").iterdir())


def test_many_processes_compile_at_once(compiles_once, tmp_path):
    code = "from ladderize.runtime.native.library import kernels; print(kernels().ladderize_sum is not None)"
    environment = {**os.environ, **compiles_once, "XDG_CACHE_HOME": str(tmp_path)}
    started = [warm.WarmProcess([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert all("True" in process.communicate()[0] for process in started)
    assert len(list((tmp_path / "ladderize").iterdir())) == 1
