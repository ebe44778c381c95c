"""What one rank does when: a forward and a backward pass of the code that trains, with a clock that is made up.

The model, its schedule, the start and wait of sums, and the order of autograd are the real ones. Only time is made up:
a product with a weight takes as long as it has operations, everything else takes none; a message takes as long as it
has bytes, and the link carries one at a time. One rank of two is computed; embedding and LM head are left out.
"""

from bisect import bisect_right
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ladderize.checkpoint.config import expected_tensors
from ladderize.layout import Layout
from ladderize.runtime.collectives.base import Collectives, Handle
from ladderize.runtime.decode import rope_table
from ladderize.runtime.kv_cache import NoCache
from ladderize.runtime.layers import Sublayer
from ladderize.runtime.loader import RandomSource
from ladderize.runtime.model import Step, TPLlama
from ladderize.runtime.schedule import Schedule
from ladderize.runtime.shards import Shape
from ladderize.runtime.training.weights import UsedWeights, build_weights

ROWS, TOKENS, RANKS = 4, 4, 2
# sizes that make an MLP take 1.7 times as long as attention
SIZES = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 60,
    "intermediate_size": 136,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 30,
    "max_position_embeddings": TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
aten = torch.ops.aten
OPERATIONS = {aten.mm: flop_registry[aten.mm], **dict.fromkeys((aten.addmm, aten.addmm_), flop_registry[aten.addmm])}
# time: attention of the whole batch takes 1, its all-reduce 1.3
ATTENTION_OPERATIONS = 2 * ROWS * TOKENS * 4 * SIZES["hidden_size"] ** 2 // RANKS
MESSAGE_BYTES, MESSAGE = 4 * ROWS * TOKENS * SIZES["hidden_size"], 1.3

FORWARD, INPUT, WEIGHT = "forward", "input", "weight"


@dataclass
class Span:
    """Compute. kind: FORWARD, or in the backward pass INPUT (gradients of activations) or WEIGHT. label: what."""

    start: float
    end: float
    kind: str
    label: str


@dataclass
class Message:
    """An all-reduce on the link; backward: sent by the backward pass."""

    start: float
    end: float
    backward: bool


@dataclass
class Timeline:
    """spans and messages in the order in which they began; waits: (from, to) in which the rank did nothing else."""

    spans: list[Span] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    now: float = 0.0
    turned: float = 0.0  # when the backward pass began

    def compute(self, seconds: float, kind: str, label: str) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.kind, last.label, last.end) == (kind, label, self.now):
            last.end += seconds
        else:
            self.spans.append(Span(self.now, self.now + seconds, kind, label))
        self.now = self.spans[-1].end

    def send(self, seconds: float, *, backward: bool) -> Message:
        free_at = self.messages[-1].end if self.messages else 0.0
        start = max(self.now, free_at)
        self.messages.append(Message(start, start + seconds, backward))
        return self.messages[-1]

    def wait(self, message: Message) -> None:
        if message.end > self.now:
            self.waits.append((self.now, message.end))
            self.now = message.end

    def waited(self, message: Message) -> list[tuple[float, float]]:
        """The parts of a message in which the rank waited, for this one or for one before it."""
        parts = ((max(message.start, start), min(message.end, end)) for start, end in self.waits)
        return [(start, end) for start, end in parts if end > start]


class RecordedLink(Collectives):
    """One rank of a group that is not there."""

    name = "recorded"

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(RANKS)
        self.timeline = timeline

    def all_reduce_async(self, x: Tensor) -> Handle:
        backward = torch._C._current_autograd_node() is not None
        message = self.timeline.send(x.nbytes * MESSAGE / MESSAGE_BYTES, backward=backward)
        return Handle(partial(self._through, x, message))

    def _through(self, x: Tensor, message: Message) -> Tensor:
        self.timeline.wait(message)
        return x


class Products(TorchDispatchMode):
    """Gives the products of the forward and the backward pass to the timeline.

    A node of the backward pass belongs to what the forward pass was at when it made the node: ``at`` says what that is.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self.timeline = timeline
        self.marks = [(INPUT, "")]
        self.first_nodes = [-1]  # of each mark, the number of the next node of the graph

    def at(self, label: str, kind: str = INPUT) -> None:
        """kind: of the products in the backward of the nodes that follow."""
        self.marks.append((kind, label))
        self.first_nodes.append(torch._C._autograd._get_sequence_nr())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = OPERATIONS.get(func._overloadpacket)
        if count is not None:
            kind, label = FORWARD, self.marks[-1][1]
            node = torch._C._current_autograd_node()
            if node is not None:
                kind, label = self.marks[bisect_right(self.first_nodes, node._sequence_nr()) - 1]
            operations = count(*args, **(kwargs or {}), out_val=out)
            self.timeline.compute(operations / ATTENTION_OPERATIONS, kind, label)
        return out


class MarkedWeights(UsedWeights):
    """Marks the nodes that are made when a sub-module takes its weights: their backward computes the gradients."""

    mark: Callable[[str, str], None]

    def take_sublayer(self, number: int) -> Sublayer:
        self.mark(f"{'AM'[number % 2]}{number // 2}", WEIGHT)
        return super().take_sublayer(number)


class MarkedLlama(TPLlama):
    """Says which sub-module of which part of the batch is at work. Parts are a, b, ..., if there are several."""

    def __init__(self, shape: Shape, layout: Layout, weights: MarkedWeights, products: Products, parts: int) -> None:
        super().__init__(shape, layout, weights, RecordedLink(products.timeline))
        weights.mark = self.mark
        self.products = products
        self.names = iter("abcdefgh") if parts > 1 else iter(("",))
        self.part = ""

    def mark(self, label: str, kind: str = INPUT) -> None:
        self.products.at(label + self.part, kind)

    def walk(self, *arguments: Any, alone: bool) -> Generator[None, None, Tensor]:
        own = next(self.names)
        inner = super().walk(*arguments, alone=alone)
        while True:
            self.part = own
            try:
                next(inner)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            yield

    def partials(self, place: int, *arguments: Any) -> list[Tensor]:
        self.mark(f"{'AM'[place % 2]}{place // 2}")
        return super().partials(place, *arguments)


def record(layout: Layout, schedule: Schedule, *, backward: bool) -> Timeline:
    """A pass over a batch. backward: with the backward pass of all layers' weights."""
    config = SIZES | {"num_hidden_layers": layout.num_layers}
    names = expected_tensors(config)
    shape = Shape.from_config(config, tp_size=RANKS, rank=0, replicate_vocab=True)
    device = torch.device("cpu")
    weights = build_weights(
        lambda dtype: RandomSource(names, dtype, device).read,
        config,
        shape,
        layout,
        trained=frozenset(name for name in names if ".layers." in name) if backward else frozenset(),
        compute=torch.float32,
    )
    timeline = Timeline()
    products = Products(timeline)
    model = MarkedLlama(shape, layout, MarkedWeights(weights), products, schedule.parts(ROWS, TOKENS))
    step = Step(rope_table(config, TOKENS, device)[None, :, None], 0, 0, causal=True)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    with products, torch.set_grad_enabled(backward):
        hidden = model.forward(ids, step, NoCache(torch.float32, device), schedule)
        timeline.turned = timeline.now
        if backward:
            hidden.backward(torch.ones_like(hidden))
    return timeline
