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

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ladderize.adapt.layers.ridge import Batches, ProjectionReport, RankRows, affine, refit, with_ones
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, check_finite
from ladderize.convert.remote_code.modeling_ladderized import column_parallel, row_parallel
from ladderize.layout import BLOCKING, DROPPED, Layout
from ladderize.ranks.group import Ranks

TOKENS_AT_ONCE = 8192
READS_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
WRITES_ATTENTION = ("self_attn.o_proj",)
READS_MLP = ("mlp.gate_proj", "mlp.up_proj")
WRITES_MLP = ("mlp.down_proj",)
Tokens = tuple[Sequence[Tensor], Tensor]  # inputs of a group of projections in each virtual rank, and its targets


class Streams:
    """States [windows, tokens, width] between two sub-modules, of this rank's windows: training ones first, then
    held-out ones. They lie in the host's memory.

    dense: the dense model's stream.
    complete: the converted model's stream.
    visible: the stream that its next attention reads, without an MLP output that is still in flight.
    heads: the inputs of its o_proj, between attention and MLP.

    Streams are float32, since a sub-module adds little to them.
    """

    def __init__(self, blocks: Blocks, windows: Windows, ranks: Ranks) -> None:
        self.device, self.ranks = blocks.device, ranks
        self.ids = torch.cat([part[ranks.rank :: ranks.size] for part in (windows.train, windows.heldout)])
        self.trained = len(windows.train[ranks.rank :: ranks.size])
        self.batch_size = max(1, TOKENS_AT_ONCE // windows.train.shape[1])
        widths = {name: int(blocks.config["hidden_size"]) for name in ("dense", "complete", "visible")}
        self.states = {name: torch.empty(*self.ids.shape, width) for name, width in widths.items()}
        self.states["heads"] = torch.empty(*self.ids.shape, heads_width(blocks), dtype=blocks.dtype)

    def batches(self, *, heldout: bool | None = None) -> Iterator[Tensor]:
        """Yield window numbers: of all windows, of the held-out ones, or of the others. No batch mixes the two."""
        rows = torch.arange(len(self.ids))
        for kind, part in ((False, rows[: self.trained]), (True, rows[self.trained :])):
            if heldout in (None, kind) and len(part):
                yield from part.split(self.batch_size)

    def read(self, name: str, rows: Tensor) -> Tensor:
        """Return the states of these windows on the device: [rows, tokens, width]."""
        return self.states[name][rows].to(self.device)

    def write(self, name: str, rows: Tensor, state: Tensor) -> None:
        """Write the states of these windows; raises UserError for NaN or infinite ones."""
        check_finite(
            float(state.sum()), f"the residual stream of the {'dense' if name == 'dense' else 'converted'} model"
        )
        store = self.states[name]
        store[int(rows[0]) : int(rows[0]) + len(rows)] = state.to(store.device)

    @torch.no_grad()
    def embed(self, teacher: Blocks, converted: Blocks) -> None:
        """Write the input of the first layer, of the dense model and of the converted one."""
        for name, model in (("dense", teacher), ("complete", converted), ("visible", converted)):
            for rows in self.batches():
                self.write(name, rows, model.embed(self.ids[rows]).float())


def states_bytes(blocks: Blocks, windows: Windows, ranks: Ranks) -> int:
    """Return the bytes of one process's states: three streams in float32, and the inputs of o_proj."""
    tokens = -(-windows.all.numel() // ranks.size)
    return tokens * (3 * 4 * int(blocks.config["hidden_size"]) + blocks.dtype.itemsize * heads_width(blocks))


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
        linear = self.layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return linear

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
        self, dense: Side, converted: Side, streams: Streams, *, ridges: Sequence[float], stored: torch.dtype
    ) -> None:
        self.dense, self.converted, self.streams, self.ridges, self.stored = dense, converted, streams, ridges, stored

    @torch.no_grad()
    def run(self, *, solve: bool) -> list[ProjectionReport]:
        """Solve the layer's projections and pass the streams through it.

        solve: False leaves the layer as it is.
        Raises UserError for weights or inputs that are NaN or infinite.
        """
        converted, dense, streams, read = self.converted, self.dense, self.streams, self.streams.read
        reports: list[ProjectionReport] = []

        def after_attention(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return converted.after_attention(read("complete", rows), read("heads", rows))

        # Each returns the inputs of a group of projections in each virtual rank, and its targets. The targets of
        # projections that read the stream are the inputs of the dense model's.
        def attention_reads(rows: Tensor) -> Tokens:
            return [converted.attention_input(read("visible", rows))], dense.attention_input(read("dense", rows))

        def attention_writes(rows: Tensor) -> Tokens:
            return [read("heads", rows)], (read("dense", rows) - read("complete", rows)) / converted.scale

        def mlp_reads(rows: Tensor) -> Tokens:
            return [*converted.mlp_input(after_attention(rows)[0])], dense.mlp_input(read("dense", rows))

        def mlp_writes(rows: Tensor) -> Tokens:
            reads, attended, _ = after_attention(rows)
            return [converted.inner(reads)], (read("dense", rows) - attended) / converted.scale

        if solve:
            reports += self._fit(READS_ATTENTION, attention_reads)
        for rows in streams.batches():
            before = read("dense", rows)
            streams.write("heads", rows, converted.heads(read("visible", rows)))
            streams.write("dense", rows, dense.after_attention(before, dense.heads(before))[1])
        if solve:
            reports += self._fit(WRITES_ATTENTION, attention_writes)
            reports += self._fit(READS_MLP, mlp_reads)
        for rows in streams.batches():
            after = read("dense", rows)
            streams.write("dense", rows, after + dense.mlp_output(dense.inner(after[None])))
        if solve:
            reports += self._fit(WRITES_MLP, mlp_writes)
        for rows in streams.batches():
            reads, attended, without = after_attention(rows)
            complete = attended + converted.mlp_output(converted.inner(reads))
            streams.write("complete", rows, complete)
            streams.write("visible", rows, complete if converted.mlp_sync == BLOCKING else without)
        return reports

    def _fit(self, names: Sequence[str], tokens: Callable[[Tensor], Tokens]) -> list[ProjectionReport]:
        """Sum the products of each virtual rank and solve the projections.

        tokens: returns inputs and targets of a batch.
        Raises UserError where they are NaN or infinite.
        """
        projections = [self.converted.projection(name) for name in names]
        parts = self.converted.virtual_ranks if names == READS_MLP else 1
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
            for part, x in zip(rows, inputs, strict=True):
                part.add(x, values)
        ranks = self.streams.ranks
        reports = refit(names, projections, rows, lambda: batches(True), self.ridges, ranks, self.stored)
        for report in reports:
            check_finite(report.error_before, f"the error of {report.projection} in layer {self.converted.index}")
        return reports
