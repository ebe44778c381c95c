"""``ladderize adapt --method align``: solve a converted model's projections anew, layer by layer, by least squares.

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.layers.layer_files import LayerJob
from ladderize.adapt.layers.options import AlignOptions, widest_input
from ladderize.adapt.layers.ridge import Batches, ProjectionReport, RankRows, affine, refit, with_ones
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, check_finite, fused_of, projection_of
from ladderize.checkpoint.config import kv_head_count
from ladderize.console import Console, human_bytes
from ladderize.files.records import Record
from ladderize.layout import APART, BLOCKING, DELAYED, Layout
from ladderize.memory import available_bytes, check_room
from ladderize.ranks.group import Ranks

RIDGES = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # tried for every projection on held-out windows, strongest first
RANDOM_SHARE = 0.25  # windows of random tokens for each window of the data (docs/adapt.md)
TOKENS_AT_ONCE = 4096
READS_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
WRITES_ATTENTION = ("self_attn.o_proj",)
READS_MLP = ("mlp.gate_proj", "mlp.up_proj")
WRITES_MLP = ("mlp.down_proj",)
# how long a layer takes that is solved, in passes of the windows through one that is not
SOLVED = 7


@dataclass(frozen=True)
class LayerReport(Record):
    """The result for one layer, its projections in the order in which they were solved."""

    layer: int
    projections: list[ProjectionReport]
    seconds: float

    def row(self) -> dict[str, str]:
        groups = {"attention reads": READS_ATTENTION, "attention writes": WRITES_ATTENTION}
        groups |= {"MLP reads": READS_MLP, "MLP writes": WRITES_MLP}
        cells = {"layer": str(self.layer)}
        for group, names in groups.items():
            members = [entry for entry in self.projections if entry.projection in names]
            before = sum(entry.error_before for entry in members) / len(members)
            after = sum(entry.error_after for entry in members) / len(members)
            is_kept = all(entry.ridge is None for entry in members)
            cells[group] = f"{before:.1%}, kept" if is_kept else f"{before:.1%} to {after:.1%}"
        return cells


def align(job: LayerJob, options: AlignOptions) -> None:
    """Solve the projections of every layer of the job that its files do not hold yet, in order. All ranks call it; each
    has a share of the windows. Raises UserError where the states are NaN or infinite, or do not fit in memory."""
    teacher, ranks, console, files = job.teacher, job.ranks, job.console, job.files
    windows = with_random(job.windows, teacher.config, options.seed)
    done = job.finished()
    if done:
        console.note(f"layers up to {done[-1]} are already aligned")
    if len(done) == len(job.layers):
        return
    streams = Streams(teacher, windows, ranks, readers_of(job.layout))
    count, tokens = len(job.windows.train), job.windows.train.numel()
    console.note(
        f"aligning {len(job.layers) - len(done)} layers on {tokens:,} tokens ({count} windows of"
        f" {tokens // count}), {len(job.windows.heldout)} windows held out, on {ranks.words};"
        f" {human_bytes(streams.bytes)} of states {located(streams.device)}"
    )
    warn_of_few(tokens, teacher.config, console)
    left, total = {*job.layers} - {*done}, job.layers[-1] + 1
    with console.progress("aligning, passes over the windows", total + (SOLVED - 1) * len(left)) as advance:
        streams.embed(teacher, job.converted)
        for index in range(total):
            begin, solve = time.perf_counter(), index in left
            weights = files.weights(index) if index in done else job.weights(index)
            layer = LayerAlignment(streams, index, job.layout, weights, job.dense_weights(index))
            made, reports = layer.run(solve=solve)
            if solve and ranks.is_main:
                files.save(index, made, LayerReport(index, reports, time.perf_counter() - begin))
            advance(SOLVED if solve else 1, detail=f"{index + 1} of {total} layers")


def warn_of_few(tokens: int, config: Mapping[str, Any], console: Console) -> None:
    if tokens < widest_input(config):
        console.warn(
            f"{tokens:,} tokens are fewer than the {widest_input(config):,} inputs of the widest projection: where"
            " they say nothing the weights stay as they are; more data align better"
        )


def with_random(windows: Windows, config: Mapping[str, Any], seed: int = 0) -> Windows:
    """Return the windows with added windows of random tokens. Weights solved on text of one kind alone go astray
    wherever another kind reads them; random tokens say a little about everything, and need no data."""
    generator = torch.Generator().manual_seed(seed)

    def extended(ids: Tensor) -> Tensor:
        count = math.ceil(RANDOM_SHARE * len(ids))
        random = torch.randint(int(config["vocab_size"]), (count, ids.shape[1]), generator=generator)
        return torch.cat([ids, random.to(ids.dtype)])

    return Windows(extended(windows.train), extended(windows.heldout))


# ---- one layer ----

# Inputs of a group of projections, with the virtual ranks in front where there are several, and its targets
Tokens = tuple[Tensor, Tensor]


class Streams:
    """States [..., windows, tokens, width] between two sub-modules, of this rank's windows, training ones first: the
    ``dense`` model's stream, the converted model's ``complete`` one, the ``visible`` ones that the virtual ranks'
    next attention reads [readers, ...], the inputs of its o_proj (``heads``), where norms come behind sums the
    dense model's ``sums`` before them, and, on CPUs alone, the inputs of its down_proj (``inner``): a GPU computes
    them again sooner than it finds the room. In front of the first converted layer the models are one
    (``is_common``), and only ``dense`` is written."""

    def __init__(self, blocks: Blocks, windows: Windows, ranks: Ranks, readers: int = 1) -> None:
        self.blocks, self.ranks, self.is_common = blocks, ranks, True
        self.ids = torch.cat([ids[ranks.rank :: ranks.size] for ids in (windows.train, windows.heldout)])
        self.trained = len(windows.train[ranks.rank :: ranks.size])
        self.batch_size = max(1, TOKENS_AT_ONCE // windows.train.shape[1])
        stream = (*self.ids.shape, int(blocks.config["hidden_size"]))
        heads = int(blocks.checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].shape[1])
        shapes = {"dense": stream, "complete": stream, "visible": (readers, *stream), "heads": (*self.ids.shape, heads)}
        if blocks.decoder.norms_sums:
            shapes["sums"] = stream
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
    """Layer ``index`` of ``layout`` with copies of ``weights``, whose class is run in pieces: up to what o_proj and
    down_proj read."""

    def __init__(self, blocks: Blocks, index: int, layout: Layout, weights: Mapping[str, Tensor]) -> None:
        self.blocks, self.index, self.scale = blocks, index, blocks.decoder.residual_scale
        self.modes = layout.attention_sync[index], layout.mlp_sync[index]
        ranks = layout.sync_tp_size or 1
        self.readers = ranks if layout.entering(index) == DELAYED else 1  # virtual ranks whose attention reads apart
        self.mlp_ranks = ranks if self.modes[0] in APART else 1  # those whose MLPs do
        self.kv_ranks = min(self.readers, kv_head_count(blocks.config))
        # no narrower than stored: else a solution would be rounded twice
        computed = {
            name: tensor.to(blocks.device, torch.promote_types(tensor.dtype, blocks.dtype), copy=True)
            for name, tensor in weights.items()
        }
        layer: Any = blocks.layer(index, layout, computed)
        layer.self_attn.__class__ = layer.heads_only  # which ends before o_proj
        self.layer: Any = layer

    def inner(self, streams: Tensor) -> Tensor:
        """Return the inputs of down_proj [windows, tokens, intermediate] from the streams that the MLP reads."""
        return self.layer.mlp_slices(self.layer.read_by_mlp(streams))

    def after_mlp(self, stream: Tensor, visible: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
        """Return the complete stream, and what the next attention reads: [..., windows, tokens, hidden]."""
        state = self.layer.after_mlp(stream, visible, *self.layer.mlp_products(inner))
        return state if isinstance(state, tuple) else (state, state)


class LayerAlignment:
    """One layer of both models, with the streams that enter it, which ``run`` replaces by those that leave it."""

    def __init__(
        self,
        streams: Streams,
        index: int,
        layout: Layout,
        weights: Mapping[str, Tensor],
        dense_weights: Mapping[str, Tensor],
    ) -> None:
        self.streams, self.weights = streams, weights
        self.dense = Side(streams.blocks, index, Layout.dense(layout.num_layers), dense_weights)
        self.converted = Side(streams.blocks, index, layout, weights)

    @torch.no_grad()
    def run(self, *, solve: bool, leave: bool = True) -> tuple[dict[str, Tensor], list[ProjectionReport]]:
        """Solve the layer's projections if asked to, and pass the streams through it; returns its weights as they will
        be stored, and what was solved. leave: False where nothing reads the converted model's streams behind it. Raises
        UserError for weights or inputs that are NaN or infinite."""
        converted, streams = self.converted, self.streams
        reports: list[ProjectionReport] = []
        if streams.is_common and not solve and self._is_unchanged():
            self._pass(self._attend_dense)
            self._pass(self._leave_dense)
            streams.check()
            return dict(self.weights), reports
        if streams.is_common:  # the converted model has a stream of its own from here on
            streams.is_common = False
            streams.states["complete"].copy_(streams.states["dense"])
            streams.states["visible"][0].copy_(streams.states["dense"])
        readers, kv_ranks = converted.readers, converted.kv_ranks
        if solve and kv_ranks == readers:
            reports += self._fit(READS_ATTENTION, self._attention_reads, readers, reads=True)
        elif solve:
            reports += self._fit(READS_ATTENTION[:1], self._attention_reads, readers, reads=True)
            reports += self._fit(READS_ATTENTION[1:], self._attention_reads, kv_ranks, reads=True)
        self._pass(self._attend)
        if solve:
            reports += self._fit(WRITES_ATTENTION, self._attention_writes)
            reports += self._fit(READS_MLP, self._mlp_reads, converted.mlp_ranks, reads=True)
        self._pass(self._feed)
        if solve:
            reports += self._fit(WRITES_MLP, self._mlp_writes)
        if leave:
            self._pass(self._leave)
        streams.check()
        # Unsolved projections keep their stored bits.
        solved = {report.projection for report in reports if report.ridge is not None}
        solved |= {fused_of(name) for name in solved}
        current, made = converted.layer.state_dict(), dict(self.weights)
        for name, tensor in self.weights.items():
            if name.rpartition(".")[0] in solved:
                made[name] = current[name].to(tensor.dtype)
        return made, reports

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
        inputs = self.converted.layer.read_by_attention(visible)
        return inputs, self.dense.layer.read_by_attention(self.streams.read("dense", rows))

    def _attention_writes(self, rows: Tensor) -> Tokens:
        return self.streams.read("heads", rows), self._missing(rows, self.streams.read("complete", rows))

    def _mlp_reads(self, rows: Tensor) -> Tokens:
        reads, _, _ = self._after_attention(rows)
        inputs = self.converted.layer.read_by_mlp(reads)
        return inputs, self.dense.layer.read_by_mlp(self.streams.read("dense", rows))

    def _mlp_writes(self, rows: Tensor) -> Tokens:
        reads, stream, _ = self._after_attention(rows)
        return self._inner(rows, reads), self._missing(rows, stream)

    def _missing(self, rows: Tensor, stream: Tensor) -> Tensor:
        """Return what a sum must be for the stream behind it to be the dense model's; where a norm comes between, the
        dense model's own sum."""
        if "sums" in self.streams.states:
            return self.streams.read("sums", rows)
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
        if "sums" in self.streams.states:
            self.streams.write("sums", rows, self.dense.layer.self_attn.o_proj(heads))
        _, stream, _ = self.dense.layer.after_attention(before, heads)
        self.streams.write("dense", rows, stream)

    def _feed(self, rows: Tensor) -> None:
        if "inner" in self.streams.states:
            reads, _, _ = self._after_attention(rows)
            self.streams.write("inner", rows, self.converted.inner(reads))
        self._leave_dense(rows)

    def _leave_dense(self, rows: Tensor) -> None:
        stream = self.streams.read("dense", rows)
        inner = self.dense.inner(stream)
        if "sums" in self.streams.states:
            self.streams.write("sums", rows, self.dense.layer.mlp.down_proj(inner))
        complete, _ = self.dense.after_mlp(stream, stream, inner)
        self.streams.write("dense", rows, complete)

    def _leave(self, rows: Tensor) -> None:
        reads, stream, visible = self._after_attention(rows)
        complete, visible = self.converted.after_mlp(stream, visible, self._inner(rows, reads))
        self.streams.write("complete", rows, complete)
        self.streams.write("visible", rows, visible)

    def _fit(
        self, names: Sequence[str], tokens: Callable[[Tensor], Tokens], ranks: int = 1, *, reads: bool = False
    ) -> list[ProjectionReport]:
        """Solve projections with the same inputs together. ``tokens`` returns inputs and targets of a batch of windows;
        each of ``ranks`` virtual ranks has rows of its own, and the inputs of as many neighbouring readers as share it.
        Where projections read the stream, targets are what the dense model's projections make of theirs."""
        projections = [projection_of(self.converted.layer, name) for name in names]
        teachers = [projection_of(self.dense.layer, name) for name in names]
        solved = []
        for rank in range(ranks):
            readout = affine(teachers, rank, ranks) if reads else None
            solved.append(RankRows(affine(projections, rank, ranks), readout))

        def batches(heldout: bool) -> Batches:
            for rows in self.streams.batches(heldout=heldout):
                with self.converted.blocks.autocast():
                    read, targets = tokens(rows)
                inputs = [*read] if read.ndim == 4 else [read]
                flat = with_ones(targets, projections[0]) if reads else targets.flatten(0, -2)
                sharing = len(inputs) // ranks
                shared = (_joined(inputs[k * sharing : (k + 1) * sharing]) for k in range(ranks))
                yield [with_ones(x, projections[0]) for x in shared], _joined([flat] * sharing)

        for inputs, values in batches(False):
            for rank_rows, x in zip(solved, inputs, strict=True):
                rank_rows.add(x, values)
        stored = {name: tensor.dtype for name, tensor in self.weights.items()}
        for name in names:
            stored.setdefault(f"{name}.weight", stored.get(f"{fused_of(name)}.weight", torch.float32))
        reports = refit(names, projections, solved, batches(True), RIDGES, self.streams.ranks, stored)
        self.streams.check()  # first: it names the model
        for report in reports:
            check_finite(report.error_before, f"the error of {report.projection} in layer {self.converted.index}")
        return reports


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after another; a single one as it is, not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])
