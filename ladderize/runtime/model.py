"""The one tensor-parallel decoder, for every family and layout: docs/design.md as its forward.

Between layers the state is the residual stream, equal on all ranks, and perhaps one all-reduce in flight. Each
sub-module returns this rank's partial sum; the layout says whether its sum is waited for at once (blocking), after the
next sub-module (overlapped, Ladder Residual, arXiv 2501.06589) or left out until the next sync point (dropped, SPD,
arXiv 2502.20727).
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.layout import BLOCKING, DROPPED, Layout
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.differentiable import PendingSum, ShareOfGradient
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import AttentionWeights, MlpWeights
from ladderize.runtime.schedule import SEQUENTIAL, Schedule, run_walks
from ladderize.runtime.shards import Shape

OneOrNone = TypeVar("OneOrNone", Tensor, Tensor | None)


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass stand.

    rope_factors: complex [batch or 1, tokens, 1, head_dim / 2]. columns: the first cache column of the tokens, or a
    tensor of their columns: [tokens], or [batch, tokens] where rows differ. length: the columns of the cache that
    attention sees; 0: a prompt, which sees itself alone. mask: bool [batch or 1, 1, tokens, columns in view], True
    where a token may look; None: everything, or with ``causal`` everything up to itself. depths: [batch, tokens], where
    the tokens of a prompt stand in their texts, if their columns do not tell how far apart they are. near: the masks of
    layers with sliding windows, by window; see ``with_windows``.
    """

    rope_factors: Tensor
    columns: int | Tensor
    length: int
    mask: Tensor | None = None
    causal: bool = False
    depths: Tensor | None = None
    near: Mapping[int, Tensor] = field(default_factory=dict)

    def with_windows(self, windows: Iterable[int], tokens: int) -> "Step":
        """The same with a mask for each of ``windows`` that leaves out something: a token sees itself and window - 1
        before it. tokens: of this pass, in each row."""
        view, device = self.length or tokens, self.rope_factors.device
        own = [window for window in windows if window < view]
        if not own:
            return self
        keys = torch.arange(view, device=device) if self.depths is None else self.depths
        queries: Tensor | int = self.columns if self.depths is None else self.depths
        if isinstance(queries, int):
            queries = torch.arange(queries, queries + tokens, device=device)
        distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
        distance = distance[None, None] if distance.ndim == 2 else distance[:, None]
        seen = self.mask
        if seen is None and self.causal:
            seen = distance >= 0
        near = {window: distance < window for window in own}
        return replace(self, near=near if seen is None else {window: mask & seen for window, mask in near.items()})

    def seen(self, window: int | None) -> tuple[Tensor | None, bool]:
        """``mask`` and ``causal`` of a layer with this window; None: without."""
        near = None if window is None else self.near.get(window)
        return (self.mask, self.causal) if near is None else (near, False)


@dataclass(frozen=True)
class Part:
    """Some rows, or some tokens of one row, of a forward pass."""

    ids: Tensor
    step: Step
    cache: KVCache


