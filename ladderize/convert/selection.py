"""``--spd auto``: which layers to drop, from the sensitivities that ``ladderize sensitivity`` measured. Imports no
torch."""

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

from ladderize.console import UserError
from ladderize.convert.sensitivity_file import IN_SENSITIVE, CalibrationData, SensitivityDocument
from ladderize.files.records import Record


@dataclass(frozen=True)
class SensitivitySource(Record):
    """What a selection records of the sensitivity.json that it was made by."""

    file: str
    model: str
    fingerprint: str
    mode: str
    sync_tp_size: int
    tau1: float
    tau2: float
    data: CalibrationData


@dataclass(frozen=True)
class SelectedBlock(Record):
    """Whether a block is dropped, and why."""

    KEYS: ClassVar = {"sensitivity_class": "class"}

    block: int
    sensitivity: float
    sensitivity_class: str
    dropped: bool
    why: str


@dataclass(frozen=True)
class Selection(Record):
    """The layers to drop: the key ``spd_selection`` of ladderize.yaml and ``--json``.

    estimated_ppl_increase: the summed sensitivities of the dropped blocks. blocks: one for each layer.
    """

    rule: str
    estimated_ppl_increase: float
    sensitivity: SensitivitySource
    blocks: list[SelectedBlock]

    @property
    def layers(self) -> list[int]:
        """The dropped ones, ascending."""
        return [entry.block for entry in self.blocks if entry.dropped]


def select(
    sensitivity: SensitivityDocument, path: Path, fraction: float | None = None, max_increase: float | None = None
) -> Selection:
    """Choose the blocks to drop, least sensitive first (of equals the lower one); raises UserError if there are none.

    path: of the sensitivity file. fraction: that part of all blocks, in (0, 1], and at least one. max_increase: as many
    as the sum of their sensitivities (those below 0 count as 0), in perplexity, stays within it. Neither: all of class
    in-sensitive.
    """
    values = [entry.sensitivity for entry in sensitivity.blocks]
    classes = [entry.sensitivity_class for entry in sensitivity.blocks]
    ascending = sorted(range(len(values)), key=lambda block: (values[block], block))
    if fraction is not None:
        count = max(1, round(fraction * len(values)))
        rule = f"the {count} least sensitive of {len(values)} blocks (spd_fraction {fraction:g})"
        why = {block: f"number {rank} of {len(values)}" for rank, block in enumerate(ascending, 1)}
        chosen = set(ascending[:count])
    elif max_increase is not None:
        sums = dict(zip(ascending, accumulate(max(values[block], 0.0) for block in ascending), strict=True))
        rule = f"the least sensitive blocks while their sum is at most {max_increase:g} (max_ppl_increase)"
        why = {block: f"sum {sums[block]:.4g}" for block in ascending}
        chosen = {block for block in ascending if sums[block] <= max_increase}
    else:
        limit = f"tau1 = {sensitivity.tau1:g}"
        rule = f"every block of class {IN_SENSITIVE} (at most {limit})"
        why = {block: f"{'at most' if name == IN_SENSITIVE else 'above'} {limit}" for block, name in enumerate(classes)}
        chosen = {block for block in ascending if classes[block] == IN_SENSITIVE}
    if not chosen:
        least = ascending[0]
        raise UserError(
            f"--spd auto selects no block of {path}: the smallest sensitivity is {values[least]:.4g} (block"
            f" {least}); give --spd-fraction, or a larger --max-ppl-increase"
        )
    return Selection(
        rule=rule,
        estimated_ppl_increase=sum(values[block] for block in sorted(chosen)),
        sensitivity=_source_of(sensitivity, path),
        blocks=[
            SelectedBlock(block, values[block], classes[block], block in chosen, why[block])
            for block in range(len(values))
        ],
    )


def _source_of(sensitivity: SensitivityDocument, path: Path) -> SensitivitySource:
    assert sensitivity.sync_tp_size is not None  # read_sensitivity refuses a file without
    return SensitivitySource(
        file=str(path),
        model=sensitivity.model,
        fingerprint=sensitivity.fingerprint,
        mode=sensitivity.mode,
        sync_tp_size=sensitivity.sync_tp_size,
        tau1=sensitivity.tau1,
        tau2=sensitivity.tau2,
        data=sensitivity.data,
    )
