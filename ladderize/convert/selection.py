"""``--spd auto``: which layers to drop, from the sensitivities that ``ladderize sensitivity`` measured. Imports no
torch."""

import sys
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ladderize.console import UserError
from ladderize.files.documents import read_document

IN_SENSITIVE = "in-sensitive"
CLASSES = (IN_SENSITIVE, "sensitive", "extremely sensitive")
OF_SPD, OF_LADDER = ("spd", "each"), ("ladder", "each-ladder")
ABOUT = ("model", "fingerprint", "mode", "sync_tp_size", "tau1", "tau2", "data")  # what a selection records of its file


@dataclass(frozen=True)
class Sensitivity:
    """What dropping the sync point of each block costs, in perplexity.

    values, classes: one for each layer. about: the file's ``ABOUT`` keys. path: where it was read.
    """

    path: Path
    fingerprint: str
    sync_tp_size: int
    values: tuple[float, ...]
    classes: tuple[str, ...]
    about: dict[str, Any]

    def check(self, num_layers: int, sync_tp_size: int | None) -> None:
        """Raise UserError unless it was measured on so many layers and, where that is given, for so many virtual
        ranks."""
        if len(self.values) != num_layers:
            raise UserError(
                f"{self.path} has {len(self.values)} blocks, but the model has {num_layers} layers; measure this model"
            )
        if sync_tp_size not in (None, self.sync_tp_size):
            raise UserError(
                f"{self.path} was measured with sync_tp_size {self.sync_tp_size}, so it says nothing about"
                f" --sync-tp-size {sync_tp_size}"
            )


@dataclass(frozen=True)
class Selection:
    """The layers to drop. rows: one dict for each block, with ``dropped`` and ``why``. estimate: their summed
    sensitivities."""

    layers: list[int]
    rows: list[dict[str, Any]]
    rule: str
    estimate: float
    sensitivity: Sensitivity

    def to_dict(self) -> dict[str, Any]:
        """The key ``spd_selection`` of ladderize.yaml and ``--json``."""
        return {
            "rule": self.rule,
            "estimated_ppl_increase": self.estimate,
            "sensitivity": {"file": str(self.sensitivity.path), **self.sensitivity.about},
            "blocks": self.rows,
        }


def read_sensitivity(path: Path) -> Sensitivity:
    """Read a sensitivity.json; raises UserError for a malformed or unfinished one, or one that measures another
    thing."""
    document = read_document(path, "sensitivity file")
    mode, ranks, fingerprint = document.get("mode"), document.get("sync_tp_size"), document.get("fingerprint")
    if mode in OF_LADDER:
        raise UserError(
            f"{path} measures the sensitivity to ladder (mode {mode}), not to dropped sync points; measure that"
        )
    if mode not in OF_SPD:
        raise UserError(f"{path}: mode is {mode!r}, but must be one of {', '.join(OF_SPD + OF_LADDER)}")
    if document.get("complete") is not True:
        raise UserError(f"{path} is not complete; run `ladderize sensitivity` again, it goes on where it was stopped")
    if type(ranks) is not int or ranks < 1:
        raise UserError(f"{path}: sync_tp_size is {ranks!r}, but must be a positive integer")
    if not isinstance(fingerprint, str) or not fingerprint:
        raise UserError(f"{path}: fingerprint is {fingerprint!r}, but must be the text that identifies a model")
    if not _is_number(document.get("tau1")):
        raise UserError(f"{path}: tau1 is {document.get('tau1')!r}, which is no number")
    blocks = document.get("blocks")
    if not isinstance(blocks, list) or not all(isinstance(entry, dict) for entry in blocks):
        raise UserError(f"{path}: blocks must be a list of objects, one for each layer")
    for index, entry in enumerate(blocks):
        number, value, kind = entry.get("block"), entry.get("sensitivity"), entry.get("class")
        if type(number) is not int or number != index:
            raise UserError(f"{path}: block {index} is called {number!r}; there must be one for each layer, in order")
        if not _is_number(value):
            raise UserError(f"{path}: the sensitivity of block {index} is {value!r}, which is no number")
        if kind not in CLASSES:
            raise UserError(f"{path}: the class of block {index} is {kind!r}, but must be one of {', '.join(CLASSES)}")
    return Sensitivity(
        path=path,
        fingerprint=fingerprint,
        sync_tp_size=ranks,
        values=tuple(float(entry["sensitivity"]) for entry in blocks),
        classes=tuple(entry["class"] for entry in blocks),
        about={key: document.get(key) for key in ABOUT},
    )


def _is_number(value: object) -> bool:
    """Whether this is a number that a float can hold; NaN is none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type, return-value]


def select(sensitivity: Sensitivity, fraction: float | None = None, max_increase: float | None = None) -> Selection:
    """Choose the blocks to drop, least sensitive first (of equals the lower one); raises UserError if there are none.

    fraction: that part of all blocks, in (0, 1], and at least one. max_increase: as many as the sum of their
    sensitivities (those below 0 count as 0), in perplexity, stays within it. Neither: all of class in-sensitive.
    """
    values = sensitivity.values
    ascending = sorted(range(len(values)), key=lambda block: (values[block], block))
    sums = dict(zip(ascending, accumulate(max(values[block], 0.0) for block in ascending), strict=True))
    if fraction is not None:
        count = max(1, round(fraction * len(values)))
        rule = f"the {count} least sensitive of {len(values)} blocks (spd_fraction {fraction:g})"
        why = {block: f"number {rank} of {len(values)}" for rank, block in enumerate(ascending, 1)}
        chosen = set(ascending[:count])
    elif max_increase is not None:
        rule = f"the least sensitive blocks while their sum is at most {max_increase:g} (max_ppl_increase)"
        why = {block: f"sum {sums[block]:.4g}" for block in ascending}
        chosen = {block for block in ascending if sums[block] <= max_increase}
    else:
        limit = f"tau1 = {sensitivity.about['tau1']:g}"
        rule = f"every block of class {IN_SENSITIVE} (at most {limit})"
        why = {
            block: f"{'at most' if kind == IN_SENSITIVE else 'above'} {limit}"
            for block, kind in enumerate(sensitivity.classes)
        }
        chosen = {block for block in ascending if sensitivity.classes[block] == IN_SENSITIVE}
    if not chosen:
        least = ascending[0]
        raise UserError(
            f"--spd auto selects no block of {sensitivity.path}: the smallest sensitivity is {values[least]:.4g} (block"
            f" {least}); give --spd-fraction, or a larger --max-ppl-increase"
        )
    rows = [
        {"block": i, "sensitivity": values[i], "class": sensitivity.classes[i], "dropped": i in chosen, "why": why[i]}
        for i in range(len(values))
    ]
    layers = sorted(chosen)
    return Selection(layers, rows, rule, sum(values[i] for i in layers), sensitivity)
