"""How long to train, and the learning rate on the way."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from ladderize.errors import UsageError
from ladderize.files.records import Record

ScheduleKind = Literal["cosine", "wsd", "constant"]
DECAY = 0.2  # wsd: of the training, at its end
MOST = 10**18  # tokens: more than any data have
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_count(text: str, *, option: str) -> int:
    """``3B``, ``20M``, ``500k`` or a plain number; raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMbBtT]?)", text.strip())
    value = float(match[1]) * COUNTS[match[2].upper()] if match else 0.0
    if not 1 <= round(min(value, MOST)) < MOST:
        shown = text if len(text) <= 40 else text[:40] + "..."
        raise UsageError(f"{option}: {shown!r} is not a number of tokens below 10^18; write for example 20M or 3B")
    return round(value)


@dataclass(frozen=True)
class Budget(Record):
    """So many tokens (padding not counted) or so many steps; one of them is None."""

    tokens: int | None = None
    steps: int | None = None

    def check(self) -> None:
        """Raise UsageError unless one of them is given, and is positive."""
        if self.steps is not None and self.tokens is not None:
            raise UsageError("--max-tokens and --max-steps both say how long to train; give one of them")
        if self.steps is None and self.tokens is None:
            raise UsageError("say how long to train: --max-tokens, such as 20M, or --max-steps")
        if (self.steps or self.tokens or 0) < 1:
            raise UsageError(f"the budget must be at least 1, not {self.steps or self.tokens or 0}")

    def share(self, step: int, tokens: int) -> float:
        """How much of it is spent, 0 to 1, after ``step`` steps that read ``tokens`` tokens."""
        spent = step / self.steps if self.steps is not None else tokens / (self.tokens or 1)
        return min(1.0, spent)

    def about_steps(self, tokens_per_step: float) -> int:
        """How many steps it buys, exactly or about."""
        return self.steps if self.steps is not None else max(1, math.ceil((self.tokens or 1) / tokens_per_step))


@dataclass(frozen=True)
class RateSchedule(Record):
    """Linear warm-up over ``warmup_steps``, then ``kind`` down to ``floor`` times the peak.

    cosine: half a wave over the whole budget. wsd (warm-up, stable, decay; Hu et al., arXiv 2404.06395): constant, and
    linear over the last fifth. constant: no decay.
    """

    kind: str
    peak: float
    warmup_steps: int = 0
    floor: float = 0.0

    def rate(self, step: int, share: float) -> float:
        """The learning rate of step number ``step`` (from 0), of which ``share`` of the budget was spent before."""
        decayed = {
            "cosine": 0.5 * (1 + math.cos(math.pi * share)),
            "wsd": min(1.0, (1 - share) / DECAY),
            "constant": 1.0,
        }[self.kind]
        decayed = self.floor + (1 - self.floor) * decayed
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return self.peak * warm * decayed
