"""One rank's part of a Llama as parameters: fp32 where they are trained, else in the dtype that is computed in.

They have the runtime's order (loader.py). ``pieces`` gives the place of a checkpoint's tensors among them.
"""

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


def share_frozen(weights: nn.Module, other: nn.Module) -> None:
    """Replace the parameters of ``weights`` by those of ``other`` that are frozen and equal. Both are
    ``TrainedWeights``."""
    theirs = dict(other.named_parameters(remove_duplicate=False))
    for name, parameter in list(weights.named_parameters(remove_duplicate=False)):
        same = theirs.get(name)
        if same is not None and not same.requires_grad and same.shape == parameter.shape and same.equal(parameter):
            owner, _, leaf = name.rpartition(".")
            setattr(weights.get_submodule(owner), leaf, same)


def named_tensors(attention: AttentionWeights, mlp: MlpWeights) -> dict[str, Tensor]:
    """Return the tensors of a layer by the names that ``TrainedWeights`` gives them."""
    norms = attention.head_norms
    named: dict[str, Tensor | None] = {
        "attention_norm": attention.norm.weight,
        "q_norm": None if norms is None else norms.query,
        "k_norm": None if norms is None else norms.key,
        "qkv": attention.qkv.weight,
        "qkv_bias": attention.qkv.bias,
        "o_bias": attention.o_bias,
        "mlp_norm": mlp.norm.weight,
        "down": mlp.down.weight,
        "down_bias": mlp.down_bias,
    }
    for number, o in enumerate(attention.o):
        named[f"o{number}"] = o.weight
    for number, gate_up in enumerate(mlp.gate_up):
        named |= {f"gate_up{number}": gate_up.weight, f"gate_up{number}_bias": gate_up.bias}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


