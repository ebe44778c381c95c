"""One rank's part of a Llama as parameters: fp32 where they are trained, else in the dtype that is computed in.

They have the runtime's order (loader.py). ``pieces`` gives the place of a checkpoint's tensors among them.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ladderize.checkpoint.config import EMBEDDING, HEAD, expected_tensors
from ladderize.layout import DROPPED, Layout
from ladderize.ranks.group import Ranks
from ladderize.runtime.layers import AttentionWeights, HeadNorms, Linear, MlpWeights, RMSNorm, Weights, WideRMSNorm
from ladderize.runtime.loader import Source, load_weights, unpair_rope_rows
from ladderize.runtime.shards import Shape, Slice
from ladderize.runtime.training.linear import LaterLinear, WeightGradient

Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """One rank's part of the checkpoint's tensor of ``shape``.

    parts: the parameters that hold it, each with its rows, side by side along ``dim``.
    dim: the dimension that the ranks share; None: every rank holds all of the tensor in one parameter.
    copies: the number of neighbouring ranks that hold the same.
    head_dim: of rows that are paired up for rope, else 0.

    Methods take ``of``, which picks a tensor of a parameter: itself, its gradient, or a moment of the optimizer.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[Tensor, slice], ...]
    dim: int | None = None
    copies: int = 1
    head_dim: int = 0

    def local(self, of: Pick) -> Tensor:
        """Return this rank's part, as the checkpoint orders it; of a padded vocabulary with the padding."""
        found = [of(parameter)[rows] for parameter, rows in self.parts]
        joined = found[0] if len(found) == 1 else torch.cat(found, self.dim or 0)
        return unpair_rope_rows(joined, self.head_dim) if self.head_dim else joined

    def whole(self, of: Pick, tensor: Ranks) -> Tensor:
        """Return the checkpoint's tensor, on every rank of ``tensor``. All of them call it."""
        local = self.local(of).detach()
        if self.dim is None or tensor.size == 1:
            return local if self.dim is None else local.narrow(self.dim, 0, self.shape[self.dim])
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(tensor.size)]
        dist.all_gather(parts, local.contiguous(), group=tensor.group)
        return torch.cat(parts[:: self.copies], self.dim).narrow(self.dim, 0, self.shape[self.dim])

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(parameter for parameter, _ in self.parts)


def share_layer(other: Any, index: int, attention: AttentionWeights, mlp: MlpWeights) -> None:
    """Replace the large weights of a layer that was just read by those of ``other`` that are frozen and equal.

    So at most one layer of both models is in memory twice.

    other: ``TrainedWeights``, or None: nothing is replaced.
    """
    if other is None:
        return
    theirs = [other.attentions[index].qkv, *other.attentions[index].o, *other.mlps[index].gate_up]
    own = [attention.qkv, *attention.o, *mlp.gate_up]
    if len(own) == len(theirs):  # as many virtual ranks are computed apart
        for linear, same in zip([*own, mlp.down], [*theirs, other.mlps[index].down], strict=True):
            if _can_share(linear.weight, same.weight):
                linear.weight = same.weight.detach()


def share_frozen(weights: nn.Module, other: nn.Module) -> None:
    """Replace the parameters of ``weights`` by those of ``other`` that are frozen and equal. Both are
    ``TrainedWeights``."""
    theirs = dict(other.named_parameters(remove_duplicate=False))
    for name, parameter in list(weights.named_parameters(remove_duplicate=False)):
        same = theirs.get(name)
        if same is not None and _can_share(parameter, same):
            owner, _, leaf = name.rpartition(".")
            setattr(weights.get_submodule(owner), leaf, same)


def _can_share(own: Tensor, other: Tensor) -> bool:
    return not other.requires_grad and own.shape == other.shape and torch.equal(own, other)


class TrainedLinear(nn.Module):
    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight, self.bias = _parameter(linear.weight), _parameter(linear.bias)


