"""The likelihood of windows under many layouts of one model, with all of its weights in memory once.

Layouts that agree in their first layers compute the same there: each layer is run once for each different beginning of
a layout. One dense pass then serves all that differ from the dense model in later layers only, and of the 3,888 layouts
of five layers each costs one layer and a little.

A table of negative log-likelihoods, windows x layouts, is filled batch by batch: announced, within the memory that is
there, and kept so often that a killed run goes on.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ladderize.blocks import Blocks, State, check_finite, complete, layer_seconds, timed
from ladderize.checkpoint.config import parameter_count
from ladderize.console import Console, human_bytes, human_seconds
from ladderize.layout import BLOCKING, DROPPED, OVERLAPPED, Layout
from ladderize.memory import check_room
from ladderize.ranks.group import Ranks

TOKENS_PER_PASS = 4096
SAVE_SECONDS = 2.0
# what a layout does in a layer: the mode of the MLP sync point that enters it, its attention's
LayerStep = tuple[str, str]


class LayoutTree:
    """Layouts of as many layers each, and where their ways part."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = list(layouts)
        self.num_layers = self.layouts[0].num_layers
        ranks = {layout.sync_tp_size for layout in self.layouts if layout.sync_tp_size is not None}
        if len(ranks) > 1 or {layout.num_layers for layout in self.layouts} != {self.num_layers}:
            raise ValueError("these layouts are of several models, or of several sync_tp_size")
        self.sync_tp_size = min(ranks, default=None)

    def parting(self, layer: int, members: Sequence[int]) -> list[tuple[LayerStep, list[int]]]:
        """What layouts, by their number, do in a layer; those of the largest group last."""
        groups: dict[LayerStep, list[int]] = defaultdict(list)
        for number in members:
            layout = self.layouts[number]
            groups[layout.entering(layer), layout.attention_sync[layer]].append(number)
        return sorted(groups.items(), key=lambda group: len(group[1]))

    @property
    def layer_runs(self) -> int:
        """How many times some layer is run for one batch."""
        return sum(self.runs_by_mode.values())

    @cached_property
    def runs_by_mode(self) -> Counter[str]:
        """The same, by the mode of the layer's attention sync point."""
        runs: Counter[str] = Counter()
        waiting = [(0, list(range(len(self.layouts))))]
        while waiting:
            layer, members = waiting.pop()
            groups = self.parting(layer, members)
            runs.update(attention for (_, attention), _ in groups)
            if layer + 1 < self.num_layers:
                waiting += [(layer + 1, group) for _, group in groups]
        return runs

    @property
    def states(self) -> int:
        """The most states that are held at a time: a walk waits only for groups that are no larger than its own."""
        return len(self.layouts).bit_length() + 1

    def overlaps(self, layer: int) -> bool:
        """Whether any layout overlaps the MLP sync point of ``layer``."""
        return any(layout.mlp_sync[layer] == OVERLAPPED for layout in self.layouts)


