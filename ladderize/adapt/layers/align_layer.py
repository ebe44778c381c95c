"""One layer of the converted model, solved anew towards the dense one.

A converted sub-module reads another stream than the one it was made for: a stale one (ladder), or one that has this
rank's partial sum only (spd). The best linear repair needs no gradient. With x the normed inputs, h the inputs of
o_proj and down_proj, r the complete stream and a what a sub-module adds, of the dense model T and the converted one S:

* the projections that read (q, k, v; gate, up) minimise |W x_S - W_T x_T|^2, in a dropped layer each virtual rank's
  rows with the input of its own;
* the projections that write (o, down) minimise |W h_S - (r_T + a_T - r_S)|^2, which also repairs what earlier layers
  left wrong. Where a family scales what they add (Granite), the target is divided by that.

Relatives: ReplaceMe (arXiv 2505.02819) puts a linear map in the place of pruned blocks; GPTAQ (arXiv 2504.02692)
calibrates quantised weights against the full-precision model's own inputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ladderize.adapt.layers.align_reports import (
    READS_ATTENTION,
    READS_MLP,
    WRITES_ATTENTION,
    WRITES_MLP,
    ProjectionReport,
)
from ladderize.adapt.layers.hidden_states import StateStore
from ladderize.adapt.layers.ridge import Batches, RankRows, affine, refit, with_ones
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks
from ladderize.convert.remote_code.modeling_ladderized import column_parallel, row_parallel
from ladderize.errors import UserError
from ladderize.layout import BLOCKING, DROPPED, Layout
from ladderize.ranks.group import Ranks

STREAMS = ("dense", "complete", "visible", "heads")


class Streams:
    """States [windows, tokens, width] between two sub-modules, of this rank's windows: training ones first, then
    held-out ones.

    dense: the dense model's stream.
    complete: the converted model's stream.
    visible: the stream that its next attention reads, without an MLP output that is still in flight.
    heads: the inputs of its o_proj, between attention and MLP.

    Streams are float32, since a sub-module adds little to them. More than ``max_memory`` bytes lie in files named after
    ``path``.
    Raises UserError where the files cannot be allocated.
    """

    def __init__(
        self, blocks: Blocks, windows: Windows, ranks: Ranks, *, batch_tokens: int, max_memory: int, path: Path
    ) -> None:
        self.device = blocks.device
        self.ranks = ranks
        self.ids = torch.cat([part[ranks.rank :: ranks.size] for part in (windows.train, windows.heldout)])
        self.trained = len(windows.train[ranks.rank :: ranks.size])
        self.tokens = windows.train.shape[1]
        self.batch_size = max(1, batch_tokens // self.tokens)
        kinds = dict.fromkeys(STREAMS, (int(blocks.config["hidden_size"]), torch.float32))
        kinds["heads"] = heads_width(blocks), blocks.dtype
        whole = sum(width * dtype.itemsize for width, dtype in kinds.values())
        self.stores: dict[str, StateStore] = {}
        try:
            for name, (width, dtype) in kinds.items():
                self.stores[name] = StateStore(
                    (len(self.ids), self.tokens, width),
                    dtype,
                    False,
                    max_memory=max_memory * width * dtype.itemsize // whole,
                    path=path.with_name(f"{path.name}-{name}"),
                )
        except UserError:
            self.close()
            raise

    def batches(self, *, heldout: bool | None = None) -> Iterator[Tensor]:
        """Yield window numbers: of all windows, of the held-out ones, or of the others. No batch mixes the two."""
        rows = torch.arange(len(self.ids))
        for kind, part in ((False, rows[: self.trained]), (True, rows[self.trained :])):
            if heldout in (None, kind) and len(part):
                yield from part.split(self.batch_size)

    def read(self, name: str, rows: Tensor) -> Tensor:
        """Return the states of these windows on the device: [rows, tokens, width]."""
        state = self.stores[name].read(rows, self.device)
        assert isinstance(state, Tensor)
        return state

    def write(self, name: str, rows: Tensor, state: Tensor) -> None:
        """Write the states of these windows; raises UserError for NaN or infinite ones."""
        self.stores[name].write(int(rows[0]), state, "dense" if name == "dense" else "converted")

    @torch.no_grad()
    def embed(self, teacher: Blocks, own: Blocks) -> None:
        """Write the input of the first layer, of the dense model and of the converted one."""
        for name, model in (("dense", teacher), ("complete", own), ("visible", own)):
            for rows in self.batches():
                self.write(name, rows, model.embed(self.ids[rows]).float())

    def close(self) -> None:
        """Free memory and disk."""
        for store in self.stores.values():
            store.close()


def heads_width(blocks: Blocks) -> int:
    """Return the width of o_proj's inputs: query heads * head_dim."""
    return int(blocks.checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].shape[1])


