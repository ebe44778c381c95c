"""The order in which the parts of a forward pass run, which changes no result (docs/layouts.md). Imports no torch.

``domino`` (arXiv 2409.15241) cuts a batch into parts and goes round: each part computes one sub-module, sends its sum,
and makes room for the next part, whose compute hides the message."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ladderize.errors import UserError

ScheduleName = Literal["sequential", "domino"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Schedule:
    """``chunks``: the parts that domino cuts the batch into."""

    name: ScheduleName = "sequential"
    chunks: int = 2

    @property
    def is_domino(self) -> bool:
        return self.name == "domino"

    @property
    def in_flight(self) -> int:
        """The number of messages that a rank may have sent before it waits for the first of them."""
        return (self.chunks if self.is_domino else 1) + 1

    def parts(self, rows: int, tokens: int) -> int:
        """Return the number of parts of a batch: fewer than ``chunks`` where there is less to cut."""
        if not self.is_domino:
            return 1
        return min(self.chunks, rows if rows > 1 else tokens)

    def check(self, rows: int, tokens: int, *, rows_name: str, tokens_name: str) -> None:
        """Raise UserError unless a batch of ``rows`` x ``tokens`` can be cut so. ``rows_name``, ``tokens_name``: the
        options that give these numbers, for the message."""
        if self.is_domino and self.parts(rows, tokens) < self.chunks:
            size = f"{rows} rows ({rows_name})" if rows > 1 else f"one row of {tokens} tokens ({tokens_name})"
            raise UserError(f"domino cuts a batch into {self.chunks} parts, and there is less to cut: {size}")


SEQUENTIAL = Schedule()


def run_walks(walks: Sequence[Generator[None, Any, Result]]) -> list[Result]:
    """Run the walks in turn, each up to its next sum, until all end; return their results. All take as many steps."""
    results: list[Result] = []
    while len(results) < len(walks):
        for walk in walks:
            try:
                next(walk)
            except StopIteration as end:
                results.append(end.value)
    return results
