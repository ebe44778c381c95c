"""Attention heads in another order: exact for the dense function, and where syncs are dropped a choice of which heads
share a rank.

A *head order* of a layer is a permutation of its query heads: the head at new position p is the old head ``order[p]``.
Whole KV groups move (the heads // kv_heads consecutive heads that share a KV head), in any order within each.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.checkpoint.config import kv_head_count
from ladderize.checkpoint.writing import Move
from ladderize.errors import UserError
from ladderize.files.documents import read_document
from ladderize.files.records import Record

if TYPE_CHECKING:
    import torch

HEAD_MAP = "head_map.json"  # the copy in a checkpoint that was made with one
MOVING = re.compile(
    r"self_attn\.(?:([qkv])_proj\.(?:weight|bias)|(o)_proj\.weight)"
)  # o's bias is added after the sum over heads


def kv_order(order: Sequence[int], kv_heads: int) -> tuple[int, ...]:
    """Return the order of KV heads that an order of query heads implies."""
    group = len(order) // kv_heads
    return tuple(order[j * group] // group for j in range(kv_heads))


def check_order(order: Sequence[int], heads: int, kv_heads: int) -> None:
    """Raise UserError unless ``order`` is a permutation of the heads that keeps KV groups together."""
    if sorted(order) != list(range(heads)):
        raise UserError(f"its order is not a permutation of the heads 0 to {heads - 1}")
    group = heads // kv_heads
    for first in range(0, heads, group):
        members = order[first : first + group]
        if len({head // group for head in members}) > 1:
            raise UserError(
                f"its order splits KV groups: positions {first} to {first + group - 1} hold the heads "
                f"{', '.join(map(str, members))}, which do not share one KV head"
            )


def move_of(name: str, order: Sequence[int], kv_heads: int) -> Move | None:
    """Return the move of the tensor ``name`` under an order; None where it does not move.

    name: within a layer, such as ``self_attn.q_proj.weight``.
    """
    match = MOVING.fullmatch(name)
    if match is None:
        return None
    whole = tuple(order) if match[1] in (None, "q") else kv_order(order, kv_heads)
    return Move(whole, 1 if match[2] else 0) if whole != tuple(range(len(whole))) else None


def permute_heads(
    weights: Mapping[str, "torch.Tensor"], order: Sequence[int], heads: int, kv_heads: int
) -> dict[str, "torch.Tensor"]:
    """Return one layer's tensors with its heads in ``order``; a tensor that does not move is not copied.

    weights: by name within the layer, such as ``self_attn.q_proj.weight``; others than q, k, v and o are allowed.
    Raises UserError for an invalid order.
    """
    import torch

    check_order(order, heads, kv_heads)
    moved = dict(weights)
    for name, tensor in weights.items():
        if (move := move_of(name, order, kv_heads)) is not None:
            index = torch.tensor(move.order, device=tensor.device)
            blocks = tensor.unflatten(move.axis, (len(move.order), -1))
            moved[name] = blocks.index_select(move.axis, index).flatten(move.axis, move.axis + 1)
    return moved


@dataclass(frozen=True)
class GroupingReport(Record):
    """The mean squared difference of a block's output to the dense block's, with heads in the old order and in the
    new."""

    error_before: float
    error_after: float


@dataclass(frozen=True)
class HeadMap(Record):
    """The head orders of some layers, for one model and one number of virtual ranks: the content of head_map.json.

    orders: layer -> order.
    fingerprint: of the model that it was computed for.
    report: the figures of layers that were grouped by ``group_heads``.
    """

    sync_tp_size: int
    orders: dict[int, tuple[int, ...]]
    fingerprint: str
    report: dict[int, GroupingReport] = field(default_factory=dict)

    @property
    def permuted_layers(self) -> list[int]:
        """The layers whose heads change places."""
        return sorted(layer for layer, order in self.orders.items() if order != tuple(range(len(order))))

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise UserError unless every order fits a model with this config."""
        for layer, order in self.orders.items():
            if not 0 <= layer < config["num_hidden_layers"]:
                raise UserError(
                    f"the head map names layer {layer}, but the model has {config['num_hidden_layers']} layers"
                )
            try:
                check_order(order, config["num_attention_heads"], kv_head_count(config))
            except UserError as error:
                raise UserError(f"the head map does not fit layer {layer}: {error}") from None

    def moves(self, config: Mapping[str, Any]) -> dict[str, Move]:
        """Return the move of every tensor of a checkpoint that moves, by its full name. Biases that the model lacks are
        named too."""
        names = [f"self_attn.{projection}_proj.{kind}" for projection in "qkvo" for kind in ("weight", "bias")]
        found = {
            f"model.layers.{layer}.{name}": move_of(name, order, kv_head_count(config))
            for layer, order in self.orders.items()
            for name in names
        }
        return {name: move for name, move in found.items() if move is not None}


def read_head_map(path: Path) -> HeadMap:
    """Return the head map in a head_map.json. Raises UserError for a malformed one; ``HeadMap.check`` says if it fits a
    model."""
    found = HeadMap.from_dict(read_document(path, "head map"), path)
    if found.sync_tp_size < 1:
        raise UserError(f"{path}: sync_tp_size is {found.sync_tp_size}, but must be a positive integer")
    return found
