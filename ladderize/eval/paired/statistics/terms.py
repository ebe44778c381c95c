"""The words and numbers that all comparisons share. Imports no torch and no numpy."""

from typing import Literal

CONFIDENCE = 0.95  # of every interval

# Is the other model at most the margin worse? "worse": it is more than the margin worse, and the interval shows that.
# "too few samples": with so few, an equally good model shows it less often than in four of five cases.
Verdict = Literal["shown", "not shown", "too few samples", "worse"]
TOO_FEW: Verdict = "too few samples"
