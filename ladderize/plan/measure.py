"""The real costs of layouts, on the windows that they were chosen by and on others; they may be aligned first, on
windows that are neither. One layer is in memory at a time."""

import hashlib
import math
from pathlib import Path

import numpy as np
import torch

from ladderize.adapt.layers.sensitivity import LayerwiseScores
from ladderize.adapt.layers.windows import split_windows
from ladderize.blocks import Blocks, compute_dtype, read_windows
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import CalibrationData, SensitivityDocument
from ladderize.data.files import file_sha256
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.layout import Layout
from ladderize.memory import check_room
from ladderize.plan.choice import LayoutCost
from ladderize.plan.options import PlanOptions
from ladderize.ranks.device import default_device

LEAST_HELD_OUT = 2  # windows: fewer have no standard error


class LayoutMeasurer:
    """A measurer of layouts of one dense model, each once, kept in a file beside another until ``tidy``."""

    def __init__(
        self, options: PlanOptions, costs: SensitivityDocument, *, kept_beside: Path, console: Console = SILENT
    ) -> None:
        data, aligned = costs.data, costs.aligned
        checkpoint = open_checkpoint(options.name)
        dtype = compute_dtype(options.dtype, stored_dtype(checkpoint))
        self.blocks, self.console = Blocks(checkpoint, dtype, torch.device(default_device())), console
        if file_sha256(data.file) != data.sha256:
            raise UserError(f"{data.file} is not the data that the costs were measured on")
        drawn = read_windows(checkpoint, data.file, seq_len=data.seq_len, seed=data.seed)
        choose, rest = drawn[: data.samples], drawn[data.samples :]
        windows, aligned_on = None, drawn[:0]
        if aligned is not None:
            windows = split_windows(rest, aligned.samples, aligned.heldout, None)
            if windows is None:
                raise _too_few(len(rest), data, "to align on and confirm a layout on")
            aligned_on = windows.all.numpy()
            rest = rest[len(aligned_on) :]
        self.scorer = LayerwiseScores(self.blocks, windows)
        chosen_on = {window.tobytes() for window in choose}
        confirm = np.array([window for window in rest if window.tobytes() not in chosen_on], dtype=drawn.dtype)
        if len(confirm) < LEAST_HELD_OUT:
            raise _too_few(len(confirm), data, "to confirm a layout on")
        self.windows = {False: choose, True: confirm[: len(choose)]}  # by held_out
        digest = hashlib.sha256(str([costs.fingerprint, dtype, aligned]).encode())
        for windows_of in (*self.windows.values(), aligned_on):
            digest.update(np.ascontiguousarray(windows_of).tobytes() + str(windows_of.shape).encode())
        # not a name that ``report`` looks for in a folder
        self.kept = kept_beside.with_name(f"measured-{kept_beside.stem}-{digest.hexdigest()[:12]}.json")
        self.tables = {held_out: read_own(self.kept).get(str(held_out), {}) for held_out in self.windows}

    def measure(self, layout: Layout, held_out: bool) -> LayoutCost:
        """Return the cost of a layout; ``held_out``: on the windows that nothing was chosen by."""
        increase = self._nlls(layout, held_out) - self._nlls(Layout.dense(self.blocks.num_layers), held_out)
        increase /= self.windows[held_out].shape[1] - 1
        stderr = float(increase.std(ddof=1) / math.sqrt(len(increase))) if len(increase) > 1 else None
        return LayoutCost(float(increase.mean()), stderr, len(increase))

    def tidy(self) -> None:
        """Delete the kept measurements, once the plan is written."""
        self.kept.unlink(missing_ok=True)

    def _nlls(self, layout: Layout, held_out: bool) -> np.ndarray:
        """Return the summed nats of each window."""
        key, count = str(layout), len(self.windows[held_out])
        if len(self.tables[held_out].get(key, [])) != count:
            # aligning takes longer than scoring, and is done once
            kinds = [held_out] if self.scorer.windows is None else [*self.windows]
            ids = torch.from_numpy(np.concatenate([self.windows[kind] for kind in kinds]))
            states = 2 * ids.numel() * int(self.blocks.config["hidden_size"]) * self.blocks.dtype.itemsize
            advice = "measure the sensitivity with fewer --samples"
            check_room(states, torch.device("cpu"), "measuring a layout", advice)
            doing = "aligning and measuring" if len(kinds) > 1 else "measuring"
            model = "the dense model" if layout.is_dense else "a layout"
            with self.console.progress(f"{doing} {model}", self.scorer.passes(layout)) as advance:
                nlls = self.scorer(layout, ids, advance)
            for kind in kinds:
                size = len(self.windows[kind])
                self.tables[kind][key], nlls = nlls[:size].tolist(), nlls[size:]
            write_json(self.kept, {str(name): table for name, table in self.tables.items()})
        return np.array(self.tables[held_out][key])


def _too_few(count: int, data: CalibrationData, purpose: str) -> UserError:
    return UserError(
        f"{data.file} has {count} windows of {data.seq_len} tokens {purpose}, beside the {data.samples} that it is"
        " chosen by; measure the sensitivity with fewer --samples, or with more data"
    )
