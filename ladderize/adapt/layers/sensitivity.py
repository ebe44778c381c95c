"""``ladderize sensitivity``: the cost of changed layers of a dense model, as converted or after alignment."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ladderize.adapt.layers.layout_scores import score_layouts
from ladderize.adapt.layers.options import SensitivityOptions, default_tokens
from ladderize.adapt.layers.windows import Windows, split_windows
from ladderize.blocks import Blocks, read_windows
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import (
    AlignmentWindows,
    CalibrationData,
    SensitivityDocument,
    layer_changes,
    layer_costs,
)
from ladderize.data.files import file_sha256
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.files.unfinished import Unfinished, work_folder
from ladderize.layout import Layout
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks, join_ranks

MEASURED = "nll.json"  # in the work folder: the nats of each window, by layout


def write_sensitivity(
    options: SensitivityOptions,
    *,
    drawn: tuple[np.ndarray, str] | None = None,
    ranks: Ranks | None = None,
    console: Console = SILENT,
) -> SensitivityDocument:
    """Measure the cost of changed layers of a dense model, and write the JSON file ``options.out``. Several processes
    (torchrun, accelerate launch) share the changed models; rank 0 writes, and all return the same. A killed run goes
    on. ``drawn`` are ids [windows, seq_len] that were drawn from the data before, and the sha256 of these. Raises
    UserError, also where the file is there and may not be replaced."""
    ranks = ranks or join_ranks(options.device or default_device())
    if ranks.is_main:
        check_writable(options.out, inputs=[options.data])
        if options.out.exists() and not options.overwrite:
            raise UserError(f"--out {options.out} is there already; name another file, or pass --overwrite")
    checkpoint = open_checkpoint(options.model)
    dense = Layout.from_config(checkpoint.config)
    if not dense.is_dense:
        raise UserError(f"{options.model} is not dense ({dense}); a sensitivity is measured on the dense model")
    changes = layer_changes(options.mode, dense.num_layers, options.sync_tp_size)
    layouts = [*(change.layout for change in changes), dense]
    for layout in layouts:
        layout.check_model(checkpoint.config)
    if drawn is None:
        windows = read_windows(checkpoint, options.data, seq_len=options.seq_len, seed=options.seed)
        drawn = windows, file_sha256(options.data)
    scored, to_align = split_drawn(checkpoint, options, drawn[0], console)
    dtype = stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype
    aligned = to_align and AlignmentWindows(*to_align.sizes)
    about: dict[str, Any] = {
        "fingerprint": fingerprint(checkpoint),
        "dtype": dtype,
        "data": CalibrationData(options.data, drawn[1], len(scored), scored.shape[1], options.seed),
        "aligned": aligned,
    }
    blocks = Blocks(checkpoint, getattr(torch, dtype), ranks.device)
    identity = {name: str(value) for name, value in about.items()}
    with ranks.main_first():
        work = Unfinished(
            work_folder(options.out), "sensitivity", identity, pieces=MEASURED, main=ranks.is_main, console=console
        )
    with work:

        def keep(nlls: Mapping[str, list[float]]) -> None:
            if ranks.is_main:
                write_json(work.folder / MEASURED, {"nll": nlls})

        measured = ranks.broadcast(read_own(work.folder / MEASURED).get("nll", {}))
        nll = score_layouts(
            blocks, layouts, scored, to_align=to_align, measured=measured, keep=keep, ranks=ranks, console=console
        )
        tokens = scored.shape[1] - 1
        document = SensitivityDocument(
            model=options.model,
            layout=str(dense),
            num_layers=dense.num_layers,
            mode=options.mode,
            sync_tp_size=options.sync_tp_size,
            dense_nll=float(nll[:, -1].mean() / tokens),
            costs=layer_costs(changes, nll, tokens, options.mode),
            **about,
        )
        if ranks.is_main:
            write_json(options.out, document.to_dict())
    return document


def split_drawn(
    checkpoint: Checkpoint, options: SensitivityOptions, drawn: np.ndarray, console: Console
) -> tuple[np.ndarray, Windows | None]:
    """Return the windows to score, and with --align those after them to align on. Raises UserError for too few."""
    scored = drawn[: options.samples]
    if len(scored) < 2:
        raise UserError(f"{options.data} gives one window of {drawn.shape[1]} tokens, and intervals need two")
    if len(scored) < options.samples:
        console.note(f"{options.data} gives {len(scored)} windows, fewer than --samples {options.samples}")
    if not options.align:
        return scored, None
    tokens = default_tokens(checkpoint.config, short=True)
    to_align = split_windows(drawn[options.samples :], options.align_samples, None, tokens)
    if to_align is None:
        raise UserError(
            f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens, too few for {options.samples}"
            " to score and others to align on; give more data, or lower --samples, --align-samples or --seq-len"
        )
    return scored, to_align
