"""On a CPU what vLLM makes of a compiled model on a GPU: its own ``split_graph`` cuts the traced model, and each piece
between two cuts is as a CUDA graph is. It reads from the addresses that it was first called with, it writes where it
wrote then, and what nobody needs any more is overwritten: a GPU's pieces share their memory.

A message is as late as it may be: its sum is taken of what lies there when it is waited for.
"""

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves
from vllm import envs
from vllm.compilation.backends import SplitItem, split_graph
from vllm.config import CompilationConfig
from vllm.distributed import get_tp_group

from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.vllm.messages import Messages
from ladderize.vllm.verify import OPERATORS, cut_at_messages

COUNTED = Counter[str]()  # of the engine that was built last: cuts, compiled pieces, replays of them, starts, waits
NAN = 0xFF  # of every byte


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Models that are built inside wait as on a GPU, for sums that are late."""
    COUNTED.clear()
    make = Messages.__init__

    def made(messages: Messages, *arguments: Any) -> None:
        make(messages, *arguments)
        messages.cuts_graph, messages.out_of_place = True, not messages.alone
        if not messages.alone:
            messages.collectives.settle()
            messages.collectives = LateSums(get_tp_group())

    with mock.patch.object(Messages, "__init__", made), mock.patch.object(envs, "VLLM_USE_AOT_COMPILE", False):
        yield


class LateSums(Collectives):
    name = "late"

    def __init__(self, group: Any) -> None:
        super().__init__(group.world_size)
        self.group = group

    def all_reduce_async(self, x: Tensor, total: Tensor | None = None) -> Handle:
        """As on a GPU, nobody keeps ``x`` but the graph."""
        assert total is not None
        return Handle(lambda: total.copy_(self.group.all_reduce(x.clone())))


def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """What ``compilation_config`` names."""
    compilation = CompilationConfig()
    cut_at_messages(compilation)
    assert compilation.splitting_ops is not None
    return Pieces(graph, compilation.splitting_ops).run


class Pieces(fx.Interpreter):
    """Runs a graph that was cut at the operators ``cuts``, piece by piece."""

    def __init__(self, graph: fx.GraphModule, cuts: list[str]) -> None:
        whole, items = split_graph(graph, cuts)
        check(items, cuts)
        super().__init__(whole)
        self.pieces = {item.submod_name: Piece(item.graph) for item in items if not item.is_splitting_graph}
        COUNTED["pieces"] += len(self.pieces)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece = self.pieces.get(str(target))
        return super().call_module(target, args, kwargs) if piece is None else piece(*args)

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        last_used = self.user_to_last_uses.get(node, [])
        kept = memory([result, *(value for other, value in self.env.items() if other not in last_used)])
        written = {pointer for piece in self.pieces.values() for pointer in piece.written}
        for tensor in tensors([self.env[other] for other in last_used]):
            if (pointer := tensor.untyped_storage().data_ptr()) in written and pointer not in kept:
                tensor.untyped_storage().fill_(NAN)
        return result


class Piece:
    """Of each shape the addresses that it reads, and what it wrote. written: the memory that is its own."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.captured: dict[tuple[Any, ...], tuple[list[int], Any]] = {}
        self.written = set[int]()

    def __call__(self, *args: Any) -> Any:
        shapes = tuple(arg.shape if isinstance(arg, Tensor) else arg for arg in args)
        addresses = [tensor.data_ptr() for tensor in tensors(args)]
        made = self.graph(*args)
        if shapes not in self.captured:
            self.captured[shapes] = addresses, made
            self.written |= memory(made) - memory(args)
            return made
        before, kept = self.captured[shapes]
        assert addresses == before, "a CUDA graph would read from where its inputs were, not from where they are"
        for into, value in zip(tensors(kept), tensors(made), strict=True):
            into.copy_(value)  # of an input that is handed on: itself
        COUNTED["replays"] += 1
        return kept


def check(items: list[SplitItem], cuts: list[str]) -> None:
    """Cuts hold nothing but their operators, pieces no message's; and between a start and its wait there is a piece."""
    begun = -1
    COUNTED["cuts"] = sum(item.is_splitting_graph for item in items)
    for item in items:
        names = [name for node in item.graph.graph.nodes if (name := operator_of(node)) is not None]
        if not item.is_splitting_graph:
            assert not any(name.startswith("ladderize::") for name in names), "a CUDA graph would send a message"
            continue
        assert {*names} <= {*cuts}, names
        for name in names:
            COUNTED[name] += 1
            if name == OPERATORS[0]:
                assert begun == -1, "two messages are in flight"
                begun = item.graph_id
            elif name == OPERATORS[1]:
                assert 0 <= begun < item.graph_id - 1, "nothing is computed while the message is in flight"
                begun = -1


def operator_of(node: fx.Node) -> str | None:
    """The name of the operator that a node calls; None for a number of a tuple, inputs and results."""
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    target = node.target
    overload = isinstance(target, torch._ops.OpOverload)
    return target.name() if overload else getattr(target, "_qualified_op_name", str(target))


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def memory(values: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors(values)}
