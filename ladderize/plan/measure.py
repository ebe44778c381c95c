"""The real costs of layouts: their likelihood on windows of data, layer by layer with one layer in memory at a time.

A choice by sums is measured on the windows of the sensitivity. Since it was chosen by these, it is measured on others,
too. Layouts may be aligned first, on windows that are neither.
"""

import hashlib
import math
from pathlib import Path

import numpy as np
import torch

from ladderize.adapt.layers.layout_scores import AlignedLayouts, passes_of, usual_batch
from ladderize.adapt.layers.windows import split_windows
from ladderize.blocks import Blocks, check_finite, compute_dtype, open_checkpoint, read_windows, window_nlls
from ladderize.checkpoint.config import stored_dtype
from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import CalibrationData, SensitivityDocument
from ladderize.data.files import file_sha256
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.layout import Layout
from ladderize.memory import check_room
from ladderize.plan.choice import LayoutCost
from ladderize.plan.options import PlanModel
from ladderize.ranks.device import default_device

LEAST_HELD_OUT = 2  # windows: fewer have no standard error


class LayoutMeasurer:
    """A measurer of layouts of one dense model, each once. Measured ones are kept in a file, from which a killed run
    goes on.

    costs: the sensitivity, on whose windows layouts are chosen, and whose models were aligned as layouts will be.
    kept_beside: the path beside which the file lies; its name holds this one's and a hash of model, windows and dtype.

    Raises UserError for too few data.
    """

    def __init__(
        self, choice: PlanModel, costs: SensitivityDocument, *, kept_beside: Path, console: Console = SILENT
    ) -> None:
        data = costs.data
        checkpoint = open_checkpoint(choice.name, choice.revision)
        computed = compute_dtype(choice.dtype, stored_dtype(checkpoint))
        self.blocks, self.console = Blocks(checkpoint, computed, torch.device(default_device())), console
        if file_sha256(data.file) != data.sha256:
            raise UserError(f"{data.file} is not the data that the costs were measured on")
        drawn = read_windows(checkpoint, data.file, seq_len=data.seq_len, seed=data.seed)
        choose, rest = drawn[: data.samples], drawn[data.samples :]
        self.aligner = None
        if costs.aligned is not None:
            windows = split_windows(rest, costs.aligned.samples, costs.aligned.heldout, None)
            if windows is None:
                raise UserError(_too_few(len(rest), data, "to align on and confirm a layout on"))
            self.aligner = AlignedLayouts(self.blocks, windows)
            rest = rest[len(windows.all) :]
        chosen_on = {window.tobytes() for window in choose}
        confirm = np.array([window for window in rest if window.tobytes() not in chosen_on], dtype=drawn.dtype)
        if len(confirm) < LEAST_HELD_OUT:
            raise UserError(_too_few(len(confirm), data, "to confirm a layout on"))
        self.windows = {False: choose, True: confirm[: len(choose)]}
        mark = hashlib.sha256(str([costs.fingerprint, computed, costs.aligned]).encode())
        for part in (*self.windows.values(), *([self.aligner.windows.all.numpy()] if self.aligner else [])):
            mark.update(np.ascontiguousarray(part).tobytes() + str(part.shape).encode())
        # not a name that ``report`` looks for in a folder
        self.kept = kept_beside.with_name(f"measured-{kept_beside.stem}-{mark.hexdigest()[:12]}.json")
        self.tables = {held_out: read_own(self.kept).get(str(held_out), {}) for held_out in self.windows}

    def measure(self, layout: Layout, held_out: bool) -> LayoutCost:
        """Return the cost of a layout.

        held_out: measure on the windows that nothing was chosen by.
        """
        tokens = self.windows[held_out].shape[1] - 1
        nll, dense = (self._nll(one, held_out) / tokens for one in (layout, Layout.dense(self.blocks.num_layers)))
        increase, count = nll - dense, len(nll)
        stderr = float(increase.std(ddof=1) / math.sqrt(count)) if count > 1 else None
        return LayoutCost(float(increase.mean()), stderr, count)

    def tidy(self) -> None:
        """Delete the kept measurements. It is called once the plan is written."""
        self.kept.unlink(missing_ok=True)

    def _nll(self, layout: Layout, held_out: bool) -> np.ndarray:
        """Return the summed nats of each window. They are measured the first time, and kept."""
        key = str(layout)
        if len(self.tables[held_out].get(key, [])) != len(self.windows[held_out]):
            layout.check_layers(self.blocks.num_layers)
            layout.check_model(self.blocks.config)
            if self.aligner is None:
                self.tables[held_out][key] = self._score(layout, self.windows[held_out])
            else:  # aligning takes longer than scoring, and is done once
                both = [*self.windows.values()]
                with self.console.progress("aligning and measuring", passes_of([layout])) as advance:
                    nll = self.aligner(layout, torch.from_numpy(np.concatenate(both)), advance)
                for name, part in zip(self.windows, np.split(nll, [len(both[0])]), strict=True):
                    self.tables[name][key] = part.tolist()
            write_json(self.kept, {str(name): rows for name, rows in self.tables.items()})
        return np.array(self.tables[held_out][key])

    def _score(self, layout: Layout, windows: np.ndarray) -> list[float]:
        blocks = self.blocks
        states = 2 * windows.size * int(blocks.config["hidden_size"]) * blocks.dtype.itemsize
        check_room(states, torch.device("cpu"), "measuring a layout", "measure the sensitivity with fewer --samples")
        what = f"measuring {'the dense model' if layout.is_dense else 'a layout'}"
        with self.console.progress(what, blocks.num_layers) as advance:

            def layer_at(index: int) -> torch.nn.Module:
                advance(1)
                return blocks.layer(index, layout, blocks.weights(index))

            nll = window_nlls(blocks, layer_at, torch.from_numpy(windows), batch_size=usual_batch(windows))
        check_finite(float(nll.sum()), f"the log-likelihood under {layout}")
        return nll.tolist()


def _too_few(count: int, data: CalibrationData, purpose: str) -> str:
    return (
        f"{data.file} has {count} windows of {data.seq_len} tokens {purpose}, beside the {data.samples} that it is"
        " chosen by; measure the sensitivity with fewer --samples, or with more data"
    )
