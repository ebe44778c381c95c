"""The sizes of a Llama, and the part of its tensors that one rank has. Imports no torch.

Heads and intermediate rows are split in contiguous blocks; KV heads are replicated where there are fewer than ranks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ladderize.checkpoint.config import column_rows
from ladderize.errors import UserError
from ladderize.families.base import FUSED, GELU, SILU, Decoder
from ladderize.families.registry import complete_config, known_family
from ladderize.files.documents import read_json
from ladderize.layout import APART, CONFIG_KEYS, Layout, LayoutError, check_split, runnable_sizes

ACTIVATIONS = (SILU, "swish", GELU)


@dataclass(frozen=True)
class Slice:
    """Indices ``start`` to ``stop`` of a tensor's dimension ``dim``, or without one all of it; ``rows``: the length to
    pad dimension 0 to with zeros, for a vocabulary that the ranks do not divide."""

    name: str
    dim: int | None = None
    start: int = 0
    stop: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that ``tp_size`` processes share, and of one rank's part of it."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    tp_size: int
    rank: int
    replicate_vocab: bool
    decoder: Decoder

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, tp_size: int, rank: int, replicate_vocab: bool = False
    ) -> "Shape":
        check_split(config, tp_size, name="--tp-size")
        full = complete_config(config)
        return cls(
            vocab=full["vocab_size"],
            hidden=full["hidden_size"],
            inner=full["intermediate_size"],
            layers=full["num_hidden_layers"],
            heads=full["num_attention_heads"],
            kv_heads=full["num_key_value_heads"],
            head_dim=full["head_dim"],
            eps=full["rms_norm_eps"],
            tied=bool(full["tie_word_embeddings"]),
            tp_size=tp_size,
            rank=rank,
            replicate_vocab=replicate_vocab or tp_size == 1,
            decoder=known_family(config).describe(config),
        )

    @property
    def rotary(self) -> int:
        """The numbers of a head that rotate, its first ones."""
        return int(self.head_dim * self.decoder.rotary_share)

    @property
    def own_heads(self) -> int:
        return self.heads // self.tp_size

    @property
    def own_kv_heads(self) -> int:
        return max(1, self.kv_heads // self.tp_size)

    @property
    def kv_copies(self) -> int:
        """The number of neighbouring ranks that hold the same KV head."""
        return max(1, self.tp_size // self.kv_heads)

    @property
    def own_inner(self) -> int:
        return self.inner // self.tp_size

    @property
    def own_vocab(self) -> int:
        """The rows of this rank's embedding and LM head, padding included."""
        return self.vocab if self.replicate_vocab else -(-self.vocab // self.tp_size)

    @property
    def vocab_start(self) -> int:
        return 0 if self.replicate_vocab else self.rank * self.own_vocab

    @property
    def fused_rows(self) -> dict[str, tuple[str, int]]:
        """By the name of a projection in a layer the fused one that has its rows, and the first of them."""
        rows, starts = column_rows(self.heads, self.kv_heads, self.head_dim, self.inner), {}
        for fused in self.decoder.fused:
            first = 0
            for name in FUSED[fused]:
                starts[name] = fused, first
                first += rows[name]
        return starts

    def query_rows(self) -> tuple[int, int]:
        width = self.own_heads * self.head_dim
        return self.rank * width, (self.rank + 1) * width

    def kv_rows(self) -> tuple[int, int]:
        first = self.rank * self.kv_heads // self.tp_size
        return first * self.head_dim, (first + self.own_kv_heads) * self.head_dim

    def inner_rows(self) -> tuple[int, int]:
        return self.rank * self.own_inner, (self.rank + 1) * self.own_inner

    def vocab_slice(self, name: str) -> Slice:
        start = min(self.vocab_start, self.vocab)
        return Slice(name, 0, start, min(self.vocab_start + self.own_vocab, self.vocab), rows=self.own_vocab)


def check_activation(config: Mapping[str, Any]) -> None:
    """Raise UserError for an MLP that the runtime does not compute."""
    activation = known_family(config).describe(config).activation
    if activation not in ACTIVATIONS:
        raise UserError(f"config.json: the activation is {activation!r}; ladderize knows {', '.join(ACTIVATIONS)}")


def check_runnable(
    config: Mapping[str, Any], layout: Layout, tp_size: int, *, name: str = "--tp-size", in_groups: bool = False
) -> None:
    """Raise LayoutError unless ``tp_size`` processes can run this model with this layout. ``in_groups``: several
    processes may be one virtual rank."""
    check_split(config, tp_size, name=name)
    virtual = layout.sync_tp_size
    if virtual is None or virtual % tp_size == 0 or (in_groups and tp_size % virtual == 0):
        return
    problem, groups = "does not divide", ""
    if in_groups:
        problem, groups = "neither divides nor is a multiple of", f", and in groups on multiples of {virtual}"
    sizes = ", ".join(map(str, runnable_sizes(config, layout)))
    raise LayoutError(
        f"{name} {tp_size} {problem} the {virtual} virtual ranks (sync_tp_size) that this layout's delayed or dropped"
        f" sync points were made for; this model runs on {sizes}{groups}"
    )


def hosted_ranks(sync_tp_size: int | None, tp_size: int) -> int:
    """Return the number of virtual ranks that one process computes; 1 where several processes are one."""
    return max(1, (sync_tp_size or tp_size) // tp_size)


def group_size(sync_tp_size: int | None, tp_size: int) -> int:
    """Return the number of neighbouring processes that are one virtual rank: they sum among themselves first."""
    return max(1, tp_size // (sync_tp_size or tp_size))


class VirtualRanks(NamedTuple):
    """The numbers of virtual ranks that one process computes apart in a layer, by weight."""

    qkv: int
    o: int
    gate_up: int
    down: int


def virtual_ranks(layout: Layout, layer: int, tp_size: int) -> VirtualRanks:
    """Return the virtual ranks of a layer, whose weights are apart on both sides of a sync point that is."""
    count = hosted_ranks(layout.sync_tp_size, tp_size)
    attention, mlp = layout.attention_sync[layer], layout.mlp_sync[layer]
    modes = (layout.entering(layer), attention, attention, mlp)
    return VirtualRanks(*(count if mode in APART else 1 for mode in modes))


def rank_shape(shape: Shape, virtual: int, number: int = 0) -> Shape:
    """Return the shape of one of the ``virtual`` ranks that a process computes apart; 1: the process's own."""
    return replace(shape, tp_size=shape.tp_size * virtual, rank=shape.rank * virtual + number)


def cached_heads(shape: Shape, layout: Layout) -> int:
    """Return the KV heads of one rank's cache: virtual ranks that read apart have keys and values of their own."""
    counts = {virtual_ranks(layout, layer, shape.tp_size).qkv for layer in range(layout.num_layers)}
    return max(count * rank_shape(shape, count).own_kv_heads for count in counts)


def weight_bytes(shape: Shape, width: int, *, packed: bool, projections: int | None = None) -> int:
    """Return the bytes of one rank's weights, each of ``width`` bytes, or of ``projections`` bytes in a projection.
    ``packed``: the LM head is a copy even of a tied embedding."""
    attention = (2 * shape.own_heads + 2 * shape.own_kv_heads) * shape.head_dim * shape.hidden
    layer = attention + 3 * shape.own_inner * shape.hidden
    tables = 1 if shape.tied and not packed else 2
    others = 2 * shape.layers * shape.hidden + tables * shape.own_vocab * shape.hidden
    return shape.layers * layer * (projections or width) + width * others


def cache_bytes(shape: Shape, layout: Layout, batch: int, columns: int, width: int) -> int:
    """Return the bytes of one rank's keys and values of ``batch`` texts of ``columns`` tokens."""
    return 2 * shape.layers * batch * cached_heads(shape, layout) * columns * shape.head_dim * width


def decode_read_bytes(shape: Shape, layout: Layout, batch: int, columns: int, width: int) -> int:
    """Return the bytes that one rank reads in a decode step which sees ``columns`` tokens of each text: every weight,
    of the embedding the tokens' rows, and the cache."""
    weights = weight_bytes(shape, width, packed=True)  # which counts the embedding and the LM head apart
    unread = (shape.own_vocab - batch) * shape.hidden * width
    return weights - unread + cache_bytes(shape, layout, batch, columns, width)


SHAPES = Path(__file__).parent / "shapes.json"


def known_shapes() -> dict[str, Any]:
    """Return the bundled configs of models' sizes: facts from the published config.json files."""
    return dict(json.loads(SHAPES.read_text(encoding="utf-8")))


def dense_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the family's own dense model of the same sizes."""
    kept = {key: value for key, value in config.items() if key not in CONFIG_KEYS}
    return {**kept, "model_type": known_family(config).model_type}


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the config of the first layers. Lists with an entry for each layer are cut as well."""
    whole = config["num_hidden_layers"]
    cut = {key: value[:layers] for key, value in config.items() if isinstance(value, list) and len(value) == whole}
    return {**config, **cut, "num_hidden_layers": layers}


def read_shape(name: str, option: str = "--random-weights") -> dict[str, Any]:
    """Return the config of a bundled size by its name, of a config.json, or of its folder, as ``option`` names it."""
    shapes = known_shapes()
    if name in shapes:
        return dict(shapes[name])
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{option} {name} is neither one of {', '.join(shapes)} nor a config.json or its folder")
    return read_json(path)
