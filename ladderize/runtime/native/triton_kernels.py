"""The kernels between a layer's products on a GPU, in Triton: few, since each takes its time in decoding.

Each computes in float32 and rounds once."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

# Columns of the cache that one program reads at a time, and at least for itself.
TILE_COLUMNS = 64
# A program of decode attention has this many rows for the queries of a KV head: the fewest of the tensor cores.
TILE_QUERIES = 16


@triton.jit
def _rms_norm(x, added, sums, weight, out, rows, width, eps, ADDED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + (row % rows).to(tl.int64) * width + column, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(added + row.to(tl.int64) * width + column, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(sums + row.to(tl.int64) * width + column, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * width + column, (wide * scale * factor).to(value.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., width], normed by ``weight`` [width]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(x, None, None, weight, out, eps)
    return out


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + ``added``, and that normed. Where ``added`` [..., *x.shape] holds several, x is added to each."""
    x, added = x.contiguous(), added.contiguous()
    sums, out = torch.empty_like(added), torch.empty_like(added)
    _launch_norm(x, added, sums, weight, out, eps)
    return sums, out


def _launch_norm(x: Tensor, added: Tensor | None, sums: Tensor | None, weight: Tensor, out: Tensor, eps: float) -> None:
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _rms_norm[(out.numel() // width,)](
        x, added, sums, weight, out, x.numel() // width, width, eps, added is not None, block, num_warps=_warps(block)
    )


@triton.jit
def _swiglu(gate_up, out, inner, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gate = tl.load(gate_up + row * 2 * inner + column, mask=inside, other=0.0)
    up = tl.load(gate_up + (row * 2 + 1) * inner + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out + row * inner + column, (wide * tl.sigmoid(wide) * up).to(gate.dtype), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., inner], of both side by side, [..., 2 * inner]."""
    gate_up = gate_up.contiguous()
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    block = min(1024, triton.next_power_of_2(inner))
    _swiglu[(out.numel() // inner, triton.cdiv(inner, block))](gate_up, out, inner, block)
    return out


@triton.jit
def _rotate_and_store(
    qkv,
    norms,
    rope,
    columns,
    query,
    keys,
    values,
    tokens,
    first,
    rope_row,
    eps,
    cache_row,
    cache_head,
    cache_column,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ALL: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    INDEXED: tl.constexpr,
):
    """All heads of one token."""
    position = tl.program_id(0).to(tl.int64)
    row, token = position // tokens, position % tokens
    head, pair = tl.arange(0, ALL)[:, None], tl.arange(0, HALF)[None]
    inside = (head < HEADS + 2 * KV_HEADS) & (pair < DIM // 2)
    offset = head * DIM + 2 * pair
    start = qkv + position * (HEADS + 2 * KV_HEADS) * DIM + offset
    a = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(start + 1, mask=inside, other=0.0).to(tl.float32)
    of_query_or_key = head < HEADS + KV_HEADS
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        weighed = inside & of_query_or_key
        a = tl.where(of_query_or_key, a * scale * tl.load(norms + offset, mask=weighed, other=0.0), a)
        b = tl.where(of_query_or_key, b * scale * tl.load(norms + offset + 1, mask=weighed, other=0.0), b)
    if ROTATED:
        factors = rope + row * rope_row + token * DIM + 2 * pair
        cos = tl.load(factors, mask=pair < DIM // 2, other=0.0)
        sin = tl.load(factors + 1, mask=pair < DIM // 2, other=0.0)
        c = tl.where(of_query_or_key, a * cos - b * sin, a)
        b = tl.where(of_query_or_key, a * sin + b * cos, b)
        a = c
    if INDEXED:
        column = tl.load(columns + token)
    else:
        column = first + token
    a, b = a.to(qkv.dtype.element_ty), b.to(qkv.dtype.element_ty)
    to_query = query + (row * HEADS + head) * tokens * DIM + token * DIM + 2 * pair
    mine = inside & (head < HEADS)
    tl.store(to_query, a, mask=mine)
    tl.store(to_query + 1, b, mask=mine)
    cached = row * cache_row + column * cache_column + 2 * pair
    to_keys = keys + cached + (head - HEADS) * cache_head
    mine = inside & (head >= HEADS) & of_query_or_key
    tl.store(to_keys, a, mask=mine)
    tl.store(to_keys + 1, b, mask=mine)
    to_values = values + cached + (head - HEADS - KV_HEADS) * cache_head
    mine = inside & (head >= HEADS + KV_HEADS)
    tl.store(to_values, a, mask=mine)
    tl.store(to_values + 1, b, mask=mine)


def rotate_and_store(
    qkv: Tensor,
    rope: Tensor | None,
    norms: Tensor | None,
    eps: float,
    keys: Tensor,
    values: Tensor,
    columns: int | Tensor,
    heads: int,
) -> Tensor:
    """Write keys and values into the cache, and return the queries [batch, heads, tokens, head_dim].

    qkv: [batch, tokens, (heads + 2 * KV heads) * head_dim].
    rope: complex [batch or 1, tokens, 1, head_dim / 2]; None: not turned.
    norms: float32 [heads + KV heads, head_dim], the weights of head norms; None: not normed.
    keys, values: [batch, KV heads, columns, head_dim], a layer of the cache, of qkv's dtype.
    columns: the first column of the tokens, or a tensor of all, [tokens].
    """
    qkv = qkv.contiguous()
    (batch, tokens, _), (_, kv_heads, _, dim) = qkv.shape, keys.shape
    query = qkv.new_empty(batch, heads, tokens, dim)
    turns = None if rope is None else torch.view_as_real(rope.contiguous())
    first, indices = (columns, None) if isinstance(columns, int) else (0, columns.contiguous())
    together, half = triton.next_power_of_2(heads + 2 * kv_heads), triton.next_power_of_2(max(1, dim // 2))
    rope_row = tokens * dim if turns is not None and turns.shape[0] > 1 else 0
    _rotate_and_store[(batch * tokens,)](
        *(qkv, norms, turns, indices, query, keys, values),
        *(tokens, first, rope_row, eps, *keys.stride()[:3]),
        *(heads, kv_heads, dim, together, half),
        *(norms is not None, turns is not None, indices is not None),
        num_warps=_warps(together * half),
    )
    return query


@triton.jit
def _attend_split(
    query,
    keys,
    values,
    mask,
    outputs,
    logs,
    length,
    columns,
    scale,
    mask_row,
    cache_row,
    cache_head,
    cache_column,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One KV head of one row, and ``columns`` columns of it: a softmax of its own (FlashDecoding)."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads, splits = tl.num_programs(1), tl.num_programs(2)
    query_head, dim = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    mine = (query_head[:, None] < GROUP) & (dim[None] < DIM)
    first = (row * kv_heads + head) * GROUP
    q = tl.load(query + (first + query_head[:, None]) * DIM + dim[None], mask=mine, other=0.0)
    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    output = tl.zeros([QUERIES, WIDE], tl.float32)
    base = row * cache_row + head * cache_head
    for start in range(split * columns, tl.minimum((split + 1) * columns, length), COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        there = column < length
        position = base + column.to(tl.int64)[:, None] * cache_column + dim[None]
        inside = there[:, None] & (dim[None] < DIM)
        k = tl.load(keys + position, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if MASKED:
            scores += tl.load(mask + row * mask_row + column, mask=there, other=float("-inf")).to(tl.float32)[None]
        else:
            scores = tl.where(there[None], scores, float("-inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet: -inf - -inf is no number
        weights = tl.exp(scores - safe[:, None])
        kept = tl.exp(best - safe)
        total = total * kept + tl.sum(weights, 1)
        v = tl.load(values + position, mask=inside, other=0.0)
        output = output * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = highest
    some = tl.where(total == 0.0, 1.0, total)
    to = (first + query_head) * splits + split
    tl.store(outputs + to[:, None] * DIM + dim[None], output / some[:, None], mask=mine)
    tl.store(logs + to, best + tl.log(total), mask=query_head < GROUP)


@triton.jit
def _join_splits(outputs, logs, out, splits, DIM: tl.constexpr, WIDE: tl.constexpr, SPLITS: tl.constexpr):
    """One query: the mean of its splits' outputs, weighted by their sums of exponentials."""
    position = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    log = tl.load(logs + position * splits + split, mask=split < splits, other=float("-inf"))
    best = tl.max(log, 0)
    weight = tl.exp(log - tl.where(best == float("-inf"), 0.0, best))
    inside = (split < splits)[:, None] & (dim < DIM)[None]
    chunk = tl.load(outputs + (position * splits + split)[:, None] * DIM + dim[None], mask=inside, other=0.0)
    total = tl.sum(weight, 0)
    output = tl.sum(chunk * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)  # a row that sees nothing is 0
    tl.store(out + position * DIM + dim, output.to(out.dtype.element_ty), mask=dim < DIM)


def attend_one(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, programs: int) -> Tensor:
    """Return grouped-query attention of one token of each row, [batch, 1, heads * head_dim].

    A row's columns are split among programs, since one program for each KV head would leave most of a GPU idle.

    query: [batch, heads, 1, head_dim].
    keys, values: [batch, KV heads, columns in view, head_dim].
    mask: additive, [batch or 1, 1, 1, columns in view]; None: all are seen.
    programs: as many as the GPU runs at once.
    """
    batch, heads, _, dim = query.shape
    kv_heads, length = keys.shape[1:3]
    wanted = max(1, programs // (batch * kv_heads))
    columns = max(TILE_COLUMNS, triton.cdiv(triton.cdiv(length, wanted), TILE_COLUMNS) * TILE_COLUMNS)
    splits, wide = triton.cdiv(length, columns), max(16, triton.next_power_of_2(dim))
    outputs = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=query.device)
    logs = torch.empty(batch, heads, splits, dtype=torch.float32, device=query.device)
    group, mask_row = heads // kv_heads, mask.stride(0) if mask is not None and mask.shape[0] > 1 else 0
    _attend_split[(batch, kv_heads, splits)](
        *(query, keys, values, mask, outputs, logs),
        *(length, columns, scale, mask_row, *keys.stride()[:3]),
        *(group, dim, wide, mask is not None, max(TILE_QUERIES, triton.next_power_of_2(group)), TILE_COLUMNS),
        num_stages=stages(wide, keys.element_size()),
    )
    out = torch.empty(batch, 1, heads * dim, dtype=query.dtype, device=query.device)
    together = triton.next_power_of_2(splits)
    _join_splits[(batch * heads,)](outputs, logs, out, splits, dim, wide, together, num_warps=_warps(together * wide))
    return out


def stages(wide: int, itemsize: int) -> int:
    """Return how many tiles of keys and values are loaded ahead: as many as the shared memory of small GPUs holds."""
    return 3 if wide * itemsize <= 256 else 1


@triton.jit(do_not_specialize=["nanoseconds"])
def ladderize_spin_kernel(nanoseconds):
    """Idle by the GPU's own clock, which does not slow down with its cores. A trace knows it for communication."""
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()


def idle(nanoseconds: int) -> None:
    """Keep the current stream busy for so long."""
    ladderize_spin_kernel[(1,)](nanoseconds, num_warps=1)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
