"""One rank's part of a Llama as parameters, in the runtime's order (loader.py): fp32 where they are trained, else in
the dtype that is computed in. ``pieces`` says where a checkpoint's tensors lie among them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ladderize.checkpoint.config import EMBEDDING, HEAD
from ladderize.families.base import FUSED
from ladderize.layout import APART, Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.layers import Linear, RMSNorm, Sublayer, Weights
from ladderize.runtime.loader import Read, load_weights, unpair_rope_rows, with_offset
from ladderize.runtime.shards import Shape
from ladderize.runtime.training.linear import LaterLinear, WeightGradient

ALL = slice(None)


@dataclass(frozen=True)
class Piece:
    """One rank's part of the checkpoint's tensor of ``shape``."""

    shape: tuple[int, ...]
    slices: tuple[tuple[Tensor, slice], ...]  # the parameters that hold it, with its rows, side by side along ``dim``
    dim: int | None = None  # that the ranks share; None: every rank holds all of the tensor in one parameter
    copies: int = 1  # neighbouring ranks that hold the same
    unpair: Callable[[Tensor], Tensor] | None = None  # of rows that are paired up for rope: to the checkpoint's order

    def whole(self, of: Callable[[Tensor], Tensor], tensor: Ranks) -> Tensor:
        """Return the checkpoint's tensor, on every rank of ``tensor``. All of them call it. of: picks a tensor
        of a parameter: itself, its gradient, or a moment of the optimizer."""
        held = [of(parameter)[rows].detach() for parameter, rows in self.slices]
        local = held[0] if len(held) == 1 else torch.cat(held, self.dim or 0)
        local = local if self.unpair is None else self.unpair(local)
        if self.dim is None:
            return local
        if tensor.size > 1:
            by_rank = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(tensor.size)]
            dist.all_gather(by_rank, local.contiguous(), group=tensor.group)
            local = torch.cat(by_rank[:: self.copies], self.dim)
        return local.narrow(self.dim, 0, self.shape[self.dim])

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(parameter for parameter, _ in self.slices)


@dataclass(frozen=True)
class FusedPiece:
    """One rank's part of a fused projection: of several ones, whose rows follow each other in the checkpoint's tensor
    and in the parameters."""

    pieces: tuple[Piece, ...]
    dim = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.pieces[0].parameters

    def whole(self, of: Callable[[Tensor], Tensor], tensor: Ranks) -> Tensor:
        """Return the checkpoint's tensor, as ``Piece.whole`` does."""
        return torch.cat([piece.whole(of, tensor) for piece in self.pieces])


class TrainedLinear(nn.Module):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight, self.bias = _parameter(linear.weight), _parameter(linear.bias)


class TrainedSublayer(nn.Module):
    """The parameters of a ``Sublayer``."""

    def __init__(self, weights: Sublayer) -> None:
        super().__init__()
        self.layer, self.shape = weights.layer, weights.shape
        self.norm, self.norm_behind = (
            _parameter(None if norm is None else norm.weight) for norm in (weights.norm, weights.norm_behind)
        )
        self.bias = _parameter(weights.bias)
        self.column_parallel = nn.ModuleList(map(TrainedLinear, weights.column_parallel))
        self.row_parallel = nn.ModuleList(map(TrainedLinear, weights.row_parallel))
        self.q_norm, self.k_norm = _parameter(weights.q_norm), _parameter(weights.k_norm)


