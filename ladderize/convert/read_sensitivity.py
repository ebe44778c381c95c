"""Reading what ``ladderize sensitivity`` wrote: what blocks cost, and what single sync points cost. A file of single
sync points tells both; one of blocks that were changed alone, too. Imports no torch."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ladderize.convert.point_sensitivity import PointChange, PointSensitivity, point_changes, point_document
from ladderize.convert.sensitivity_file import (
    CLASSES,
    FORMER_CLASSES,
    LADDER,
    MODES,
    POINTS,
    SPD,
    SensitivityDocument,
    block_document,
    check_follows,
    kind_of,
    perplexity_increases,
    read_complete,
    read_table,
    run_of,
)
from ladderize.errors import UserError
from ladderize.files.documents import read_document
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED


def read_sensitivity(path: Path, kind: str | None = None) -> SensitivityDocument:
    """Read what a sensitivity.json says of blocks that become ``kind`` layers (``spd`` or ``ladder``); None: whatever
    it measures. Of mode ``points``: of blocks that were changed alone.

    Raises UserError for a malformed or unfinished one, or one that measures the other kind.
    """
    content = read_document(path, "sensitivity file")
    mode = content.get("mode")
    if mode == POINTS:
        points = read_point_sensitivity(path)
        return _blocks_of(points, kind or (LADDER if points.sync_tp_size is None else SPD), path)
    if mode not in MODES:
        raise UserError(f"{path}: mode is {mode!r}, but must be one of {', '.join(MODES)}")
    kind = kind or kind_of(mode)
    if kind_of(mode) != kind:
        raise UserError(
            f"{path} measures the sensitivity to --{kind_of(mode)} (mode {mode}), not to --{kind}; measure that with"
            f" `ladderize sensitivity --mode {kind}`, or select with --{kind_of(mode)} auto"
        )
    document = read_complete(SensitivityDocument, content, path)
    if kind == SPD and document.sync_tp_size is None:
        raise UserError(f"{path}: sync_tp_size is None, but must be a positive integer")
    if not math.isfinite(document.tau1):
        raise UserError(f"{path}: tau1 is {document.tau1}, which is not a number")
    blocks = [
        replace(entry, sensitivity_class=FORMER_CLASSES.get(entry.sensitivity_class, entry.sensitivity_class))
        for entry in document.blocks
    ]
    for number, entry in enumerate(blocks):
        if entry.block != number:
            raise UserError(
                f"{path}: block {number} is called {entry.block}; there must be one for each layer, in order"
            )
        if not math.isfinite(entry.sensitivity):
            raise UserError(f"{path}: the sensitivity of block {number} is {entry.sensitivity}, which is not a number")
        if (name := entry.sensitivity_class) not in CLASSES:
            known = ", ".join(CLASSES)
            raise UserError(f"{path}: the class of block {number} is {name!r}, but must be one of {known}")
    import numpy as np

    perplexities = np.exp(read_table(document.nll, document.data, len(blocks) + 1, path).mean(0))
    for entry, right in zip(blocks, perplexity_increases(perplexities, document.mode), strict=True):
        check_follows(path, f"the sensitivity of block {entry.block}", entry.sensitivity, right)
    return replace(document, blocks=blocks)


def read_point_sensitivity(path: Path) -> PointSensitivity:
    """Read the costs of single sync points that a sensitivity file knows.

    Mode ``each`` knows those of dropped attention, ``each-ladder`` those of ladder layers. Raises UserError for a
    malformed or unfinished file, and for one of the paper's sweep, where blocks are changed one more at a time.
    """
    content = read_document(path, "sensitivity file")
    mode = content.get("mode")
    if mode in ("each", "each-ladder"):
        return _points_of(read_sensitivity(path))
    if mode != POINTS:
        raise UserError(
            f"{path} has the mode {mode!r}, which does not tell what a single sync point costs; measure that with"
            f" `ladderize sensitivity --mode {POINTS}`"
        )
    document = read_complete(PointSensitivity, content, path)
    for problem in _problems(document):
        raise UserError(f"{path}: {problem}; measure it again")
    means = read_table(document.nll, document.data, len(document.costs) + 1, path).mean(0)
    check_follows(path, "dense_nll", document.dense_nll, means[-1])
    for cost, mean in zip(document.costs, means, strict=False):
        check_follows(path, f"the cost of {cost}", cost.nats, mean - means[-1])
    return document


def _problems(document: PointSensitivity) -> Iterator[str]:
    """What is wrong with the content of a file, which may be anybody's."""
    if document.num_layers < 1:
        yield f"num_layers is {document.num_layers}, but must be a positive integer"
    expected = point_changes(document.num_layers, dropped=document.sync_tp_size is not None, pairs=document.pairs)
    found = [PointChange(cost.layers, cost.entering, cost.attention, before=cost.before) for cost in document.costs]
    for cost in document.costs:
        if not all(map(math.isfinite, (cost.nats, cost.low, cost.high))):
            yield f"the cost of {cost} is not a number"
    if missing := Counter(expected) - Counter(found):
        yield f"it has no cost of {min(missing)}"
    if unknown := Counter(found) - Counter(expected):
        yield f"it has a cost of {min(unknown)}, which is no change of this model's, or one that is there already"


def _blocks_of(document: PointSensitivity, kind: str, path: Path) -> SensitivityDocument:
    """The sensitivities of blocks that were changed alone, from the table of all single sync points."""
    import numpy as np

    if kind == SPD and document.sync_tp_size is None:
        raise UserError(
            f"{path} was measured without --sync-tp-size, so nothing was dropped; measure it again with that, or"
            f" select with --{LADDER} auto"
        )
    places = {(cost.layers, cost.entering, cost.attention): place for place, cost in enumerate(document.costs)}
    changes = _block_changes(kind, document.num_layers)
    columns = [places[change.layers, change.entering, change.attention] for change in changes]
    about = {"mode": "each"} if kind == SPD else {"mode": "each-ladder", "sync_tp_size": None}
    return block_document(run_of(document, **about), np.array(document.nll)[:, [*columns, -1]].tolist())


def _points_of(document: SensitivityDocument) -> PointSensitivity:
    """The costs of blocks that were changed alone, from the table that the file holds."""
    layers = len(document.blocks)
    changes = _block_changes(document.kind, layers)
    return point_document(run_of(document), changes, document.nll, num_layers=layers, pairs=False)


def _block_changes(kind: str, num_layers: int) -> list[PointChange]:
    """Each layer alone as a layer of this kind."""
    entering, attention = (BLOCKING, DROPPED) if kind == SPD else (OVERLAPPED, OVERLAPPED)
    return [PointChange((layer,), entering if layer else BLOCKING, attention) for layer in range(num_layers)]
