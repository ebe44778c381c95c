"""What layouts really cost: their likelihood on windows of data, with the model's weights in memory once.

Costs of single sync points do not add up, so a choice that was made by sums is measured before it is recommended: on
the windows that the sensitivity was measured on, and, since it was chosen by these, on others. Layouts may be aligned
first, on windows that are neither.
"""

import hashlib
import math
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.blockwise.windows import Windows
from ladderize.blocks import Blocks, check_finite, open_checkpoint, read_windows, stored_dtype
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.choices import Dtype
from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import AlignmentWindows, CalibrationData
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.eval.suffixes import SAVE_SECONDS, LayoutTree, Suffixes, check_table_memory, usual_batch
from ladderize.files.documents import read_own, write_json
from ladderize.files.regular import split_name
from ladderize.files.work import WorkFolder
from ladderize.layout import Layout
from ladderize.planning.plans.document import LayoutNll
from ladderize.ranks.device import check_device, default_device
from ladderize.ranks.environment import already_started
from ladderize.workflows.aligned_layouts import AlignedLayouts, describe_alignment, layers_of, windows_to_align_on

LEAST_HELD_OUT = 2  # windows, of which a standard error can be told
# to align layouts on, and to hold out; None: as many as alignment takes by default, and no more than half of what is
# left where windows to confirm on have to be left, too
AlignmentCounts = tuple[int | None, int | None]


class MeasuredLayouts(WorkFolder):
    """What was measured so far: the summed nats of each window, by layout, on either windows."""

    TABLES = "layouts.json"
    COMMAND = "plan"
    CONTENT = (*WorkFolder.CONTENT, TABLES)

    def tables(self) -> dict[str, dict[str, list[float]]]:
        """By the windows' name and the layout's; what is no table counts as not measured."""
        found = read_own(self.folder / self.TABLES)
        return {name: _rows(found.get(name)) for name in ("choose", "confirm")}


def _rows(found: Any) -> dict[str, list[float]]:
    table = found if isinstance(found, dict) else {}
    return {
        name: row
        for name, row in table.items()
        if isinstance(row, list) and all(type(value) is float and math.isfinite(value) for value in row)
    }


def layout_key(layout: Layout) -> str:
    """A short name of a layout: the modes' first letters, and the virtual ranks of dropped ones."""
    attention, mlp = ("".join(mode[0] for mode in modes) for modes in (layout.attention_sync, layout.mlp_sync))
    return f"{attention}/{mlp}" + (f"/{layout.sync_tp_size}" if layout.sync_tp_size else "")


