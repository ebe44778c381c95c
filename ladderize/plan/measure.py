"""The real costs of layouts: their likelihood on windows of data, layer by layer with one layer in memory at a time.

A choice by sums is measured on the windows of the sensitivity. Since it was chosen by these, it is measured on others,
too. Layouts may be aligned first, on windows that are neither.
"""

import contextlib
import hashlib
import math
from pathlib import Path

import numpy as np
import torch

from ladderize.adapt.layers.layout_scores import (
    AlignedLayouts,
    describe_alignment,
    layers_of,
    usual_batch,
    windows_to_align_on,
)
from ladderize.blocks import (
    Blocks,
    check_finite,
    compute_dtype,
    open_checkpoint,
    read_windows,
    stored_dtype,
    window_nlls,
)
from ladderize.checkpoint.tensors import fingerprint
from ladderize.choices import Dtype
from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import AlignmentWindows, CalibrationData
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.files.regular import split_name
from ladderize.layout import Layout
from ladderize.memory import check_room
from ladderize.plan.document import LayoutNll
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.environment import already_started

LEAST_HELD_OUT = 2  # windows: fewer have no standard error


def layout_key(layout: Layout) -> str:
    """Return a short name of a layout: the modes' first letters, and the virtual ranks of dropped ones."""
    attention, mlp = ("".join(mode[0] for mode in modes) for modes in (layout.attention_sync, layout.mlp_sync))
    return f"{attention}/{mlp}" + (f"/{layout.sync_tp_size}" if layout.sync_tp_size else "")


