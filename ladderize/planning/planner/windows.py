"""Windows of data that layouts are measured on: to choose by, to confirm a choice on, and to align layouts on. None is
among two of them."""

from dataclasses import dataclass

import numpy as np

from ladderize.adapt.blockwise.windows import Windows
from ladderize.blocks import read_windows
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import Console
from ladderize.convert.sensitivity_file import CalibrationData
from ladderize.data import file_sha256, split_name
from ladderize.errors import UserError
from ladderize.workflows.aligned_layouts import windows_to_align_on

LEAST_HELD_OUT = 2  # windows, of which a standard error can be told


@dataclass(frozen=True)
class AlignmentCounts:
    """How many windows to align layouts on, and to hold out; None: as alignment takes by default, and no more than half
    of what is left where windows to confirm on have to be left, too."""

    samples: int | None = None
    heldout: int | None = None


def windows_to_measure_on(
    checkpoint: Checkpoint,
    data: CalibrationData,
    data_file: str | None,
    held_out_data: str | None,
    held_out_windows: int | None,
    align: AlignmentCounts | None,
    console: Console,
) -> tuple[np.ndarray, np.ndarray, Windows | None]:
    """Windows to choose on, to confirm on, and to align on: ids [windows, seq_len] each. Arguments of
    ``LayoutMeasurer``. Raises UserError for data that changed or are too few."""
    file = data_file or data.file
    if data_file is None and not split_name(file)[0].expanduser().exists():
        raise UserError(
            f"{file}, which the sensitivity was measured on, is not there; say where these data lie with --data"
        )
    drawn = read_windows(checkpoint, file, seq_len=data.seq_len, samples=None, seed=data.seed)
    choose, rest, origin = drawn[: data.samples], drawn[data.samples :], file
    if file_sha256(file) != data.sha256:
        if data_file is None:
            raise UserError(
                f"{file} is not what it was when the sensitivity was measured on it; measure again, or name the data"
                " with --data"
            )
        console.note(
            f"{file} is not what the sensitivity was measured on ({data.file}), so layouts are measured on other"
            " windows than its costs"
        )
    others = held_out_data is not None and file_sha256(held_out_data) != file_sha256(file)
    aligned = None
    if align is not None:
        aligned = _to_align_on(checkpoint, file, choose, rest, align, alone=others)
        rest = rest[len(aligned.all) :]
    if others:
        rest = read_windows(checkpoint, str(held_out_data), seq_len=data.seq_len, samples=None, seed=data.seed)
        origin = str(held_out_data)
    seen = {window.tobytes() for window in (*choose, *(aligned.all.numpy() if aligned is not None else ()))}
    new = np.array([window for window in rest if window.tobytes() not in seen], dtype=drawn.dtype)
    least = held_out_windows or LEAST_HELD_OUT
    if len(new) < least:
        beside = f"{len(choose)} that it is chosen by"
        beside += f" and the {len(aligned.all)} that layouts are aligned on" if aligned is not None else ""
        raise UserError(
            f"{origin} has {len(new)} windows of {data.seq_len} tokens to confirm a layout on beside the {beside}, and"
            f" {least} are needed; give more of them with --held-out-data, or measure the sensitivity with fewer"
            " --samples"
        )
    return choose, new[: held_out_windows or len(choose)], aligned


def _to_align_on(
    checkpoint: Checkpoint, file: str, choose: np.ndarray, rest: np.ndarray, align: AlignmentCounts, *, alone: bool
) -> Windows:
    """The first windows of ``rest``. alone: nothing else is taken of them."""
    most = rest if alone or align.samples is not None else rest[: len(rest) // 2]
    windows = windows_to_align_on(checkpoint, most, align.samples, align.heldout)
    if windows is None:
        raise UserError(
            f"{file} has {len(rest)} windows of {rest.shape[1]} tokens beside the {len(choose)} that a layout is chosen"
            f" by, too few for {align.samples or 1} to align on and some that are held out; lower --align-samples, give"
            " more data with --data, or measure the sensitivity with fewer --samples"
        )
    return windows