class LayoutMeasurer:
    """Measures layouts of one dense model, each once: what was measured is kept in ``folder``, from which a killed run
    goes on. Used as a context.

    model_fingerprint, data: of the sensitivity file. data_file: where the data lie now, or others; None: where the file
    says. held_out_data: other data to confirm on; None: windows of the same data that the sensitivity left, as many as
    it has, or all there are. align: how many windows to align each layout on before it is measured; None: it is
    measured as it is. Raises UserError for another model, for data that changed or are too few, and for a folder with
    the work of another run.
    """

    def __init__(
        self,
        model: str | Path,
        model_fingerprint: str,
        data: CalibrationData,
        *,
        folder: Path,
        data_file: str | None = None,
        held_out_data: str | None = None,
        align: AlignmentCounts | None = None,
        dtype: Dtype = "auto",
        device: str | None = None,
        batch_size: int | None = None,
        revision: str | None = None,
        console: Console = SILENT,
    ) -> None:
        if already_started():
            raise UserError(
                "plan --verify is one process; run it without torchrun, accelerate launch or srun, which share the work"
                " of `ladderize sensitivity`"
            )
        device = device or default_device()
        check_device(device)
        checkpoint = open_checkpoint(str(model), revision)
        layout = Layout.from_config(checkpoint.config)
        if not layout.is_dense:
            raise UserError(f"{model} is not dense ({layout}); layouts are measured on the dense model's weights")
        if fingerprint(checkpoint) != model_fingerprint:
            raise UserError(
                f"the sensitivity was measured on another model than {model} (their fingerprints differ); measure this"
                " one"
            )
        name = stored_dtype(checkpoint) if dtype == "auto" else dtype
        self.blocks = Blocks(checkpoint, getattr(torch, name), torch.device(device))
        self.console, self.batch_size = console, batch_size
        choose, confirm, aligned = _windows_to_measure_on(checkpoint, data, data_file, held_out_data, align, console)
        self.windows = {"choose": choose, "confirm": confirm}
        self.aligner = AlignedLayouts(self.blocks, aligned, batch_size) if aligned is not None else None
        self.work = MeasuredLayouts(
            folder,
            {
                "model": model_fingerprint,
                "dtype": name,
                "windows to choose on": _sha256(choose),
                "windows to confirm on": _sha256(confirm),
                "windows to align on": [_sha256(part.numpy()) for part in (aligned.train, aligned.heldout)]
                if aligned is not None
                else None,
            },
        )
        self.tables = self.work.tables()
        self.weights: list[dict[str, Tensor]] | None = None

    def __enter__(self) -> "LayoutMeasurer":
        self.work.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.work.__exit__(kind, error, trace)

    def tidy(self) -> None:
        """Delete what is kept, once the context has ended and the plan is written."""
        MeasuredLayouts.tidy(self.work.folder, self.work.identity)

    @property
    def aligned(self) -> AlignmentWindows | None:
        """On what layouts are aligned."""
        return describe_alignment(self.aligner.windows) if self.aligner is not None else None

    def measure(self, layout: Layout, held_out: bool) -> LayoutNll:
        """The cost of a layout. held_out: on the windows that nothing was chosen by."""
        name = "confirm" if held_out else "choose"
        windows, table = self.windows[name], self.tables[name]
        layout.check_layers(self.blocks.num_layers)
        layout.check_model(self.blocks.config)
        tokens = windows.shape[1] - 1
        found = []
        for one in (Layout.dense(self.blocks.num_layers), layout):
            if len(table.get(layout_key(one), [])) < len(windows):
                if self.aligner is None:
                    self._score(name, one)
                else:
                    self._score_aligned(self.aligner, one)
            found.append(np.array(table[layout_key(one)][: len(windows)]) / tokens)
        dense, nll = found
        increase = nll - dense
        return LayoutNll(float(nll.mean()), _stderr(nll), float(increase.mean()), _stderr(increase), len(nll))

    def _score(self, name: str, layout: Layout) -> None:
        """Score the windows that a layout has no likelihood of yet."""
        windows, row = self.windows[name], self.tables[name].setdefault(layout_key(layout), [])
        batch_size = usual_batch(self.batch_size, windows)
        what = f"measuring {'the dense model' if layout.is_dense else 'a layout'}"
        what += " on held-out windows" if name == "confirm" else " on windows"
        loaded = self.weights is not None
        check_table_memory(self.blocks, LayoutTree([layout]), batch_size, windows.shape[1], what, loaded=loaded)
        if self.weights is None:
            with self.console.stage("loading the weights"):
                self.weights = [self.blocks.weights(layer) for layer in range(self.blocks.num_layers)]
        suffixes, saved_at = Suffixes(self.blocks, [layout], self.weights), time.monotonic()
        with self.console.progress(what, len(windows) - len(row)) as advance:
            for start in range(len(row), len(windows), batch_size):
                scored = suffixes(torch.from_numpy(windows[start : start + batch_size]))[:, 0].tolist()
                check_finite(sum(scored), f"the log-likelihood under {layout}")
                row.extend(scored)
                if time.monotonic() - saved_at > SAVE_SECONDS:
                    self._save()
                    saved_at = time.monotonic()
                advance(len(scored))
        self._save()

    def _score_aligned(self, aligner: AlignedLayouts, layout: Layout) -> None:
        """Score all windows, also those to confirm on: aligning takes longer than scoring, and is done once."""
        both = [self.windows["choose"], self.windows["confirm"]]
        ids = np.concatenate(both)
        if not any(self.tables.values()):
            every = Layout.from_layers(self.blocks.num_layers, ladder=range(self.blocks.num_layers))
            aligner.announce("a layout of which all layers are changed", [every], ids, self.console)
        with self.console.progress("aligning and measuring", layers_of([layout])) as advance:
            found = aligner(layout, torch.from_numpy(ids), advance)
        for name, part in zip(("choose", "confirm"), np.split(found, [len(both[0])]), strict=True):
            self.tables[name][layout_key(layout)] = part.tolist()
        self._save()

    def _save(self) -> None:
        write_json(self.work.folder / self.work.TABLES, self.tables)


def _stderr(nll: np.ndarray) -> float | None:
    """nll: nats per token of each window."""
    return float(nll.std(ddof=1) / math.sqrt(len(nll))) if len(nll) > 1 else None


def _sha256(windows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(windows).tobytes() + str(windows.shape).encode()).hexdigest()


def _windows_to_measure_on(
    checkpoint: Checkpoint,
    data: CalibrationData,
    data_file: str | None,
    held_out_data: str | None,
    align: AlignmentCounts | None,
    console: Console,
) -> tuple[np.ndarray, np.ndarray, Windows | None]:
    """Windows to choose on, to confirm on, and to align on, none of them twice: ids [windows, seq_len] each. Arguments
    of ``LayoutMeasurer``."""
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
    aligned, beside = None, f"{len(choose)} that it is chosen by"
    if align is not None:
        most = rest if others or align[0] is not None else rest[: len(rest) // 2]
        aligned = windows_to_align_on(checkpoint, most, *align)
        if aligned is None:
            raise UserError(
                f"{file} has {len(rest)} windows of {data.seq_len} tokens beside the {len(choose)} that a layout is"
                f" chosen by, too few for {align[0] or 1} to align on and some that are held out; lower"
                " --align-samples, give more data with --data, or measure the sensitivity with fewer --samples"
            )
        rest = rest[len(aligned.all) :]
        beside += f" and the {len(aligned.all)} that layouts are aligned on"
    if others:
        rest = read_windows(checkpoint, str(held_out_data), seq_len=data.seq_len, samples=None, seed=data.seed)
        origin = str(held_out_data)
    seen = {window.tobytes() for window in (*choose, *(aligned.all.numpy() if aligned is not None else ()))}
    new = np.array([window for window in rest if window.tobytes() not in seen], dtype=drawn.dtype)
    if len(new) < LEAST_HELD_OUT:
        raise UserError(
            f"{origin} has {len(new)} windows of {data.seq_len} tokens to confirm a layout on beside the {beside}, and"
            f" {LEAST_HELD_OUT} are needed; give more of them with --held-out-data, or measure the sensitivity with"
            " fewer --samples"
        )
    return choose, new[: len(choose)], aligned
