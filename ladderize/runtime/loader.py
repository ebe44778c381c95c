"""The loading of weights: each rank reads its own slices from the safetensors files, one tensor at a time."""

import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import read_tensor
from ladderize.layout import Layout
from ladderize.runtime.layers import JoinedLinears, Linear, RMSNorm, Sublayer, Weights
from ladderize.runtime.shards import Shape, Slice, VirtualRanks, rank_shape, virtual_ranks

Read = Callable[[Slice], Tensor]


class CheckpointSource:
    """A checkpoint's tensors. Every slice is read by itself, as ``dtype`` on ``device``."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device

    def read(self, piece: Slice) -> Tensor:
        folder, info, dtype = self.checkpoint.folder, self.checkpoint.tensors[piece.name], self.dtype
        dim, start, stop = piece.dim, piece.start, piece.stop
        loaded = read_tensor(folder, info, dim=dim, start=start, stop=stop, dtype=dtype, device=self.device)
        return _padded(loaded, piece.rows)


class RandomSource:
    """Weights of a shape without a checkpoint: normal with the standard deviation that keeps activations of order one.
    Each tensor's numbers depend on its name only, so that layouts compared in one run have the same weights."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self.shapes, self.dtype, self.device = shapes, dtype, device

    def read(self, piece: Slice) -> Tensor:
        shape = list(self.shapes[piece.name])
        if piece.dim is not None:
            shape[piece.dim] = piece.stop - piece.start
        if len(shape) == 1:
            tensor = torch.full(shape, float(not piece.name.endswith("bias")), dtype=self.dtype, device=self.device)
        else:
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(piece.name.encode()))
            tensor = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
            tensor.mul_(self.shapes[piece.name][1] ** -0.5)
        return _padded(tensor, piece.rows)


def load_weights(
    read_slice: Read, shape: Shape, layout: Layout, *, pack: bool, advance: Callable[[int], None] = lambda count: None
) -> Weights:
    """Return one rank's weights for ``layout``. ``pack``: store weights as inference multiplies them fastest; see
    Linear and JoinedLinears."""

    def read(name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> Tensor:
        return read_slice(Slice(name, dim, start, stop))

    embed = read_slice(shape.vocab_slice("model.embed_tokens.weight"))
    sublayers: list[Sublayer] = []
    for index in range(shape.layers):
        sublayers += _layer(read, index, shape, virtual_ranks(layout, index, shape.tp_size), pack)
        advance(1)
    head = embed if shape.tied else read_slice(shape.vocab_slice("lm_head.weight"))
    norm = RMSNorm(with_offset(read("model.norm.weight"), shape), shape.eps)
    return Weights(embed, sublayers, norm, Linear(head, pack=pack))


def with_offset(weight: Tensor, shape: Shape) -> Tensor:
    """Return a norm's weight from the stored one; one that is 1 + w is in float32: 16 bits would lose most of w."""
    offset = shape.decoder.norm_offset
    return weight.float() + offset if offset else weight


def _layer(
    read: Callable[..., Tensor], index: int, shape: Shape, virtual: VirtualRanks, pack: bool
) -> tuple[Sublayer, Sublayer]:
    prefix, decoder, starts = f"model.layers.{index}.", shape.decoder, shape.fused_rows

    def rows(name: str, bounds: tuple[int, int], biased: bool, *, paired: bool = False) -> list[Tensor]:
        """Return rows of a projection's weight, and of its bias if it has one."""
        stored, first = starts.get(name, (name, 0))
        begin, end = (first + bound for bound in bounds)
        tensors = [read(f"{prefix}{stored}.{kind}", 0, begin, end) for kind in ("weight", "bias")[: 1 + biased]]
        return [pair_rope_rows(tensor, shape) for tensor in tensors] if paired else tensors

    def fused(*projections: list[Tensor]) -> Linear:
        return Linear(*map(torch.cat, zip(*projections, strict=True)), pack=pack)

    def sent(name: str, bounds: tuple[int, int]) -> Linear:
        return Linear(read(f"{prefix}{name}.weight", 1, *bounds), pack=pack)

    def of_ranks(count: int, make: Callable[[Shape], Linear]) -> list[Linear]:
        """Return the layers of the virtual ranks computed apart, on a GPU joined: small kernels mostly wait."""
        made = [make(rank_shape(shape, count, k)) for k in range(count)]
        return JoinedLinears(made) if pack and count > 1 and made[0].weight.device.type != "cpu" else made

    def qkv(rank: Shape) -> Linear:
        return fused(
            rows("self_attn.q_proj", rank.query_rows(), decoder.qkv_bias, paired=True),
            rows("self_attn.k_proj", rank.kv_rows(), decoder.qkv_bias, paired=True),
            rows("self_attn.v_proj", rank.kv_rows(), decoder.qkv_bias),
        )

    def gate_up(rank: Shape) -> Linear:
        return fused(*(rows(f"mlp.{name}_proj", rank.inner_rows(), decoder.mlp_bias) for name in ("gate", "up")))

    def norm(name: str | None) -> RMSNorm | None:
        return None if name is None else RMSNorm(with_offset(read(f"{prefix}{name}.weight"), shape), shape.eps)

    def head_norm(name: str) -> Tensor | None:
        if not decoder.head_norms:
            return None
        weight = read(f"{prefix}self_attn.{name}_norm.weight")
        return pair_rope_rows(with_offset(weight, shape), shape)

    attention = Sublayer(
        index,
        rank_shape(shape, virtual.qkv),
        norm(decoder.norms.before_attention),
        of_ranks(virtual.qkv, qkv),
        of_ranks(virtual.o, lambda rank: sent("self_attn.o_proj", rank.query_rows())),
        read(f"{prefix}self_attn.o_proj.bias") if decoder.o_bias else None,
        head_norm("q"),
        head_norm("k"),
        norm(decoder.norms.behind_attention),
    )
    mlp = Sublayer(
        index,
        rank_shape(shape, virtual.gate_up),
        norm(decoder.norms.before_mlp),
        of_ranks(virtual.gate_up, gate_up),
        of_ranks(virtual.down, lambda rank: sent("mlp.down_proj", rank.inner_rows())),
        read(f"{prefix}mlp.down_proj.bias") if decoder.mlp_bias else None,
        norm_behind=norm(decoder.norms.behind_mlp),
    )
    return attention, mlp


def pair_rope_rows(rows: Tensor, shape: Shape) -> Tensor:
    """Reorder each head's rows so that the two that rope turns together are neighbours, as a complex product needs.
    Done to q and k alike, this changes no attention score."""
    return rows if shape.decoder.interleaved else _rotating_transposed(rows, shape, (2, shape.rotary // 2))


def unpair_rope_rows(rows: Tensor, shape: Shape) -> Tensor:
    """Undo ``pair_rope_rows``: return the rows as a checkpoint orders them."""
    return rows if shape.decoder.interleaved else _rotating_transposed(rows, shape, (shape.rotary // 2, 2))


def _rotating_transposed(rows: Tensor, shape: Shape, sizes: tuple[int, int]) -> Tensor:
    """Return the rows with those of each head that rotate, its first ones, transposed as a matrix of ``sizes``."""
    heads = rows.unflatten(0, (-1, shape.head_dim))
    rotating, others = heads[:, : shape.rotary], heads[:, shape.rotary :]
    rotating = rotating.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
    return torch.cat((rotating, others), 1).reshape(rows.shape)


def _padded(tensor: Tensor, rows: int | None) -> Tensor:
    return tensor if rows in (None, len(tensor)) else F.pad(tensor, (0, 0, 0, rows - len(tensor)))
