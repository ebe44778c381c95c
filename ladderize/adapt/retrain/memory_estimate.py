"""How much memory a training run takes on each device, counted before anything is loaded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.checkpoint.llama import head_dim, kv_head_count, parameter_count
from ladderize.layout import DROPPED, Layout

FP32 = 4
MOMENT_BYTES = 2 * FP32  # Adam's two moments
OTHER_BYTES = 500_000_000  # of the interpreter and the libraries, roughly


@dataclass(frozen=True)
class Demand:
    """What decides the memory. trained: numbers that change. adapters: which come on top of the model's own. compute:
    bytes of what is computed in. compared: layers whose sub-modules are compared with the teacher's. shards: ranks that
    share the parameters (FSDP2), else 1. tp_size: ranks that share the model and its compute. rows, seq_len: of a
    micro-batch."""

    config: Mapping[str, Any]
    layout: Layout
    trained: int
    compute: int
    rows: int
    seq_len: int
    adapters: bool = False
    teacher: bool = False
    compared: int = 0
    shared_teacher: bool = False  # frozen parameters that student and teacher have in common are held once
    gradient_checkpointing: bool = False
    shards: int = 1
    tp_size: int = 1

    def parts(self) -> dict[str, int]:
        """Bytes on one device, by what takes them."""
        parameters = parameter_count(self.config)
        frozen = parameters if self.adapters else parameters - self.trained
        own_teacher = parameters - (frozen if self.shared_teacher and self.shards == 1 else 0)
        held = self.shards * self.tp_size  # norms, and KV heads beyond their number, are on every rank: left out
        return {
            "parameters": (self.trained * FP32 + frozen * self.compute) // held,
            "gradients": self.trained * FP32 // held,
            # bf16 copies of fp32 weights last during a pass
            "bf16 copies": self.trained * self.compute // held if self.compute < FP32 and self.shards == 1 else 0,
            "optimizer": self.trained * MOMENT_BYTES // held,
            "teacher": own_teacher * self.compute // held if self.teacher else 0,
            "gathered": self.gathered(parameters, own_teacher if self.teacher else 0),
            "activations": self.activations(),
            "logits": self.logits(),
            "compared outputs": self.compared_outputs(),
            "other": OTHER_BYTES,
        }

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def gathered(self, parameters: int, teacher: int) -> int:
        """What FSDP2 puts together for a pass beside ``tp_size``: all of a rank's slices at once, as they are computed
        in, the gradients of the trained ones, and these once more in fp32 to be summed. Otherwise a layer at a time,
        which is left out."""
        if self.shards == 1 or self.tp_size == 1:
            return 0
        numbers = (parameters + teacher) * self.compute + self.trained * (self.compute + FP32)
        return numbers // self.tp_size

    def activations(self) -> int:
        """What is kept for the backward pass: counted from the products of a layer, an estimate."""
        tokens = self.rows * self.seq_len
        layers = [self._layer_numbers(layer) for layer in range(self.layout.num_layers)]
        if self.gradient_checkpointing:
            return tokens * (int(self.config["hidden_size"]) * FP32 * len(layers) + max(layers) * self._width)
        return tokens * sum(layers) * self._width

    @property
    def _width(self) -> int:
        # products are narrow, norms and (where it enters as fp32) the stream are not
        return FP32 if self.compute == FP32 else 3

    def _layer_numbers(self, layer: int) -> int:
        """Numbers kept per token: both norms' inputs and outputs, q, k, v, the heads, and four of the MLP's width."""
        hidden, heads = int(self.config["hidden_size"]), int(self.config["num_attention_heads"])
        ranks = (self.layout.sync_tp_size or 1) // self.tp_size if self.layout.attention_sync[layer] == DROPPED else 1
        own_kv_heads = max(1, kv_head_count(self.config) // self.tp_size)
        attention = (3 * heads // self.tp_size + 4 * own_kv_heads) * head_dim(self.config)
        # a dropped layer has a partial stream, and its norm, for each virtual rank
        return 3 * hidden + attention + 4 * hidden * ranks + 4 * int(self.config["intermediate_size"]) // self.tp_size

    def compared_outputs(self) -> int:
        """What attention and MLP of student and teacher add, and fp32 copies of one of them with their difference."""
        numbers = self.rows * self.seq_len * int(self.config["hidden_size"])
        return numbers * (4 * self.compared * self.compute + 3 * FP32) if self.compared else 0

    def logits(self) -> int:
        """Logits, their gradient, the teacher's, and fp32 copies of a part of them."""
        numbers = self.rows * self.seq_len * -(-int(self.config["vocab_size"]) // self.tp_size)
        kept, copies = (3, 5) if self.teacher else (2, 3)
        return numbers * self.compute * kept + min(numbers, LOGITS_AT_ONCE) * FP32 * copies


def what_would_fit(
    demand: Demand, available: int, *, lora_trained: int | None, on_gpu: bool, tp_sizes: Sequence[int] = ()
) -> str:
    """Advice for a demand that does not fit: the first of the usual remedies, or of them together, that does.

    tp_sizes: into how many ranks the model may be split.
    """
    lean, words = replace(demand, rows=1, gradient_checkpointing=True), "--gradient-checkpointing"
    remedies: list[tuple[str, Demand]] = []
    if demand.rows > 1:
        remedies.append(("--micro-batch-size 1", replace(demand, rows=1)))
    if not demand.gradient_checkpointing:
        remedies.append((words + (" with --micro-batch-size 1" if demand.rows > 1 else ""), lean))
    words = f"with {words} and --micro-batch-size 1"
    if lora_trained is not None:
        remedies.append((f"--method lora {words}", replace(lean, trained=lora_trained, adapters=True)))
    for ranks in (2, 4, 8, 16, 32, 64) if on_gpu else ():  # processes on a CPU share its memory
        if ranks > demand.tp_size and ranks in tp_sizes:
            remedies.append((f"--tp-size {ranks}, on as many GPUs, {words}", replace(lean, tp_size=ranks)))
        if ranks > demand.shards and demand.tp_size == 1:
            launch = f"{ranks} GPUs (accelerate launch --use_fsdp --fsdp_version 2 --num_processes {ranks})"
            remedies.append((f"{launch} {words}", replace(lean, shards=ranks)))
    for words, remedy in remedies:
        if remedy.total <= available:
            return f"{words} would fit"
    if demand.seq_len > 512:
        return "a shorter --seq-len, or devices with more memory, would be needed"
    return "devices with more memory would be needed"
