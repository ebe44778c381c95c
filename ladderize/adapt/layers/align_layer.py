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

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ladderize.adapt.layers.ridge import Batches, ProjectionReport, RankRows, affine, refit, with_ones
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, check_finite
from ladderize.checkpoint.config import kv_head_count
from ladderize.convert.remote_code.modeling_ladderized import column_parallel, row_parallel
from ladderize.layout import APART, BLOCKING, DELAYED, DROPPED, Layout
from ladderize.memory import available_bytes, check_room
from ladderize.ranks.group import Ranks

TOKENS_AT_ONCE = 4096
READS_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
WRITES_ATTENTION = ("self_attn.o_proj",)
READS_MLP = ("mlp.gate_proj", "mlp.up_proj")
WRITES_MLP = ("mlp.down_proj",)
Tokens = tuple[Sequence[Tensor], Tensor]  # inputs of a group of projections in each virtual rank, and its targets


class Streams:
    """States [windows, tokens, width] between two sub-modules, of this rank's windows: training ones first, then
    held-out ones.

    dense: the dense model's stream.
    complete: the converted model's stream.
    visible k: the stream that virtual rank k's next attention reads, without what it lacks of an MLP's output.
    heads: the inputs of its o_proj.
    inner: those of its down_proj, on CPUs alone: a GPU computes them again sooner than it finds the room.

    Streams are float32, since a sub-module adds little to them. In front of the first converted layer the models are
    one: ``is_common``, and only ``dense`` is written.

    readers: virtual ranks whose attention may read apart; see ``readers_of``.
    place: where they lie, the computing device or the host.
    Raises UserError where neither has room.
    """

    def __init__(self, blocks: Blocks, windows: Windows, ranks: Ranks, readers: int = 1) -> None:
        self.place = place_of_states(states_bytes(blocks, windows, ranks, readers), ranks)
        self.device, self.ranks, self.is_common = blocks.device, ranks, True
        self.ids = torch.cat([part[ranks.rank :: ranks.size] for part in (windows.train, windows.heldout)])
        self.trained = len(windows.train[ranks.rank :: ranks.size])
        self.batch_size = max(1, TOKENS_AT_ONCE // windows.train.shape[1])
        hidden, names = int(blocks.config["hidden_size"]), ("dense", "complete", *map(visible_name, range(readers)))
        self.states = {name: torch.empty(*self.ids.shape, hidden, device=self.place) for name in names}
        for name, width in kept_inputs(blocks, ranks).items():
            self.states[name] = torch.empty(*self.ids.shape, width, dtype=blocks.dtype, device=self.place)
        self.sums = {model: torch.zeros((), device=self.device) for model in ("dense", "converted")}

    def batches(self, *, heldout: bool | None = None) -> Iterator[Tensor]:
        """Yield window numbers: of all windows, of the held-out ones, or of the others. No batch mixes the two."""
        rows = torch.arange(len(self.ids))
        for kind, part in ((False, rows[: self.trained]), (True, rows[self.trained :])):
            if heldout in (None, kind) and len(part):
                yield from part.split(self.batch_size)

    def read(self, name: str, rows: Tensor) -> Tensor:
        """Return the states of these windows on the device: [rows, tokens, width]."""
        name = "dense" if self.is_common else name
        return self.states[name][int(rows[0]) : int(rows[0]) + len(rows)].clone().to(self.device)

    def write(self, name: str, rows: Tensor, state: Tensor) -> None:
        """Write the states of these windows, of which ``check`` will ask whether they are finite."""
        self.sums["dense" if name == "dense" else "converted"] += state.sum()
        store = self.states[name]
        store[int(rows[0]) : int(rows[0]) + len(rows)] = state.to(store.device)

    def check(self) -> None:
        """Raise UserError where a state that was written is NaN or infinite. The host waits for the device here, and
        not at each write."""
        for model, total in self.sums.items():
            check_finite(float(total), f"the residual stream of the {model} model")

    @torch.no_grad()
    def embed(self, teacher: Blocks, converted: Blocks) -> None:
        """Write the input of the first layer, of the dense model and of the converted one."""
        for rows in self.batches():
            own = converted.embed(self.ids[rows]).float()
            for name, state in (("dense", teacher.embed(self.ids[rows]).float()), ("complete", own)):
                self.write(name, rows, state)
            self.write(visible_name(0), rows, own)
        self.is_common = torch.equal(self.states["dense"], self.states["complete"])
        self.check()

    def part(self) -> None:
        """Give the converted model a stream of its own from here on."""
        if self.is_common:
            self.is_common = False
            for name in ("complete", visible_name(0)):
                self.states[name].copy_(self.states["dense"])


def visible_name(reader: int) -> str:
    return f"visible {reader}"


def readers_of(layout: Layout) -> int:
    """Return the number of virtual ranks whose attention may read apart: those of a delayed MLP, else 1."""
    return (layout.sync_tp_size or 1) if DELAYED in layout.mlp_sync else 1


def states_bytes(blocks: Blocks, windows: Windows, ranks: Ranks, readers: int = 1) -> int:
    """Return the bytes of one process's states: streams in float32, and inputs of projections."""
    tokens, width = -(-windows.all.numel() // ranks.size), (2 + readers) * int(blocks.config["hidden_size"])
    return tokens * (4 * width + blocks.dtype.itemsize * sum(kept_inputs(blocks, ranks).values()))


def place_of_states(needed: int, ranks: Ranks) -> torch.device:
    """Return where the states of all windows lie: on the GPU where they fill at most half of what is free there, so
    that no batch waits for a copy; else in the host's memory.

    needed: bytes of one process.
    Raises UserError where neither has room.
    """
    host = torch.device("cpu")
    if ranks.device != host and needed <= (available_bytes(ranks.device) or 0) // 2:
        return ranks.device
    check_room(needed, host, "keeping the states of all windows", "lower --samples", processes=ranks.local_size)
    return host


def located(place: torch.device) -> str:
    return "in memory" if place.type == "cpu" else "on the GPU"


def kept_inputs(blocks: Blocks, ranks: Ranks) -> dict[str, int]:
    """Return the width of o_proj's inputs (query heads * head_dim) and, where they are kept, of down_proj's."""
    heads = int(blocks.checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].shape[1])
    neurons = {"inner": int(blocks.config["intermediate_size"])} if ranks.device.type == "cpu" else {}
    return {"heads": heads, **neurons}


class Side:
    """Layer ``index`` of ``layout`` with ``weights``, cut where it reads and writes the residual stream.

    Streams are float32, and weights may be; products are computed in the dtype of ``blocks``. ``attention_ranks`` and
    ``mlp_ranks`` are the numbers of virtual ranks with inputs of their own.
    """

    def __init__(self, blocks: Blocks, index: int, layout: Layout, weights: Mapping[str, Tensor]) -> None:
        self.attention_sync, self.mlp_sync = layout.attention_sync[index], layout.mlp_sync[index]
        self.ranks = layout.sync_tp_size or 1
        self.attention_ranks = self.ranks if layout.entering(index) == DELAYED else 1
        self.mlp_ranks = self.ranks if self.attention_sync in APART else 1
        # A layer with a dropped sum ends its attention before o_proj; here every layer does.
        entering = BLOCKING if self.attention_ranks == 1 else DELAYED
        mlp_sync = (entering,) * (blocks.num_layers - 1) + (BLOCKING,)
        apart = Layout((DROPPED,) * blocks.num_layers, mlp_sync, self.attention_ranks)
        self.layer = blocks.layer(index, apart, weights)
        self.blocks, self.index, self.scale = blocks, index, blocks.decoder.residual_scale
        self.kv_ranks = min(self.attention_ranks, kv_head_count(blocks.config))

    def is_layer_of(self, other: "Side") -> bool:
        """Return True if both compute alike: with blocking sync points and the same weights."""
        modes = {side.attention_sync for side in (self, other)} | {side.mlp_sync for side in (self, other)}
        own, others = self.layer.state_dict(), other.layer.state_dict()
        return modes == {BLOCKING} and all(torch.equal(weight, others[name]) for name, weight in own.items())

    def projection(self, name: str) -> nn.Linear:
        linear = self.layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return linear

    def attention_input(self, streams: Tensor) -> Tensor:
        """Return the streams that attention reads, normed: [..., hidden]."""
        return self.layer.get_submodule("input_layernorm")(streams)

    def heads(self, streams: Tensor) -> Tensor:
        """Return the inputs of o_proj [batch, tokens, heads * head_dim] from the stream that each virtual rank reads:
        [attention ranks, batch, tokens, hidden]."""
        tokens, inputs = streams.shape[2], self.attention_input(streams)
        with self._narrow():
            rope, mask = self.blocks.position_embeddings(tokens), self.blocks.mask(self.index, tokens)
            inputs = inputs if self.attention_ranks > 1 else inputs[0]
            return self.layer.get_submodule("self_attn")(inputs, rope, mask)[0]

    def after_attention(self, complete: Tensor, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return three streams from the complete stream before attention and o_proj's inputs.

        The stream that the MLP of each virtual rank reads [MLP ranks, batch, tokens, hidden]; the complete stream after
        attention; and the latter without what is only summed together with the MLP's output (dropped).
        """
        with self._narrow():
            partials, bias = row_parallel(self.projection("self_attn.o_proj"), heads, self.mlp_ranks)
        partials = partials.float() * self.scale
        base = complete if bias is None else complete + bias * self.scale
        attended = base + partials.sum(0)
        if self.attention_sync in APART:
            return base + partials, attended, base if self.attention_sync == DROPPED else attended
        return (attended if self.attention_sync == BLOCKING else complete)[None], attended, attended

    def after_mlp(self, streams: tuple[Tensor, Tensor, Tensor], inner: Tensor) -> tuple[Tensor, Tensor]:
        """Return the complete stream after the MLP, and what the next attention of each virtual rank reads: [readers,
        batch, tokens, hidden].

        streams: of ``after_attention``.
        inner: down_proj's inputs.
        """
        reads, attended, without = streams
        with self._narrow():
            ranks = self.ranks if self.mlp_sync == DELAYED else 1
            partials, bias = row_parallel(self.projection("mlp.down_proj"), inner, ranks)
        partials, added = partials.float() * self.scale, 0 if bias is None else bias * self.scale
        complete = attended + partials.sum(0) + added
        if self.mlp_sync == DELAYED:
            before = reads if self.attention_sync == DROPPED else attended
            return complete, before + partials + added
        return complete, (complete if self.mlp_sync == BLOCKING else without)[None]

    def mlp_input(self, streams: Tensor) -> Tensor:
        """Return the streams that the MLP reads, normed: [..., hidden]."""
        return self.layer.get_submodule("post_attention_layernorm")(streams)

    def inner(self, streams: Tensor) -> Tensor:
        """Return down_proj's inputs [batch, tokens, intermediate] from the streams that each virtual rank reads."""
        inputs, ranks = self.mlp_input(streams), self.mlp_ranks
        with self._narrow():
            gate, up = (column_parallel(self.projection(name), inputs, ranks) for name in READS_MLP)
            return self.layer.get_submodule("mlp.act_fn")(gate) * up

    def _narrow(self) -> torch.autocast:
        dtype = self.blocks.dtype
        return torch.autocast(self.blocks.device.type, dtype=dtype, enabled=dtype != torch.float32)


class LayerAlignment:
    """One layer of both models, with the streams that enter it. ``run`` replaces these by the streams that leave it.

    stored: the dtypes that the converted layer's tensors are stored in.
    """

    def __init__(
        self,
        dense: Side,
        converted: Side,
        streams: Streams,
        *,
        ridges: Sequence[float],
        stored: Mapping[str, torch.dtype],
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
        if streams.is_common and not solve and converted.is_layer_of(dense):
            for rows in streams.batches():
                before = read("dense", rows)
                after = dense.after_attention(before, dense.heads(before[None]))[1]
                streams.write("dense", rows, dense.after_mlp((after[None], after, after), dense.inner(after[None]))[0])
            streams.check()
            return reports
        streams.part()

        def after_attention(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return converted.after_attention(read("complete", rows), read("heads", rows))

        def visible(rows: Tensor) -> Tensor:
            return torch.stack([read(visible_name(k), rows) for k in range(converted.attention_ranks)])

        def inner(rows: Tensor, reads: Tensor) -> Tensor:
            return read("inner", rows) if "inner" in streams.states else converted.inner(reads)

        # Each returns the inputs of a group of projections in each virtual rank, and its targets. The targets of
        # projections that read the stream are the inputs of the dense model's.
        def attention_reads(rows: Tensor) -> Tokens:
            return [*converted.attention_input(visible(rows))], dense.attention_input(read("dense", rows))

        def attention_writes(rows: Tensor) -> Tokens:
            return [read("heads", rows)], (read("dense", rows) - read("complete", rows)) / converted.scale

        def mlp_reads(rows: Tensor) -> Tokens:
            return [*converted.mlp_input(after_attention(rows)[0])], dense.mlp_input(read("dense", rows))

        def mlp_writes(rows: Tensor) -> Tokens:
            reads, attended, _ = after_attention(rows)
            return [inner(rows, reads)], (read("dense", rows) - attended) / converted.scale

        if solve and converted.kv_ranks == converted.attention_ranks:
            reports += self._fit(READS_ATTENTION, attention_reads, converted.attention_ranks)
        elif solve:
            reports += self._fit(READS_ATTENTION[:1], attention_reads, converted.attention_ranks)
            reports += self._fit(READS_ATTENTION[1:], attention_reads, converted.kv_ranks)
        for rows in streams.batches():
            before = read("dense", rows)
            streams.write("heads", rows, converted.heads(visible(rows)))
            streams.write("dense", rows, dense.after_attention(before, dense.heads(before[None]))[1])
        if solve:
            reports += self._fit(WRITES_ATTENTION, attention_writes)
            reports += self._fit(READS_MLP, mlp_reads, converted.mlp_ranks)
        for rows in streams.batches():
            after = read("dense", rows)
            if "inner" in streams.states:
                streams.write("inner", rows, converted.inner(after_attention(rows)[0]))
            streams.write("dense", rows, dense.after_mlp((after[None], after, after), dense.inner(after[None]))[0])
        if solve:
            reports += self._fit(WRITES_MLP, mlp_writes)
        for rows in streams.batches():
            between = after_attention(rows)
            complete, reads = converted.after_mlp(between, inner(rows, between[0]))
            streams.write("complete", rows, complete)
            for reader, own in enumerate(reads):
                streams.write(visible_name(reader), rows, own)
        streams.check()
        return reports

    def _fit(self, names: Sequence[str], tokens: Callable[[Tensor], Tokens], parts: int = 1) -> list[ProjectionReport]:
        """Sum the products of each virtual rank and solve the projections.

        tokens: returns inputs and targets of a batch.
        parts: of the projections' rows; each has the inputs of as many neighbouring virtual ranks as share it.
        Raises UserError where they are NaN or infinite.
        """
        projections = [self.converted.projection(name) for name in names]
        reads = not {*names} & {*WRITES_ATTENTION, *WRITES_MLP}
        teachers = [self.dense.projection(name) for name in names]
        rows = [
            RankRows(affine(projections, part, parts), affine(teachers, part, parts) if reads else None)
            for part in range(parts)
        ]

        def batches(heldout: bool) -> Batches:
            for batch in self.streams.batches(heldout=heldout):
                inputs, targets = tokens(batch)
                flat = with_ones(targets, projections[0]) if reads else targets.flatten(0, -2)
                sharing = len(inputs) // parts
                own = (one_after_another(inputs[k * sharing : (k + 1) * sharing]) for k in range(parts))
                yield [with_ones(x, projections[0]) for x in own], one_after_another([flat] * sharing)

        for inputs, values in batches(False):
            for part, x in zip(rows, inputs, strict=True):
                part.add(x, values)
        ranks = self.streams.ranks
        reports = refit(names, projections, rows, batches(True), self.ridges, ranks, self.stored)
        self.streams.check()  # first: it names the model
        for report in reports:
            check_finite(report.error_before, f"the error of {report.projection} in layer {self.converted.index}")
        return reports


def one_after_another(parts: Sequence[Tensor]) -> Tensor:
    """Return tensors one after another; a single one as it is, not copied."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])
