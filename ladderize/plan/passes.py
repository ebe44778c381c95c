"""The times of a forward pass: of its parts, and of a whole pass in some layout. Imports no torch.

All layers are alike (of layers with and without a window, attention is the mean), so a pass is a few figures. Each wait
comes right after the next sub-module (docs/layouts.md), so one message is in flight at a time, and times add up over
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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ladderize.layout import APART, DELAYED, DROPPED, HIDING, Layout
from ladderize.plan.hardware import DeviceSpec, EngineFacts
from ladderize.runtime.collectives.links import NO_LINK, SLICED_BYTES, Interconnect, Link
from ladderize.runtime.shards import Shape, group_size, hosted_ranks

WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4}
FP8_RATE = "float8"  # of products of 8-bit floats, in a device's matmul_tflop_s
THIN_ROWS = (2, 256)  # of products that are neither a matrix times a vector nor large


@dataclass(frozen=True)
class Serving:
    """A model on a group of devices, and the batch that is served: so many texts, and new tokens of each."""

    config: Mapping[str, Any]  # sizes, as config.json names them
    dtype: str  # to compute in, and of messages
    is_fp8: bool  # projections read 8-bit floats and write ``dtype``
    device: DeviceSpec
    engine: EngineFacts
    links: tuple[Interconnect, ...]  # a message takes the fastest; none where nothing is sent
    ranks: int
    batch_size: int
    prompt_len: int
    output_len: int  # the first new token belongs to the prefill, as in ``ladderize bench``

    @property
    def shape(self) -> Shape:
        """The sizes of one rank. Raises LayoutError for sizes that the ranks do not divide."""
        return Shape.from_config(self.config, tp_size=self.ranks, rank=0, replicate_vocab=self.engine.replicate_vocab)

    @property
    def passes(self) -> dict[str, int]:
        """The number of passes by phase: a prefill, and all decode steps."""
        return {"prefill": 1, "decode": self.output_len - 1}

    def fastest(self, size: int, ranks: int | None = None, between: int | None = None) -> Link:
        """Return the fastest link for a message of ``size`` bytes in a group of ``ranks``, or ``between`` as many
        groups of so many ranks as there are; NO_LINK where nothing is sent."""
        count = self.ranks // between if between else ranks or self.ranks
        usable = [link for link in self.links if link.most_ranks is None or count <= link.most_ranks]
        links = [link.parts(self.ranks, between)[1] if between else link.at(count) for link in usable]
        return min(links, key=lambda link: link.seconds(size), default=NO_LINK)


class Errors(NamedTuple):
    """How far the parts of a prediction are off, in standard deviations of each error. The errors are independent."""

    compute: float = 0.0
    message: float = 0.0
    contention: float = 0.0
    gain: float = 0.0  # by fused norms


NO_ERRORS = Errors()
# a figure as it is predicted, then with one error at plus and at minus a standard deviation
CASES = (NO_ERRORS, *(Errors(**{name: sign}) for name in Errors._fields for sign in (1.0, -1.0)))
COMPUTE = ("attention", "mlp", "attention_apart", "mlp_apart", "parallel", "rest", "norm", "reading")
MESSAGES = ("message", "message_start", "within", "across", "gather", "vocabulary")
# one standard deviation of contention: where it was measured on the link itself, and elsewhere
CALIBRATED_CONTENTION_ERROR, OTHER_CONTENTION_ERROR = 0.05, 0.1


@dataclass(frozen=True)
class PassParts:
    """The seconds of the parts of one forward pass of one rank: a prefill, or the mean decode step."""

    layers: int
    # the compute of a sub-module; the same in a layer whose virtual ranks a rank computes apart; the MLP reads partials
    attention: float
    mlp: float
    attention_apart: float
    mlp_apart: float
    parallel: float  # both sub-modules of a layer of the parallel baseline
    rest: float  # the compute outside of all layers
    message: float  # one all-reduce of a layer, alone
    message_bytes: int
    message_start: float  # the part of ``message`` that the host spends, which no compute hides
    vocabulary: float  # the collectives that every layout waits for
    contention: float  # compute beside a message runs at the rate 1 - contention
    # a delayed sum where several ranks are one virtual rank: the sum within their group, the message between groups,
    # and the gathering of the slices of a long one; nothing hides the first and the last; a dropped one has the first
    within: float
    across: float
    gather: float
    norm: float = 0.0  # the part of a sub-module that a fused all-reduce does on its way: the sum and the norm
    reading: float = 0.0  # the extra compute of attention that reads partials, behind a delayed MLP
    errors: Errors = NO_ERRORS  # one standard deviation of compute and of messages, relative, and of contention

    def off_by(self, errors: Errors) -> "PassParts":
        """Return the parts whose times and contention are off by so many standard deviations."""
        compute = 1 + errors.compute * self.errors.compute
        message = (1 + self.errors.message) ** errors.message
        times = {name: compute * getattr(self, name) for name in COMPUTE}
        times |= {name: message * getattr(self, name) for name in MESSAGES}
        contention = self.contention + errors.contention * self.errors.contention
        return replace(self, **times, contention=min(0.99, max(0.0, contention)))


def pass_parts(serving: Serving, sync_tp_size: int | None = None) -> dict[str, PassParts]:
    """Return the parts of the phases ``prefill`` and ``decode`` (the mean step), with so many virtual ranks."""
    prompt, end = serving.prompt_len, serving.prompt_len + serving.output_len
    read = (end, end) if serving.engine.masked_prefill else (1, prompt)
    seen = (prompt + 1, max(prompt + 1, end - 1))  # step j of output_len - 1 sees the prompt and j new tokens
    launch_s = 1e-6 * serving.device.launch_us
    return {
        "prefill": _Pass(serving, prompt, read).parts(sync_tp_size, launch_s),
        "decode": _Pass(serving, 1, seen).parts(sync_tp_size, 0.0),  # one CUDA graph starts a decode step as a whole
    }


def product_seconds(
    device: DeviceSpec, rows: float, inner: float, outer: float, width: int, flop_s: float, *, read: int
) -> float:
    """Return the time of [rows, inner] times [inner, outer], without its start; ``width`` and ``read``: bytes of a
    number that is written, and of one of the input and of the weight."""
    size = read * inner * outer + rows * (read * inner + width * outer)
    seconds = _roofline(device, 2 * rows * inner * outer, size, flop_s)
    is_thin = THIN_ROWS[0] <= rows <= THIN_ROWS[1]
    return seconds * (1 + device.thin_share) + device.thin_us * 1e-6 if is_thin else seconds


def _roofline(device: DeviceSpec, flop: float, size: float, flop_s: float) -> float:
    """Return the longer of arithmetic and memory traffic. With a serial share s it is (a^(1/s) + b^(1/s))^s, a roofline
    with a round corner: where both take as long, neither hides the other."""
    shorter, longer = sorted((flop / flop_s, size / device.reached_bytes_s))
    share = device.serial_share
    return longer * (1 + (shorter / longer) ** (1 / share)) ** share if share and longer else longer


class _Pass:
    """One forward pass of ``batch_size`` times ``tokens`` rows, which see from ``seen[0]`` to ``seen[1]`` columns of
    the cache, each number as often."""

    def __init__(self, serving: Serving, tokens: int, seen: tuple[int, int]) -> None:
        self.serving, self.shape, self.device, self.engine = serving, serving.shape, serving.device, serving.engine
        self.batch, self.tokens, self.seen, self.is_fp8 = serving.batch_size, tokens, seen, serving.is_fp8
        self.rows, self.width = self.batch * tokens, WIDTHS[serving.dtype]
        self.stream = self.rows * self.shape.hidden * self.width  # bytes of the residual stream, and of a message
        self.query = self.shape.own_heads * self.shape.head_dim  # columns
        self.qkv = self.query + 2 * self.shape.own_kv_heads * self.shape.head_dim
        self.flop_s = self.device.reached_flop_s(serving.dtype)
        self.layer_flop_s = self.device.reached_flop_s(FP8_RATE) if self.is_fp8 else self.flop_s

    def product(self, inner: float, outer: float) -> float:
        """Return the time of all rows times a layer's weight [inner, outer], without its start."""
        read = 1 if self.is_fp8 else self.width
        return product_seconds(self.device, self.rows, inner, outer, self.width, self.layer_flop_s, read=read)

    def other(self, kernels: float, size: float) -> float:
        """Return the time of starting kernels, and of moving so many bytes."""
        return 1e-6 * kernels * self.device.kernel_us + size / self.device.reached_bytes_s

    def parts(self, sync_tp_size: int | None, launch_s: float) -> PassParts:
        """Return the parts of this pass; ``launch_s``: the host's time for each operation that it starts by itself."""
        serving, engine, stream = self.serving, self.engine, self.stream
        virtual, group = hosted_ranks(sync_tp_size, serving.ranks), group_size(sync_tp_size, serving.ranks)
        attention, mlp, reading = self.attention(1), self.mlp(1), self.reading(virtual)
        attention_apart, mlp_apart = self.attention(virtual), self.mlp(virtual) + reading
        host = launch_s * (engine.attention_launches + engine.mlp_launches)
        host_apart = host + (virtual - 1) * launch_s * engine.mlp_launches
        # where a layer takes the host longer than the device
        slowed = max(1.0, host / (attention + mlp))
        slowed_apart = max(1.0, host_apart / (attention_apart + mlp_apart))
        link = serving.fastest(stream)
        message, start, within, gather, contention_error = 0.0, 0.0, 0.0, 0.0, 0.0
        if link is not NO_LINK:
            # the host runs ahead of a slower device, and starts messages meanwhile
            ahead = max(0.0, attention + mlp - host) / 2
            start = max(0.0, launch_s * engine.message_launches - ahead)
            message = max(link.seconds(stream), start)
            is_measured = serving.links[0].calibrated
            contention_error = CALIBRATED_CONTENTION_ERROR if is_measured else OTHER_CONTENTION_ERROR
        across = message
        if link is not NO_LINK and group > 1:
            is_sliced = stream >= SLICED_BYTES
            size = stream // group if is_sliced else stream
            within = serving.fastest(stream, group).seconds(stream)
            across = max(serving.fastest(stream, between=group).seconds(size), start)
            gather = within if is_sliced else 0.0  # counts as a message of as many bytes, as in an emulated group
        return PassParts(
            layers=self.shape.layers,
            attention=slowed * attention,
            mlp=slowed * mlp,
            attention_apart=slowed_apart * attention_apart,
            mlp_apart=slowed_apart * mlp_apart,
            parallel=max(self.parallel(), host),
            rest=self.rest(),
            message=message,
            message_bytes=stream,
            message_start=start,
            vocabulary=self.vocabulary(),
            contention=max((link.contention for link in serving.links), default=0.0),
            within=within,
            across=across,
            gather=gather,
            norm=self.other(engine.norm_kernels, engine.stream_passes * stream),
            reading=slowed_apart * reading,
            errors=Errors(self.device.relative_error, link.error(stream), contention_error),
        )

    def attention(self, virtual: int) -> float:
        """Return the time of attention, where the sums of so many virtual ranks are computed apart."""
        engine, hidden = self.engine, self.shape.hidden
        products = self.product(hidden, self.qkv) + virtual * self.product(self.query / virtual, hidden)
        kernels = engine.attention_kernels + virtual - 1
        moved = engine.stream_passes * self.stream + engine.head_passes * self.rows * self.qkv * self.width
        if self.is_fp8:  # norms and activations write 8 bits by themselves, attention does not
            kernels += 1
            moved += self.rows * self.query * (self.width + 1)
        windows = Counter(self.shape.decoder.windows) if engine.windowed else Counter([None])
        scores = sum(layers * self.scores(window) for window, layers in windows.items()) / windows.total()
        return products + scores + self.other(kernels, moved)

    def scores(self, window: int | None) -> float:
        """Return the time of queries times keys, softmax, and times values, in a layer with this window."""
        engine, shape, (least, most) = self.engine, self.shape, self.seen
        width = self.width if engine.cache_bytes is None else engine.cache_bytes
        heads = shape.own_heads if engine.kv_per_query_head else shape.own_kv_heads
        seen = (least + most) / 2  # keys, on average
        if window is not None and window < most:
            count, inside = most - least + 1, max(0, window - least)
            seen = (inside * (least + window - 1) / 2 + (count - inside) * window) / count
        # a decode step reads the keys that it sees; a prompt reads each key once for many tokens
        columns = seen if self.tokens == 1 else most
        cache = 2 * self.batch * heads * columns * shape.head_dim * width
        pairs = self.batch * shape.own_heads * self.tokens * seen
        written = engine.score_passes * pairs * self.width if self.tokens > 1 else 0.0
        return _roofline(self.device, 4 * pairs * shape.head_dim, cache, self.flop_s) + self.other(0, written)

    def mlp(self, virtual: int) -> float:
        engine, hidden, inner = self.engine, self.shape.hidden, self.shape.own_inner
        products = virtual * self.product(hidden, 2 * inner / virtual) + self.product(inner, hidden)
        moved = engine.stream_passes * self.stream + engine.inner_passes * self.rows * inner * self.width
        return products + self.other(engine.mlp_kernels + virtual - 1, moved)

    def reading(self, virtual: int) -> float:
        """Return the extra time of a sub-module behind a delayed or dropped sync point: each virtual rank adds its
        partial to its input and to a message, and has norms and activations of its own."""
        engine = self.engine
        kernels = (virtual - 1) * (engine.norm_kernels + engine.activation_kernels) + 2 * virtual + (virtual > 1)
        return self.other(kernels, self.stream * (6 * virtual + (virtual - 1) * engine.stream_passes))

    def parallel(self) -> float:
        """Return the time of a layer of the parallel baseline."""
        seconds = self.attention(1) + self.mlp(1) - self.other(self.engine.parallel_saves, 0)
        if self.engine.parallel_fused:
            hidden, gates = self.shape.hidden, 2 * self.shape.own_inner
            apart = self.product(hidden, self.qkv) + self.product(hidden, gates)
            seconds += self.product(hidden, self.qkv + gates) - apart
        return seconds

    def rest(self) -> float:
        """Return the time outside of all layers."""
        engine, shape, width = self.engine, self.shape, self.width
        rows = self.rows if engine.all_logits else self.batch
        head = product_seconds(self.device, rows, shape.hidden, shape.own_vocab, width, self.flop_s, read=width)
        logits = engine.logit_passes * self.batch * shape.vocab * 4
        return head + self.other(engine.rest_kernels, 4 * self.stream + logits)

    def vocabulary(self) -> float:
        """Return the time of the embedding's all-reduce and of the gathering of sampled logits."""
        if self.shape.replicate_vocab:
            return 0.0
        # counts as a message of as many bytes, as in an emulated group
        gathered = self.batch * self.shape.own_vocab * self.shape.tp_size * self.width
        return sum(self.serving.fastest(size).seconds(size) for size in (self.stream, gathered))


