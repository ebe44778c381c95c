"""How long the parts of a forward pass take by themselves, and of a whole pass in some layout. Imports no torch.

All layers of a Llama are alike, so a pass is a few figures. Each wait comes right after the next sub-module
(docs/design.md), so one message is in flight at a time, and times add up over sync points.

A product takes as long as its floating-point operations or its bytes, whichever takes longer (the roofline of Williams
et al., 2009), and everything else as long as its bytes; what is started costs some microseconds besides. Where the host
starts every operation (a prefill without CUDA graphs), a sub-module takes no less than that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ladderize.files.records import Record
from ladderize.planning.hardware import DeviceSpec, EngineFacts
from ladderize.runtime.collectives.links import Link
from ladderize.runtime.shards import Shape

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}
THIN_ROWS = (2, 256)  # of products that are neither a matrix times a vector nor large


@dataclass(frozen=True)
class Workload(Record):
    """What is served at a time: ``batch_size`` texts of ``prompt_len`` tokens, and ``output_len`` new tokens of each.

    The first new token belongs to the prefill, as in ``ladderize bench``.
    """

    batch_size: int
    prompt_len: int
    output_len: int

    @property
    def decode_steps(self) -> int:
        return self.output_len - 1


@dataclass(frozen=True)
class PassParts:
    """One forward pass of one rank, in seconds: a prefill, or the mean decode step.

    attention, mlp: the compute of one sub-module. attention_apart, mlp_apart: the same in a layer whose attention sync
    is dropped, where a rank computes its virtual ranks one by one. parallel: of a layer of the parallel baseline, both
    sub-modules. rest: outside of all layers. message: one all-reduce of a layer, alone; message_bytes: its size;
    message_start: of its time, what the host spends on it and no compute hides. vocabulary: the collectives that every
    layout waits for. contention: while a message is in flight, compute runs at the rate 1 - contention.
    """

    layers: int
    attention: float
    mlp: float
    attention_apart: float
    mlp_apart: float
    parallel: float
    rest: float
    message: float
    message_bytes: int
    message_start: float
    vocabulary: float
    contention: float


def pass_parts(
    config: Mapping[str, Any],
    device: DeviceSpec,
    engine: EngineFacts,
    link: Link,
    contention: float,
    ranks: int,
    dtype: str,
    workload: Workload,
    sync_tp_size: int | None = None,
) -> dict[str, PassParts]:
    """Of the phases ``prefill`` and ``decode`` (the mean step). link: of this number of ranks. sync_tp_size: virtual
    ranks of dropped sync points; None where none is dropped.

    Raises LayoutError for sizes that the ranks do not divide, and UserError for a dtype that the device has no peak
    for.
    """
    shape = Shape.from_config(config, tp_size=ranks, rank=0, replicate_vocab=engine.replicate_vocab)
    pace = _Pace(device, dtype)
    prompt, batch = workload.prompt_len, workload.batch_size
    end = prompt + workload.output_len
    # step j of output_len - 1 sees the prompt and j new tokens
    seen = end if engine.whole_cache else prompt + workload.output_len / 2
    passes = {
        "prefill": _Pass(shape, engine, pace, batch, prompt, float(end if engine.masked_prefill else prompt)),
        "decode": _Pass(shape, engine, pace, batch, 1, seen, is_graph=True),
    }
    return {phase: one.parts(link, contention, sync_tp_size) for phase, one in passes.items()}


class _Pace:
    """Seconds of what a device does, products of ``dtype``."""

    def __init__(self, device: DeviceSpec, dtype: str) -> None:
        self.width = WIDTHS[dtype]
        self.flop_s = device.peak_flop_s(dtype) * device.matmul_share
        self.bytes_s = device.memory_bandwidth_gb_s * 1e9 * device.bandwidth_share
        self.serial, self.thin_share = device.serial_share, device.thin_share
        self.kernel, self.thin, self.launch = device.kernel_us * 1e-6, device.thin_us * 1e-6, device.launch_us * 1e-6

    def product(self, rows: float, inner: float, outer: float) -> float:
        """[rows, inner] times [inner, outer], without its start."""
        size = self.width * (inner * outer + rows * (inner + outer))
        seconds = self.roofline(2 * rows * inner * outer, size)
        is_thin = THIN_ROWS[0] <= rows <= THIN_ROWS[1]
        return seconds * (1 + self.thin_share) + self.thin if is_thin else seconds

    def roofline(self, flop: float, size: float) -> float:
        times = flop / self.flop_s, size / self.bytes_s
        return max(times) + self.serial * min(times)

    def moved(self, size: float) -> float:
        return size / self.bytes_s

    def started(self, kernels: float) -> float:
        return kernels * self.kernel


class _Pass:
    """One forward pass: ``batch`` times ``tokens`` rows, each token with ``seen`` columns of the cache in view.
    is_graph: the host starts it as a whole."""

    def __init__(
        self,
        shape: Shape,
        engine: EngineFacts,
        pace: _Pace,
        batch: int,
        tokens: int,
        seen: float,
        *,
        is_graph: bool = False,
    ) -> None:
        self.shape, self.engine, self.pace = shape, engine, pace
        self.batch, self.tokens, self.seen = batch, tokens, seen
        self.rows = batch * tokens
        self.launch = 0.0 if is_graph else pace.launch
        self.stream = self.rows * shape.hidden * pace.width  # bytes of the residual stream
        self.own_query = shape.own_heads * shape.head_dim
        self.own_qkv = self.own_query + 2 * shape.own_kv_heads * shape.head_dim

    def parts(self, link: Link, contention: float, sync_tp_size: int | None) -> PassParts:
        shape, engine = self.shape, self.engine
        virtual = 1 if sync_tp_size is None else sync_tp_size // shape.tp_size
        host = self.launch * (engine.attention_launches + engine.mlp_launches)
        attention, mlp = self.attention(1), self.mlp(1)
        message, start = 0.0, 0.0
        if shape.tp_size > 1:
            # the host gets ahead of a device that is slower than it, and starts messages meanwhile
            ahead = max(0.0, attention + mlp - host) / 2
            start = max(0.0, self.launch * engine.message_launches - ahead)
            message = max(link.seconds(self.stream), start)
        attention, mlp = _no_less(attention, mlp, host)
        attention_apart, mlp_apart = _no_less(
            self.attention(virtual),
            self.mlp(virtual) + self.carrying(virtual),
            host + (virtual - 1) * self.launch * engine.mlp_launches,
        )
        return PassParts(
            layers=shape.layers,
            attention=attention,
            mlp=mlp,
            attention_apart=attention_apart,
            mlp_apart=mlp_apart,
            parallel=max(self.parallel(), host),
            rest=self.rest(),
            message=message,
            message_bytes=self.stream,
            message_start=start,
            vocabulary=self.vocabulary(link),
            contention=contention,
        )

    def qkv_product(self) -> float:
        return self.pace.product(self.rows, self.shape.hidden, self.own_qkv)

    def gate_up_product(self, virtual: int) -> float:
        return virtual * self.pace.product(self.rows, self.shape.hidden, 2 * self.shape.own_inner / virtual)

    def attention(self, virtual: int) -> float:
        """virtual: the ranks whose sums are computed apart."""
        engine, pace = self.engine, self.pace
        output = virtual * pace.product(self.rows, self.own_query / virtual, self.shape.hidden)
        elsewhere = engine.stream_passes * self.stream + engine.head_passes * self.rows * self.own_qkv * pace.width
        kernels = engine.attention_kernels + virtual - 1
        return self.qkv_product() + self.scores() + output + pace.moved(elsewhere) + pace.started(kernels)

    def scores(self) -> float:
        """Queries times keys, softmax, times values."""
        engine, shape, pace = self.engine, self.shape, self.pace
        width = pace.width if engine.cache_bytes is None else engine.cache_bytes
        heads = shape.own_heads if engine.kv_per_query_head else shape.own_kv_heads
        cache = 2 * self.batch * heads * self.seen * shape.head_dim * width
        pairs = self.tokens * self.seen
        if self.tokens > 1 and not engine.masked_prefill:
            pairs = self.tokens * (self.tokens + 1) / 2
        pairs *= self.batch * shape.own_heads
        written = pace.moved(engine.score_passes * pairs * width) if self.tokens > 1 else 0.0
        return pace.roofline(4 * pairs * shape.head_dim, cache) + written

    def mlp(self, virtual: int) -> float:
        engine, shape, pace = self.engine, self.shape, self.pace
        down = pace.product(self.rows, shape.own_inner, shape.hidden)
        elsewhere = engine.stream_passes * self.stream + engine.inner_passes * self.rows * shape.own_inner * pace.width
        kernels = engine.mlp_kernels + virtual - 1
        return self.gate_up_product(virtual) + down + pace.moved(elsewhere) + pace.started(kernels)

    def carrying(self, virtual: int) -> float:
        """What an MLP behind a dropped sync point does besides: each virtual rank adds what it carries to what it reads
        and to what it sends, and norms and activations are computed for each."""
        engine, pace = self.engine, self.pace
        kernels = (virtual - 1) * (engine.norm_kernels + engine.activation_kernels) + 2 * virtual + (virtual > 1)
        moved = self.stream * (6 * virtual + (virtual - 1) * engine.stream_passes)
        return pace.started(kernels) + pace.moved(moved)

    def parallel(self) -> float:
        """A layer of the parallel baseline."""
        engine, shape, pace = self.engine, self.shape, self.pace
        seconds = self.attention(1) + self.mlp(1) - pace.started(engine.parallel_saves)
        if engine.parallel_fused:
            wide = pace.product(self.rows, shape.hidden, self.own_qkv + 2 * shape.own_inner)
            seconds += wide - self.qkv_product() - self.gate_up_product(1)
        return seconds

    def rest(self) -> float:
        engine, shape, pace = self.engine, self.shape, self.pace
        rows = self.rows if engine.all_logits else self.batch
        head = pace.product(rows, shape.hidden, shape.own_vocab)
        sampled = engine.logit_passes * self.batch * shape.vocab * 4
        return head + pace.moved(4 * self.stream + sampled) + pace.started(engine.rest_kernels)

    def vocabulary(self, link: Link) -> float:
        """The embedding's all-reduce, and the gathering of the logits that are sampled, which counts as a message of as
        many bytes, as in an emulated group."""
        if self.shape.replicate_vocab:
            return 0.0
        gathered = self.batch * self.shape.own_vocab * self.shape.tp_size * self.pace.width
        return link.seconds(self.stream) + link.seconds(gathered)


def _no_less(attention: float, mlp: float, host: float) -> tuple[float, float]:
    """Both longer in proportion where a layer takes the host longer than the device."""
    longer = max(1.0, host / (attention + mlp))
    return attention * longer, mlp * longer
