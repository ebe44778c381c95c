"""How much each block's perplexity suffers when its sync points are dropped or overlapped: the SPD paper's sweep.

S[i] = PPL(changed: blocks i..L-1) - PPL(changed: blocks i+1..L-1), arXiv 2502.20727: one sweep from the last block
backwards. A table of negative log-likelihoods, windows x (L + 1), is what everything follows from.
"""

from collections.abc import Iterator

from ladderize.convert.sensitivity_file import SensitivityDocument, changes_to_ladder
from ladderize.layout import Layout


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
