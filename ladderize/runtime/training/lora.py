"""LoRA (arXiv 2106.09685) in one rank's part of a model: y = W x + scaling * B A x, and its parameters.

A projection that is split by outputs (q, k, v; gate, up) has all of A and its own rows of B on each rank; one that is
split by inputs (o, down) its own columns of A and all of B. What such a pair adds is then this rank's outputs, or a
partial sum, like what its projection computes. The halves that every rank has whole get partial gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ladderize.runtime.layers import AttentionWeights, MlpWeights
from ladderize.runtime.shards import Shape
from ladderize.runtime.training.weights import Piece


class Product(Protocol):
    """A linear layer as the model calls it (see layers.Linear)."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def products(self, x: Tensor, columns: int) -> Iterator[Tensor]: ...
    @property
    def nbytes(self) -> int: ...


class InputDropout:
    """Dropout of what enters a projection's A, drawn once for one forward pass.

    All ranks of a group draw the same numbers, over the whole width of the input, and use those of their own columns:
    so a result depends neither on the number of ranks nor on which virtual ranks a process computes apart.
    """

    def __init__(self, probability: float, width: int, start: int, stop: int) -> None:
        self.keep, self.width = 1 - probability, width
        self.start, self.stop = start, stop
        self.drawn: Tensor | None = None

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """x: [..., n], the columns ``start`` and on of this rank's part of the input."""
        if self.drawn is None:
            drawn = x.new_empty((*x.shape[:-1], self.width)).bernoulli_(self.keep).div_(self.keep)
            self.drawn = drawn if self.stop - self.start == self.width else drawn[..., self.start : self.stop].clone()
        return x * self.drawn[..., start : start + x.shape[-1]]


class LowRank:
    """What LoRA adds to a product: scaling * B A x, for A [rank, in] and B [out, rank] in the dtype of x."""

    def __init__(self, a: Tensor, b: Tensor, scaling: float, dropout: InputDropout | None, start: int = 0) -> None:
        self.a, self.b, self.scaling, self.dropout, self.start = a, b, scaling, dropout, start

    def products(self, x: Tensor, columns: int) -> Iterator[Tensor]:
        """In ``columns`` parts of its outputs, one after the other."""
        kept = x if self.dropout is None else self.dropout(x, self.start)
        low = F.linear(kept, self.a) * self.scaling
        return (F.linear(low, part) for part in (self.b.chunk(columns) if columns > 1 else (self.b,)))


class WithLora:
    """A linear layer of one or several projections of one input, and what LoRA adds to each, called as the layer is.

    added: of each projection what is added, None where it has no LoRA, and its number of outputs.
    """

    __slots__ = ("added", "linear")

    def __init__(self, linear: Product, added: Sequence[tuple[LowRank | None, int]]) -> None:
        self.linear, self.added = linear, added

    def __call__(self, x: Tensor) -> Tensor:
        (product,) = self._added(x, 1)
        return self.linear(x) + product

    def products(self, x: Tensor, columns: int) -> Iterator[Tensor]:
        for product, added in zip(self.linear.products(x, columns), self._added(x, columns), strict=True):
            yield product + added

    def _added(self, x: Tensor, columns: int) -> Iterator[Tensor]:
        if len(self.added) == 1 and (only := self.added[0][0]) is not None:
            return only.products(x, columns)
        parts = [x.new_zeros((*x.shape[:-1], n)) if one is None else next(one.products(x, 1)) for one, n in self.added]
        return iter(torch.cat(parts, -1).chunk(columns, -1))

    @property
    def nbytes(self) -> int:
        return self.linear.nbytes


# the whole matrix that an adapter's file has, or would have, under a name: rows x columns
Matrices = Callable[[str, tuple[int, int]], Tensor]
ATTENTION, MLP = "self_attn", "mlp"
# projection -> its sub-module, whether it is split by outputs (else by inputs), whether rope turns its rows
PROJECTIONS = {
    "q_proj": (ATTENTION, True, True), "k_proj": (ATTENTION, True, True), "v_proj": (ATTENTION, True, False),
    "o_proj": (ATTENTION, False, False),
    "gate_proj": (MLP, True, False), "up_proj": (MLP, True, False), "down_proj": (MLP, False, False),
}  # fmt: skip


@dataclass(frozen=True)
class LoraPlan:
    """LoRA on ``targets`` (names of projections) of ``layers``. scaling: what B A x is multiplied by. dropout: of what
    enters A, in training."""

    rank: int
    scaling: float
    targets: Sequence[str]
    layers: Sequence[int]
    dropout: float = 0.0


