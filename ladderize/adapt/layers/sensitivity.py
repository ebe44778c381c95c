"""``ladderize sensitivity``: the cost of changed layers of a dense model, as converted or after alignment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladderize.adapt.layers.layout_scores import AlignedLayouts, score_aligned, score_layouts
from ladderize.adapt.layers.options import default_tokens
from ladderize.adapt.layers.windows import split_windows
from ladderize.blocks import Blocks, read_windows
from ladderize.checkpoint.config import stored_dtype
from ladderize.checkpoint.opening import open_checkpoint
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
from ladderize.eval.options import SensitivityOptions
from ladderize.files.documents import check_writable, read_own, write_json
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks, join_ranks

UNFINISHED = ".unfinished"  # ends the name of the file beside OUT that keeps aligned models' figures until OUT is there


def write_sensitivity(
    model: str | Path,
    out: str | Path,
    options: SensitivityOptions,
    *,
    overwrite: bool = False,
    console: Console = SILENT,
) -> SensitivityDocument:
    """Measure the cost of changed layers of a dense ``model``, and write the JSON file ``out``.

    Several processes (torchrun, accelerate launch) share the windows or, with ``options.align``, the models; rank 0
    writes, and all return the same. Aligned models that a killed run measured are not measured again.
    Raises UserError, also where ``out`` exists and ``overwrite`` is False.
    """
    ranks = join_ranks(options.device)
    out = Path(out).expanduser()
    if ranks.is_main:
        check_writable(out, inputs=[options.data])
        if out.exists() and not overwrite:
            raise UserError(f"--out {out} is there already; name another file, or pass --overwrite")
    unfinished = out.with_name(out.name + UNFINISHED)
    document = measure_sensitivity(model, options, console=console, ranks=ranks, unfinished=unfinished)
    if ranks.is_main:
        write_json(out, document.to_dict())
        if options.align:  # else the file is another run's
            unfinished.unlink(missing_ok=True)
    return document


def measure_sensitivity(
    model: str | Path,
    options: SensitivityOptions,
    *,
    console: Console = SILENT,
    drawn: tuple[np.ndarray, str] | None = None,
    ranks: Ranks | None = None,
    unfinished: Path | None = None,
) -> SensitivityDocument:
    """Return the cost of changed layers of a dense ``model``.

    drawn: ids [windows, seq_len] that were drawn from the data before, and the sha256 of these.
    ranks: those that share the work, all of which return the same; None: those that a launcher started.
    unfinished: a file that keeps the measurements of aligned models.
    Raises UserError for a model or data that cannot be measured.
    """
    ranks = ranks or join_ranks(options.device)
    checkpoint = open_checkpoint(str(model), options.revision)
    dense = Layout.from_config(checkpoint.config)
    if not dense.is_dense:
        raise UserError(f"{model} is not dense ({dense}); a sensitivity is measured on the dense model")
    changes = layer_changes(options.mode, dense.num_layers, options.sync_tp_size)
    layouts = [*(change.layout for change in changes), dense]
    for layout in layouts:
        layout.check_model(checkpoint.config)
    if drawn is None:
        file = options.data
        windows = read_windows(checkpoint, file, seq_len=options.seq_len, seed=options.seed)
        drawn = windows, file_sha256(file)
    windows, sha256 = drawn
    scored = windows[: options.samples]
    if len(scored) < 2:
        raise UserError(f"{options.data} gives one window of {windows.shape[1]} tokens, and intervals need two")
    if len(scored) < options.samples:
        console.note(f"{options.data} gives {len(scored)} windows, fewer than --samples {options.samples}")
    to_align = None
    if options.align:
        tokens = default_tokens(checkpoint.config, short=True)
        to_align = split_windows(windows[options.samples :], options.align_samples, None, tokens)
    if options.align and to_align is None:
        raise UserError(
            f"{options.data} gives {len(windows)} windows of {windows.shape[1]} tokens, too few for {options.samples}"
            " to score and others to align on; give more data, or lower --samples, --align-samples or --seq-len"
        )
    aligned_on = to_align and AlignmentWindows(len(to_align.train), len(to_align.heldout), windows.shape[1])
    dtype = stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype
    about: dict[str, Any] = {
        "fingerprint": fingerprint(checkpoint),
        "dtype": dtype,
        "data": CalibrationData(options.data, sha256, len(scored), scored.shape[1], options.seed),
        "aligned": aligned_on,
    }
    blocks = Blocks(checkpoint, getattr(torch, dtype), ranks.device)
    if to_align is None:
        nll = score_layouts(blocks, layouts, scored, ranks, console)
    else:
        identity = {name: str(value) for name, value in about.items()}
        known = ranks.broadcast(_measured_before(unfinished, identity) if ranks.is_main else {})

        def keep(nlls: Mapping[str, list[float]]) -> None:
            if ranks.is_main and unfinished is not None:
                write_json(unfinished, {**identity, "nll": nlls})

        aligned = AlignedLayouts(blocks, to_align)
        nll = score_aligned(aligned, layouts, scored, known=known, keep=keep, ranks=ranks, console=console)
    tokens = scored.shape[1] - 1
    return SensitivityDocument(
        model=str(model),
        layout=str(dense),
        num_layers=dense.num_layers,
        mode=options.mode,
        sync_tp_size=options.sync_tp_size,
        dense_nll=float(nll[:, -1].mean() / tokens),
        costs=layer_costs(changes, nll, tokens, options.mode),
        **about,
    )


def _measured_before(path: Path | None, identity: Mapping[str, str]) -> dict[str, list[float]]:
    """Return the nats of each window that a killed run kept, by layout. Raises UserError where it measured something
    else."""
    kept = read_own(path) if path is not None else {}
    if kept and (different := [name for name in identity if kept.get(name) != identity[name]]):
        raise UserError(
            f"{path} holds unfinished work with another {' and '.join(different)}; delete it, or name another --out"
        )
    return {name: [*map(float, row)] for name, row in kept.get("nll", {}).items()}