class PassSeconds(NamedTuple):
    """The seconds of a pass or of a layer."""

    busy: float  # compute, and the collectives of the vocabulary
    waiting: float  # the part of the layers' all-reduces that no compute hides

    @property
    def total(self) -> float:
        return self.busy + self.waiting


def predict_pass(times: PassParts, layout: Layout) -> PassSeconds:
    """Return the times of a pass in a layout of as many layers."""
    layers = [predict_layer(times, layout.entering(i), mode) for i, mode in enumerate(layout.attention_sync)]
    busy, waiting = map(sum, zip(*layers, strict=True))
    return PassSeconds(times.rest + times.vocabulary + busy, waiting)


def predict_parallel(times: PassParts) -> PassSeconds:
    """Return the times of the parallel baseline: one blocking message a layer."""
    return PassSeconds(times.rest + times.vocabulary + times.layers * times.parallel, times.layers * times.message)


def predict_silent(times: PassParts) -> PassSeconds:
    """Return the times of the no-communication bound: the compute of the dense layout."""
    return PassSeconds(times.rest + times.layers * (times.attention + times.mlp), 0.0)


def predict_layer(times: PassParts, entering: str, mode: str) -> PassSeconds:
    """Return the times of a layer: its compute, its attention's message, and that of the MLP sync point entering it.
    The first layer has no entering one: blocking stands for the last layer's MLP message."""
    attention = times.attention_apart if mode in APART or entering in APART else times.attention
    attention += times.reading if entering in APART else 0.0
    mlp = times.mlp_apart if mode in APART else times.mlp
    waiting = sum(_waited(times, sync, cover) for sync, cover in ((entering, attention), (mode, mlp)))
    return PassSeconds(attention + mlp, waiting)


def _waited(times: PassParts, mode: str, cover: float) -> float:
    """Return the part of a sync point's messages that no compute hides; a late sum may run under ``cover``."""
    if mode == DROPPED:
        return times.within
    late, visible = (times.across, times.within + times.gather) if mode == DELAYED else (times.message, 0.0)
    if mode in HIDING:
        late -= min(cover, late - times.message_start, (1 - times.contention) * late)
    return visible + late
