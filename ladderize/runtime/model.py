"""The tensor-parallel decoder for every family and layout. docs/layouts.md describes its forward pass.

Between layers the state is the residual stream, equal on all ranks, and perhaps one all-reduce in flight. The layout
says whether a sub-module's sum is waited for at once, after the next sub-module (overlapped or delayed: that one reads
this rank's partial at once), or left out until the next sync point (dropped)."""

from collections.abc import Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ladderize.layout import APART, DROPPED, HIDING, Layout
from ladderize.runtime.collectives.base import Collectives, Split
from ladderize.runtime.collectives.differentiable import PendingSum, Stream, whole
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.operations import Operations
from ladderize.runtime.schedule import SEQUENTIAL, Schedule, run_walks
from ladderize.runtime.shards import Shape, group_size
from ladderize.runtime.step import Step, join_parts, split_parts

OneOrNone = TypeVar("OneOrNone", Tensor, Tensor | None)
ALONE = Collectives()  # of one process


class TPLlama:
    """One rank of a decoder with a layout, for inference and for training; ``weights`` are ``layers.Weights``, or in
    training ``UsedWeights``."""

    def __init__(
        self, shape: Shape, layout: Layout, weights: Any, collectives: Collectives, operations: Operations | None = None
    ) -> None:
        self.shape, self.layout, self.weights, self.collectives = shape, layout, weights, collectives
        self.operations = operations or Operations()
        self.modes = layout.modes
        self.head = weights.take_head()
        self.windows = sorted({window for window in shape.decoder.windows if window is not None})
        self.group_size = group_size(layout.sync_tp_size, shape.tp_size)
        self.carries = shape.rank % self.group_size == 0  # a carry that the group has summed counts once
        if self.group_size > 1:
            collectives.split(self.group_size)  # made by all ranks at once, and before any CUDA graph is captured

    def forward(self, ids: Tensor, step: Step, cache: KVCache, schedule: Schedule = SEQUENTIAL) -> Tensor:
        """Return the output layer's input [batch, tokens, hidden] for ids [batch, tokens], equal on all ranks: the
        normed end of the residual stream, times ``logits_scale``."""
        if self.windows:
            step = step.with_windows(self.windows, ids.shape[1])
        chunks = split_parts(ids, step, cache, schedule)
        walks = [self.walk(*chunk, alone=len(chunks) == 1) for chunk in chunks]
        return join_parts(run_walks(walks), ids.shape[0])

    def walk(self, ids: Tensor, step: Step, cache: KVCache, *, alone: bool) -> Generator[None, None, Tensor]:
        """Run the forward pass as a generator, which returns the result of ``forward``.

        It yields after each sum that it has sent, so that other walks may compute meanwhile; ``alone``: there are none.

        A sub-module's weights are taken before the sum that it reads is waited for. In training that puts the products
        of its weights' gradients behind the start of its input's gradient (see training/linear.py).
        """
        sent: PendingSum | None = self.embed(ids, alone)
        taken = self.upcoming(0)
        yield
        assert sent is not None
        residual, x = self.arrived(sent)
        sent = None
        apart: list[Tensor] | None = None  # what each virtual rank reads beside x: its partial of the sub-module before
        for number, mode in enumerate(self.modes):
            weights = taken.pop(0)
            partials = self.partials(number, weights, x, apart, step, cache)
            if sent is not None:  # waited for behind the compute: that is the overlap
                residual, x = self.arrived(sent)
                sent = None
            apart, bias = None, self.scaled(weights.bias)
            if mode in APART:
                apart = [*map(self.groups.within.all_reduce, partials)]
                residual, x = self.add_bias(residual, x, bias)
                if mode == DROPPED:
                    continue
                # the partials are read meanwhile: the message is new memory
                message = apart[0].clone() if len(apart) == 1 else sum_of(apart)
                sent = PendingSum(self.groups.across, residual, None, message)
            else:
                blocking = alone and mode not in HIDING
                behind, product = weights.norm_behind, partials.pop()
                sent = PendingSum(self.collectives, residual, bias, product, behind=behind, blocking=blocking)
            taken = self.upcoming(number + 1)
            yield
            if mode not in HIDING:
                residual, x = self.arrived(sent)
                sent = None
        return self.end(x)  # the last MLP sync is blocking: nothing is on its way

    def arrived(self, sent: PendingSum) -> tuple[Stream, Stream]:
        """Wait for a sum; return the stream with it, and the same as x."""
        return sent.wait(self.operations.norm, unadded=self.operations.adds_in_norm)

    def end(self, x: Stream) -> Tensor:
        scale = self.shape.decoder.logits_scale
        normed = self.operations.norm(self.weights.norm, x)
        return normed if scale == 1 else normed * scale

    def scaled(self, added: OneOrNone) -> OneOrNone:
        """Return a part that is added to the stream, times the family's factor; nothing is computed where that is 1."""
        scale = self.shape.decoder.residual_scale
        return added if added is None or scale == 1 else added * scale

    def upcoming(self, number: int) -> list[Any]:
        """Return the weights of the sub-modules from ``number`` on up to the next sum; behind the last take the
        head's."""
        if number == len(self.modes):
            self.head = self.weights.take_head()  # like a sub-module's: before the last sum is waited for
            return []
        last = number + 1 if self.modes[number] == DROPPED else number
        return [self.weights.take_sublayer(taken) for taken in range(number, last + 1)]

    def add_bias(self, residual: Stream, x: Stream, bias: Tensor | None) -> tuple[Stream, Stream]:
        """Return the stream and x with the bias of a dropped sum. All ranks add it to the stream alike, so its gradient
        counts once."""
        if bias is None:
            return residual, x
        if residual is x:
            return (whole(residual) + bias,) * 2
        shared, share = bias.view_as(bias), 1 / self.collectives.ranks
        if shared.requires_grad:
            shared.register_hook(lambda gradient: gradient * share)
        return whole(residual) + shared, whole(x) + bias

    @property
    def groups(self) -> Split:
        """The collectives of the processes that are one virtual rank, and those that sum over virtual ranks."""
        return Split(ALONE, self.collectives) if self.group_size == 1 else self.collectives.split(self.group_size)

    def partials(
        self, number: int, weights: Any, x: Stream, apart: list[Tensor] | None, step: Step, cache: KVCache
    ) -> list[Tensor]:
        """Return this rank's part of the sum of sub-module ``number``, without the bias of its last projection.

        Where it is read before it is summed, it comes for each virtual rank. After a dropped attention its partials are
        added to the MLP's: they are the P of SPD section 4.1: X' = X + AR(Z + P).

        apart: what virtual rank k of this process reads beside x; None: nothing.
        """
        operations, is_mlp = self.operations, number % 2
        inner = operations.mlp(weights, x, apart) if is_mlp else operations.attention(weights, x, apart, step, cache)
        carry = apart if is_mlp and self.modes[number - 1] == DROPPED and self.carries else None
        if self.modes[number] in APART:
            products = [*map(self.scaled, operations.products_apart(weights.row_parallel, inner))]
            return products if carry is None else [*map(torch.add, products, carry)]
        product = self.scaled(operations.product(weights.row_parallel[0], inner))
        return [product if carry is None else product + sum_of(carry)]

    def embed(self, ids: Tensor, alone: bool) -> PendingSum:
        """Return the embedding of ids [batch, tokens] as a sum [batch, tokens, hidden]. Each rank looks up its own part
        of the vocabulary. alone: no other walk computes until the wait."""
        if self.shape.replicate_vocab:
            rows, collectives = self.weights.rows(ids), ALONE
        else:
            rows_here = ids - self.shape.vocab_start
            inside = (rows_here >= 0) & (rows_here < self.shape.own_vocab)
            rows = self.weights.rows(rows_here.clamp(0, self.shape.own_vocab - 1)) * inside.unsqueeze(-1)
            collectives = self.collectives
        decoder = self.shape.decoder
        scale = decoder.embedding_scale
        if decoder.rounds_scale:
            scale = torch.tensor(scale, dtype=rows.dtype).item()
        return PendingSum(collectives, None, None, rows if scale == 1 else rows * scale, blocking=alone)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab] of hidden states [..., hidden], equal on all ranks."""
        logits = self.operations.product(self.head, hidden)
        if self.shape.replicate_vocab:
            return logits
        return self.collectives.all_gather(logits)[..., : self.shape.vocab]


def sum_of(partials: list[Tensor]) -> Tensor:
    """Return the sum of the virtual ranks' partials."""
    return partials[0] if len(partials) == 1 else torch.stack(partials).sum(0)
