"""One block of a dense model whose attention sum is late or dropped: what each choice of heads and neurons loses.

The MLP's neurons of rank r see r's own heads only. With act_n the input of down_proj that neuron n gives, it costs on
rank r

    E[(act_n with all heads - act_n with the heads of r)^2] * |down[:, n]|^2.

For given heads of all ranks the cheapest balanced assignment of the neurons is exact (``cheapest_ranks``). The heads of
ranks are exchanged while the cheapest assignment gets cheaper.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from ladderize.blocks import check_finite

MIN_GAIN = 1e-9  # relative; less is rounding
BLOCK_TOKENS = 2048
ALL = slice(None)  # neurons
Members = tuple[tuple[int, ...], ...]  # the head units of each rank, ascending


@dataclass(frozen=True)
class BlockTokens:
    """Tokens that enter a block of the dense model: the residual stream [tokens, hidden], with o_proj's bias, and the
    inputs of o_proj [tokens, heads * head_dim]."""

    residual: Tensor
    heads: Tensor

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.residual.split(BLOCK_TOKENS), self.heads.split(BLOCK_TOKENS), strict=True)

    def sample(self, count: int) -> "BlockTokens":
        """Return ``count`` tokens at most, evenly spread."""
        step = -(-len(self.residual) // count)
        return BlockTokens(self.residual[::step], self.heads[::step])


class ApartBlock:
    """A block with a dropped attention sum, whose heads come in ``units`` that may change ranks."""

    def __init__(self, layer: Any, ranks: int, units: int) -> None:
        self.layer, self.ranks, self.units = layer, ranks, units
        self.neurons = int(layer.mlp.down_proj.in_features)

    @property
    def members(self) -> Members:
        """The units of each rank as the model lies."""
        return tuple(map(tuple, np.arange(self.units).reshape(self.ranks, -1).tolist()))

    @property
    def neuron_ranks(self) -> np.ndarray:
        """The rank of each neuron as the model lies."""
        return np.arange(self.neurons) // (self.neurons // self.ranks)

    def partials(self, heads: Tensor) -> Tensor:
        """Return what each unit adds through o_proj: [units, tokens, hidden]."""
        columns = self.layer.self_attn.o_proj.weight.unflatten(1, (self.units, -1))
        return self.layer.scaled(torch.einsum("tud,hud->uth", heads.unflatten(1, (self.units, -1)), columns))

    def inner(self, stream: Tensor, neurons: Tensor | slice = ALL) -> Tensor:
        """Return the inputs of down_proj [tokens, neurons] from the stream that the MLP reads."""
        mlp, x = self.layer.mlp, self.layer.post_attention_layernorm(stream)
        gate, up = (
            linear(x, projection.weight[neurons], projection.bias[neurons] if projection.bias is not None else None)
            for projection in (mlp.gate_proj, mlp.up_proj)
        )
        return mlp.act_fn(gate) * up

    def costs(self, tokens: BlockTokens, sets: Sequence[tuple[int, ...]], neurons: Tensor | slice = ALL) -> np.ndarray:
        """Return what each neuron costs where it sees a set of units instead of all: float64 [neurons, sets]. Raises
        UserError for NaN or infinite activations."""
        down = self.layer.scaled(self.layer.mlp.down_proj.weight[:, neurons]).float()
        total = torch.zeros(len(sets), down.shape[1], device=down.device, dtype=torch.float64)
        for residual, heads in tokens.batches():
            partials = self.partials(heads)
            full = self.inner(residual + partials.sum(0), neurons)
            for number, units in enumerate(sets):
                seen = self.inner(residual + partials[list(units)].sum(0), neurons)
                total[number] += (full - seen).float().square().sum(0)
        costs = total / len(tokens.residual) * down.square().sum(0)
        check_finite(float(costs.sum()), f"an activation in layer {self.layer.self_attn.layer_idx}")
        return costs.T.cpu().numpy()

    def error(self, tokens: BlockTokens, members: Members, neuron_ranks: np.ndarray) -> float:
        """Return the mean squared difference between the block's output with dropped sum and the dense block's."""
        device = tokens.heads.device
        ranks = [torch.from_numpy(np.flatnonzero(neuron_ranks == rank)).to(device) for rank in range(self.ranks)]
        down, total = self.layer.mlp.down_proj.weight, 0.0
        for residual, heads in tokens.batches():
            partials = self.partials(heads)
            everything = residual + partials.sum(0)
            difference = torch.zeros_like(residual, dtype=torch.float32)
            for units, neurons in zip(members, ranks, strict=True):
                seen = self.inner(residual + partials[list(units)].sum(0), neurons)
                lost = linear(seen - self.inner(everything, neurons), down[:, neurons])
                difference += self.layer.scaled(lost.float())
            total += float(difference.double().square().sum())
        return total / tokens.residual.numel()


# ---- neurons ----


def cheapest_ranks(costs: np.ndarray) -> np.ndarray:
    """Return the rank of each neuron, as many on each, for the smallest sum of costs [neurons, ranks], exactly: every
    neuron begins where it is cheapest, then the cheapest chain of moves from a rank with too many to one with too few
    is made until all have equally many. ``linear_sum_assignment`` would need a matrix of 1.6 GB for 14336 neurons."""
    neurons, ranks = costs.shape
    rank_of, share = costs.argmin(1), neurons // ranks
    held = np.bincount(rank_of, minlength=ranks)
    least, mover = np.full((ranks, ranks), np.inf), np.zeros((ranks, ranks), int)  # the cheapest move between two ranks
    tolerance = 1e-12 * float(np.abs(costs).max(initial=0.0))  # what is shorter by rounding alone may be a cycle

    def renew(rank: int) -> None:
        members = np.flatnonzero(rank_of == rank)
        least[rank] = np.inf
        if len(members):
            extra = costs[members] - costs[members, rank][:, None]
            best = extra.argmin(0)
            least[rank], mover[rank] = extra[best, np.arange(ranks)], members[best]

    for rank in range(ranks):
        renew(rank)
    while (held > share).any():
        length, before = np.where(held > share, 0.0, np.inf), np.full(ranks, -1)
        for _ in range(ranks):
            through = length[:, None] + least
            best = through.argmin(0)
            shortest = through[best, np.arange(ranks)]
            shorter = shortest < length - tolerance
            if not shorter.any():
                break
            length, before = np.where(shorter, shortest, length), np.where(shorter, best, before)
        chain = [int(np.where(held < share, length, np.inf).argmin())]
        while before[chain[-1]] >= 0:
            chain.append(int(before[chain[-1]]))
        chain.reverse()
        moved = [int(mover[source, target]) for source, target in itertools.pairwise(chain)]
        rank_of[moved] = chain[1:]
        held[chain[0]] -= 1
        held[chain[-1]] += 1
        for rank in chain:
            renew(rank)
    return rank_of


# ---- heads ----


def descend(start: Members, cost: Callable[[Members], float], seed: int = 0) -> Members:
    """Exchange units between ranks while that lowers the cost; return what is left."""
    rng, members, least = np.random.default_rng(seed), start, cost(start)
    while True:
        for other in exchanged(members, rng):
            if (value := cost(other)) < least * (1 - MIN_GAIN):
                members, least = other, value
                break
        else:
            return members


def exchanged(members: Members, rng: np.random.Generator) -> Iterator[Members]:
    """Yield every result of exchanging two units, or all that two ranks hold, in a drawn order."""
    rank_of = {unit: rank for rank, units in enumerate(members) for unit in units}
    pairs = list(itertools.combinations(sorted(rank_of), 2))
    for number in rng.permutation(len(pairs)):
        a, b = pairs[number]
        if rank_of[a] != rank_of[b]:
            changed = [set(units) for units in members]
            changed[rank_of[a]] ^= {a, b}
            changed[rank_of[b]] ^= {a, b}
            yield tuple(tuple(sorted(units)) for units in changed)
    for a, b in itertools.combinations(range(len(members)), 2):
        swapped = list(members)
        swapped[a], swapped[b] = members[b], members[a]
        yield tuple(swapped)
