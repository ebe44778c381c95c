"""The assignment of KV groups and MLP neurons to virtual ranks: what shares a rank where sums are late or dropped.

Virtual rank k owns the k-th contiguous block of heads and of neurons, so an assignment is a permutation of both:

* a *head order* of a layer is a permutation of its query heads: the head at new position p is the old head
  ``order[p]``. Whole KV groups move, in any order within each;
* the *neurons* of a layer have a rank each, all ranks equally many. Those of one rank keep their old order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.checkpoint.config import kv_head_count
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.writing import Move
from ladderize.errors import UserError
from ladderize.families.base import FUSED
from ladderize.files.documents import read_document
from ladderize.files.records import Record, shown

if TYPE_CHECKING:
    import torch

ASSIGNMENT = "assignment.json"  # the copy in a checkpoint that was made with one
TENSOR_KINDS = ("weight", "bias")
# Tensors of a layer: what they lie in the order of, and along which axis. The biases of o and down do not move, since
# they are added after the sum over heads and neurons.
LIES_IN = {
    **{f"self_attn.q_proj.{kind}": ("heads", 0) for kind in TENSOR_KINDS},
    **{f"self_attn.{name}_proj.{kind}": ("kv_heads", 0) for name in "kv" for kind in TENSOR_KINDS},
    "self_attn.o_proj.weight": ("heads", 1),
    **{f"mlp.{name}_proj.{kind}": ("neurons", 0) for name in ("gate", "up") for kind in TENSOR_KINDS},
    "mlp.down_proj.weight": ("neurons", 1),
}


@dataclass(frozen=True)
class AssignmentReport(Record):
    """The mean squared difference of a block's output to the dense block's, as the model lay and as it is assigned, on
    tokens that nothing was chosen by."""

    error_before: float
    error_after: float


@dataclass(frozen=True)
class RankAssignment(Record):
    """The heads and neurons that share a virtual rank in some layers of one model, by its fingerprint: the content of
    assignment.json. By layer: the order of heads, the rank of each neuron, and what ``assign_ranks`` lost."""

    sync_tp_size: int
    fingerprint: str
    heads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    neurons: dict[int, tuple[int, ...]] = field(default_factory=dict)
    report: dict[int, AssignmentReport] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the document, with the ranks of a layer's neurons as one line of text instead of thousands."""
        lines = {str(layer): " ".join(map(str, ranks)) for layer, ranks in self.neurons.items()}
        return {**super().to_dict(), "neurons": lines}

    @classmethod
    def from_dict(cls, value: object, where: str | Path) -> "RankAssignment":
        """Return the assignment that ``to_dict`` made a document of. Raises UserError for anything else."""
        lines = value.get("neurons") if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and isinstance(lines, Mapping):
            value = {**value, "neurons": {key: _numbers(line, f"{where}: {key}") for key, line in lines.items()}}
        return super().from_dict(value, where)

    def moved(self, orders: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the layers of ``heads`` or ``neurons`` in which something changes its place."""
        return sorted(layer for layer, numbers in orders.items() if list(numbers) != sorted(numbers))

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise UserError unless everything fits a model with this config."""
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        neurons = config["intermediate_size"]
        group = heads // kv_head_count(config)
        shares = dict.fromkeys(range(self.sync_tp_size), neurons // self.sync_tp_size)
        for layer in (*self.heads, *self.neurons):
            if not 0 <= layer < layers:
                raise UserError(f"the assignment names layer {layer}, but the model has {layers} layers")
            order, ranks = self.heads.get(layer, range(heads)), self.neurons.get(layer)
            groups = {(position // group, head // group) for position, head in enumerate(order)}
            problem = ""
            if sorted(order) != list(range(heads)) or len(groups) > heads // group:
                problem = (
                    f"its order is not a permutation of the heads 0 to {heads - 1} in which the {group} heads of each"
                    " KV head stay together"
                )
            elif ranks is not None and Counter(ranks) != shares:
                problem = (
                    f"it does not give each of the {neurons} neurons of the MLP a rank from 0 to"
                    f" {self.sync_tp_size - 1}, and every rank equally many"
                )
            if problem:
                raise UserError(f"the assignment does not fit layer {layer}: {problem}")

    def layer_moves(self, layer: int, config: Mapping[str, Any]) -> dict[str, Move]:
        """Return the move of every tensor of a layer that moves, also of biases that the model lacks."""
        orders: dict[str, tuple[int, ...]] = {}
        if layer in self.heads:
            heads = self.heads[layer]
            group = len(heads) // kv_head_count(config)
            orders |= {"heads": tuple(heads), "kv_heads": tuple(head // group for head in heads[::group])}
        if layer in self.neurons:  # those of a rank keep their order
            ranks = self.neurons[layer]
            orders["neurons"] = tuple(sorted(range(len(ranks)), key=ranks.__getitem__))
        changed = {kind: order for kind, order in orders.items() if order != tuple(range(len(order)))}
        moves = {name: Move(changed[kind], axis) for name, (kind, axis) in LIES_IN.items() if kind in changed}
        for name, projections in FUSED.items():
            kinds = [LIES_IN[f"{projection}.weight"][0] for projection in projections]  # of its rows
            if changed.keys() & {*kinds}:
                joined: list[int] = []
                for kind in kinds:
                    first = len(joined)
                    joined += [first + block for block in orders[kind]]
                moves[f"{name}.weight"] = Move(tuple(joined), 0)
        return moves

    def moves(self, config: Mapping[str, Any]) -> dict[str, Move]:
        """Return the move of every tensor of a checkpoint that moves, by its full name."""
        return {
            f"model.layers.{layer}.{name}": move
            for layer in sorted({*self.heads, *self.neurons})
            for name, move in self.layer_moves(layer, config).items()
        }

    def permuted(
        self, layer: int, weights: Mapping[str, "torch.Tensor"], config: Mapping[str, Any]
    ) -> dict[str, "torch.Tensor"]:
        """Return one layer's tensors in their new order; a tensor that does not move is not copied."""
        import torch

        moved = dict(weights)
        for name, move in self.layer_moves(layer, config).items():
            if name in weights:
                index = torch.tensor(move.order, device=weights[name].device)
                blocks = weights[name].unflatten(move.axis, (len(move.order), -1))
                moved[name] = blocks.index_select(move.axis, index).flatten(move.axis, move.axis + 1)
        return moved


def _numbers(line: Any, where: str) -> list[int]:
    """Return the numbers in a line of text. Raises UserError for anything else."""
    if not isinstance(line, str) or not all(word.isascii() and word.isdigit() for word in line.split()):
        raise UserError(f"{where} is {shown(line)}, but must be the ranks of a layer's neurons, with spaces between")
    return [int(word) for word in line.split()]


def read_assignment(path: Path) -> RankAssignment:
    """Return the assignment in an assignment.json; ``RankAssignment.check`` says if it fits a model."""
    assignment = RankAssignment.from_dict(read_document(path, "rank assignment"), path)
    if assignment.sync_tp_size < 1:
        raise UserError(f"{path}: sync_tp_size is {assignment.sync_tp_size}, but must be a positive integer")
    return assignment


def assignment_of(checkpoint: Checkpoint) -> RankAssignment | None:
    """Return the assignment in whose order a checkpoint lies; None where that is the dense model's order."""
    path = checkpoint.folder / ASSIGNMENT
    return read_assignment(path) if path.is_file() else None
