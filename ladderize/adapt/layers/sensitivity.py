"""``ladderize sensitivity``: the cost of changed layers of a dense model, as converted or after alignment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ladderize import data
from ladderize.adapt.layers.layout_scores import (
    AlignedLayouts,
    describe_alignment,
    score_aligned,
    score_layouts,
    windows_to_align_on,
)
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, open_checkpoint, read_windows, stored_dtype
from ladderize.checkpoint.config import parameter_count
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.sensitivity_file import (
    INTERVAL,
    CalibrationData,
    SensitivityDocument,
    default_tau1,
    layer_changes,
    layer_costs,
)
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
    windows: np.ndarray | None = None,
    sha256: str | None = None,
    ranks: Ranks | None = None,
    unfinished: Path | None = None,
) -> SensitivityDocument:
    """Return the cost of changed layers of a dense ``model``.

    windows: ids [windows, seq_len] that were drawn from the data before.
    sha256: of the data, if they are no single file.
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
    scored, to_align = drawn_windows(checkpoint, options, windows, console)
    dtype = stored_dtype(checkpoint) if options.dtype == "auto" else options.dtype
    sha256 = sha256 or data.file_sha256(options.data)
    about: dict[str, Any] = {
        "fingerprint": fingerprint(checkpoint),
        "dtype": dtype,
        "data": CalibrationData(options.data, sha256, len(scored), scored.shape[1], options.seed),
        "aligned": describe_alignment(to_align) if to_align is not None else None,
    }
    blocks = Blocks(checkpoint, getattr(torch, dtype), ranks.device)
    if to_align is None:
        nll = score_layouts(blocks, layouts, scored, batch_size=options.batch_size, ranks=ranks, console=console)
    else:
        identity = {name: str(value) for name, value in about.items()}
        known = ranks.broadcast(_measured_before(unfinished, identity) if ranks.is_main else {})

        def keep(nlls: Mapping[str, list[float]]) -> None:
            if ranks.is_main and unfinished is not None:
                write_json(unfinished, {**identity, "nll": nlls})

        aligner = AlignedLayouts(blocks, to_align, options.batch_size)
        nll = score_aligned(aligner, layouts, scored, known=known, keep=keep, ranks=ranks, console=console)
    parameters, tokens = parameter_count(checkpoint.config), scored.shape[1] - 1
    tau1 = default_tau1(parameters) if options.tau1 is None else options.tau1
    return SensitivityDocument(
        model=str(model),
        layout=str(dense),
        parameters=parameters,
        num_layers=dense.num_layers,
        mode=options.mode,
        sync_tp_size=options.sync_tp_size,
        tau1=tau1,
        tau2=options.tau2,
        interval=INTERVAL,
        dense_nll=float(nll[:, -1].mean() / tokens),
        costs=layer_costs(changes, nll, tokens, options.mode, tau1=tau1, tau2=options.tau2),
        **about,
    )


def drawn_windows(
    checkpoint: Checkpoint, options: SensitivityOptions, drawn: np.ndarray | None, console: Console
) -> tuple[np.ndarray, Windows | None]:
    """Return the windows to score, ids [samples, seq_len], and those after them to align on; None where models are
    scored as converted.

    drawn: all windows in random order, if they were read before.
    Raises UserError where there are too few.
    """
    if drawn is None:
        drawn = read_windows(checkpoint, options.data, seq_len=options.seq_len, samples=None, seed=options.seed)
    scored, gives = drawn[: options.samples], f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens"
    if not options.align:
        if len(scored) < options.samples:
            console.note(f"{gives}, fewer than the {options.samples} of --samples: all are taken")
        return scored, None
    aligned = windows_to_align_on(checkpoint, drawn[options.samples :], options.align_samples)
    if aligned is None:
        raise UserError(
            f"{gives}, too few for {options.samples} to score, {options.align_samples or 1} others to align on and some"
            " that are held out; give more data, or lower --samples, --align-samples or --seq-len"
        )
    return scored, aligned


def _measured_before(path: Path | None, identity: Mapping[str, str]) -> dict[str, list[float]]:
    """Return the nats of each window that a killed run kept, by layout. Raises UserError where it measured something
    else."""
    kept = read_own(path) if path is not None else {}
    if kept and (different := [name for name in identity if kept.get(name) != identity[name]]):
        raise UserError(
            f"{path} holds unfinished work with another {' and '.join(different)}; delete it, or name another --out"
        )
    return {name: [*map(float, row)] for name, row in kept.get("nll", {}).items()}
