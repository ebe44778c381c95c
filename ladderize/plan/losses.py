"""The accuracy that layouts cost a real model, from measurements of our own. Imports no torch."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ladderize.files.parsing import read_yaml
from ladderize.files.records import Record
from ladderize.layout import Layout

LOSS_TABLE = Path(__file__).parent / "losses.yaml"
LOSS_PAGE = "docs/results.md"
SHARE_REACH = 0.1  # how far the share of converted layers may be from a measured one
LONG_TRAINING_POINTS = -5.0  # a loss that no short training makes good


@dataclass(frozen=True)
class MeasuredLoss(Record):
    """Points that a real model lost, aligned, and their 95 % interval; below 0 is worse than dense.

    shares: of its layers, by kind.
    """

    shares: dict[str, float]
    points: float
    low: float
    high: float

    @property
    def needs_long_training(self) -> bool:
        return self.points < LONG_TRAINING_POINTS


@cache
def all_losses() -> list[MeasuredLoss]:
    """Return the rows of losses.yaml."""
    return [MeasuredLoss.from_dict(row, LOSS_TABLE) for row in read_yaml(LOSS_TABLE)]


def measured_loss(layout: Layout) -> MeasuredLoss | None:
    """Return the loss of the measured layout that has the same kinds on about the same shares of its layers; None where
    there is none."""
    layers = {"ladder": layout.ladder_layers, "delayed": layout.delayed_layers, "spd": layout.spd_layers}
    shares = {kind: len(some) / layout.num_layers for kind, some in layers.items() if some}
    alike = {_distance(loss.shares, shares): loss for loss in all_losses() if loss.shares.keys() == shares.keys()}
    nearest = min(alike, default=SHARE_REACH + 1)
    return alike[nearest] if nearest <= SHARE_REACH else None


def _distance(these: dict[str, float], those: dict[str, float]) -> float:
    return max((abs(these[kind] - those[kind]) for kind in these), default=0.0)
