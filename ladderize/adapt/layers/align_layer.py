"""One layer of the converted model, solved anew towards the dense one.

A converted sub-module reads another stream than the one it was made for: a stale one (ladder), or one that has this
rank's partial sum only (spd, delayed). The best linear repair needs no gradient. With x the normed inputs, h the inputs
of o_proj and down_proj, r the complete stream and a what a sub-module adds, of the dense model T and the converted one
S:

* the projections that read (q, k, v; gate, up) minimise |W x_S - W_T x_T|^2, after a dropped or delayed sub-module each
  virtual rank's rows with the input of its own (rows of a KV head that several share, with the inputs of them all);
* the projections that write (o, down) minimise |W h_S - (r_T + a_T - r_S)|^2, which also repairs what earlier layers
  left wrong. Where a family scales what they add (Granite), the target is divided by that.

Relatives: ReplaceMe (arXiv 2505.02819) puts a linear map in the place of pruned blocks; GPTAQ (arXiv 2504.02692)
calibrates quantised weights against the full-precision model's own inputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.layers.ridge import Batches, ProjectionReport, RankRows, affine, refit, with_ones
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, check_finite
from ladderize.checkpoint.config import kv_head_count
from ladderize.layout import APART, BLOCKING, DELAYED, Layout
from ladderize.memory import available_bytes, check_room
from ladderize.ranks.group import Ranks

TOKENS_AT_ONCE = 4096
READS_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
WRITES_ATTENTION = ("self_attn.o_proj",)
READS_MLP = ("mlp.gate_proj", "mlp.up_proj")
WRITES_MLP = ("mlp.down_proj",)
Tokens = tuple[Sequence[Tensor], Tensor]  # inputs of a group of projections in each virtual rank, and its targets


class Streams:
    """States [..., windows, tokens, width] between two sub-modules, of this rank's windows, training ones first: the
    ``dense`` model's stream, the converted model's ``complete`` one, the ``visible`` ones that the virtual ranks' next
    attention reads [readers, ...], the inputs of its o_proj (``heads``) and, on CPUs alone, of its down_proj
    (``inner``): a GPU computes them again sooner than it finds the room. In front of the first converted layer the
    models are one (``is_common``), and only ``dense`` is written."""

    def __init__(self, blocks: Blocks, windows: Windows, ranks: Ranks, readers: int = 1) -> None:
        self.blocks, self.ranks, self.is_common = blocks, ranks, True
        self.ids = torch.cat([ids[ranks.rank :: ranks.size] for ids in (windows.train, windows.heldout)])
        self.trained = len(windows.train[ranks.rank :: ranks.size])
        self.batch_size = max(1, TOKENS_AT_ONCE // windows.train.shape[1])
        stream = (*self.ids.shape, int(blocks.config["hidden_size"]))
        heads = int(blocks.checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].shape[1])
        shapes = {"dense": stream, "complete": stream, "visible": (readers, *stream), "heads": (*self.ids.shape, heads)}
        if ranks.device.type == "cpu":
            shapes["inner"] = (*self.ids.shape, int(blocks.config["intermediate_size"]))
        dtypes = dict.fromkeys(shapes, torch.float32) | {"heads": blocks.dtype, "inner": blocks.dtype}
        self.bytes = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
        self.device = device_of_states(self.bytes, ranks)
        self.states = {
            name: torch.empty(shape, dtype=dtypes[name], device=self.device) for name, shape in shapes.items()
        }
        self.sums = {model: torch.zeros((), device=blocks.device) for model in ("dense", "converted")}

    def batches(self, *, heldout: bool | None = None) -> Iterator[Tensor]:
        """Yield window numbers: of all windows, of the held-out ones, or of the others. No batch mixes the two."""
        trained, held = torch.arange(len(self.ids)).tensor_split([self.trained])
        for is_held, rows in ((False, trained), (True, held)):
            if heldout in (None, is_held) and len(rows):
                yield from rows.split(self.batch_size)

    def read(self, name: str, rows: Tensor, readers: int = 1) -> Tensor:
        """Return the states of these windows on the computing device: [rows, tokens, width], of ``visible`` the first
        ``readers`` streams, with these in front where there are several."""
        if self.is_common:
            name, readers = "dense", 1
        state = self.states[name]
        if name == "visible":
            state = state[0] if readers == 1 else state[:readers]
        return state[..., int(rows[0]) : int(rows[0]) + len(rows), :, :].clone().to(self.blocks.device)

    def write(self, name: str, rows: Tensor, state: Tensor) -> None:
        self.sums["dense" if name == "dense" else "converted"] += state.sum()
        store = self.states[name]
        if name == "visible":
            store = store[: len(state)] if state.ndim == store.ndim else store[0]
        store[..., int(rows[0]) : int(rows[0]) + len(rows), :, :] = state.to(store.device)

    def check(self) -> None:
        """Raise UserError where a state that was written is NaN or infinite. Only here the host waits."""
        for model, total in self.sums.items():
            check_finite(float(total), f"the residual stream of the {model} model")

    @torch.no_grad()
    def embed(self, teacher: Blocks, converted: Blocks) -> None:
        """Write the input of the first layer, of the dense model and of the converted one."""
        for rows in self.batches():
            self.write("dense", rows, teacher.embed(self.ids[rows]).float())
            for name in ("complete", "visible"):
                self.write(name, rows, converted.embed(self.ids[rows]).float())
        self.is_common = torch.equal(self.states["dense"], self.states["complete"])
        self.check()

    def separate(self) -> None:
        """Give the converted model a stream of its own from here on."""
        if self.is_common:
            self.is_common = False
            self.states["complete"].copy_(self.states["dense"])
            self.states["visible"][0].copy_(self.states["dense"])


def readers_of(layout: Layout) -> int:
    """Return the number of virtual ranks whose attention may read apart."""
    return (layout.sync_tp_size or 1) if DELAYED in layout.mlp_sync else 1


def device_of_states(needed: int, ranks: Ranks) -> torch.device:
    """Return where states lie: on the GPU where they fill at most half of what is free there, so that no batch waits
    for a copy; else in the host's memory. Raises UserError where neither has room."""
    host = torch.device("cpu")
    if ranks.device != host and needed <= (available_bytes(ranks.device) or 0) // 2:
        return ranks.device
    check_room(needed, host, "keeping the states of all windows", "lower --samples", processes=ranks.local_size)
    return host


