"""Which layers alignment solves."""

from ladderize.adapt.methods import CONVERTED
from ladderize.errors import UserError
from ladderize.layout import Layout, format_ranges, parse_ranges


def layers_to_align(layout: Layout, ranges: str | None) -> tuple[int, ...]:
    """``converted``, ranges, or None: every layer from the first converted one on. Those behind it read a changed
    stream too, and repairing them helped on every layout that was measured (docs/results.md)."""
    converted = tuple(layout.converted_layers)
    if ranges == CONVERTED:
        return converted
    able = tuple(range(converted[0], layout.num_layers))
    if ranges is None or ranges == "all":
        return able
    chosen = tuple(parse_ranges(ranges, layout.num_layers, option="--train"))
    if rest := sorted(set(chosen) - set(able)):
        raise UserError(
            f"--train: {format_ranges(rest)} read what the dense model's read; only {format_ranges(able)} can be"
            " aligned"
        )
    return chosen
