"""A table of negative log-likelihoods, windows x layouts, which is filled batch by batch: announced, within the memory
that there is, and kept so often that a killed run goes on."""

import math
import time
from collections.abc import Callable

import numpy as np
import torch

from ladderize.blocks import Blocks, check_finite, layer_seconds, timed
from ladderize.console import Console, human_bytes, human_seconds
from ladderize.eval.suffixes import LayoutTree, Suffixes, suffix_memory
from ladderize.layout import Layout
from ladderize.memory import check_room

TOKENS_PER_PASS = 4096
SAVE_SECONDS = 2.0


def usual_batch(batch_size: int | None, windows: np.ndarray) -> int:
    """Windows per forward pass: as many as asked for, or as have 4096 tokens, and no more than there are."""
    return min(batch_size or max(1, TOKENS_PER_PASS // windows.shape[1]), len(windows))


def check_table_memory(
    blocks: Blocks, tree: LayoutTree, batch_size: int, seq_len: int, what: str, *, loaded: bool = False
) -> None:
    """Raise UserError unless the weights and a pass over so many windows of ``seq_len`` tokens have room. loaded: the
    weights have theirs already."""
    weights, work = suffix_memory(blocks, tree, batch_size * seq_len)
    check_room(
        work if loaded else weights + work,
        blocks.device,
        f"{what} with {batch_size:,} windows of {seq_len:,} tokens at a time",
        "lower --batch-size or --seq-len" if batch_size > 1 else "choose a machine with more",
    )


def fill_table(
    rows: list[list[float]],
    blocks: Blocks,
    layouts: list[Layout],
    windows: np.ndarray,
    *,
    batch_size: int | None,
    what: str,
    data: str,
    save: Callable[[list[list[float]]], None],
    console: Console,
) -> None:
    """Add the rows of the windows that have none yet: of each layout the summed negative log-likelihood, in nats.

    windows: ids [samples, seq_len], of the file ``data``. save: gets the rows every few seconds. what: of the messages.
    """
    if rows:
        console.note(f"resuming after {len(rows)} of {len(windows)} windows")
    batch_size = usual_batch(batch_size, windows)
    check_table_memory(blocks, LayoutTree(layouts), batch_size, windows.shape[1], what)
    with console.stage("loading the weights"):
        suffixes = Suffixes(blocks, layouts)
    left = windows[len(rows) :]
    console.note(announcement(suffixes, left, batch_size))
    saved_at = time.monotonic()
    with console.progress(what, len(left)) as advance:
        for batch in np.split(left, range(batch_size, len(left), batch_size)):
            rows += suffixes(torch.from_numpy(batch)).tolist()
            check_finite(
                sum(map(sum, rows[-len(batch) :])), f"the log-likelihood of {data} under {blocks.checkpoint.folder}"
            )
            if time.monotonic() - saved_at > SAVE_SECONDS:
                save(rows)
                saved_at = time.monotonic()
            advance(len(batch))


def is_table(rows: object, columns: int, windows: int, *, gaps: bool = False) -> bool:
    """Whether these are at most ``windows`` rows of finite numbers, as a file holds them, which may be anybody's. gaps:
    None may stand for a number."""
    return isinstance(rows, list) and len(rows) <= windows and all(_is_row(row, columns, gaps) for row in rows)


def _is_row(row: object, columns: int, gaps: bool) -> bool:
    return (
        isinstance(row, list)
        and len(row) == columns
        and all((type(value) is float and math.isfinite(value)) or (gaps and value is None) for value in row)
    )


def batch_seconds(suffixes: Suffixes, batch: torch.Tensor) -> float:
    """What a batch of ids takes, from a layer of each mode and the LM head, timed here and now."""
    blocks, tree = suffixes.blocks, suffixes.tree
    layers = {mode: layer_seconds(blocks, suffixes.layer(0, mode), batch) for mode in tree.runs_by_mode}
    with torch.no_grad():
        state = blocks.embed(batch)
        head = min(timed(lambda: blocks.nll(state, batch), blocks.device) for _ in range(2))
    return sum(layers[mode] * runs for mode, runs in tree.runs_by_mode.items()) + head * len(tree.layouts)


def announcement(suffixes: Suffixes, windows: np.ndarray, batch_size: int) -> str:
    """Time and memory of what is to come."""
    blocks, tree = suffixes.blocks, suffixes.tree
    batch = torch.from_numpy(windows[:batch_size])
    seconds = batch_seconds(suffixes, batch) * math.ceil(len(windows) / batch_size)
    weights, states = suffix_memory(blocks, tree, batch.numel())
    return (
        f"{len(windows)} windows of {windows.shape[1]} tokens, {len(tree.layouts):,} models: about"
        f" {human_seconds(seconds)} on {blocks.device}, {human_bytes(weights)} of weights and {human_bytes(states)} of"
        " states in memory"
    )