class Side:
    """Layer ``index`` of ``layout`` with ``weights``, cut where it reads and writes the residual stream.

    Streams are float32, and weights may be; products are computed in the dtype of ``blocks``. ``virtual_ranks`` is the
    number of inputs that its MLP has.
    """

    def __init__(self, blocks: Blocks, index: int, layout: Layout, weights: Mapping[str, Tensor]) -> None:
        # A layer with a dropped sum ends its attention before o_proj; here every layer does.
        apart = Layout((DROPPED,) * blocks.num_layers, (BLOCKING,) * blocks.num_layers, 1)
        self.layer = blocks.layer(index, apart, weights)
        self.blocks, self.index, self.scale = blocks, index, blocks.decoder.residual_scale
        self.attention_sync, self.mlp_sync = layout.attention_sync[index], layout.mlp_sync[index]
        self.virtual_ranks = (layout.sync_tp_size or 1) if self.attention_sync == DROPPED else 1

    def projection(self, name: str) -> nn.Linear:
        """Return a projection by its name within the layer, such as ``self_attn.q_proj``."""
        found = self.layer.get_submodule(name)
        assert isinstance(found, nn.Linear)
        return found

    def attention_input(self, stream: Tensor) -> Tensor:
        """Return the stream that attention reads, normed: [batch, tokens, hidden]."""
        normed: Tensor = self.layer.get_submodule("input_layernorm")(stream)
        return normed

    def heads(self, stream: Tensor) -> Tensor:
        """Return the inputs of o_proj: [batch, tokens, heads * head_dim]."""
        with self._narrow():
            rope = self.blocks.position_embeddings(stream.shape[1])
            mask = self.blocks.mask(self.index, stream.shape[1])
            heads: Tensor = self.layer.get_submodule("self_attn")(self.attention_input(stream), rope, mask)[0]
        return heads

    def after_attention(self, complete: Tensor, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three streams from the complete stream before attention and o_proj's inputs.

        The stream that the MLP of each virtual rank reads [virtual ranks, batch, tokens, hidden]; the complete stream
        after attention; and the latter without what is only summed together with the MLP's output (dropped).
        """
        with self._narrow():
            partials, bias = row_parallel(self.projection("self_attn.o_proj"), heads, self.virtual_ranks)
        partials = partials.float() * self.scale
        base = complete if bias is None else complete + bias * self.scale
        attended = base + partials.sum(0)
        if self.attention_sync == DROPPED:
            return base + partials, attended, base
        return (attended if self.attention_sync == BLOCKING else complete)[None], attended, attended

    def mlp_input(self, streams: Tensor) -> Tensor:
        """Return the streams that the MLP reads, normed: [..., hidden]."""
        normed: Tensor = self.layer.get_submodule("post_attention_layernorm")(streams)
        return normed

    def inner(self, streams: Tensor) -> Tensor:
        """Return down_proj's inputs [batch, tokens, intermediate] from the streams that each virtual rank reads."""
        inputs, ranks = self.mlp_input(streams), self.virtual_ranks
        with self._narrow():
            gate, up = (column_parallel(self.projection(name), inputs, ranks) for name in READS_MLP)
            inner: Tensor = self.layer.get_submodule("mlp.act_fn")(gate) * up
        return inner

    def mlp_output(self, inner: Tensor) -> Tensor:
        """Return the MLP's output from down_proj's inputs: float32 [batch, tokens, hidden]."""
        with self._narrow():
            output: Tensor = self.projection("mlp.down_proj")(inner)
        return output.float() * self.scale

    def _narrow(self) -> torch.autocast:
        dtype = self.blocks.dtype
        return torch.autocast(self.blocks.device.type, dtype=dtype, enabled=dtype != torch.float32)


class LayerAlignment:
    """One layer of both models, with the streams that enter it. ``run`` replaces these by the streams that leave it."""

    def __init__(
        self, dense: Side, own: Side, streams: Streams, *, ridges: Sequence[float], stored: torch.dtype
    ) -> None:
        self.dense, self.own, self.streams, self.ridges, self.stored = dense, own, streams, ridges, stored

    @torch.no_grad()
    def run(self, *, solve: bool) -> list[ProjectionReport]:
        """Solve the layer's projections and pass the streams through it.

        solve: False leaves the layer as it is.
        Raises UserError for weights or inputs that are NaN or infinite.
        """
        reports = self._fit(READS_ATTENTION, self._attention_reads) if solve else []
        self._attend()
        reports += self._fit(WRITES_ATTENTION, self._attention_writes) if solve else []
        reports += self._fit(READS_MLP, self._mlp_reads) if solve else []
        self._pass_dense_mlp()
        reports += self._fit(WRITES_MLP, self._mlp_writes) if solve else []
        for rows in self.streams.batches():
            reads, attended, without = self._after_attention(rows)
            self._write(rows, attended + self.own.mlp_output(self.own.inner(reads)), without)
        return reports

    @torch.no_grad()
    def pass_through(self) -> None:
        """Pass the streams of both models through at once, while their streams and weights are still equal."""
        own, streams = self.own, self.streams
        for rows in streams.batches():
            before = streams.read("dense", rows)
            reads, attended, without = own.after_attention(before, own.heads(before))
            complete = attended + own.mlp_output(own.inner(reads))
            streams.write("dense", rows, complete)
            self._write(rows, complete, without)

    def _write(self, rows: Tensor, complete: Tensor, without: Tensor) -> None:
        """Write the converted model's streams that leave the layer."""
        self.streams.write("complete", rows, complete)
        self.streams.write("visible", rows, complete if self.own.mlp_sync == BLOCKING else without)

    def _attend(self) -> None:
        """Run the attention of both models. Afterwards ``dense`` is the stream after it, and ``heads`` are o_proj's
        inputs."""
        own, dense, streams = self.own, self.dense, self.streams
        for rows in streams.batches():
            before = streams.read("dense", rows)
            _, attended, _ = dense.after_attention(before, dense.heads(before))
            streams.write("heads", rows, own.heads(streams.read("visible", rows)))
            streams.write("dense", rows, attended)

    def _pass_dense_mlp(self) -> None:
        """Run the dense model's MLP. Afterwards ``dense`` is the stream that leaves the layer."""
        dense, streams = self.dense, self.streams
        for rows in streams.batches():
            attended = streams.read("dense", rows)
            streams.write("dense", rows, attended + dense.mlp_output(dense.inner(attended[None])))

    def _after_attention(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.own.after_attention(self.streams.read("complete", rows), self.streams.read("heads", rows))

    # Each of these returns a projection group's inputs in each virtual rank, and its targets. The targets of
    # projections that read the stream are the inputs of the dense model's projections.

    def _attention_reads(self, rows: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        x = self.own.attention_input(self.streams.read("visible", rows))
        return [x], self.dense.attention_input(self.streams.read("dense", rows))

    def _attention_writes(self, rows: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        streams = self.streams
        missing = streams.read("dense", rows) - streams.read("complete", rows)
        return [streams.read("heads", rows)], missing / self.own.scale

    def _mlp_reads(self, rows: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        reads, _, _ = self._after_attention(rows)
        return [*self.own.mlp_input(reads)], self.dense.mlp_input(self.streams.read("dense", rows))

    def _mlp_writes(self, rows: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        reads, attended, _ = self._after_attention(rows)
        return [self.own.inner(reads)], (self.streams.read("dense", rows) - attended) / self.own.scale

    def _fit(
        self, names: Sequence[str], tokens: Callable[[Tensor], tuple[Sequence[Tensor], Tensor]]
    ) -> list[ProjectionReport]:
        """Sum the products of each virtual rank and solve the projections.

        tokens: returns inputs and targets of a batch.
        Raises UserError where they are NaN or infinite.
        """
        projections = [self.own.projection(name) for name in names]
        parts = self.own.virtual_ranks if names == READS_MLP else 1
        reads = names in (READS_ATTENTION, READS_MLP)
        teachers = [self.dense.projection(name) for name in names]
        rows = [
            RankRows(affine(projections, part, parts), affine(teachers, part, parts) if reads else None)
            for part in range(parts)
        ]

        def batches(heldout: bool) -> Batches:
            for batch in self.streams.batches(heldout=heldout):
                inputs, targets = tokens(batch)
                flat = with_ones(targets, projections[0]) if reads else targets.flatten(0, -2)
                yield [with_ones(x, projections[0]) for x in inputs], flat

        for inputs, values in batches(False):
            for own, x in zip(rows, inputs, strict=True):
                own.add(x, values)
        ranks = self.streams.ranks
        reports = refit(names, projections, rows, lambda: batches(True), self.ridges, ranks, self.stored)
        for report in reports:
            if not math.isfinite(report.error_before):
                raise UserError(
                    f"layer {self.own.index}: {report.projection} of the dense or the converted model has NaN or"
                    " infinite weights or inputs; check the weights, or compute in float32"
                )
        return reports
