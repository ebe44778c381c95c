"""Several virtual ranks of a dropped layout in one process: each computes its slices of o_proj, gate and up alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.linear import UnquantizedLinearMethod


def unwrapped(projection: nn.Module) -> Any:
    """vLLM's projection, which its LoRA may have wrapped."""
    return projection.base_layer if isinstance(projection, BaseLayerWithLoRA) else projection


class KeptWeight(UnquantizedLinearMethod):
    """Leaves a weight as a plain tensor that can be sliced. On CPUs vLLM packs it for whole products otherwise."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        weight: Any = layer.weight
        layer.weight = nn.Parameter(weight.data, requires_grad=False)


@dataclass(frozen=True)
class VirtualRanks:
    """``count`` of them; the k-th owns the k-th contiguous part of the process's heads and intermediate rows."""

    count: int

    def row_parallel(self, projection: nn.Module, inputs: Tensor) -> Tensor:
        """Each virtual rank's product of its part of ``inputs`` [tokens, in], without bias: [count, tokens, out]."""
        parts = inputs.unflatten(1, (self.count, -1)).transpose(0, 1)
        weight = unwrapped(projection).weight.unflatten(1, (self.count, -1)).permute(1, 2, 0)
        output = torch.bmm(parts, weight)
        if isinstance(projection, BaseLayerWithLoRA):
            alone = torch.zeros_like(inputs).expand(self.count, *inputs.shape).unflatten(2, (self.count, -1)).clone()
            for k in range(self.count):
                alone[k, :, k] = parts[k]
                output[k] += lora_product(projection, alone[k].flatten(1), output.shape[2])
        return output

    def column_parallel(self, projection: nn.Module, inputs: Tensor) -> Tensor:
        """Each virtual rank's gate and up, side by side, of its own ``inputs`` [count, tokens, hidden]:
        [count, tokens, 2 * intermediate / count]. projection: vLLM's merged gate_up_proj."""
        base = unwrapped(projection)
        parts = []
        biases = (None, None) if base.bias is None else base.bias.chunk(2)
        for weight, bias in zip(base.weight.chunk(2), biases, strict=True):
            part = torch.bmm(inputs, weight.unflatten(0, (self.count, -1)).transpose(1, 2))
            parts.append(part if bias is None else part + bias.view(self.count, 1, -1))
        output = torch.cat(parts, -1)
        if isinstance(projection, BaseLayerWithLoRA):
            for k in range(self.count):
                whole = lora_product(projection, inputs[k], base.weight.shape[0])
                output[k] += whole.unflatten(1, (2, self.count, -1))[:, :, k].flatten(1)
        return output


def lora_product(projection: BaseLayerWithLoRA, inputs: Tensor, size: int) -> Tensor:
    """What the adapters of a batch's requests add to a product of ``inputs`` [tokens, in]: [tokens, size]."""
    output = torch.zeros(inputs.shape[0], size, dtype=inputs.dtype, device=inputs.device)
    projection.punica_wrapper.add_lora_linear(
        output, inputs, projection.lora_a_stacked, projection.lora_b_stacked, 1.0, projection.output_slices
    )
    return output