class LayoutMeasurer:
    """A measurer of layouts of one dense model, each once. Measured ones are kept in a file, from which a killed run
    goes on.

    model_fingerprint, data: of the sensitivity file.
    kept_beside: the path that the file's name begins with; its end is a hash of model, windows and dtype.
    data_file: the data to measure on; None: the sensitivity's.
    align: each layout is aligned before it is measured.
    align_counts: windows to solve with and to hold out; None: alignment's defaults, and at most half of the windows
    that are left.

    Raises UserError for another model, and for too few data.
    """

    def __init__(
        self,
        model: str | Path,
        model_fingerprint: str,
        data: CalibrationData,
        *,
        kept_beside: Path,
        data_file: str | None = None,
        align: bool = False,
        align_counts: AlignmentWindows | None = None,
        dtype: Dtype = "auto",
        device: str | None = None,
        revision: str | None = None,
        console: Console = SILENT,
    ) -> None:
        if already_started():
            raise UserError("plan --verify is one process; run it without torchrun, accelerate launch or srun")
        device = device or default_device()
        check_device(device)
        checkpoint = open_checkpoint(str(model), revision)
        if fingerprint(checkpoint) != model_fingerprint:
            raise UserError(
                f"the sensitivity was measured on another model than {model} (their fingerprints differ); measure this"
                " one"
            )
        computed = compute_dtype(dtype, stored_dtype(checkpoint))
        self.blocks, self.console = Blocks(checkpoint, computed, torch.device(device)), console
        file = data_file or data.file
        if data_file is None and not split_name(file)[0].expanduser().exists():
            raise UserError(
                f"{file}, which the sensitivity was measured on, is not there; say where these data lie with --data"
            )
        drawn = read_windows(checkpoint, file, seq_len=data.seq_len, samples=None, seed=data.seed)
        choose, rest = drawn[: data.samples], drawn[data.samples :]
        self.aligner = None
        if align:
            samples, heldout = (None, None) if align_counts is None else (align_counts.samples, align_counts.heldout)
            windows = windows_to_align_on(
                checkpoint, rest if align_counts else rest[: len(rest) // 2], samples, heldout
            )
            if windows is None:
                raise UserError(_too_few(file, len(rest), data, "to align on and confirm a layout on"))
            self.aligner = AlignedLayouts(self.blocks, windows, None)
            rest = rest[len(windows.all) :]
        chosen_on = {window.tobytes() for window in choose}
        confirm = np.array([window for window in rest if window.tobytes() not in chosen_on], dtype=drawn.dtype)
        if len(confirm) < LEAST_HELD_OUT:
            raise UserError(_too_few(file, len(confirm), data, "to confirm a layout on"))
        self.windows = {False: choose, True: confirm[: len(choose)]}
        mark = hashlib.sha256(str([model_fingerprint, computed, self.aligned]).encode())
        for part in (*self.windows.values(), *([self.aligner.windows.all.numpy()] if self.aligner else [])):
            mark.update(np.ascontiguousarray(part).tobytes() + str(part.shape).encode())
        self.kept = kept_beside.with_name(f"{kept_beside.stem}-measured-{mark.hexdigest()[:12]}.json")
        self.tables = {held_out: _rows(read_own(self.kept).get(str(held_out))) for held_out in self.windows}

    @property
    def aligned(self) -> AlignmentWindows | None:
        """The windows that layouts are aligned on."""
        return describe_alignment(self.aligner.windows) if self.aligner is not None else None

    def measure(self, layout: Layout, held_out: bool) -> LayoutNll:
        """Return the cost of a layout.

        held_out: measure on the windows that nothing was chosen by.
        """
        tokens = self.windows[held_out].shape[1] - 1
        nll, dense = (self._nll(one, held_out) / tokens for one in (layout, Layout.dense(self.blocks.num_layers)))
        increase = nll - dense
        return LayoutNll(float(nll.mean()), _stderr(nll), float(increase.mean()), _stderr(increase), len(nll))

    def tidy(self) -> None:
        """Delete the kept measurements. It is called once the plan is written."""
        with contextlib.suppress(FileNotFoundError):
            self.kept.unlink()

    def _nll(self, layout: Layout, held_out: bool) -> np.ndarray:
        """Return the summed nats of each window. They are measured the first time, and kept."""
        key, table = layout_key(layout), self.tables[held_out]
        if len(table.get(key, [])) != len(self.windows[held_out]):
            layout.check_layers(self.blocks.num_layers)
            layout.check_model(self.blocks.config)
            if self.aligner is None:
                table[key] = self._score(layout, self.windows[held_out])
            else:  # aligning takes longer than scoring, and is done once
                both = [*self.windows.values()]
                with self.console.progress("aligning and measuring", layers_of([layout])) as advance:
                    nll = self.aligner(layout, torch.from_numpy(np.concatenate(both)), advance)
                for name, part in zip(self.windows, np.split(nll, [len(both[0])]), strict=True):
                    self.tables[name][key] = part.tolist()
            write_json(self.kept, {str(name): rows for name, rows in self.tables.items()})
        return np.array(table[key])

    def _score(self, layout: Layout, windows: np.ndarray) -> list[float]:
        blocks = self.blocks
        states = 2 * windows.size * int(blocks.config["hidden_size"]) * blocks.dtype.itemsize
        check_room(states, torch.device("cpu"), "measuring a layout", "measure the sensitivity with fewer --samples")
        what = f"measuring {'the dense model' if layout.is_dense else 'a layout'}"
        with self.console.progress(what, blocks.num_layers) as advance:

            def layer_at(index: int) -> torch.nn.Module:
                advance(1)
                return blocks.layer(index, layout, blocks.weights(index))

            nll = window_nlls(blocks, layer_at, torch.from_numpy(windows), batch_size=usual_batch(None, windows))
        check_finite(float(nll.sum()), f"the log-likelihood under {layout}")
        return [float(one) for one in nll]


def _rows(table: object) -> dict[str, list[float]]:
    """Return the rows of a file that may be damaged. A damaged row counts as not measured."""
    return {
        name: row
        for name, row in (table if isinstance(table, dict) else {}).items()
        if isinstance(row, list) and all(type(value) is float and math.isfinite(value) for value in row)
    }


def _stderr(nll: np.ndarray) -> float | None:
    """Return the standard error of the mean.

    nll: nats per token of each window.
    """
    return float(nll.std(ddof=1) / math.sqrt(len(nll))) if len(nll) > 1 else None


def _too_few(file: str, count: int, data: CalibrationData, purpose: str) -> str:
    return (
        f"{file} has {count} windows of {data.seq_len} tokens {purpose}, beside the {data.samples} that it is chosen"
        " by; give more data with --data, or measure the sensitivity with fewer --samples"
    )
