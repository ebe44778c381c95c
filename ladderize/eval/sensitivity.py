"""How much each block's perplexity suffers when its sync points are dropped or overlapped: the SPD paper's sweep.

S[i] = PPL(changed: blocks i..L-1) - PPL(changed: blocks i+1..L-1), arXiv 2502.20727: one sweep from the last block
backwards. A table of negative log-likelihoods, windows x (L + 1), is what everything follows from.
"""

from collections.abc import Iterator

import numpy as np

from ladderize.convert.sensitivity_file import (
    CLASSES,
    INTERVAL,
    RESAMPLES,
    BlockSensitivity,
    SensitivityDocument,
    changes_to_ladder,
    perplexity_increases,
)
from ladderize.layout import Layout

TAU1, TAU1_LARGE, LARGE = 0.05, 0.02, 30_000_000_000  # the paper's, and from how many parameters on the lower one holds


def column_layouts(mode: str, num_layers: int, sync_tp_size: int | None) -> list[Layout]:
    """The L + 1 models of the table: column k < L changes blocks k..L-1 (or, with each, block k alone), column L is
    dense."""
    kind = "ladder" if changes_to_ladder(mode) else "spd"
    ranks = sync_tp_size if kind == "spd" else None
    layouts = []
    for first in range(num_layers):
        changed = [first] if mode.startswith("each") else list(range(first, num_layers))
        layouts.append(Layout.from_layers(num_layers, **{kind: changed}, sync_tp_size=ranks))
    return [*layouts, Layout.dense(num_layers)]


def block_sensitivities(
    table: np.ndarray, tokens: int, mode: str, *, tau1: float, tau2: float
) -> tuple[list[float], list[BlockSensitivity]]:
    """Perplexities [L + 1], and S of each block with its bootstrap interval over windows and its class.

    table: [windows, L + 1] in nats; tokens: scored in each window.
    """
    perplexities = np.exp(table.mean(0) / tokens)
    rng = np.random.default_rng(0)
    counts = rng.multinomial(len(table), np.full(len(table), 1 / len(table)), size=RESAMPLES)
    resampled = perplexity_increases(np.exp(counts @ table / len(table) / tokens), mode)
    low, high = np.quantile(resampled, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2], axis=0)
    values = perplexity_increases(perplexities, mode).tolist()
    blocks = [
        BlockSensitivity(block, value, low=least, high=most, sensitivity_class=classify(value, tau1, tau2))
        for block, (value, least, most) in enumerate(zip(values, low.tolist(), high.tolist(), strict=True))
    ]
    return perplexities.tolist(), blocks


def default_tau1(parameters: int) -> float:
    return TAU1_LARGE if parameters >= LARGE else TAU1


def classify(sensitivity: float, tau1: float, tau2: float) -> str:
    """The paper's three classes: dropped as they are, distilled, regrouped and distilled."""
    return CLASSES[(sensitivity > tau1) + (sensitivity > tau2)]


def sensitivity_rows(document: SensitivityDocument) -> Iterator[dict[str, str]]:
    """One row per block for people."""
    for entry, perplexity in zip(document.blocks, document.perplexity, strict=False):
        yield {
            "block": str(entry.block),
            "S": f"{entry.sensitivity:+.4f}",
            f"{document.interval:.0%} interval": f"{entry.low:+.4f} to {entry.high:+.4f}",
            "class": entry.sensitivity_class,
            "perplexity": f"{perplexity:.4f}",
        }