class ProjectionLora(nn.Module):
    """This rank's A [rank, in] and B [out, rank] of one projection, in float32.

    pieces: by the names that an adapter's file has, A's first.
    """

    def __init__(
        self, layer: int, projection: str, plan: LoraPlan, shape: Shape, values: Matrices, device: torch.device
    ) -> None:
        super().__init__()
        module, self.by_outputs, turned = PROJECTIONS[projection]
        start, stop, width = _bounds(projection, shape)
        self.scaling, self.probability = plan.scaling, plan.dropout
        self.inputs = (0, shape.hidden, shape.hidden) if self.by_outputs else (start, stop, width)
        inputs, outputs = (shape.hidden, stop - start) if self.by_outputs else (stop - start, shape.hidden)
        self.a = nn.Parameter(torch.empty(plan.rank, inputs, device=device, dtype=torch.float32))
        self.b = nn.Parameter(torch.empty(outputs, plan.rank, device=device, dtype=torch.float32))
        # no parts yet: ``pieces`` puts in the parameters as they are
        if self.by_outputs:
            copies = shape.kv_copies if projection in ("k_proj", "v_proj") else 1
            head_dim = shape.head_dim if turned else 0
            first = Piece((plan.rank, shape.hidden), ())
            second = Piece((width, plan.rank), (), dim=0, start=start, copies=copies, head_dim=head_dim)
        else:
            first = Piece((plan.rank, width), (), dim=1, start=start)
            second = Piece((shape.hidden, plan.rank), ())
        name = f"base_model.model.model.layers.{layer}.{module}.{projection}.lora_"
        self._pieces = {f"{name}A.weight": ("a", first), f"{name}B.weight": ("b", second)}
        for name, piece in self.pieces().items():
            rows, columns = piece.shape
            piece.assign(lambda parameter: parameter, values(name, (rows, columns)))

    def pieces(self) -> dict[str, Piece]:
        """Of the parameters as they are now: FSDP2 puts others in their place."""
        return {
            name: replace(piece, parts=((getattr(self, own), slice(None)),))
            for name, (own, piece) in self._pieces.items()
        }

    def taken(self, compute: torch.dtype, virtual: int = 1) -> list[LowRank]:
        """What it adds to the product of each of ``virtual`` virtual ranks, computed in ``compute``."""
        a, b = self.a.to(compute), self.b.to(compute)
        start, stop, width = self.inputs
        dropout = InputDropout(self.probability, width, start, stop) if self.training and self.probability else None
        if self.by_outputs:
            return [LowRank(a, own, self.scaling, dropout) for own in b.chunk(virtual)]
        parts = a.chunk(virtual, 1)
        return [LowRank(own, b, self.scaling, dropout, k * own.shape[1]) for k, own in enumerate(parts)]


class TrainedLora(nn.Module):
    """LoRA of one rank's part of a model. values: is asked for every matrix on every rank."""

    def __init__(self, plan: LoraPlan, shape: Shape, values: Matrices, device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.projections = {
            (layer, name): ProjectionLora(layer, name, plan, shape, values, device)
            for layer in plan.layers
            for name in PROJECTIONS
            if name in plan.targets
        }
        self.registered = nn.ModuleList(self.projections.values())

    def pieces(self) -> dict[str, Piece]:
        """Every matrix by the name that an adapter's file gives it."""
        return {name: piece for projection in self.projections.values() for name, piece in projection.pieces().items()}

    def partial_parameters(self) -> list[Tensor]:
        """Held by every rank, with a gradient that is the sum of the ranks'."""
        return [projection.a if projection.by_outputs else projection.b for projection in self.projections.values()]

    def copied_rows(self) -> list[tuple[Tensor, slice]]:
        """The parameters, and which rows of them, that belong to KV heads that several ranks hold."""
        if self.shape.kv_copies == 1:
            return []
        return [
            (projection.b, slice(0, None))
            for (_, name), projection in self.projections.items()
            if name in ("k_proj", "v_proj")
        ]

    def attention(self, layer: int, weights: AttentionWeights, compute: torch.dtype) -> AttentionWeights:
        """The weights of a layer's attention with what LoRA adds to them."""
        queries, keys = (rows[1] - rows[0] for rows in (self.shape.query_rows(), self.shape.kv_rows()))
        fused = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        (qkv,) = self._adapted(layer, [weights.qkv], fused, compute)
        return replace(weights, qkv=qkv, o=self._adapted(layer, weights.o, {"o_proj": self.shape.hidden}, compute))

    def mlp(self, layer: int, weights: MlpWeights, compute: torch.dtype) -> MlpWeights:
        """The weights of a layer's MLP with what LoRA adds to them."""
        width = self.shape.own_inner // len(weights.gate_up)
        gate_up = self._adapted(layer, weights.gate_up, {"gate_proj": width, "up_proj": width}, compute)
        (down,) = self._adapted(layer, [weights.down], {"down_proj": self.shape.hidden}, compute)
        return replace(weights, gate_up=gate_up, down=down)

    def _adapted(
        self, layer: int, linears: Sequence[Product], widths: dict[str, int], compute: torch.dtype
    ) -> list[Any]:
        """linears: one for each virtual rank that is computed apart. widths: the outputs of each projection in one."""
        found = {name: self.projections.get((layer, name)) for name in widths}
        taken = {name: own.taken(compute, len(linears)) for name, own in found.items() if own is not None}
        if not taken:
            return list(linears)
        return [
            WithLora(linear, [(taken[name][k] if name in taken else None, width) for name, width in widths.items()])
            for k, linear in enumerate(linears)
        ]


def _bounds(projection: str, shape: Shape) -> tuple[int, int, int]:
    """Of the side that is split: this rank's part, from and to, and the whole."""
    if projection in ("k_proj", "v_proj"):
        return (*shape.kv_rows(), shape.kv_heads * shape.head_dim)
    if projection in ("q_proj", "o_proj"):
        return (*shape.query_rows(), shape.heads * shape.head_dim)
    return (*shape.inner_rows(), shape.inner)
