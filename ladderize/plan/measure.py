"""The real costs of layouts, on the windows that they were chosen by and on others; they may be aligned first, on
windows that are neither. One layer is in memory at a time."""

import hashlib
import math
from pathlib import Path

import numpy as np
import torch

from ladderize.adapt.layers.sensitivity import LayerwiseScores
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, compute_dtype, read_windows
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.console import Console
from ladderize.convert.sensitivity_file import SensitivityDocument
from ladderize.data.files import file_sha256
from ladderize.errors import UserError
from ladderize.files.documents import read_own, write_json
from ladderize.layout import Layout
from ladderize.plan.options import PlanOptions
from ladderize.plan.rows import LayoutCost
from ladderize.ranks.device import default_device


class LayoutMeasurer:
    """A measurer of layouts of one dense model, each once; until the plan is there, their nats are in file ``kept``."""

    def __init__(self, options: PlanOptions, costs: SensitivityDocument, kept_beside: Path, console: Console) -> None:
        data, aligned, checkpoint = costs.data, costs.aligned, open_checkpoint(options.name)
        dtype = compute_dtype(options.dtype, stored_dtype(checkpoint))
        self.blocks, self.console = Blocks(checkpoint, dtype, torch.device(default_device())), console
        if file_sha256(data.file) != data.sha256:
            raise UserError(f"{data.file} is not the data that the costs were measured on")
        drawn = read_windows(checkpoint, data.file, seq_len=data.seq_len, seed=data.seed)
        sizes = [data.samples, *((aligned.samples, aligned.heldout) if aligned else ())]
        choose, *to_align, rest = np.split(drawn, np.cumsum(sizes))
        self.scorer = LayerwiseScores(self.blocks, Windows(*map(torch.from_numpy, to_align)) if aligned else None)
        chosen_on = {window.tobytes() for window in choose}
        confirm = np.array([window for window in rest if window.tobytes() not in chosen_on], dtype=drawn.dtype)
        if len(confirm) < 2:  # which have no standard error
            raise UserError(
                f"{data.file} has {len(confirm)} windows of {data.seq_len} tokens to confirm a layout on, beside those"
                " that it is chosen by; measure the sensitivity with fewer --samples, or with more data"
            )
        self.windows = {False: choose, True: confirm[: len(choose)]}  # by held_out
        digest = hashlib.sha256(str([costs.fingerprint, dtype, data, aligned]).encode() + drawn.tobytes())
        # not a name that ``report`` looks for in a folder
        self.kept = kept_beside.with_name(f"measured-{kept_beside.stem}-{digest.hexdigest()[:12]}.json")
        self.nlls: dict[str, list[float]] = read_own(self.kept)  # by layout and windows

    def measure(self, layout: Layout, held_out: bool) -> LayoutCost:
        """Return the cost of a layout; ``held_out``: on the windows that nothing was chosen by."""
        increase = self._nlls(layout, held_out) - self._nlls(Layout.dense(self.blocks.num_layers), held_out)
        increase /= self.windows[held_out].shape[1] - 1
        return LayoutCost(float(increase.mean()), float(increase.std(ddof=1) / math.sqrt(len(increase))), len(increase))

    def _nlls(self, layout: Layout, held_out: bool) -> np.ndarray:
        keys = {False: f"{layout}", True: f"{layout}, held out"}
        if keys[held_out] not in self.nlls:
            # aligning takes longer than scoring, and is done once
            kinds = [held_out] if self.scorer.windows is None else [False, True]
            ids = torch.from_numpy(np.concatenate([self.windows[kind] for kind in kinds]))
            doing = "measuring" if self.scorer.windows is None else "aligning and measuring"
            model = "the dense model" if layout.is_dense else "a layout"
            with self.console.progress(f"{doing} {model}", self.scorer.passes(layout)) as advance:
                nlls = self.scorer(layout, ids, advance).tolist()
            for kind in kinds:
                count = len(self.windows[kind])
                self.nlls[keys[kind]], nlls = nlls[:count], nlls[count:]
            write_json(self.kept, self.nlls)
        return np.array(self.nlls[keys[held_out]])
