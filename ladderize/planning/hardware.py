"""What a forward pass runs on: a device with its peaks and the few figures that were fitted to timings of it, and the
facts of the engine whose timings these were. Imports no torch."""

from dataclasses import dataclass

from ladderize.files.records import Record


@dataclass(frozen=True)
class EngineFacts(Record):
    """What an engine does beside the products, by which its times differ on one device.

    attention_kernels, mlp_kernels, rest_kernels: started in one sub-module, and outside of all layers (embedding, last
    norm, LM head, sampling). kv_per_query_head: the KV cache is read once for each query head, not for each KV head.
    whole_cache: a decode step reads the cache to its end, not to the current position. replicate_vocab: every rank
    holds the whole embedding and LM head, so that nothing of them is communicated.
    """

    name: str
    attention_kernels: int
    mlp_kernels: int
    rest_kernels: int
    kv_per_query_head: bool
    whole_cache: bool
    replicate_vocab: bool
    source: str


@dataclass(frozen=True)
class DeviceSpec(Record):
    """One rank's device.

    memory_bandwidth_gb_s (1e9 bytes), matmul_tflop_s (by dtype, without sparsity), memory_gib: of the data sheet, or
    measured. bandwidth_share, matmul_share: what of these peaks is reached. kernel_us: the cost of starting a kernel.
    thin_us: what a product of 2 to 256 rows takes more. relative_error: of a time of compute, one standard deviation.
    engine: whose timings the figures were fitted to. calibrated: on this device itself, by ``ladderize calibrate``.
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