def located(device: torch.device) -> str:
    return "in memory" if device.type == "cpu" else "on the GPU"


class Side:
    """Layer ``index`` of ``layout`` with ``weights``, whose class is run in pieces: up to what o_proj and down_proj
    read."""

    def __init__(self, blocks: Blocks, index: int, layout: Layout, weights: Mapping[str, Tensor]) -> None:
        self.blocks, self.index, self.scale = blocks, index, blocks.decoder.residual_scale
        self.modes = layout.attention_sync[index], layout.mlp_sync[index]
        ranks = layout.sync_tp_size or 1
        self.readers = ranks if layout.entering(index) == DELAYED else 1  # virtual ranks whose attention reads apart
        self.mlp_ranks = ranks if self.modes[0] in APART else 1  # those whose MLPs do
        self.kv_ranks = min(self.readers, kv_head_count(blocks.config))
        layer: Any = blocks.layer(index, layout, weights)
        layer.self_attn.__class__ = layer.heads_only  # which ends before o_proj
        self.layer: Any = layer

    def inner(self, streams: Tensor) -> Tensor:
        """Return the inputs of down_proj [windows, tokens, intermediate] from the streams that the MLP reads."""
        return self.layer.mlp_slices(self.layer.post_attention_layernorm(streams))

    def after_mlp(self, stream: Tensor, visible: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
        """Return the complete stream, and what the next attention reads: [..., windows, tokens, hidden]."""
        state = self.layer.after_mlp(stream, visible, *self.layer.mlp_products(inner))
        return state if isinstance(state, tuple) else (state, state)


@dataclass(frozen=True)
class Step:
    """Projections with the same inputs, which are solved together. ``tokens`` returns inputs and targets of a batch of
    windows; each of ``ranks`` virtual ranks has rows of its own, and the inputs of as many neighbouring readers as
    share it. Where projections read the stream, targets are what the dense model's projections make of theirs."""

    names: Sequence[str]
    tokens: Callable[[Tensor], Tokens]
    ranks: int = 1
    reads: bool = True


@dataclass(frozen=True)
class LayerAlignment:
    """One layer of both models, with the streams that enter it, which ``run`` replaces by those that leave it; stored:
    the dtypes of the converted layer's tensors."""

    dense: Side
    converted: Side
    streams: Streams
    ridges: Sequence[float]
    stored: Mapping[str, torch.dtype]

    @torch.no_grad()
    def run(self, *, solve: bool, leave: bool = True) -> list[ProjectionReport]:
        """Solve the layer's projections if asked to, and pass the streams through it; leave: False where nothing reads
        the converted model's streams behind it. Raises UserError for weights or inputs that are NaN or infinite."""
        converted, streams = self.converted, self.streams
        reports: list[ProjectionReport] = []
        if streams.is_common and not solve and self._is_unchanged():
            self._pass(self._attend_dense)
            self._pass(self._leave_dense)
            streams.check()
            return reports
        streams.separate()
        readers, kv_ranks = converted.readers, converted.kv_ranks
        reads = [Step(READS_ATTENTION, self._attention_reads, readers)]
        if kv_ranks < readers:
            reads = [
                Step(READS_ATTENTION[:1], self._attention_reads, readers),
                Step(READS_ATTENTION[1:], self._attention_reads, kv_ranks),
            ]
        # what is solved, and what passes the windows on from there
        table: list[tuple[list[Step], Callable[[Tensor], None] | None]] = [
            (reads, self._attend),
            ([Step(WRITES_ATTENTION, self._attention_writes, reads=False)], None),
            ([Step(READS_MLP, self._mlp_reads, converted.mlp_ranks)], self._feed),
            ([Step(WRITES_MLP, self._mlp_writes, reads=False)], self._leave if leave else None),
        ]
        for steps, move_on in table:
            for step in steps if solve else ():
                reports += self._fit(step)
            if move_on is not None:
                self._pass(move_on)
        streams.check()
        return reports

    def _is_unchanged(self) -> bool:
        """Return whether both layers compute alike: with blocking sync points and the same weights."""
        weights, others = self.converted.layer.state_dict(), self.dense.layer.state_dict()
        is_blocking = {*self.converted.modes, *self.dense.modes} == {BLOCKING}
        return is_blocking and all(torch.equal(weight, others[name]) for name, weight in weights.items())

    def _pass(self, move_on: Callable[[Tensor], None]) -> None:
        for rows in self.streams.batches():
            with self.converted.blocks.autocast():
                move_on(rows)

    # ---- inputs and targets; the targets of what reads are the inputs of the dense model's ----

    def _attention_reads(self, rows: Tensor) -> Tokens:
        visible = self.streams.read("visible", rows, self.converted.readers)
        inputs = self.converted.layer.input_layernorm(visible)
        return _by_rank(inputs), self.dense.layer.input_layernorm(self.streams.read("dense", rows))

    def _attention_writes(self, rows: Tensor) -> Tokens:
        return [self.streams.read("heads", rows)], self._missing(rows, self.streams.read("complete", rows))

    def _mlp_reads(self, rows: Tensor) -> Tokens:
        reads, _, _ = self._after_attention(rows)
        inputs = self.converted.layer.post_attention_layernorm(reads)
        return _by_rank(inputs), self.dense.layer.post_attention_layernorm(self.streams.read("dense", rows))

    def _mlp_writes(self, rows: Tensor) -> Tokens:
        reads, stream, _ = self._after_attention(rows)
        return [self._inner(rows, reads)], self._missing(rows, stream)

    def _missing(self, rows: Tensor, stream: Tensor) -> Tensor:
        return (self.streams.read("dense", rows) - stream) / self.converted.scale

    def _after_attention(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the streams that the MLP reads, the complete one, and the visible one."""
        complete, heads = self.streams.read("complete", rows), self.streams.read("heads", rows)
        return self.converted.layer.after_attention(complete, heads)

    def _inner(self, rows: Tensor, reads: Tensor) -> Tensor:
        return self.streams.read("inner", rows) if "inner" in self.streams.states else self.converted.inner(reads)

    # ---- passes: up to o_proj, up to down_proj, and out of the layer ----

    def _attend(self, rows: Tensor) -> None:
        blocks, visible = self.converted.blocks, self.streams.read("visible", rows, self.converted.readers)
        self.streams.write("heads", rows, blocks.heads(self.converted.layer, visible))
        self._attend_dense(rows)

    def _attend_dense(self, rows: Tensor) -> None:
        before = self.streams.read("dense", rows)
        heads = self.dense.blocks.heads(self.dense.layer, before)
        _, stream, _ = self.dense.layer.after_attention(before, heads)
        self.streams.write("dense", rows, stream)

    def _feed(self, rows: Tensor) -> None:
        if "inner" in self.streams.states:
            reads, _, _ = self._after_attention(rows)
            self.streams.write("inner", rows, self.converted.inner(reads))
        self._leave_dense(rows)

    def _leave_dense(self, rows: Tensor) -> None:
        stream = self.streams.read("dense", rows)
        complete, _ = self.dense.after_mlp(stream, stream, self.dense.inner(stream))
        self.streams.write("dense", rows, complete)

    def _leave(self, rows: Tensor) -> None:
        reads, stream, visible = self._after_attention(rows)
        complete, visible = self.converted.after_mlp(stream, visible, self._inner(rows, reads))
        self.streams.write("complete", rows, complete)
        self.streams.write("visible", rows, visible)

    def _fit(self, step: Step) -> list[ProjectionReport]:
        projections = [self.converted.layer.get_submodule(name) for name in step.names]
        teachers = [self.dense.layer.get_submodule(name) for name in step.names]
        solved = []
        for rank in range(step.ranks):
            readout = affine(teachers, rank, step.ranks) if step.reads else None
            solved.append(RankRows(affine(projections, rank, step.ranks), readout))

        def batches(heldout: bool) -> Batches:
            for rows in self.streams.batches(heldout=heldout):
                with self.converted.blocks.autocast():
                    inputs, targets = step.tokens(rows)
                flat = with_ones(targets, projections[0]) if step.reads else targets.flatten(0, -2)
                sharing = len(inputs) // step.ranks
                shared = (_joined(inputs[k * sharing : (k + 1) * sharing]) for k in range(step.ranks))
                yield [with_ones(x, projections[0]) for x in shared], _joined([flat] * sharing)

        for inputs, values in batches(False):
            for rank_rows, x in zip(solved, inputs, strict=True):
                rank_rows.add(x, values)
        ranks = self.streams.ranks
        reports = refit(step.names, projections, solved, batches(True), self.ridges, ranks, self.stored)
        self.streams.check()  # first: it names the model
        for report in reports:
            check_finite(report.error_before, f"the error of {report.projection} in layer {self.converted.index}")
        return reports


def _by_rank(inputs: Tensor) -> list[Tensor]:
    return [*inputs] if inputs.ndim == 4 else [inputs]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after another; a single one as it is, not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])
