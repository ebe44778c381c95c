"""Search for an order of heads by the error of the SPD block itself: exchanges between ranks until none helps."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from ladderize.adapt.blockwise.head_assignment import MIN_GAIN, Assignment, Units


class Probe:
    """The MLP half of one SPD block on tokens of the dense model.

    residual: [tokens, hidden], with o_proj's bias. partials: [units, tokens, hidden], what each unit adds through
    o_proj.
    """

    def __init__(self, layer: Any, residual: Tensor, partials: Tensor, ranks: int) -> None:
        self.norm, self.mlp, self.residual, self.partials, self.ranks = (
            layer.post_attention_layernorm,
            layer.mlp,
            residual,
            partials,
            ranks,
        )
        everything = residual + partials.sum(0)
        self.target = sum(
            (self.slice(rank, everything) for rank in range(ranks)), torch.zeros((), device=residual.device)
        )

    def slice(self, rank: int, seen: Tensor) -> Tensor:
        """Rank's part of the MLP, without down_proj's bias, where its residual stream is ``seen``; float32, so that
        sums are exact."""
        x = self.norm(seen)
        gate, up = (_rows(projection, rank, self.ranks, x) for projection in (self.mlp.gate_proj, self.mlp.up_proj))
        return linear(self.mlp.act_fn(gate) * up, self.mlp.down_proj.weight.chunk(self.ranks, 1)[rank]).float()

    def output(self, rank: int, members: Iterable[int]) -> Tensor:
        """The same where the rank has the heads of ``members``."""
        return self.slice(rank, self.residual + self.partials[sorted(members)].sum(0))

    def error(self, assignment: Assignment) -> float:
        """Mean squared difference between the SPD block's output and the dense block's."""
        return _mean_square(sum((self.output(rank, members) for rank, members in enumerate(assignment)), -self.target))

    def norms(self, groups: Sequence[Sequence[int]]) -> np.ndarray:
        """||MLP_m(group)||, the mean over tokens: [groups, ranks]."""
        values = [[self.output(rank, group).norm(dim=-1).mean() for rank in range(self.ranks)] for group in groups]
        return torch.tensor(values, dtype=torch.float64).numpy()


def _rows(projection: torch.nn.Linear, rank: int, ranks: int, x: Tensor) -> Tensor:
    bias = projection.bias.chunk(ranks)[rank] if projection.bias is not None else None
    return linear(x, projection.weight.chunk(ranks)[rank], bias)


def _mean_square(x: Tensor | float) -> float:
    assert isinstance(x, Tensor)
    return float(x.square().mean())


class Descent:
    """An assignment on its way to a smaller error."""

    def __init__(self, probe: Probe, units: Units, start: Assignment) -> None:
        self.probe, self.units = probe, units
        self.held = [frozenset(members) for members in start]
        self.outputs = [probe.output(rank, members) for rank, members in enumerate(self.held)]
        self.difference = sum(self.outputs, -probe.target)
        self.error = _mean_square(self.difference)

    def attempt(self, change: Mapping[int, frozenset[int]]) -> bool:
        """Give some ranks other units if that lowers the error; says whether it did."""
        outputs = {rank: self.probe.output(rank, members) for rank, members in change.items()}
        difference = self.difference + sum(
            (output - self.outputs[rank] for rank, output in outputs.items()),
            torch.zeros((), device=self.difference.device),
        )
        error = _mean_square(difference)
        if not error < self.error * (1 - MIN_GAIN):
            return False
        self.difference, self.error = difference, error
        for rank, members in change.items():
            self.held[rank], self.outputs[rank] = members, outputs[rank]
        return True

    def exchanges(self, rng: np.random.Generator) -> Iterator[dict[int, frozenset[int]]]:
        """Every exchange of two units, of two ranks' groups, of two families' ranks, each from what is held by then."""
        if self.units.per_rank > 1:
            pairs = [pair for family in self.units.families for pair in itertools.combinations(family, 2)]
            for one, other in rng.permutation(pairs).tolist():
                a, b = (
                    next(rank for rank, members in enumerate(self.held) if unit in members) for unit in (one, other)
                )
                if a != b:
                    yield {a: self.held[a] - {one} | {other}, b: self.held[b] - {other} | {one}}
        width = self.units.ranks_per_family
        places = [range(first, first + width) for first in range(0, self.units.ranks, width)]
        for place in places:
            for a, b in itertools.combinations(place, 2):
                yield {a: self.held[b], b: self.held[a]}
        for one, other in itertools.combinations(places, 2):
            yield {a: self.held[b] for x, y in zip(one, other, strict=True) for a, b in ((x, y), (y, x))}


def descend(probe: Probe, units: Units, start: Assignment, *, seed: int = 0) -> Assignment:
    """Exchange units and groups between ranks until no exchange lowers the block's error any more.

    An exchange computes two slices of the MLP, so a pass over U units costs about as much as U^2 / N forward passes of
    the MLP.
    """
    descent, rng = Descent(probe, units, start), np.random.default_rng(seed)
    while sum(descent.attempt(change) for change in descent.exchanges(rng)):  # a whole pass, then another
        pass
    return [sorted(members) for members in descent.held]