class TrainedWeights(nn.Module):
    """The trained and the frozen weights of one rank; see ``build_weights``.

    layers: the parameters of each (``named_tensors``).
    apart: how many virtual ranks are computed apart in the attention and in the MLP of each layer.
    head: the embedding, where the two are tied.
    pad_id: the token that only fills rows. Its row of the embedding has no gradient, as in transformers.
    """

    norm: Tensor
    embed: Tensor
    head: Tensor
    layers: Any

    def __init__(
        self, weights: Weights, shape: Shape, layout: Layout, compute: torch.dtype, pad_id: int | None
    ) -> None:
        super().__init__()
        self.shape, self.layout, self.compute = shape, layout, compute
        # a number below 0 counts from the end
        pad = None if pad_id is None else pad_id % shape.vocab - shape.vocab_start
        self.own_pad = pad if pad is not None and 0 <= pad < shape.own_vocab else None
        self.embed = _parameter(weights.embed)
        frozen = ({name: _parameter(own) for name, own in named_tensors(*layer).items()} for layer in weights.layers)
        self.layers = nn.ModuleList(map(nn.ParameterDict, frozen))
        self.apart = [(len(attention.o), len(mlp.gate_up)) for attention, mlp in weights.layers]
        self.norm = _parameter(weights.norm.weight)
        self.head = self.embed if shape.tied else _parameter(weights.head.weight)

    def pieces(self) -> dict[str, Piece]:
        """Return the pieces of the trained tensors, by their names in a checkpoint."""
        pieces = self._all_pieces()
        return {name: piece for name, piece in pieces if all(own.requires_grad for own in piece.parameters)}

    def _all_pieces(self) -> Iterator[tuple[str, Piece]]:
        shape = self.shape
        vocabulary = (shape.vocab, shape.hidden)
        yield EMBEDDING, Piece(vocabulary, _whole(self.embed), 0)
        for index, own in enumerate(self.layers):
            prefix, (of_o, _) = f"model.layers.{index}.", self.apart[index]
            for name, key, head_dim in (
                ("input_layernorm.weight", "attention_norm", 0),
                ("post_attention_layernorm.weight", "mlp_norm", 0),
                ("self_attn.o_proj.bias", "o_bias", 0),
                ("self_attn.q_norm.weight", "q_norm", shape.head_dim),
                ("self_attn.k_norm.weight", "k_norm", shape.head_dim),
                ("mlp.down_proj.bias", "down_bias", 0),
            ):
                if key in own:
                    yield prefix + name, Piece(tuple(own[key].shape), _whole(own[key]), head_dim=head_dim)
            yield from self._column_pieces(index)
            for name, keys, size in (
                ("self_attn.o_proj", [f"o{number}" for number in range(of_o)], shape.heads * shape.head_dim),
                ("mlp.down_proj", ["down"], shape.inner),
            ):
                parts = tuple((own[key], slice(None)) for key in keys)
                yield f"{prefix}{name}.weight", Piece((shape.hidden, size), parts, 1)
        yield "model.norm.weight", Piece(tuple(self.norm.shape), _whole(self.norm))
        if not shape.tied:
            yield HEAD, Piece(vocabulary, _whole(self.head), 0)

    def _column_pieces(self, index: int) -> Iterator[tuple[str, Piece]]:
        """Yield the pieces of projections whose output rows the ranks share."""
        own, (_, of_mlp) = self.layers[index], self.apart[index]
        shape, width = self.shape, self.shape.own_inner // of_mlp
        query, kv = shape.own_heads * shape.head_dim, shape.own_kv_heads * shape.head_dim
        heads, kv_heads, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_copies
        gate_up = [f"gate_up{number}" for number in range(of_mlp)]
        for name, keys, rows, size, copies, head_dim in (
            ("self_attn.q_proj", ["qkv"], slice(0, query), heads, 1, shape.head_dim),
            ("self_attn.k_proj", ["qkv"], slice(query, query + kv), kv_heads, shared, shape.head_dim),
            ("self_attn.v_proj", ["qkv"], slice(query + kv, query + 2 * kv), kv_heads, shared, 0),
            ("mlp.gate_proj", gate_up, slice(0, width), shape.inner, 1, 0),
            ("mlp.up_proj", gate_up, slice(width, 2 * width), shape.inner, 1, 0),
        ):
            for kind, end, sizes in (("weight", "", (size, shape.hidden)), ("bias", "_bias", (size,))):
                if keys[0] + end in own:
                    parts = tuple((own[key + end], rows) for key in keys)
                    yield f"model.layers.{index}.{name}.{kind}", Piece(sizes, parts, 0, copies, head_dim)

    # ---- gradients that the ranks know parts of ----

    def partial_parameters(self) -> list[Tensor]:
        """Return the parameters that every rank holds and knows a part of the gradient of.

        They lie between a sum over the ranks and the products that are split among them.
        """
        found: list[Tensor] = [self.norm]
        for index, own in enumerate(self.layers):
            keys = ["attention_norm", "mlp_norm", "q_norm", "k_norm"]  # the last two: of this rank's heads alone
            keys += ["o_bias"] if self.layout.attention_sync[index] == DROPPED else []
            found += [own[key] for key in keys if key in own]
        return found

    def copied_rows(self) -> list[tuple[Tensor, slice]]:
        """Return the rows of KV heads that neighbouring ranks hold too, each with its parameter."""
        begin = self.shape.own_heads * self.shape.head_dim
        layers = self.layers if self.shape.kv_copies > 1 else []
        return [(own[key], slice(begin, None)) for own in layers for key in ("qkv", "qkv_bias") if key in own]

    @property
    def partial_numbers(self) -> int:
        """The numbers in the message of ``sum_partial_gradients``, where all is trained."""
        copied = sum(parameter[rows].numel() for parameter, rows in self.copied_rows())
        partial = sum(parameter.numel() for parameter in self.partial_parameters())
        return partial + copied * self.shape.tp_size // self.shape.kv_copies

    @torch.no_grad()
    def sum_partial_gradients(self, tensor: Ranks) -> None:
        """Sum the gradients that ranks know parts of, in one message, after all backward passes of a step.

        All ranks of ``tensor`` call it. KV heads that neighbouring ranks hold have the sum of these ranks' gradients.
        """
        if tensor.size == 1:
            return
        partial = [own.grad for own in self.partial_parameters() if own.grad is not None]
        copied = [own.grad[rows] for own, rows in self.copied_rows() if own.grad is not None]
        copies = self.shape.kv_copies
        # each rank has a place in the message for the heads that it holds, the same as the other ranks that hold them
        places = [gradient.new_zeros(tensor.size // copies, *gradient.shape) for gradient in copied]
        for place, gradient in zip(places, copied, strict=True):
            place[tensor.rank // copies] = gradient
        if sent := [*partial, *places]:
            message = tensor.sum(torch.cat([gradient.flatten() for gradient in sent]))
            sums = message.split([gradient.numel() for gradient in sent])
            for gradient, total in zip(partial, sums, strict=False):
                gradient.copy_(total.view_as(gradient))
            for gradient, place, total in zip(copied, places, sums[len(partial) :], strict=True):
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

    def take_head(self) -> Linear:
        return self._later(self.weights.head, None)

    def attention(self, layer: int) -> AttentionWeights:
        own, shape = self.weights.layers[layer], self.weights.shape
        head_norms = None
        if "q_norm" in own:
            head_norms = HeadNorms(own["q_norm"], own["k_norm"], shape.own_heads, shape.own_kv_heads, shape.eps)
        o = [self._later(own[f"o{number}"], None) for number in range(self.weights.apart[layer][0])]
        bias = self._small(own, "o_bias")
        return AttentionWeights(self._norm(own["attention_norm"]), self._linear(own, "qkv"), o, bias, head_norms)

    def mlp(self, layer: int) -> MlpWeights:
        own = self.weights.layers[layer]
        gate_up = [self._linear(own, f"gate_up{number}") for number in range(self.weights.apart[layer][1])]
        down = self._later(own["down"], None)
        return MlpWeights(self._norm(own["mlp_norm"]), gate_up, down, self._small(own, "down_bias"))

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.weights.parameters())

    @property
    def resident_bytes(self) -> int:
        return self.nbytes

    def _linear(self, own: Any, key: str) -> Linear:
        return self._later(own[key], self._small(own, f"{key}_bias"))

    def _later(self, parameter: Tensor, bias: Tensor | None) -> Linear:
        gradient = self._gradients.setdefault(id(parameter), WeightGradient())
        return LaterLinear(parameter, self._value(parameter), bias, gradient)

    def _norm(self, weight: Tensor) -> RMSNorm:
        kind = RMSNorm if self.weights.compute == torch.float32 else WideRMSNorm
        return kind(weight.float(), self.weights.shape.eps)

    def _small(self, own: Any, key: str) -> Tensor | None:
        return own[key].to(self.weights.compute) if key in own else None

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
    weights = TrainedWeights(
        load_weights(reading, shape, layout, pack=False),
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


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _whole(parameter: Tensor) -> tuple[tuple[Tensor, slice]]:
    return ((parameter, slice(None)),)
