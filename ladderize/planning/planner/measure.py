"""What layouts really cost: their likelihood on windows of data, with the model's weights in memory once.

Costs of single sync points do not add up, so a choice that was made by sums is measured before it is recommended: on
the windows that the sensitivity was measured on, and, since it was chosen by these, on others. Layouts may be aligned
first, on windows that are neither.
"""

import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ladderize.blocks import Blocks, check_finite, open_checkpoint, stored_dtype
from ladderize.checkpoint.tensors import fingerprint
from ladderize.choices import Dtype
from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import AlignmentWindows, CalibrationData
from ladderize.errors import UserError
from ladderize.eval.suffixes import SAVE_SECONDS, LayoutTree, Suffixes, check_table_memory, usual_batch
from ladderize.files.documents import read_own, write_json
from ladderize.files.work import WorkFolder
from ladderize.layout import Layout
from ladderize.planning.planner.document import LayoutNll
from ladderize.planning.planner.windows import AlignmentCounts, windows_to_measure_on
from ladderize.ranks.device import check_device, default_device
from ladderize.workflows.aligned_layouts import AlignedLayouts, describe_alignment, layers_of


class MeasuredLayouts(WorkFolder):
    """What was measured so far: the summed nats of each window, by layout, on either windows."""

    TABLES = "layouts.json"
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
    says. held_out_data: other data to confirm on; None: windows of the same data that the sensitivity left.
    held_out_windows: how many; None: as many as the sensitivity has, or all there are. align: how many windows to
    align each layout on before it is measured; None: it is measured as it is. Raises UserError for another model, for
    data that changed or are too few, and for a folder with the work of another run.
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
        held_out_windows: int | None = None,
        align: AlignmentCounts | None = None,
        dtype: Dtype = "auto",
        device: str | None = None,
        batch_size: int | None = None,
        revision: str | None = None,
        console: Console = SILENT,
    ) -> None:
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
        choose, confirm, aligned = windows_to_measure_on(
            checkpoint, data, data_file, held_out_data, held_out_windows, align, console
        )
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

    def measured(self, layout: Layout, held_out: bool) -> bool:
        """Whether a layout's cost is known already, from this run or an earlier one."""
        name = "confirm" if held_out else "choose"
        return len(self.tables[name].get(layout_key(layout), [])) >= len(self.windows[name])

    def measure(self, layouts: Sequence[Layout], held_out: bool) -> list[LayoutNll]:
        """The cost of each layout. held_out: on the windows that nothing was chosen by. Those that begin alike share
        the work, so many at a time are cheaper than one by one."""
        name = "confirm" if held_out else "choose"
        dense = Layout.dense(self.blocks.num_layers)
        for layout in layouts:
            layout.check_layers(self.blocks.num_layers)
            layout.check_model(self.blocks.config)
        self._fill(name, [dense, *layouts])
        tokens = self.windows[name].shape[1] - 1
        table = {key: np.array(row[: len(self.windows[name])]) / tokens for key, row in self.tables[name].items()}
        base = table[layout_key(dense)]
        return [_summary(table[layout_key(layout)], base) for layout in layouts]

    def _fill(self, name: str, layouts: list[Layout]) -> None:
        """Score the windows that a layout has no likelihood of yet."""
        windows, table = self.windows[name], self.tables[name]
        batch_size = usual_batch(self.batch_size, windows)
        wanted = {layout_key(layout): layout for layout in layouts}
        missing = {key: layout for key, layout in wanted.items() if len(table.get(key, [])) < len(windows)}
        if not missing:
            return
        if self.aligner is not None:
            self._fill_aligned(self.aligner, [*missing.values()])
            return
        check_table_memory(
            self.blocks,
            LayoutTree([*missing.values()]),
            batch_size,
            windows.shape[1],
            f"measuring {len(missing)} layouts",
            loaded=self.weights is not None,
        )
        if self.weights is None:
            with self.console.stage("loading the weights"):
                self.weights = [self.blocks.weights(layer) for layer in range(self.blocks.num_layers)]
        what = "on held-out windows" if name == "confirm" else "on windows"
        count = len(missing) - (layout_key(layouts[0]) in missing)
        label = f"measuring {count} layouts {what}" if count else f"measuring the dense model {what}"
        todo = sum(len(windows) - len(table.get(key, [])) for key in missing)
        saved_at = time.monotonic()
        with self.console.progress(label, todo) as advance:
            while missing:
                done = min(len(table.get(key, [])) for key in missing)
                together = [key for key in missing if len(table.get(key, [])) == done]
                suffixes = Suffixes(self.blocks, [missing[key] for key in together], self.weights)
                stop = min((len(table[key]) for key in missing if key not in together), default=len(windows))
                for start in range(done, stop, batch_size):
                    batch = windows[start : min(start + batch_size, stop)]
                    scored = suffixes(torch.from_numpy(batch)).T.tolist()
                    for key, row in zip(together, scored, strict=True):
                        check_finite(sum(row), f"the log-likelihood under {missing[key]}")
                        table.setdefault(key, []).extend(row)
                    if time.monotonic() - saved_at > SAVE_SECONDS:
                        self._save()
                        saved_at = time.monotonic()
                    advance(len(batch) * len(together))
                missing = {key: layout for key, layout in missing.items() if len(table[key]) < len(windows)}
        self._save()

    def _fill_aligned(self, aligner: AlignedLayouts, layouts: list[Layout]) -> None:
        """Score all windows, also those to confirm on: aligning takes longer than scoring, and is done once."""
        both = [self.windows["choose"], self.windows["confirm"]]
        ids = np.concatenate(both)
        if not any(self.tables.values()):
            every = Layout.from_layers(self.blocks.num_layers, ladder=range(self.blocks.num_layers))
            aligner.announce("a layout of which all layers are changed", [every], ids, self.console)
        with self.console.progress("aligning and measuring", layers_of(layouts)) as advance:
            for layout in layouts:
                found = aligner(layout, torch.from_numpy(ids), advance)
                for name, part in zip(("choose", "confirm"), np.split(found, [len(both[0])]), strict=True):
                    self.tables[name][layout_key(layout)] = part.tolist()
                self._save()

    def _save(self) -> None:
        write_json(self.work.folder / self.work.TABLES, self.tables)


def _summary(nll: np.ndarray, dense: np.ndarray) -> LayoutNll:
    """nll, dense: nats per token of each window."""

    def stderr(values: np.ndarray) -> float | None:
        return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None

    increase = nll - dense
    return LayoutNll(
        nll=float(nll.mean()),
        stderr=stderr(nll),
        increase=float(increase.mean()),
        increase_stderr=stderr(increase),
        windows=len(nll),
    )


def _sha256(windows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(windows).tobytes() + str(windows.shape).encode()).hexdigest()
