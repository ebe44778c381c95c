"""What measured layouts tell of others: a Gaussian process of how far real costs are from estimates. Imports no torch.

A layout's real cost is taken as its estimate times a factor that all share (unknown, above 1 where costs are more than
sums), and apart from that each changed layer, and each pair of neighbours that are both changed, costs more or less
than estimated, alike in every layout that has it. So a measured layout tells much of one that differs in a layer or
two: all that they share is known, and only the difference is estimated.
"""

import numpy as np

from ladderize.planning.planner.front import OptionCosts

FACTOR, FACTOR_SPREAD = 1.3, 0.5  # of all costs to their estimates, before anything is measured
LAYER_SPREAD = 0.25  # of a layer's real cost about its estimate, as a part of it
PAIR_SPREAD = 0.25  # of what a pair costs more, as a part of the geometric mean of both
NOISE = 0.01  # of a layout's cost, of its own
FLOOR = 0.02  # of the mean cost of a changed layer: what the cheapest is unsure by at least


def believed_costs(
    costs: OptionCosts, measured: np.ndarray, increases: np.ndarray, asked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the real costs of layouts, in nats per token: [A] each.

    measured: [M, L] options of layouts, whose real costs are ``increases`` [M]. asked: [A, L].
    """
    known, wanted = _Terms(costs, measured), _Terms(costs, asked)
    variance = wanted.own_variance()
    if not len(measured):
        return FACTOR * wanted.estimates, np.sqrt(variance)
    covariance = known.covariance(known)
    covariance[np.diag_indices(len(measured))] += (NOISE * known.estimates) ** 2 + 1e-12
    cross = wanted.covariance(known)
    weights = np.linalg.solve(covariance, cross.T).T
    mean = FACTOR * wanted.estimates + weights @ (increases - FACTOR * known.estimates)
    return mean, np.sqrt(np.maximum(variance - (weights * cross).sum(1), 0.0))


class _Terms:
    """Of layouts [P, L] their estimates [P], and how large what may differ is, by layer [P, L] and pair [P, L - 1]."""

    def __init__(self, costs: OptionCosts, chosen: np.ndarray) -> None:
        self.chosen = chosen.astype(np.int64)
        self.pairs = self.chosen[:, :-1] * 8 + self.chosen[:, 1:]
        self.estimates = costs.totals(chosen)[1]
        finite = costs.nats[np.isfinite(costs.nats) & (costs.nats > 0)]
        least = FLOOR * float(finite.mean()) if len(finite) else 0.0
        changed = self.chosen > 0
        self.layer_sizes = np.where(changed, costs.nats[np.arange(costs.num_layers), self.chosen] + least, 0.0)
        self.pair_sizes = np.sqrt(self.layer_sizes[:, :-1] * self.layer_sizes[:, 1:])

    def covariance(self, other: "_Terms") -> np.ndarray:
        """[P, other's]."""
        shared = FACTOR_SPREAD**2 * self.estimates[:, None] * other.estimates
        for spread, sizes, names, others, other_names in (
            (LAYER_SPREAD, self.layer_sizes, self.chosen, other.layer_sizes, other.chosen),
            (PAIR_SPREAD, self.pair_sizes, self.pairs, other.pair_sizes, other.pairs),
        ):
            for layer in range(sizes.shape[1]):
                same = names[:, layer, None] == other_names[:, layer]
                shared += spread**2 * same * sizes[:, layer, None] * others[:, layer]
        return shared

    def own_variance(self) -> np.ndarray:
        """[P], with what is a layout's own."""
        return (
            (FACTOR_SPREAD**2 + NOISE**2) * self.estimates**2
            + LAYER_SPREAD**2 * (self.layer_sizes**2).sum(1)
            + PAIR_SPREAD**2 * (self.pair_sizes**2).sum(1)
        )