class OwnWeights(Protocol):
    """What the model asks of one rank's weights; see ``layers.Weights``. It takes a sub-module's weights before it
    waits for the sum that the sub-module reads."""

    @property
    def norm(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    def take_head(self) -> Callable[[Tensor], Tensor]: ...
    def rows(self, ids: Tensor) -> Tensor: ...
    def attention(self, layer: int) -> AttentionWeights: ...
    def mlp(self, layer: int) -> MlpWeights: ...


class TakesOutputs(Protocol):
    """Takes what the sub-modules of a layer add to the stream; see training/outputs.py."""

    def attention(self, output: Tensor) -> None: ...
    def mlp(self, output: Tensor) -> None: ...
    def send_dropped(self, collectives: Collectives, partials: list[Tensor], bias: Tensor | None) -> None: ...


class TPLlama:
    """One rank of a decoder with a layout, for inference and for training; the sums go through ``collectives``.

    compile: run the sub-modules between the collectives through torch.compile.
    """

    def __init__(
        self, shape: Shape, layout: Layout, weights: OwnWeights, collectives: Collectives, *, compile: bool = False
    ) -> None:
        self.shape, self.layout, self.weights, self.collectives = shape, layout, weights, collectives
        self.head = weights.take_head()
        self.windows = sorted({window for window in shape.decoder.windows if window is not None})
        self.project: Callable[..., Any] = compiled(project) if compile else project
        self.mlp_inner: Callable[..., Any] = compiled(mlp_inner) if compile else mlp_inner

    def forward(self, ids: Tensor, step: Step, cache: KVCache, schedule: Schedule = SEQUENTIAL) -> Tensor:
        """ids: [batch, tokens]. Returns the normed end of the residual stream [batch, tokens, hidden], equal on all
        ranks: what the output layer reads, so times ``logits_scale``."""
        if self.windows:
            step = step.with_windows(self.windows, ids.shape[1])
        parts = split_parts(ids, with_usable_mask(step, cache), cache, schedule)
        walks = [self.walk(part.ids, part.step, part.cache, schedule.columns) for part in parts]
        return join_parts(run_walks(walks), ids.shape[0])

    def walk(self, ids: Tensor, step: Step, cache: KVCache, columns: int = 1) -> Generator[None, None, Tensor]:
        """The one forward: it yields after each sum that it has sent, so that others may compute meanwhile, and returns
        what ``forward`` does. columns: parts in which sums are sent.

        A sub-module's weights are taken before the sum that it reads is waited for. In training that puts the products
        of its weights' gradients behind the start of its input's gradient (see training/linear.py).
        """
        collectives, layout, weights, scaled = self.collectives, self.layout, self.weights, self.scaled
        sent: PendingSum | None = self.embed(ids)
        attention, mlp = self.upcoming(0)
        yield
        assert sent is not None
        residual, x = sent.wait()
        sent = None
        for index in range(self.shape.layers):
            outputs = self.outputs_of(index)
            products = self.attention_products(index, attention, x, step, cache, columns)
            if sent is not None:
                products = iter(list(products))  # first compute: that is the overlap
                residual, x = sent.wait()
                sent = None
            carry = None
            if layout.attention_sync[index] == DROPPED:
                carry = list(products)
                residual, x = self.add_bias(residual, x, scaled(attention.o_bias))
            else:
                take = None if outputs is None else outputs.attention
                sent = PendingSum(collectives, residual, scaled(attention.o_bias), products, take)
                mlp = weights.mlp(index)
                yield
                if layout.attention_sync[index] == BLOCKING:
                    residual, x = sent.wait()
                    sent = None
            assert mlp is not None
            products = self.mlp_products(mlp, x, carry, columns)
            if sent is not None:
                products = iter(list(products))
                residual, x = sent.wait()
            take = None if outputs is None else outputs.mlp
            sent = PendingSum(collectives, residual, scaled(mlp.down_bias), products, take)
            if outputs is not None and carry is not None:
                outputs.send_dropped(collectives, carry, scaled(attention.o_bias))
            if index + 1 < self.shape.layers:
                attention, mlp = self.upcoming(index + 1)
            else:
                self.head = weights.take_head()  # like a sub-module's: before the last sum is waited for
            yield
            if layout.mlp_sync[index] == BLOCKING:
                residual, x = sent.wait()
                sent = None
        return self.end(x)  # the last MLP sync is blocking: nothing is on its way

    def end(self, x: Tensor) -> Tensor:
        """What the output layer reads, of the end of the residual stream."""
        scale = self.shape.decoder.logits_scale
        return self.weights.norm(x) if scale == 1 else self.weights.norm(x) * scale

    def scaled(self, added: OneOrNone) -> OneOrNone:
        """A part of what is added to the stream, times the family's factor; nothing is computed where that is 1."""
        scale = self.shape.decoder.residual_scale
        return added if added is None or scale == 1 else added * scale

    def outputs_of(self, index: int) -> TakesOutputs | None:
        """Who takes what this layer's sub-modules add: somebody in training alone."""
        return None

    def upcoming(self, index: int) -> tuple[AttentionWeights, MlpWeights | None]:
        """The weights up to the next sum: those of attention, and where its sum is dropped also those of the MLP."""
        dropped = self.layout.attention_sync[index] == DROPPED
        return self.weights.attention(index), self.weights.mlp(index) if dropped else None

    def add_bias(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The bias of a dropped sum. All ranks add it to the stream alike, so there its gradient counts once."""
        if bias is None:
            return residual, x
        if residual is x:
            return (residual + bias,) * 2
        return residual + ShareOfGradient.apply(bias, 1 / self.collectives.ranks), x + bias

    def attention_products(
        self, index: int, weights: AttentionWeights, x: Tensor, step: Step, cache: KVCache, columns: int
    ) -> Iterator[Tensor]:
        """This rank's part of attention's sum, without o_proj's bias: in ``columns`` parts, or, where the sum is
        dropped, whole for each virtual rank."""
        decoder = self.shape.decoder
        query, key, value = self.project(weights, x, step.rope_factors if decoder.rope[index] else None, self.shape)
        cache.write(index, step.columns, key, value)
        if step.length:
            key, value = cache.read(index, step.length)
        else:
            key, value = key.to(x.dtype), value.to(x.dtype)
        seen = step.seen(decoder.windows[index])
        heads = attend(query.to(key.dtype), key, value, *seen, scale=decoder.attention_scale).to(x.dtype)
        if self.layout.attention_sync[index] != DROPPED:
            yield from map(self.scaled, weights.o[0].products(heads, columns))
        else:
            for o, part in zip(weights.o, heads.chunk(len(weights.o), -1), strict=True):
                yield self.scaled(o(part))

    def mlp_products(
        self, weights: MlpWeights, x: Tensor, carry: list[Tensor] | None, columns: int
    ) -> Iterator[Tensor]:
        """This rank's part of the MLP's sum, without down_proj's bias, plus what this rank carries (SPD section 4.1:
        X' = X + AR(Z + P)), in ``columns`` parts.

        Each virtual rank k of this process reads x + carry[k]; the one product with down_proj adds them all up.
        """
        inner = self.mlp_inner(weights, x, carry)
        for number, product in enumerate(map(self.scaled, weights.down.products(inner, columns))):
            for own in carry or ():
                product = product + own.chunk(columns, -1)[number]
            yield product

    def embed(self, ids: Tensor) -> PendingSum:
        """[batch, tokens] -> the sum [batch, tokens, hidden]; each rank looks up its own part of the vocabulary."""
        scale = self.shape.decoder.embedding_scale
        if self.shape.replicate_vocab:
            rows = self.weights.rows(ids)
            return PendingSum(Collectives(), None, None, [rows if scale == 1 else rows * scale])
        own = ids - self.shape.vocab_start
        inside = (own >= 0) & (own < self.shape.own_vocab)
        rows = self.weights.rows(own.clamp(0, self.shape.own_vocab - 1))
        rows = rows if scale == 1 else rows * scale
        return PendingSum(self.collectives, None, None, [rows * inside.unsqueeze(-1)])

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab], equal on all ranks."""
        own = self.head(hidden)
        if self.shape.replicate_vocab:
            return own
        return self.collectives.all_gather(own)[..., : self.shape.vocab]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for each shape anew, as often as there are shapes; what it cannot compile is an error, not a slower
    run."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=False)


def project(
    weights: AttentionWeights, x: Tensor, rope_factors: Tensor | None, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, own heads, tokens, head_dim], float32, of the residual stream [batch, tokens,
    hidden]. rope_factors: None in a layer without rope."""
    fused = weights.qkv(weights.norm(x)).float().unflatten(-1, (-1, shape.head_dim))
    query_key, value = fused.split((shape.own_heads + shape.own_kv_heads, shape.own_kv_heads), 2)
    if weights.head_norms is not None:
        query_key = weights.head_norms(query_key)
    if rope_factors is not None:
        query_key = rotate(query_key, rope_factors)
    query, key = query_key.split((shape.own_heads, shape.own_kv_heads), 2)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def rotate(x: Tensor, rope_factors: Tensor) -> Tensor:
    """Rope: neighbouring pairs of x [batch, tokens, heads, head_dim] as complex numbers, times ``rope_factors``
    (RoFormer, arXiv 2104.09864)."""
    pairs = x.unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # inductor generates no code for complex numbers
        (a, b), (cos, sin) = pairs.unbind(-1), torch.view_as_real(rope_factors).unbind(-1)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.view_as_real(torch.view_as_complex(pairs) * rope_factors).flatten(-2)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, *, scale: float | None = None
) -> Tensor:
    """Grouped-query attention. query: [batch, heads, tokens, head_dim]; returns [batch, tokens, heads * head_dim].
    scale: of the scores; None: head_dim ** -0.5."""
    batch, heads, tokens, dim = query.shape
    groups = keys.shape[1]
    if tokens == 1:
        # the queries of a KV head take the place of tokens: no key is copied, and every SDPA kernel can do it
        folded = query.reshape(batch, groups, heads // groups, dim)
        return F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale).reshape(batch, 1, -1)
    if mask is not None and groups != heads:  # kernels that take a mask know no groups
        keys, values = (t.repeat_interleave(heads // groups, 1) for t in (keys, values))
    output = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=keys.shape[1] != heads
    )
    return output.transpose(1, 2).reshape(batch, tokens, -1)


def mlp_inner(weights: MlpWeights, x: Tensor, carry: list[Tensor] | None) -> Tensor:
    """What down_proj reads: [batch, tokens, own inner], of the virtual ranks side by side."""
    if carry is None:
        return gated(weights.gate_up[0](weights.norm(x)))
    inner = [gated(gate_up(weights.norm(x + own))) for gate_up, own in zip(weights.gate_up, carry, strict=True)]
    return inner[0] if len(inner) == 1 else torch.cat(inner, -1)


def gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def with_usable_mask(step: Step, cache: KVCache) -> Step:
    """On a GPU ``step`` with what is added to the scores in place of a bool mask, in the dtype of keys: attention would
    make that of it once more in every layer."""
    if cache.keys.device.type == "cpu":
        return step

    def added(mask: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=cache.keys.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)

    near = {window: added(mask) for window, mask in step.near.items()}
    return replace(step, mask=None if step.mask is None else added(step.mask), near=near)


# ---- the parts that a schedule cuts a pass into: by rows, or one row along its tokens ----


def split_parts(ids: Tensor, step: Step, cache: KVCache, schedule: Schedule) -> list[Part]:
    """Cut a pass over ids [batch, tokens] as ``schedule`` says: as evenly as it goes, larger parts first.

    One row is cut along its tokens: a later part sees the keys and values of the earlier ones.
    """
    rows, tokens = ids.shape
    count = schedule.parts(rows, tokens)
    if count == 1:
        return [Part(ids, step, cache)]
    if rows > 1:
        return [Part(ids[a:b], _rows(step, a, b, rows), cache.batch_rows(a, b)) for a, b in _bounds(rows, count)]
    cache = cache.for_parts()
    return [Part(ids[:, a:b], _tokens(step, a, b, tokens), cache) for a, b in _bounds(tokens, count)]


def join_parts(results: Sequence[Tensor], rows: int) -> Tensor:
    """What the parts' walks returned, [rows, tokens, hidden] each, as one. rows: of the whole batch."""
    return results[0] if len(results) == 1 else torch.cat(list(results), 0 if rows > 1 else 1)


def _bounds(size: int, count: int) -> list[tuple[int, int]]:
    small, larger = divmod(size, count)
    ends = [number * small + min(number, larger) for number in range(count + 1)]
    return list(pairwise(ends))


def _rows(step: Step, begin: int, end: int, rows: int) -> Step:
    def own(tensor: Tensor) -> Tensor:
        return tensor[begin:end] if tensor.shape[0] == rows else tensor

    columns = step.columns
    if not isinstance(columns, int) and columns.ndim == 2:
        columns = columns[begin:end]
    mask = None if step.mask is None else own(step.mask)
    near = {window: own(of_window) for window, of_window in step.near.items()}
    return replace(step, rope_factors=own(step.rope_factors), columns=columns, mask=mask, near=near)


def _tokens(step: Step, begin: int, end: int, tokens: int) -> Step:
    before = max(0, step.length - tokens)  # columns of the cache that are older than this pass
    length = before + end
    columns = step.columns + begin if isinstance(step.columns, int) else step.columns[..., begin:end]
    mask, causal = step.mask, step.causal
    if mask is not None:
        mask = mask[:, :, begin:end, :length]
    elif causal and before + begin:
        seen = torch.arange(length, device=step.rope_factors.device)
        mask, causal = (seen <= seen[before + begin :, None])[None, None], False
    factors = step.rope_factors[:, begin:end]
    near = {window: of_window[:, :, begin:end, :length] for window, of_window in step.near.items()}
    return Step(factors, columns, length, mask, causal, near=near)
