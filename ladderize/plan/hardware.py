"""The device that a forward pass runs on, and the facts of the engine whose code it runs. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.files.documents import read_section, read_yaml
from ladderize.files.records import Record
from ladderize.files.regular import names_a_file
from ladderize.ranks.device import DEVICE_TABLE
from ladderize.runtime.collectives.links import Interconnect, over_similar_wires

ENGINE_TABLE = Path(__file__).with_name("engines.yaml")
RATES = ("memory_bandwidth_gb_s", "matmul_tflop_s", "memory_gib", "bandwidth_share", "matmul_share")  # never 0
SHARES = ("bandwidth_share", "matmul_share", "relative_error", "serial_share", "thin_share")
# the figures that a device with ``like: h100-sxm`` need not give, since no data sheet has them
LIKE_ANOTHER = (
    *("bandwidth_share", "matmul_share", "kernel_us", "thin_us", "thin_share", "launch_us", "serial_share"),
    *("speeds", "calibrated"),
)


@dataclass(frozen=True)
class EngineFacts(Record):
    """The work of an engine beside the products, by which engines differ on one device."""

    name: str
    # kernels that it starts: for one sub-module, products included, and outside of all layers
    attention_kernels: int
    mlp_kernels: int
    rest_kernels: int
    # of these, the kernels that each virtual rank that is computed apart starts again
    norm_kernels: int
    activation_kernels: int
    parallel_saves: int  # kernels fewer in a layer of the parallel baseline
    parallel_fused: bool  # that baseline computes q, k, v, gate and up in one product
    # the number of passes over memory, reading or writing, by operations that are no products
    stream_passes: float  # a sub-module's [rows, hidden]
    head_passes: float  # q, k and v
    inner_passes: float  # of the MLP's inner width
    score_passes: float  # attention scores of a prompt; 0: they never leave the chip
    logit_passes: float  # float32 logits of the tokens that are sampled
    kv_per_query_head: bool  # the KV cache is read once for each query head, not for each KV head
    masked_prefill: bool  # a prompt's attention computes every score of the whole cache, not the prompt's causal half
    windowed: bool  # attention reads and multiplies a window's keys only; else all of them, under a mask
    all_logits: bool  # a prefill computes the logits of every token of a prompt, not only of the last
    replicate_vocab: bool  # every rank holds the whole embedding and LM head: nothing of them is communicated
    source: str
    # by the kind of the wires: the kernels of all-reduces that it chooses among, and the most ranks that each takes
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)
    # operations, views included, that the host starts one by one in a prefill; 0 where it does not matter (CPUs), or a
    # CUDA graph starts them all
    attention_launches: int = 0
    mlp_launches: int = 0
    message_launches: int = 0
    relative_error: float = 0.0  # besides the device's, where no timing of the engine was compared: one deviation


@dataclass(frozen=True)
class DeviceSpec(Record):
    """The device of one rank: its peaks, and the few figures that were fitted to timings of it."""

    name: str
    # peaks, of the data sheet or measured: 1e9 bytes/s; 1e12 operations/s by dtype, without sparsity
    memory_bandwidth_gb_s: float
    matmul_tflop_s: dict[str, float]
    memory_gib: float | None
    # the share of these peaks that is reached
    bandwidth_share: float
    matmul_share: float
    kernel_us: float  # the cost of starting a kernel
    thin_us: float  # the extra time of a product of 2 to 256 rows
    relative_error: float  # of a time of compute, one standard deviation
    speeds: str  # the engine whose timings the figures were fitted to
    calibrated: bool  # on this device itself, by ``ladderize calibrate``
    source: str
    # of the host, for each operation that it starts one by one
    launch_us: float = 0.0
    # the degree to which a product's arithmetic and memory traffic add up: 0, the longer of both (a GPU), to 1, their
    # sum; about a half on a CPU's core
    serial_share: float = 0.0
    # the extra time of a product of 2 to 256 rows, as a share of its time
    thin_share: float = 0.0
    # what joins the cards of a machine: the kind of the wires (links.csv), and their bandwidth for one card in one
    # direction; None where they are unknown
    medium: str | None = None
    wire_gb_s: float | None = None
    multimem: bool = False  # its NVLink's switch sums (NVLS)
    machine: int = 8  # cards of a machine, at most
    # MiB of a message by ranks: the size up to which vLLM fuses its all-reduce with the norm behind it, on this kind of
    # card; and the size from which on its own all-reduce was measured to be faster than that
    fused_norm_mib: dict[int, float] = field(default_factory=dict)
    faster_unfused_mib: dict[int, float] = field(default_factory=dict)

    def check(self, where: str) -> None:
        """Raise UserError, which begins with ``where``, for figures out of range or an unknown engine."""
        if not self.matmul_tflop_s:
            raise UserError(f"{where}: matmul_tflop_s names no dtype; give for example bfloat16: 989")
        for name, value in vars(self).items():
            least, most = (1e-4 if name in RATES else 0), (1 if name in SHARES else 1e6)
            for figure in value.values() if isinstance(value, dict) else [value]:
                if isinstance(figure, float) and not least <= figure <= most:
                    raise UserError(f"{where}: {name} is {figure:g}, but must be between {least:g} and {most:g}")
        if self.speeds not in known_engines():
            raise UserError(f"{where}: speeds {self.speeds!r} is not one of {', '.join(known_engines())}; name one")

    @property
    def reached_bytes_s(self) -> float:
        """Bytes/s of memory that are reached."""
        return self.memory_bandwidth_gb_s * 1e9 * self.bandwidth_share

    def reached_flop_s(self, dtype: str) -> float:
        """Return the operations/s that products of ``dtype`` reach. Raises UserError where the peak is not known."""
        if dtype not in self.matmul_tflop_s:
            raise UserError(
                f"device {self.name} has no matmul_tflop_s for {dtype}, but for {', '.join(self.matmul_tflop_s)};"
                " choose another --dtype, or add the figure to the device's file"
            )
        return self.matmul_tflop_s[dtype] * 1e12 * self.matmul_share


@cache
def known_devices() -> dict[str, DeviceSpec]:
    devices: dict[str, DeviceSpec] = {}
    for name, row in read_yaml(DEVICE_TABLE).items():
        devices[name] = _device({"name": name, **row}, devices, f"{DEVICE_TABLE}: {name}")
    return devices


def _device(row: Mapping[str, Any], devices: Mapping[str, DeviceSpec], where: str) -> DeviceSpec:
    """Return the device of a row, completed by figures of the one that ``like`` names."""
    if "like" in row:
        name = str(row["like"])
        if name not in devices:
            raise UserError(f"{where}: like {name} is not one of {', '.join(devices)}; name one of them")
        row = {**{key: getattr(devices[name], key) for key in LIKE_ANOTHER}, **row}
    return DeviceSpec.from_dict(row, where)


def read_device(text: str) -> DeviceSpec:
    """Return a device of devices.yaml by its name, or the ``device`` of a file, of `ladderize calibrate` or your
    own."""
    devices = known_devices()
    if text in devices:
        return devices[text]
    if not names_a_file(text):
        raise UserError(
            f"--hardware {text} is neither one of {', '.join(devices)} nor a file; name one of them, or write its data"
            " sheet's figures into a file as examples/hardware/my-card.yaml"
        )
    where = f"{text}: device"
    device = _device(read_section(Path(text), "device", "--hardware"), devices, where)
    device.check(where)
    return device


@cache
def known_engines() -> dict[str, EngineFacts]:
    rows = read_yaml(ENGINE_TABLE)
    return {name: EngineFacts.from_dict({"name": name, **row}, f"{ENGINE_TABLE}: {name}") for name, row in rows.items()}


def own_links(device: DeviceSpec, engine: EngineFacts) -> tuple[Interconnect, ...]:
    """Return the links over the device's own wires, one for each kernel that the engine has and that was timed."""
    if device.medium is None or device.wire_gb_s is None:
        return ()
    links = []
    for kernel, most_ranks in engine.collectives.get(device.medium, {}).items():
        link = over_similar_wires(kernel, device.medium, device.wire_gb_s)
        if link is not None and (device.multimem or kernel != "multimem"):
            links.append(replace(link, most_ranks=most_ranks))
    return tuple(links)
