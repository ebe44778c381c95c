"""Seconds of a forward pass in a layout, from its parts. Imports no torch."""

from dataclasses import dataclass

from ladderize.layout import ATTENTION_MODES, BLOCKING, DROPPED, MLP_MODES, OVERLAPPED, Layout
from ladderize.planning.passes import PassParts
from ladderize.runtime.bench.cost_model import Operation, Prediction, predict


@dataclass(frozen=True)
class PointSeconds:
    """A pass as a sum: ``constant`` plus, of each layer, ``layer[entering MLP mode, attention mode]``, in seconds.

    A layer has its own compute, its attention's message and the MLP's message that enters it, as far as they are waited
    for. Into the first layer enters none: it counts as ``blocking``, which stands for the last layer's MLP message.
    """

    layers: int
    constant: float
    layer: dict[tuple[str, str], float]

    def total(self, layout: Layout) -> float:
        """Seconds of the pass in ``layout``."""
        return self.constant + sum(
            self.layer[_entering(layout, index), mode] for index, mode in enumerate(layout.attention_sync)
        )


def predict_pass(parts: PassParts, layout: Layout) -> Prediction:
    """Raises ValueError for a layout of another number of layers."""
    if layout.num_layers != parts.layers:
        raise ValueError(f"a layout of {layout.num_layers} layers for a pass of {parts.layers}")
    compute, operations = parts.rest, []
    for index, mode in enumerate(layout.attention_sync):
        compute += _compute(parts, mode)
        operations += _operations(parts, _entering(layout, index), mode)
    return predict(compute, operations, parts.vocabulary)


def predict_parallel(parts: PassParts) -> Prediction:
    """The parallel baseline: one blocking message a layer."""
    sent = parts.vocabulary + parts.layers * parts.message
    return predict(parts.rest + parts.layers * parts.parallel, [], sent)


def predict_silent(parts: PassParts, layout: Layout | None = None) -> Prediction:
    """The no-communication bound: of the dense layout, or what another computes."""
    modes = (BLOCKING,) * parts.layers if layout is None else layout.attention_sync
    return predict(parts.rest + sum(_compute(parts, mode) for mode in modes), [])


def point_seconds(parts: PassParts) -> PointSeconds:
    """The same times as ``predict_pass``, as a sum over layers."""
    layer = {}
    for entering in MLP_MODES:
        for mode in ATTENTION_MODES:
            one = predict(_compute(parts, mode), _operations(parts, entering, mode))
            layer[entering, mode] = one.total
    return PointSeconds(parts.layers, parts.rest + parts.vocabulary, layer)


def _entering(layout: Layout, index: int) -> str:
    return layout.mlp_sync[index - 1] if index else BLOCKING


def _compute(parts: PassParts, mode: str) -> float:
    """Of a layer with this mode of its attention."""
    return parts.attention_apart + parts.mlp_apart if mode == DROPPED else parts.attention + parts.mlp


def _operations(parts: PassParts, entering: str, mode: str) -> list[Operation]:
    """The messages of a layer's attention, and of the MLP before it: what each can run under is the next sub-module."""
    attention = parts.attention_apart if mode == DROPPED else parts.attention
    operations = [_message(parts, attention if entering == OVERLAPPED else 0.0)]
    if mode != DROPPED:
        operations.append(_message(parts, parts.mlp if mode == OVERLAPPED else 0.0))
    return operations


def _message(parts: PassParts, cover: float) -> Operation:
    cover = min(cover, parts.message - parts.message_start)
    return Operation(parts.message_bytes, parts.message, (cover,), parts.contention)
