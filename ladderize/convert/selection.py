"""The layers that ``--spd auto`` and ``--ladder auto`` convert, chosen by the costs that ``ladderize sensitivity``
measured. Imports no torch."""

from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

from ladderize.choices import ppl_increase
from ladderize.convert.sensitivity_file import (
    INSENSITIVE,
    SPD,
    AlignmentWindows,
    CalibrationData,
    SensitivityDocument,
)
from ladderize.errors import UserError
from ladderize.files.records import Record


@dataclass(frozen=True)
class SensitivitySource(Record):
    """The sensitivity.json that a selection is based on."""

    LEFT_OUT: ClassVar = ("aligned",)

    file: str
    model: str
    fingerprint: str
    mode: str
    sync_tp_size: int | None
    tau1: float
    tau2: float
    data: CalibrationData
    aligned: AlignmentWindows | None = None


@dataclass(frozen=True)
class SelectedBlock(Record):
    """A block: whether it is selected, and the reason."""

    KEYS: ClassVar = {"sensitivity_class": "class"}

    block: int
    sensitivity: float
    sensitivity_class: str
    selected: bool
    why: str


@dataclass(frozen=True)
class Selection(Record):
    """The layers to convert: the key ``selection`` of ladderize.yaml and ``--json``.

    estimated_ppl_increase: the sum of the selected blocks' sensitivities.
    blocks: one for each layer.
    """

    rule: str
    estimated_ppl_increase: float
    sensitivity: SensitivitySource
    blocks: list[SelectedBlock]

    @property
    def layers(self) -> list[int]:
        """The selected layers, ascending."""
        return [entry.block for entry in self.blocks if entry.selected]


def select(
    sensitivity: SensitivityDocument,
    path: Path,
    kind: str,
    fraction: float | None = None,
    max_increase: float | str | None = None,
) -> Selection:
    """Return the blocks that become ``kind`` (``spd`` or ``ladder``), least sensitive first, of equal ones the lower
    first.

    Without ``fraction`` and ``max_increase`` all of class insensitive are selected.

    path: of the sensitivity file.
    fraction: the share of all blocks, in (0, 1]; at least one block.
    max_increase: the limit of their summed sensitivities (those below 0 count as 0), in perplexity or per cent of the
    dense one.
    Raises UserError where nothing is selected, or the kind was not measured.
    """
    costs = sensitivity.of_kind(kind)
    if not costs:
        raise UserError(
            f"{path} has costs of {' and '.join(sensitivity.kinds)} layers, none of {kind}; measure them with"
            f" `ladderize sensitivity{' --sync-tp-size N' if kind == SPD else ' --mode layers'}`"
        )
    values = [cost.sensitivity for cost in costs]
    classes = [cost.sensitivity_class for cost in costs]
    ascending = sorted(range(len(values)), key=lambda block: (values[block], block))
    if fraction is not None:
        count = max(1, round(fraction * len(values)))
        rule = f"the {count} least sensitive of {len(values)} blocks ({kind}_fraction {fraction:g})"
        why = {block: f"number {rank} of {len(values)}" for rank, block in enumerate(ascending, 1)}
        chosen = set(ascending[:count])
    elif max_increase is not None:
        sums = dict(zip(ascending, accumulate(max(values[block], 0.0) for block in ascending), strict=True))
        most = ppl_increase(max_increase, sensitivity.dense_perplexity)
        rule = f"the least sensitive blocks while their sum is at most {most:.4g} (max_ppl_increase {max_increase})"
        why = {block: f"sum {sums[block]:.4g}" for block in ascending}
        chosen = {block for block in ascending if sums[block] <= most}
    else:
        limit = f"tau1 = {sensitivity.tau1:g}"
        rule = f"every block of class {INSENSITIVE} (at most {limit})"
        why = {block: f"{'at most' if name == INSENSITIVE else 'above'} {limit}" for block, name in enumerate(classes)}
        chosen = {block for block in ascending if classes[block] == INSENSITIVE}
    if not chosen:
        least = ascending[0]
        raise UserError(
            f"--{kind} auto selects no block of {path}: the smallest sensitivity is {values[least]:.4g} (block"
            f" {least}); give --{kind}-fraction, or a larger --max-ppl-increase"
        )
    measured = {name.name: getattr(sensitivity, name.name) for name in fields(SensitivitySource)[1:]}
    return Selection(
        rule=rule,
        estimated_ppl_increase=sum(values[block] for block in sorted(chosen)),
        sensitivity=SensitivitySource(str(path), **measured),
        blocks=[
            SelectedBlock(block, values[block], classes[block], block in chosen, why[block])
            for block in range(len(values))
        ],
    )
