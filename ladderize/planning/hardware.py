"""What a forward pass runs on: a device with its peaks and the few figures that were fitted to timings of it, and the
facts of the engine whose timings these were. Imports no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladderize.errors import UserError
from ladderize.files.documents import read_section
from ladderize.files.parsing import read_yaml
from ladderize.files.records import Record
from ladderize.files.regular import names_a_file

DEVICE_TABLE = Path(__file__).parent / "devices.yaml"
ENGINE_TABLE = Path(__file__).parent / "engines.yaml"
# what a device that says ``like: h100-sxm`` need not give: no data sheet has it
LIKE_ANOTHER = (
    "bandwidth_share",
    "matmul_share",
    "kernel_us",
    "thin_us",
    "thin_share",
    "launch_us",
    "serial_share",
    "engine",
    "calibrated",
)


@dataclass(frozen=True)
class EngineFacts(Record):
    """What an engine does beside the products, by which its times differ on one device.

    Counts of kernels that it starts: attention_kernels, mlp_kernels (one sub-module, products included), rest_kernels
    (outside of all layers: embedding, last norm, LM head, sampling); norm_kernels, activation_kernels (of these, what a
    virtual rank that is computed apart starts once more); parallel_saves (fewer in a layer of the parallel baseline).
    parallel_fused: that baseline computes q, k, v, gate and up in one product.

    How often memory is passed over, read or written, by what is no product: stream_passes (a sub-module's [rows,
    hidden]), head_passes (q, k and v), inner_passes (of the MLP's inner width), score_passes (attention scores of a
    prompt; 0: they never leave the chip), logit_passes (float32 logits of the tokens that are sampled).

    kv_per_query_head: the KV cache is read once for each query head, not for each KV head. whole_cache: a decode step
    reads the cache to its end, not to the current position. masked_prefill: a prompt's attention computes every score
    of the whole cache and masks some, instead of the causal half of the prompt's. all_logits: a prefill computes the
    logits of every token of a prompt, not only of the last. replicate_vocab: every rank holds the whole embedding and
    LM head, so that nothing of them is communicated. cache_bytes: of a number in the KV cache; None: as the weights.

    attention_launches, mlp_launches, message_launches: operations, views included, that the host starts one by one in a
    prefill; 0 where it does not matter (CPUs), or a CUDA graph starts them all.
    """

    name: str
    attention_kernels: int
    mlp_kernels: int
    rest_kernels: int
    norm_kernels: int
    activation_kernels: int
    parallel_saves: int
    parallel_fused: bool
    stream_passes: float
    head_passes: float
    inner_passes: float
    score_passes: float
    logit_passes: float
    kv_per_query_head: bool
    whole_cache: bool
    masked_prefill: bool
    all_logits: bool
    replicate_vocab: bool
    source: str
    cache_bytes: int | None = None
    attention_launches: int = 0
    mlp_launches: int = 0
    message_launches: int = 0


@dataclass(frozen=True)
class DeviceSpec(Record):
    """One rank's device.

    memory_bandwidth_gb_s (1e9 bytes), matmul_tflop_s (by dtype, without sparsity), memory_gib: of the data sheet, or
    measured. bandwidth_share, matmul_share: what of these peaks is reached. kernel_us: the cost of starting a kernel.
    thin_us, thin_share: what a product of 2 to 256 rows takes more: this long, and this much of its time. launch_us: of
    the host, for each operation that it starts one by one. serial_share: of a product's arithmetic and memory traffic,
    what of the shorter does not run beside the longer: 0 on a GPU, about a half on a CPU's core. relative_error: of a
    time of compute, one standard deviation. engine: whose timings the figures were fitted to. calibrated: on this
    device itself, by ``ladderize calibrate``. nvlink_gb_s: of its NVLink, to all others, in one direction; 0 where it
    has none, None where it is unknown. uncertain: names of figures that were fitted and are uncertain by more than
    their size.
    """

    name: str
    memory_bandwidth_gb_s: float
    matmul_tflop_s: dict[str, float]
    memory_gib: float | None
    bandwidth_share: float
    matmul_share: float
    kernel_us: float
    thin_us: float
    relative_error: float
    engine: str
    calibrated: bool
    source: str
    launch_us: float = 0.0
    serial_share: float = 0.0
    thin_share: float = 0.0
    nvlink_gb_s: float | None = None
    uncertain: list[str] = field(default_factory=list)

    def check(self, where: str) -> None:
        """Raise UserError, which begins with ``where``, for figures that no device has."""
        bounds = {
            "memory_bandwidth_gb_s": (self.memory_bandwidth_gb_s, 1e-2, 1e6),
            "memory_gib": (1.0 if self.memory_gib is None else self.memory_gib, 1e-2, 1e6),
            "bandwidth_share": (self.bandwidth_share, 1e-3, 1.0),
            "matmul_share": (self.matmul_share, 1e-3, 1.0),
            "kernel_us": (self.kernel_us, 0.0, 1e5),
            "thin_us": (self.thin_us, 0.0, 1e5),
            "launch_us": (self.launch_us, 0.0, 1e5),
            "thin_share": (self.thin_share, 0.0, 1.0),
            "serial_share": (self.serial_share, 0.0, 1.0),
            "relative_error": (self.relative_error, 0.0, 1.0),
            "nvlink_gb_s": (self.nvlink_gb_s or 0.0, 0.0, 1e6),
            **{f"matmul_tflop_s.{dtype}": (rate, 1e-4, 1e6) for dtype, rate in self.matmul_tflop_s.items()},
        }
        for key, (value, least, most) in bounds.items():
            if not (math.isfinite(value) and least <= value <= most):
                raise UserError(f"{where}: {key} is {value:g}, but must be between {least:g} and {most:g}; correct it")
        if not self.matmul_tflop_s:
            raise UserError(f"{where}: matmul_tflop_s names no dtype; give for example bfloat16: 989")
        if self.engine not in known_engines():
            raise UserError(f"{where}: engine {self.engine!r} is not one of {', '.join(known_engines())}; name one")

    def peak_flop_s(self, dtype: str) -> float:
        """Of products of ``dtype``; raises UserError where the device has no figure for it."""
        if dtype not in self.matmul_tflop_s:
            raise UserError(
                f"device {self.name} has no matmul_tflop_s for {dtype}, but for {', '.join(self.matmul_tflop_s)};"
                " choose another --dtype, or add the figure to the device's file"
            )
        return self.matmul_tflop_s[dtype] * 1e12


def known_devices() -> dict[str, DeviceSpec]:
    """The rows of devices.yaml, by name."""
    found: dict[str, DeviceSpec] = {}
    for name, row in read_yaml(DEVICE_TABLE).items():
        where = f"{DEVICE_TABLE}: {name}"
        found[name] = DeviceSpec.from_dict({"name": name, **_completed(row, found, where)}, where)
    return found


def _completed(row: Mapping[str, Any], devices: Mapping[str, DeviceSpec], where: str) -> dict[str, Any]:
    """With the figures of the device that ``like`` names, as far as they may be another's and are not given."""
    if "like" not in row:
        return {**row}
    name = str(row["like"])
    if name not in devices:
        raise UserError(f"{where}: like {name} is not one of {', '.join(devices)}; name one of them")
    return {**{key: getattr(devices[name], key) for key in LIKE_ANOTHER}, **row}


def known_engines() -> dict[str, EngineFacts]:
    """The rows of engines.yaml, by name."""
    rows = read_yaml(ENGINE_TABLE)
    return {name: EngineFacts.from_dict({"name": name, **row}, f"{ENGINE_TABLE}: {name}") for name, row in rows.items()}


def read_device(text: str, *, option: str = "--hardware") -> DeviceSpec:
    """A row of devices.yaml by its name, or the ``device`` of a file: of ``ladderize calibrate``, or written by
    hand."""
    devices = known_devices()
    if text in devices:
        return devices[text]
    if not names_a_file(text):
        raise UserError(f"{option} {text} is neither one of {', '.join(devices)} nor a file; name one of them")
    where = f"{text}: device"
    section = read_section(Path(text), "device", option)
    device = DeviceSpec.from_dict(_completed(section, devices, where), where)
    device.check(where)
    return device