class Suffixes:
    """The likelihood of a batch of windows under each of ``layouts``. weights: of the layers, where they were read."""

    def __init__(
        self, blocks: Blocks, layouts: Sequence[Layout], weights: Sequence[Mapping[str, Tensor]] | None = None
    ) -> None:
        self.blocks, self.tree = blocks, LayoutTree(layouts)
        self.weights = weights if weights is not None else [blocks.weights(i) for i in range(blocks.num_layers)]
        self.built: dict[tuple[int, str], torch.nn.Module] = {}

    def layer(self, index: int, attention: str = BLOCKING) -> torch.nn.Module:
        """A layer with this mode of its attention sync point. It hands on its stream with and without its MLP's output
        where a layout overlaps the MLP sync point, so that one run serves both modes."""
        if (index, attention) not in self.built:
            modes, layers = [BLOCKING] * self.blocks.num_layers, self.blocks.num_layers
            modes[index] = attention
            after = [OVERLAPPED if i == index and self.tree.overlaps(i) else BLOCKING for i in range(layers)]
            ranks = self.tree.sync_tp_size if attention == DROPPED else None
            layout = Layout(tuple(modes), tuple(after), ranks)
            self.built[index, attention] = self.blocks.layer(index, layout, self.weights[index])
        return self.built[index, attention]

    def __call__(self, ids: Tensor) -> np.ndarray:
        """ids: [batch, tokens] -> summed negative log-likelihoods in nats, float64 [batch, layouts]."""
        table = np.empty((len(ids), len(self.tree.layouts)))
        for members, nll in self.walk(ids, list(range(len(self.tree.layouts)))):
            table[:, members] = nll.cpu().numpy()[:, None]
        return table

    def walk(self, ids: Tensor, members: list[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield ``members``, layouts by their number, a group of equal ones after the other, and the group's summed
        negative log-likelihood [batch], on the device."""
        with torch.no_grad():
            state = self.blocks.embed(ids)
        return self._walk(0, state, members, ids)

    @torch.no_grad()
    def _walk(self, first: int, state: State, members: list[int], ids: Tensor) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the same of layouts that agree before layer ``first``, which ``state`` enters."""
        for layer in range(first, self.blocks.num_layers):
            *others, (step, members) = self.tree.parting(layer, members)
            for other, apart in others:
                yield from self._walk(layer + 1, self._run(layer, other, state), apart, ids)
            state = self._run(layer, step, state)
        yield members, self.blocks.nll(complete(state), ids)

    def _run(self, layer: int, step: LayerStep, state: State) -> State:
        entering, attention = step
        return self.blocks.run(self.layer(layer, attention), state if entering == OVERLAPPED else complete(state))


def suffix_memory(blocks: Blocks, tree: LayoutTree, tokens: int) -> tuple[int, int]:
    """Bytes of the weights, and of a pass over ``tokens`` tokens: the states that are held, and one layer's work."""
    hidden, intermediate = int(blocks.config["hidden_size"]), int(blocks.config["intermediate_size"])
    pair = 2 if any(map(tree.overlaps, range(tree.num_layers))) else 1  # with and without what is in flight
    states = pair * tree.states * hidden
    layer = 4 * hidden * (tree.sync_tp_size or 1) + 3 * intermediate
    return parameter_count(blocks.config) * blocks.dtype.itemsize, tokens * (states + layer) * blocks.dtype.itemsize


# ---- the table ----


def usual_batch(batch_size: int | None, windows: np.ndarray) -> int:
    """Windows per forward pass: as many as asked for, or as have 4096 tokens, and no more than there are."""
    return min(batch_size or max(1, TOKENS_PER_PASS // windows.shape[1]), len(windows))


def check_table_memory(
    blocks: Blocks,
    tree: LayoutTree,
    batch_size: int,
    seq_len: int,
    what: str,
    *,
    loaded: bool = False,
    processes: int = 1,
) -> None:
    """Raise UserError unless the weights and a pass over so many windows of ``seq_len`` tokens have room, in each of so
    many processes of this machine. loaded: the weights have theirs already."""
    weights, work = suffix_memory(blocks, tree, batch_size * seq_len)
    check_room(
        work if loaded else weights + work,
        blocks.device,
        f"{what} with {batch_size:,} windows of {seq_len:,} tokens at a time",
        "lower --batch-size or --seq-len" if batch_size > 1 else "choose a machine with more",
        processes=processes,
    )


def fill_table(
    table: np.ndarray,
    blocks: Blocks,
    layouts: list[Layout],
    windows: np.ndarray,
    *,
    batch_size: int | None,
    what: str,
    data: str,
    ranks: Ranks,
    save: Callable[[], None],
    console: Console,
) -> None:
    """Fill the places of ``table`` [windows, layouts] that are not there yet (NaN): the summed negative log-likelihood,
    in nats.

    windows: ids [samples, seq_len], of the file ``data``. ranks: share the windows, and all get all. save: is called
    every few seconds, also between the models of one batch. what: of the messages.
    """
    left = np.flatnonzero((missing := np.isnan(table)).any(1))
    if not missing.all():
        begun = len(layouts) - int(missing[left[0]].sum())
        console.note(
            f"resuming after {len(windows) - len(left)} of {len(windows)} windows"
            + (f" and {begun} of {len(layouts)} models on those that follow" if begun else "")
        )
    batch_size = min(usual_batch(batch_size, windows), math.ceil(len(left) / ranks.size))
    tree, processes = LayoutTree(layouts), ranks.local_size
    check_table_memory(blocks, tree, batch_size, windows.shape[1], what, processes=processes)
    ranks.barrier()  # what one loads is not free for another that still checks
    with console.stage("loading the weights"):
        suffixes = Suffixes(blocks, layouts)
    console.note(announcement(suffixes, windows[left], batch_size, ranks))
    saved_at = time.monotonic()

    def scored(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        nonlocal saved_at
        members = np.flatnonzero(np.isnan(table[rows]).any(0)).tolist()
        known: list[tuple[list[int], Tensor]] = []  # on the device, where a copy would wait for all before it

        def fill() -> None:
            nll = torch.stack([one for _, one in known]).cpu().numpy()
            check_finite(float(nll.sum()), f"the log-likelihood of {data} under {blocks.checkpoint.folder}")
            for (alike, _), one in zip(known, nll, strict=True):
                table[rows[:, None], alike] = one[:, None]
            known.clear()

        for one in suffixes.walk(torch.from_numpy(windows[rows]), members):
            known.append(one)
            if time.monotonic() - saved_at > SAVE_SECONDS:
                fill()
                save()
                saved_at = time.monotonic()
        if known:
            fill()
        return rows, table[rows]

    with console.progress(what, len(left)) as advance:
        for found in ranks.shared_out(np.split(left, range(batch_size, len(left), batch_size)), scored):
            for rows, values in found:
                table[rows] = values
                advance(len(rows))


def is_table(rows: object, columns: int, windows: int, *, gaps: bool = False) -> bool:
    """Whether these are at most ``windows`` rows of finite numbers, as a file holds them, which may be anybody's. gaps:
    None may stand for a number."""
    return (
        isinstance(rows, list)
        and len(rows) <= windows
        and all(isinstance(row, list) and len(row) == columns for row in rows)
        and all(
            (type(value) is float and math.isfinite(value)) or (gaps and value is None) for row in rows for value in row
        )
    )


def announcement(suffixes: Suffixes, windows: np.ndarray, batch_size: int, ranks: Ranks) -> str:
    """Time and memory of what is to come: a batch takes what a layer of each mode and the LM head take here and now."""
    blocks, tree = suffixes.blocks, suffixes.tree
    batch = torch.from_numpy(windows[:batch_size])
    layers = sum(
        layer_seconds(blocks, suffixes.layer(0, mode), batch) * runs for mode, runs in tree.runs_by_mode.items()
    )
    with torch.no_grad():
        state = blocks.embed(batch)
        head = min(timed(lambda: blocks.nll(state, batch), blocks.device) for _ in range(2)) * len(tree.layouts)
    seconds = (layers + head) * math.ceil(len(windows) / batch_size / ranks.size)
    weights, states = suffix_memory(blocks, tree, batch.numel())
    return (
        f"{len(windows)} windows of {windows.shape[1]} tokens, {len(tree.layouts):,} models: about"
        f" {human_seconds(seconds)} on {ranks.words}, {human_bytes(weights)} of weights and {human_bytes(states)} of"
        f" states in memory{' of each' if ranks.size > 1 else ''}"
    )