class TrainedWeights(nn.Module):
    """The trained and the frozen weights of one rank; see ``build_weights``. ``pad_id``: the token that only fills
    rows. Its row of the embedding has no gradient, as in transformers."""

    norm: Tensor
    embed: Tensor
    head: Tensor  # the embedding, where the two are tied

    def __init__(
        self, weights: Weights, shape: Shape, layout: Layout, compute: torch.dtype, pad_id: int | None
    ) -> None:
        super().__init__()
        self.shape, self.layout, self.compute = shape, layout, compute
        self.own_pad: int | None = None
        if pad_id is not None:
            pad = pad_id % shape.vocab - shape.vocab_start  # a number below 0 counts from the end
            self.own_pad = pad if 0 <= pad < shape.own_vocab else None
        self.embed = _parameter(weights.embed)
        self.sublayers = nn.ModuleList(map(TrainedSublayer, weights.sublayers))
        self.norm = _parameter(weights.norm.weight)
        self.head = self.embed if shape.tied else _parameter(weights.head.weight)

    def layers(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.sublayers[::2], self.sublayers[1::2], strict=True)

    def pieces(self) -> dict[str, Piece | FusedPiece]:
        return {name: piece for name, piece in self.all_pieces() if piece.parameters[0].requires_grad}

    def all_pieces(self) -> Iterator[tuple[str, Piece | FusedPiece]]:
        shape, norms = self.shape, self.shape.decoder.norms
        unpair = partial(unpair_rope_rows, shape=shape)
        vocabulary = (shape.vocab, shape.hidden)
        yield EMBEDDING, Piece(vocabulary, ((self.embed, ALL),), 0)
        for index, (attention, mlp) in enumerate(self.layers()):
            prefix = f"model.layers.{index}."
            for name, parameter, order in (
                (f"{norms.before_attention}.weight", attention.norm, None),
                (f"{norms.behind_attention}.weight", attention.norm_behind, None),
                (f"{norms.before_mlp}.weight", mlp.norm, None),
                (f"{norms.behind_mlp}.weight", mlp.norm_behind, None),
                ("self_attn.o_proj.bias", attention.bias, None),
                ("self_attn.q_norm.weight", attention.q_norm, unpair),
                ("self_attn.k_norm.weight", attention.k_norm, unpair),
                ("mlp.down_proj.bias", mlp.bias, None),
            ):
                if parameter is not None:
                    yield prefix + name, Piece(tuple(parameter.shape), ((parameter, ALL),), unpair=order)
            columns = dict(self._column_pieces(attention, mlp, unpair))
            for fused in shape.decoder.fused:
                fused_pieces = tuple(columns.pop(f"{name}.weight") for name in FUSED[fused])
                yield f"{prefix}{fused}.weight", FusedPiece(fused_pieces)
            for name, piece in columns.items():
                yield prefix + name, piece
            for name, linears, size in (
                ("self_attn.o_proj", attention.row_parallel, shape.heads * shape.head_dim),
                ("mlp.down_proj", mlp.row_parallel, shape.inner),
            ):
                slices = tuple((linear.weight, ALL) for linear in linears)
                yield f"{prefix}{name}.weight", Piece((shape.hidden, size), slices, 1)
        yield "model.norm.weight", Piece(tuple(self.norm.shape), ((self.norm, ALL),))
        if not shape.tied:
            yield HEAD, Piece(vocabulary, ((self.head, ALL),), 0)

    def _column_pieces(
        self, attention: Any, mlp: Any, unpair: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Piece]]:
        """Yield the pieces of projections whose output rows the ranks share, by their names in a layer."""
        shape, rank, width = self.shape, attention.shape, mlp.shape.own_inner
        qkv, gate_up = attention.column_parallel, mlp.column_parallel
        query, kv = rank.own_heads * shape.head_dim, rank.own_kv_heads * shape.head_dim
        heads, kv_heads, copies = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_copies
        distinct = qkv[:: min(len(qkv), rank.kv_copies)]  # of the KV heads on this process
        for name, linears, rows, size, held_by, order in (
            ("self_attn.q_proj", qkv, slice(0, query), heads, 1, unpair),
            ("self_attn.k_proj", distinct, slice(query, query + kv), kv_heads, copies, unpair),
            ("self_attn.v_proj", distinct, slice(query + kv, query + 2 * kv), kv_heads, copies, None),
            ("mlp.gate_proj", gate_up, slice(0, width), shape.inner, 1, None),
            ("mlp.up_proj", gate_up, slice(width, 2 * width), shape.inner, 1, None),
        ):
            weights = tuple((linear.weight, rows) for linear in linears)
            yield f"{name}.weight", Piece((size, shape.hidden), weights, 0, held_by, order)
            if linears[0].bias is not None:
                biases = tuple((linear.bias, rows) for linear in linears)
                yield f"{name}.bias", Piece((size,), biases, 0, held_by, order)

    # ---- gradients that the ranks know parts of ----

    def partial_parameters(self) -> list[Tensor]:
        """Return the parameters of which every rank knows a part of the gradient: they lie between a sum over the ranks
        and the products that are split among them. The norms behind a sum do not."""
        partial: list[Tensor | None] = [self.norm]
        sublayers: Any = self.sublayers
        for sublayer, mode in zip(sublayers, self.layout.modes, strict=True):
            partial += [sublayer.norm, sublayer.q_norm, sublayer.k_norm]  # the latter of this rank's heads alone
            partial += [sublayer.bias] if mode in APART else []
        return [parameter for parameter in partial if parameter is not None]

    def copied_rows(self) -> list[list[tuple[Any, slice, int]]]:
        """Return the rows of KV heads that several virtual ranks hold, of this process or of its neighbours. A group is
        of one kind of parameter in a layer; each virtual rank of this process has its parameter in it, the rows of the
        KV head in it, and the head's number."""
        groups = []
        for attention, _ in self.layers():
            rank, linears = attention.shape, attention.column_parallel
            if rank.kv_copies > 1:
                rows = slice(rank.own_heads * rank.head_dim, None)
                heads = [(rank.rank + number) // rank.kv_copies for number in range(len(linears))]
                for held in zip(*(linear.parameters() for linear in linears), strict=True):
                    groups.append([(parameter, rows, head) for parameter, head in zip(held, heads, strict=True)])
        return groups

    @property
    def partial_numbers(self) -> int:
        """The size of the message of ``sum_partial_gradients``, where all is trained."""
        copied = sum(group[0][0][group[0][1]].numel() for group in self.copied_rows())
        return sum(parameter.numel() for parameter in self.partial_parameters()) + copied * self.shape.kv_heads

    @torch.no_grad()
    def sum_partial_gradients(self, tensor: Ranks) -> None:
        """Sum the gradients that ranks know parts of, in one message, after all backward passes of a step. KV heads
        that several virtual ranks hold have the sum of their gradients."""
        sent: list[Tensor] = []
        if tensor.size > 1:
            sent = [parameter.grad for parameter in self.partial_parameters() if parameter.grad is not None]
        groups = [group for group in self.copied_rows() if group[0][0].grad is not None]
        partial = len(sent)
        for group in groups:
            parameter, rows, _ = group[0]
            heads = parameter.new_zeros(self.shape.kv_heads, *parameter[rows].shape)  # the same on all ranks
            for parameter, rows, head in group:
                heads[head] += parameter.grad[rows]
            sent.append(heads)
        if not sent:
            return
        message = tensor.sum(torch.cat([gradient.flatten() for gradient in sent]))
        sums = message.split([gradient.numel() for gradient in sent])
        totals = [total.view_as(gradient) for gradient, total in zip(sent, sums, strict=True)]
        for gradient, total in zip(sent[:partial], totals[:partial], strict=True):
            gradient.copy_(total)
        for group, total in zip(groups, totals[partial:], strict=True):
            for parameter, rows, head in group:
                parameter.grad[rows].copy_(total[head])


class UsedWeights:
    """The weights of one pass for ``TPLlama``, each converted once to the dtype that is computed in."""

    def __init__(self, weights: TrainedWeights) -> None:
        self.weights = weights
        self._values: dict[int, Tensor] = {}
        self._gradients: dict[int, WeightGradient] = {}

    def rows(self, ids: Tensor) -> Tensor:
        # gradients of repeated ids add up in the parameter's own dtype
        return F.embedding(ids, self.weights.embed, padding_idx=self.weights.own_pad).to(self.weights.compute)

    @property
    def norm(self) -> RMSNorm | None:
        return self._norm(self.weights.norm)

    def take_head(self) -> LaterLinear:
        return self._later(self.weights.head, None)

    def take_sublayer(self, number: int) -> Sublayer:
        weights: Any = self.weights.sublayers[number]
        first, last = (self._linears(linears) for linears in (weights.column_parallel, weights.row_parallel))
        norm, norm_behind = self._norm(weights.norm), self._norm(weights.norm_behind)
        head_norms = self._scale(weights.q_norm), self._scale(weights.k_norm)
        bias = self._small(weights.bias)
        return Sublayer(weights.layer, weights.shape, norm, first, last, bias, *head_norms, norm_behind)

    def _linears(self, linears: Any) -> list[Linear]:
        return [self._later(linear.weight, self._small(linear.bias)) for linear in linears]

    def _later(self, parameter: Tensor, bias: Tensor | None) -> LaterLinear:
        key, compute = id(parameter), self.weights.compute
        if key not in self._values:
            self._values[key] = parameter if parameter.dtype == compute else parameter.detach().to(compute)
            self._gradients[key] = WeightGradient()
        return LaterLinear(parameter, self._values[key], bias, self._gradients[key])

    def _norm(self, weight: Tensor | None) -> RMSNorm | None:
        scale = self._scale(weight)
        return None if scale is None else RMSNorm(scale, self.weights.shape.eps)

    def _scale(self, weight: Tensor | None) -> Tensor | None:
        return None if weight is None else with_offset(weight.float(), self.weights.shape)

    def _small(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(self.weights.compute)


def build_weights(
    source: Callable[[torch.dtype], Read],
    config: Mapping[str, Any],
    shape: Shape,
    layout: Layout,
    *,
    trained: frozenset[str],
    compute: torch.dtype,
    shared: TrainedWeights | None = None,
) -> TrainedWeights:
    """Read this rank's part. source: returns the function that reads slices as a dtype.

    trained: names of the tensors that change; of a layer all or none.
    shared: weights whose frozen parameters are used again where they are equal (a teacher and its student).
    """
    wide, narrow = source(torch.float32), source(compute)
    stored = replace(shape, decoder=replace(shape.decoder, norm_offset=0.0))  # added where a norm is used
    loaded = load_weights(
        lambda tensor: (wide if tensor.name in trained else narrow)(tensor), stored, layout, pack=False
    )
    weights = TrainedWeights(loaded, shape, layout, compute, config.get("pad_token_id"))
    for name, piece in weights.all_pieces():
        for parameter in piece.parameters:
            parameter.requires_grad_(name in trained)
    if shared is None:
        return weights
    theirs = dict(shared.named_parameters(remove_duplicate=False))
    for name, parameter in [*weights.named_parameters(remove_duplicate=False)]:
        same = theirs.get(name)
        if same is not None and not same.requires_grad and same.shape == parameter.shape and same.equal(parameter):
            owner, _, leaf = name.rpartition(".")
            setattr(weights.get_submodule(owner), leaf, same)
    return weights


def _parameter(tensor: Tensor | None) -> Any:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)
