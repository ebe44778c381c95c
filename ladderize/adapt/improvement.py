"""Whether a retraining was worth writing, and how much of what the conversion cost it won back."""

import math
from pathlib import Path

from ladderize.errors import UserError


def share_won_back(before: float, after: float, dense: float) -> float | None:
    """Of the loss that the conversion cost, the share that training won back (1: all of it; below 0: it got worse).

    All three are held-out perplexities, compared by their logarithms. None where the conversion cost nothing.
    """
    if not all(math.isfinite(value) and value > 0 for value in (before, after, dense)) or before <= dense:
        return None
    return math.log(before / after) / math.log(before / dense)


def check_improved(before: float, after: float, *, work: Path, advice: str, what: str = "training") -> None:
    """Raise UserError unless the held-out perplexity after training is below the one before.

    after: of the weights that would be written. work: the folder that keeps what was done. what: was done. advice: what
    else to try.
    """
    if after < before:
        return
    raise UserError(
        f"{what} never lowered the held-out perplexity (before {before:.4f}, after {after:.4f}), so nothing"
        f" is written and {work} keeps the work; {advice}, or run the same command with --write last to write the"
        " weights as they are"
    )


def target_text(before: float, after: float, dense: float) -> str:
    """The dense model's perplexity as the target, and the share won back, for people."""
    share = share_won_back(before, after, dense)
    won = f": {_recovered(share)}" if share is not None else ""
    return f"dense model (target) {dense:.4f}{won}"


def _recovered(share: float) -> str:
    """A share outside 0 to 1 has no meaning as a number: the loss that it is of may be next to nothing."""
    if share < 0:
        return "none of the loss recovered"
    return f"{share:.0%} of the loss recovered" if share <= 1 else "all of the loss recovered, and more"
