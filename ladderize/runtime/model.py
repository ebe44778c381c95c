"""The tensor-parallel decoder for every family and layout. docs/design.md describes its forward pass.

Between layers the state is the residual stream, equal on all ranks, and perhaps one all-reduce in flight. Each
sub-module returns this rank's partial sum; the layout says whether its sum is waited for at once (blocking), after the
next sub-module (overlapped, Ladder Residual, arXiv 2501.06589) or left out until the next sync point (dropped, SPD,
arXiv 2502.20727).
"""

from collections.abc import Callable, Generator, Iterator
from typing import Protocol, TypeVar

from torch import Tensor

from ladderize.layout import BLOCKING, DROPPED, Layout
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.differentiable import PendingSum, ShareOfGradient
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.layers import AttentionWeights, MlpWeights, RMSNorm
from ladderize.runtime.operations import Operations
from ladderize.runtime.schedule import SEQUENTIAL, Schedule, run_walks
from ladderize.runtime.shards import Shape
from ladderize.runtime.step import Step, join_parts, split_parts, with_additive_masks

OneOrNone = TypeVar("OneOrNone", Tensor, Tensor | None)


class OwnWeights(Protocol):
    """The interface of one rank's weights; see ``layers.Weights``.

    The model takes a sub-module's weights before it waits for the sum that the sub-module reads.
    """

    @property
    def norm(self) -> RMSNorm: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    def take_head(self) -> Callable[[Tensor], Tensor]: ...
    def rows(self, ids: Tensor) -> Tensor: ...
    def attention(self, layer: int) -> AttentionWeights: ...
    def mlp(self, layer: int) -> MlpWeights: ...


class TakesOutputs(Protocol):
    """The receiver of what the sub-modules of a layer add to the stream; see training/outputs.py."""

    def attention(self, output: Tensor) -> None: ...
    def mlp(self, output: Tensor) -> None: ...
    def send_dropped(self, collectives: Collectives, partials: list[Tensor], bias: Tensor | None) -> None: ...


class TPLlama:
    """One rank of a decoder with a layout, for inference and for training; the sums go through ``collectives``.

    operations: the computation between the products; None: by PyTorch.
    """

    def __init__(
        self,
        shape: Shape,
        layout: Layout,
        weights: OwnWeights,
        collectives: Collectives,
        operations: Operations | None = None,
    ) -> None:
        self.shape, self.layout, self.weights, self.collectives = shape, layout, weights, collectives
        self.operations = operations or Operations()
        self.head = weights.take_head()
        self.windows = sorted({window for window in shape.decoder.windows if window is not None})

    def forward(self, ids: Tensor, step: Step, cache: KVCache, schedule: Schedule = SEQUENTIAL) -> Tensor:
        """Return the output layer's input [batch, tokens, hidden], equal on all ranks.

        It is the normed end of the residual stream, times ``logits_scale``.

        ids: [batch, tokens].
        """
        if self.windows:
            step = step.with_windows(self.windows, ids.shape[1])
        parts = split_parts(ids, with_additive_masks(step, cache.keys.dtype), cache, schedule)
        walks = [self.walk(part.ids, part.step, part.cache, schedule.columns) for part in parts]
        return join_parts(run_walks(walks), ids.shape[0])

    def walk(self, ids: Tensor, step: Step, cache: KVCache, columns: int = 1) -> Generator[None, None, Tensor]:
        """Run the forward pass as a generator, which returns the result of ``forward``.

        It yields after each sum that it has sent, so that other walks may compute meanwhile.

        columns: parts in which sums are sent.

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
                products = iter(list(products))  # computed before the wait: that is the overlap
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
        """Return the output layer's input, from the end of the residual stream."""
        scale = self.shape.decoder.logits_scale
        normed = self.operations.norm(self.weights.norm, x)
        return normed if scale == 1 else normed * scale

    def scaled(self, added: OneOrNone) -> OneOrNone:
        """Return a part that is added to the stream, times the family's factor; nothing is computed where that is 1."""
        scale = self.shape.decoder.residual_scale
        return added if added is None or scale == 1 else added * scale

    def outputs_of(self, index: int) -> TakesOutputs | None:
        """Return the receiver of what this layer's sub-modules add. There is one in training alone."""
        return None

    def upcoming(self, index: int) -> tuple[AttentionWeights, MlpWeights | None]:
        """Return the weights up to the next sum: those of attention, and where its sum is dropped also those of the
        MLP."""
        dropped = self.layout.attention_sync[index] == DROPPED
        return self.weights.attention(index), self.weights.mlp(index) if dropped else None

    def add_bias(self, residual: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream and x with the bias of a dropped sum. All ranks add it to the stream alike, so its gradient
        counts once."""
        if bias is None:
            return residual, x
        if residual is x:
            return (residual + bias,) * 2
        return residual + ShareOfGradient.apply(bias, 1 / self.collectives.ranks), x + bias

    def attention_products(
        self, index: int, weights: AttentionWeights, x: Tensor, step: Step, cache: KVCache, columns: int
    ) -> Iterator[Tensor]:
        """Yield this rank's part of attention's sum, without o_proj's bias.

        It comes in ``columns`` parts, or, where the sum is dropped, whole for each virtual rank.
        """
        heads = self.operations.attention(weights, x, step, cache, index, self.shape)
        if self.layout.attention_sync[index] != DROPPED:
            yield from map(self.scaled, weights.o[0].products(heads, columns))
        else:
            for o, part in zip(weights.o, heads.chunk(len(weights.o), -1), strict=True):
                yield self.scaled(o(part))

    def mlp_products(
        self, weights: MlpWeights, x: Tensor, carry: list[Tensor] | None, columns: int
    ) -> Iterator[Tensor]:
        """Yield this rank's part of the MLP's sum, without down_proj's bias, plus its carry, in ``columns`` parts.

        The carry is the P of SPD section 4.1: X' = X + AR(Z + P).

        Each virtual rank k of this process reads x + carry[k]; the one product with down_proj adds them all up.
        """
        inner = self.operations.mlp(weights, x, carry)
        for number, product in enumerate(map(self.scaled, weights.down.products(inner, columns))):
            for own in carry or ():
                product = product + own.chunk(columns, -1)[number]
            yield product

    def embed(self, ids: Tensor) -> PendingSum:
        """Return the embedding of ids [batch, tokens] as a sum [batch, tokens, hidden]. Each rank looks up its own part
        of the vocabulary."""
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
        """Return the logits [..., vocab] of hidden states [..., hidden], equal on all ranks."""
        own = self.head(hidden)
        if self.shape.replicate_vocab:
            return own
        return self.collectives.all_gather(own)[..., : self.shape.vocab]