class TrainedAttention(nn.Module):
    def __init__(self, weights: AttentionWeights) -> None:
        super().__init__()
        self.norm, self.o_bias = _parameter(weights.norm.weight), _parameter(weights.o_bias)
        self.qkv = TrainedLinear(weights.qkv)
        self.o = nn.ModuleList(map(TrainedLinear, weights.o))
        norms = weights.head_norms
        self.q_norm = None if norms is None else _parameter(norms.query)
        self.k_norm = None if norms is None else _parameter(norms.key)


class TrainedMlp(nn.Module):
    def __init__(self, weights: MlpWeights) -> None:
        super().__init__()
        self.norm, self.down_bias = _parameter(weights.norm.weight), _parameter(weights.down_bias)
        self.gate_up = nn.ModuleList(map(TrainedLinear, weights.gate_up))
        self.down = TrainedLinear(weights.down)


class TrainedWeights(nn.Module):
    """The trained and the frozen weights of one rank; see ``build_weights``.

    head: the embedding, where the two are tied.
    pad_id: the token that only fills rows. Its row of the embedding has no gradient, as in transformers.
    """

    norm: Tensor
    embed: Tensor
    head: Tensor

    def __init__(
        self, weights: Weights, shape: Shape, layout: Layout, compute: torch.dtype, pad_id: int | None
    ) -> None:
        super().__init__()
        self.shape, self.layout, self.compute = shape, layout, compute
        # a number below 0 counts from the end
        pad = None if pad_id is None else pad_id % shape.vocab - shape.vocab_start
        self.own_pad = pad if pad is not None and 0 <= pad < shape.own_vocab else None
        self.embed = _parameter(weights.embed)
        self.attentions = nn.ModuleList(TrainedAttention(attention) for attention, _ in weights.layers)
        self.mlps = nn.ModuleList(TrainedMlp(mlp) for _, mlp in weights.layers)
        self.norm = _parameter(weights.norm.weight)
        self.head = self.embed if shape.tied else _parameter(weights.head.weight)

    def pieces(self) -> dict[str, Piece]:
        """Return the pieces of the trained tensors, by their names in a checkpoint."""
        pieces = self._all_pieces()
        return {name: piece for name, piece in pieces if all(own.requires_grad for own in piece.parameters)}

    def _all_pieces(self) -> Iterator[tuple[str, Piece]]:
        shape = self.shape
        vocabulary = (shape.vocab, shape.hidden)
        rows = functools.partial(Piece, dim=0)
        yield EMBEDDING, rows(vocabulary, ((self.embed, slice(None)),))
        for index, (attention, mlp) in enumerate(self._layers()):
            prefix = f"model.layers.{index}."
            yield f"{prefix}input_layernorm.weight", _replicated(attention.norm)
            yield f"{prefix}post_attention_layernorm.weight", _replicated(mlp.norm)
            yield from self._attention_pieces(f"{prefix}self_attn.", attention)
            yield from self._mlp_pieces(f"{prefix}mlp.", mlp)
        yield "model.norm.weight", _replicated(self.norm)
        if not shape.tied:
            yield HEAD, rows(vocabulary, ((self.head, slice(None)),))

    def _layers(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.attentions, self.mlps, strict=True)

    def _attention_pieces(self, prefix: str, attention: Any) -> Iterator[tuple[str, Piece]]:
        shape = self.shape
        query, kv = shape.own_heads * shape.head_dim, shape.own_kv_heads * shape.head_dim
        for name, begin, size, heads in (
            ("q", 0, query, shape.heads),
            ("k", query, kv, shape.kv_heads),
            ("v", query + kv, kv, shape.kv_heads),
        ):
            whole, head_dim = heads * shape.head_dim, 0 if name == "v" else shape.head_dim
            copies = 1 if name == "q" else shape.kv_copies
            for kind, parameter, sizes in (
                ("weight", attention.qkv.weight, (whole, shape.hidden)),
                ("bias", attention.qkv.bias, (whole,)),
            ):
                if parameter is not None:
                    part = ((parameter, slice(begin, begin + size)),)
                    yield f"{prefix}{name}_proj.{kind}", Piece(sizes, part, 0, copies, head_dim)
        yield f"{prefix}o_proj.weight", self._row_parallel(attention.o, shape.heads * shape.head_dim)
        if attention.o_bias is not None:
            yield f"{prefix}o_proj.bias", _replicated(attention.o_bias)
        if attention.q_norm is not None:
            yield f"{prefix}q_norm.weight", _replicated(attention.q_norm, shape.head_dim)
            yield f"{prefix}k_norm.weight", _replicated(attention.k_norm, shape.head_dim)

    def _mlp_pieces(self, prefix: str, mlp: Any) -> Iterator[tuple[str, Piece]]:
        shape = self.shape
        width = shape.own_inner // len(mlp.gate_up)
        for name, rows in (("gate", slice(0, width)), ("up", slice(width, 2 * width))):
            for kind, sizes in (("weight", (shape.inner, shape.hidden)), ("bias", (shape.inner,))):
                parameters = [getattr(linear, kind) for linear in mlp.gate_up]
                if parameters[0] is not None:
                    parts = tuple((parameter, rows) for parameter in parameters)
                    yield f"{prefix}{name}_proj.{kind}", Piece(sizes, parts, 0)
        yield f"{prefix}down_proj.weight", self._row_parallel([mlp.down], shape.inner)
        if mlp.down_bias is not None:
            yield f"{prefix}down_proj.bias", _replicated(mlp.down_bias)

    def _row_parallel(self, linears: Any, size: int) -> Piece:
        parts = tuple((linear.weight, slice(None)) for linear in linears)
        return Piece((self.shape.hidden, size), parts, 1)

    # ---- gradients that the ranks know parts of ----

    def partial_parameters(self) -> list[Tensor]:
        """Return the parameters that every rank holds and knows a part of the gradient of.

        They lie between a sum over the ranks and the products that are split among them.
        """
        found: list[Tensor] = [self.norm]
        for index, (attention, mlp) in enumerate(self._layers()):
            found += [attention.norm, mlp.norm]
            if attention.q_norm is not None:  # of this rank's heads alone
                found += [attention.q_norm, attention.k_norm]
            if attention.o_bias is not None and self.layout.attention_sync[index] == DROPPED:
                found.append(attention.o_bias)
        return [parameter for parameter in found if parameter.requires_grad]

    def copied_rows(self) -> list[tuple[Tensor, slice, int]]:
        """Return (parameter, rows, copies) of KV heads that ``copies`` neighbouring ranks hold.

        Their gradient is the sum of these ranks'.
        """
        shape = self.shape
        if shape.kv_copies == 1:
            return []
        begin = shape.own_heads * shape.head_dim
        found = [
            (linear, slice(begin, None)) for attention, _ in self._layers() for linear in attention.qkv.parameters()
        ]
        return [(parameter, rows, shape.kv_copies) for parameter, rows in found if parameter.requires_grad]

    @torch.no_grad()
    def sum_partial_gradients(self, tensor: Ranks) -> None:
        """Sum the gradients that ranks know parts of, in one message, after all backward passes of a step.

        All ranks of ``tensor`` call it.
        """
        if tensor.size == 1:
            return
        partial = [parameter.grad for parameter in self.partial_parameters() if parameter.grad is not None]
        copied = [
            (parameter.grad[rows], copies)
            for parameter, rows, copies in self.copied_rows()
            if parameter.grad is not None
        ]
        # each rank has a place in the message for the heads that it holds, the same as the other ranks that hold them
        places = [gradient.new_zeros(tensor.size // copies, *gradient.shape) for gradient, copies in copied]
        for place, (gradient, copies) in zip(places, copied, strict=True):
            place[tensor.rank // copies] = gradient
        if not partial and not copied:
            return
        message = torch.cat([gradient.flatten() for gradient in (*partial, *places)])
        tensor.sum(message)
        sizes = [gradient.numel() for gradient in (*partial, *places)]
        sums = list(message.split(sizes))
        for gradient, total in zip(partial, sums, strict=False):
            gradient.copy_(total.view_as(gradient))
        for (gradient, copies), place, total in zip(copied, places, sums[len(partial) :], strict=True):
            gradient.copy_(total.view_as(place)[tensor.rank // copies])


class UsedWeights:
    """The weights of one pass for ``TPLlama``, each converted once to the dtype that is computed in."""

    def __init__(self, weights: TrainedWeights) -> None:
        self.weights = weights
        self._values: dict[int, Tensor] = {}
        self._gradients: dict[int, WeightGradient] = {}

    def rows(self, ids: Tensor) -> Tensor:
        """Return the embedding's rows. Gradients of repeated ids add up in the parameter's own dtype."""
        return F.embedding(ids, self.weights.embed, padding_idx=self.weights.own_pad).to(self.weights.compute)

    @property
    def norm(self) -> RMSNorm:
        return self._norm(self.weights.norm)

    def take_head(self) -> LaterLinear:
        return self._later(self.weights.head, None)

    def attention(self, layer: int) -> AttentionWeights:
        own: Any = self.weights.attentions[layer]
        shape = self.weights.shape
        return AttentionWeights(
            self._norm(own.norm),
            self._linear(own.qkv),
            [self._linear(o) for o in own.o],
            self._small(own.o_bias),
            HeadNorms(own.q_norm, own.k_norm, shape.own_heads, shape.own_kv_heads, shape.eps)
            if own.q_norm is not None
            else None,
        )

    def mlp(self, layer: int) -> MlpWeights:
        own: Any = self.weights.mlps[layer]
        return MlpWeights(
            self._norm(own.norm),
            [self._linear(gate_up) for gate_up in own.gate_up],
            self._linear(own.down),
            self._small(own.down_bias),
        )

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.weights.parameters())

    @property
    def resident_bytes(self) -> int:
        return self.nbytes

    def _linear(self, linear: Any) -> LaterLinear:
        return self._later(linear.weight, self._small(linear.bias))

    def _later(self, parameter: Tensor, bias: Tensor | None) -> LaterLinear:
        gradient = self._gradients.setdefault(id(parameter), WeightGradient())
        return LaterLinear(parameter, self._value(parameter), bias, gradient)

    def _norm(self, weight: Tensor) -> RMSNorm:
        kind = RMSNorm if self.weights.compute == torch.float32 else WideRMSNorm
        return kind(weight.float(), self.weights.shape.eps)

    def _small(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(self.weights.compute)

    def _value(self, parameter: Tensor) -> Tensor:
        if parameter.dtype == self.weights.compute:
            return parameter
        key = id(parameter)
        if key not in self._values:
            self._values[key] = parameter.detach().to(self.weights.compute)
        return self._values[key]


class _Reading:
    """A source of slices that reads trained tensors as fp32."""

    def __init__(self, wide: Source, narrow: Source, trained: frozenset[str]) -> None:
        self.wide, self.narrow, self.trained = wide, narrow, trained

    def read(self, part: Slice) -> Tensor:
        return (self.wide if part.name in self.trained else self.narrow).read(part)


def build_weights(
    source: Callable[[torch.dtype], Source],
    config: Mapping[str, Any],
    shape: Shape,
    layout: Layout,
    *,
    trained: frozenset[str],
    compute: torch.dtype,
    shared: TrainedWeights | None = None,
) -> TrainedWeights:
    """Read this rank's part. Raises ValueError for a name in ``trained`` that the model does not have.

    source: opens the tensors as a dtype.
    trained: names of the tensors that change; of a layer all or none.
    shared: weights whose frozen parameters are used again where they are equal (a teacher and its student).
    """
    reading = _Reading(source(torch.float32), source(compute), trained)
    made = functools.partial(share_layer, shared)
    weights = TrainedWeights(
        load_weights(reading, shape, layout, pack=False, made=made),
        shape,
        layout,
        compute,
        config.get("pad_token_id"),
    )
    unknown = trained - expected_tensors(dict(config)).keys()
    if unknown:
        raise ValueError(f"the model has no {sorted(unknown)[0]}")
    for name, piece in weights._all_pieces():
        for parameter in piece.parameters:
            parameter.requires_grad_(name in trained)
    if shared is not None:
        share_frozen(weights, shared)
    return weights


def _parameter(tensor: Tensor | None) -> Any:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


def _replicated(parameter: Tensor, head_dim: int = 0) -> Piece:
    return Piece(tuple(parameter.shape), ((parameter, slice(None)),), head_dim=head_dim)
