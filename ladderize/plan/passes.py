"""The times of a forward pass: of its parts, and of a whole pass in some layout. Imports no torch.

All layers are alike (of layers with and without a window, attention is the mean), so a pass is a few figures. Each wait
comes right after the next sub-module (docs/design.md), so one message is in flight at a time, and times add up over
layers.

A product takes as long as its floating-point operations or its bytes, whichever takes longer (the roofline of Williams
et al., 2009), and everything else as long as its bytes; each kernel costs some microseconds besides. Where the host
starts every operation (a prefill without CUDA graphs), a sub-module takes no less than that.

A message in flight takes some of the device for itself (NCCL's kernels hold multiprocessors and memory bandwidth): the
compute beside it runs at the rate 1 - contention. A message of ``a`` seconds and compute of ``c`` then take
max(a, c + contention * a) together.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ladderize.files.records import Record
from ladderize.layout import DROPPED, OVERLAPPED, Layout
from ladderize.plan.hardware import DeviceSpec, EngineFacts
from ladderize.runtime.collectives.links import NO_LINK, Interconnect, Link
from ladderize.runtime.shards import Shape

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}
FLOAT_WEIGHTS, FP8 = "float", "fp8"  # how the weights of projections are stored: as the dtype, or in 8 bits
FP8_RATE = "float8"  # of products of 8-bit floats, in a device's matmul_tflop_s
THIN_ROWS = (2, 256)  # of products that are neither a matrix times a vector nor large


@dataclass(frozen=True)
class Workload(Record):
    """A batch that is served: ``batch_size`` texts of ``prompt_len`` tokens, and ``output_len`` new tokens of each.

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
    """The seconds of the parts of one forward pass of one rank: a prefill, or the mean decode step.

    attention, mlp: the compute of one sub-module.
    attention_apart, mlp_apart: the same in a layer with dropped attention, whose virtual ranks a rank computes apart.
    parallel: both sub-modules of a layer of the parallel baseline.
    rest: the compute outside of all layers.
    message: one all-reduce of a layer, alone, of ``message_bytes``.
    message_start: the part of ``message`` that the host spends, which no compute hides.
    vocabulary: the collectives that every layout waits for.
    contention: compute beside a message runs at the rate 1 - contention.
    norm: the part of a sub-module that a fused all-reduce does on its way: the sum and the norm.
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
    norm: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """The seconds of a pass, or of several: ``total`` = ``compute`` + ``exposed``.

    hidden: the part of communication that is hidden.
    """

    compute: float
    communication: float
    hidden: float

    @property
    def exposed(self) -> float:
        return self.communication - self.hidden

    @property
    def total(self) -> float:
        return self.compute + self.exposed


def pass_parts(
    config: Mapping[str, Any],
    device: DeviceSpec,
    engine: EngineFacts,
    interconnect: Interconnect | None,
    ranks: int,
    dtype: str,
    workload: Workload,
    sync_tp_size: int | None = None,
    weights: str = FLOAT_WEIGHTS,
) -> dict[str, PassParts]:
    """Return the parts of the phases ``prefill`` and ``decode`` (the mean step).

    interconnect: None where nothing is sent.
    sync_tp_size: virtual ranks of dropped sync points; None where none is dropped.
    weights: FLOAT_WEIGHTS, or FP8: its products read 8 bits and write ``dtype``, in which messages are sent.

    Raises LayoutError for sizes that the ranks do not divide, and UserError for a dtype that the device has no peak
    for, or a link that is not known with so many ranks.
    """
    shape = Shape.from_config(config, tp_size=ranks, rank=0, replicate_vocab=engine.replicate_vocab)
    prompt, batch = workload.prompt_len, workload.batch_size
    end = prompt + workload.output_len
    whole = end, end
    passes = {
        "prefill": _Pass(
            *(shape, engine, device, dtype, weights, batch, prompt), whole if engine.masked_prefill else (1, prompt)
        ),
        # step j of output_len - 1 sees the prompt and j new tokens
        "decode": _Pass(
            *(shape, engine, device, dtype, weights, batch, 1),
            whole if engine.whole_cache else (prompt + 1, max(prompt + 1, end - 1)),
        ),
    }
    link, contention = (NO_LINK, 0.0) if interconnect is None else (interconnect.at(ranks), interconnect.contention)
    # one CUDA graph starts a decode step as a whole
    launch_s = {"prefill": device.launch_us * 1e-6, "decode": 0.0}
    return {phase: one.parts(link, contention, sync_tp_size, launch_s[phase]) for phase, one in passes.items()}


def product_seconds(
    device: DeviceSpec, rows: float, inner: float, outer: float, *, weight: int, read: int, width: int, flop_s: float
) -> float:
    """Return the time of [rows, inner] times [inner, outer], without its start.

    weight, read, width: bytes of a number of the weight, of the input and of the output.
    flop_s: operations/s of such products.
    """
    size = weight * inner * outer + rows * (read * inner + width * outer)
    seconds = _roofline(device, 2 * rows * inner * outer, size, flop_s)
    is_thin = THIN_ROWS[0] <= rows <= THIN_ROWS[1]
    return seconds * (1 + device.thin_share) + device.thin_us * 1e-6 if is_thin else seconds


def _roofline(device: DeviceSpec, flop: float, size: float, flop_s: float) -> float:
    """Return the longer of arithmetic and memory traffic.

    With a serial share s it is (a^(1/s) + b^(1/s))^s, a roofline with a round corner: where both take as long, neither
    hides the other.
    """
    bytes_s = device.memory_bandwidth_gb_s * 1e9 * device.bandwidth_share
    shorter, longer = sorted((flop / flop_s, size / bytes_s))
    share = device.serial_share
    return longer * (1 + (shorter / longer) ** (1 / share)) ** share if share and longer else longer


class _Pass:
    """One forward pass of ``batch`` times ``tokens`` rows.

    seen: the least and the most columns of the cache in view; each number between has as many rows.
    """

    def __init__(
        self,
        shape: Shape,
        engine: EngineFacts,
        device: DeviceSpec,
        dtype: str,
        weights: str,
        batch: int,
        tokens: int,
        seen: tuple[int, int],
    ) -> None:
        self.shape, self.engine, self.device = shape, engine, device
        self.batch, self.tokens, self.seen = batch, tokens, seen
        self.rows = batch * tokens
        self.width = WIDTHS[dtype]
        self.flop_s = device.peak_flop_s(dtype) * device.matmul_share
        self.quantises = weights == FP8
        rate = device.peak_flop_s(FP8_RATE) * device.matmul_share if self.quantises else self.flop_s
        # of a projection: bytes of a weight and of a number that it reads, and operations/s
        self.projection = (1, 1, rate) if self.quantises else (self.width, self.width, rate)
        self.bytes_s = device.memory_bandwidth_gb_s * 1e9 * device.bandwidth_share
        self.stream = self.rows * shape.hidden * self.width  # bytes of the residual stream
        self.own_query = shape.own_heads * shape.head_dim
        self.own_qkv = self.own_query + 2 * shape.own_kv_heads * shape.head_dim

    # ---- seconds of a device's work ----

    def product(self, rows: float, inner: float, outer: float) -> float:
        """Return the time of a projection, [rows, inner] times [inner, outer], without its start."""
        return self.multiplied(rows, inner, outer, *self.projection)

    def multiplied(self, rows: float, inner: float, outer: float, weight: int, read: int, flop_s: float) -> float:
        width = self.width
        return product_seconds(self.device, rows, inner, outer, weight=weight, read=read, width=width, flop_s=flop_s)

    def moved(self, size: float) -> float:
        return size / self.bytes_s

    def started(self, kernels: float) -> float:
        return kernels * self.device.kernel_us * 1e-6

    # ---- parts of a pass ----

    def parts(self, link: Link, contention: float, sync_tp_size: int | None, launch_s: float) -> PassParts:
        """Return the parts of this pass.

        launch_s: the host's time for each operation that it starts by itself.
        """
        shape, engine = self.shape, self.engine
        virtual = 1 if sync_tp_size is None else sync_tp_size // shape.tp_size
        host = launch_s * (engine.attention_launches + engine.mlp_launches)
        attention, mlp = self.attention(1), self.mlp(1)
        message, start = 0.0, 0.0
        if link is not NO_LINK:
            # the host runs ahead of a slower device, and starts messages meanwhile
            ahead = max(0.0, attention + mlp - host) / 2
            start = max(0.0, launch_s * engine.message_launches - ahead)
            message = max(link.seconds(self.stream), start)
        attention, mlp = _no_less(attention, mlp, host)
        attention_apart, mlp_apart = _no_less(
            self.attention(virtual),
            self.mlp(virtual) + self.carrying(virtual),
            host + (virtual - 1) * launch_s * engine.mlp_launches,
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
            norm=self.started(engine.norm_kernels) + self.moved(engine.stream_passes * self.stream),
        )

    def qkv_product(self) -> float:
        return self.product(self.rows, self.shape.hidden, self.own_qkv)

    def gate_up_product(self, virtual: int) -> float:
        return virtual * self.product(self.rows, self.shape.hidden, 2 * self.shape.own_inner / virtual)

    def attention(self, virtual: int) -> float:
        """Return the time of attention.

        virtual: the number of virtual ranks whose sums are computed apart.
        """
        engine = self.engine
        output = virtual * self.product(self.rows, self.own_query / virtual, self.shape.hidden)
        elsewhere = engine.stream_passes * self.stream + engine.head_passes * self.rows * self.own_qkv * self.width
        kernels = engine.attention_kernels + virtual - 1
        if self.quantises:  # norms and activations write 8 bits by themselves, attention does not
            elsewhere += self.rows * self.own_query * (self.width + 1)
            kernels += 1
        return self.qkv_product() + self.scores() + output + self.moved(elsewhere) + self.started(kernels)

    def scores(self) -> float:
        """Return the time of queries times keys, softmax, and times values: the mean over the layers."""
        if not self.engine.windowed:
            return self.scores_within(None)
        windows = Counter(self.shape.decoder.windows)
        return sum(layers * self.scores_within(window) for window, layers in windows.items()) / windows.total()

    def scores_within(self, window: int | None) -> float:
        """Return the time of the scores of a layer with this window; None: without."""
        engine, shape = self.engine, self.shape
        width = self.width if engine.cache_bytes is None else engine.cache_bytes
        heads = shape.own_heads if engine.kv_per_query_head else shape.own_kv_heads
        seen = mean_keys(*self.seen, window)
        # a decode step reads the keys that it sees; a prompt reads each key once for many tokens
        columns = seen if self.tokens == 1 else self.seen[1]
        cache = 2 * self.batch * heads * columns * shape.head_dim * width
        pairs = self.batch * shape.own_heads * self.tokens * seen
        written = self.moved(engine.score_passes * pairs * width) if self.tokens > 1 else 0.0
        return _roofline(self.device, 4 * pairs * shape.head_dim, cache, self.flop_s) + written

    def mlp(self, virtual: int) -> float:
        engine, inner = self.engine, self.shape.own_inner
        down = self.product(self.rows, inner, self.shape.hidden)
        elsewhere = engine.stream_passes * self.stream + engine.inner_passes * self.rows * inner * self.width
        kernels = engine.mlp_kernels + virtual - 1
        return self.gate_up_product(virtual) + down + self.moved(elsewhere) + self.started(kernels)

    def carrying(self, virtual: int) -> float:
        """Return the extra time of an MLP behind a dropped sync point.

        Each virtual rank adds its carry to its input and to its message, and has norms and activations of its own.
        """
        engine = self.engine
        kernels = (virtual - 1) * (engine.norm_kernels + engine.activation_kernels) + 2 * virtual + (virtual > 1)
        moved = self.stream * (6 * virtual + (virtual - 1) * engine.stream_passes)
        return self.started(kernels) + self.moved(moved)

    def parallel(self) -> float:
        """Return the time of a layer of the parallel baseline."""
        seconds = self.attention(1) + self.mlp(1) - self.started(self.engine.parallel_saves)
        if self.engine.parallel_fused:
            wide = self.product(self.rows, self.shape.hidden, self.own_qkv + 2 * self.shape.own_inner)
            seconds += wide - self.qkv_product() - self.gate_up_product(1)
        return seconds

    def rest(self) -> float:
        engine, shape = self.engine, self.shape
        rows = self.rows if engine.all_logits else self.batch
        head = self.multiplied(rows, shape.hidden, shape.own_vocab, self.width, self.width, self.flop_s)
        sampled = engine.logit_passes * self.batch * shape.vocab * 4
        return head + self.moved(4 * self.stream + sampled) + self.started(engine.rest_kernels)

    def vocabulary(self, link: Link) -> float:
        """Return the time of the embedding's all-reduce and of the gathering of sampled logits.

        The latter counts as a message of as many bytes, as in an emulated group.
        """
        if self.shape.replicate_vocab:
            return 0.0
        gathered = self.batch * self.shape.own_vocab * self.shape.tp_size * self.width
        return link.seconds(self.stream) + link.seconds(gathered)


def mean_keys(least: int, most: int, window: int | None) -> float:
    """Return the mean number of keys in the window, over tokens that have ``least`` to ``most`` keys in view."""
    if window is None or window >= most:
        return (least + most) / 2
    count, inside = most - least + 1, max(0, window - least)
    return (inside * (least + window - 1) / 2 + (count - inside) * window) / count


def _no_less(attention: float, mlp: float, host: float) -> tuple[float, float]:
    """Return both times, scaled up where a layer takes the host longer than the device."""
    longer = max(1.0, host / (attention + mlp))
    return attention * longer, mlp * longer


# ---- whole passes ----


def predict_pass(parts: PassParts, layout: Layout) -> Prediction:
    """Return the times of a pass in a layout; raises ValueError for a layout of another number of layers."""
    if layout.num_layers != parts.layers:
        raise ValueError(f"a layout of {layout.num_layers} layers for a pass of {parts.layers}")
    layers = [predict_layer(parts, layout.entering(i), mode) for i, mode in enumerate(layout.attention_sync)]
    return Prediction(
        compute=parts.rest + sum(one.compute for one in layers),
        communication=parts.vocabulary + sum(one.communication for one in layers),
        hidden=sum(one.hidden for one in layers),
    )


def predict_parallel(parts: PassParts) -> Prediction:
    """Return the times of the parallel baseline: one blocking message a layer."""
    return Prediction(
        parts.rest + parts.layers * parts.parallel, parts.vocabulary + parts.layers * parts.message, hidden=0.0
    )


def predict_silent(parts: PassParts) -> Prediction:
    """Return the times of the no-communication bound: the compute of the dense layout."""
    return Prediction(parts.rest + parts.layers * (parts.attention + parts.mlp), communication=0.0, hidden=0.0)


def predict_layer(parts: PassParts, entering: str, mode: str) -> Prediction:
    """Return the times of a layer: its compute, its attention's message, and the MLP's message that enters it.

    A message can run under the next sub-module.

    entering, mode: the modes of the entering MLP sync point and of the layer's own attention sync point. The first
    layer has no entering one: blocking stands for the last layer's MLP message.
    """
    apart = mode == DROPPED
    attention, mlp = (parts.attention_apart, parts.mlp_apart) if apart else (parts.attention, parts.mlp)
    covers = [attention] * (entering == OVERLAPPED) + [mlp] * (mode == OVERLAPPED)
    most = min(parts.message - parts.message_start, (1 - parts.contention) * parts.message)
    return Prediction(
        attention + mlp, parts.message * (1 if apart else 2), hidden=sum(min(cover, most) for cover in covers)
    )
