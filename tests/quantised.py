"""Tiny quantised checkpoints, made of a plain one: what the tools of each format write, and what it computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers import save_llama

Stored = dict[str, Tensor]
SIZES = {"hidden_size": 64, "intermediate_size": 128}  # widths that groups of 8 and blocks of 16 divide four times


def int8(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": torch.round(weight / scale).to(torch.int8), "weight_scale": scale}


def fp8(weight: Tensor, per_channel: bool = True) -> Stored:
    most = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().amax().reshape(1)
    scale = most / 448
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def fp8_static(weight: Tensor) -> Stored:
    return {**fp8(weight, False), "input_scale": torch.full((1,), 0.02)}


def fp8_blocks(weight: Tensor) -> Stored:
    blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
    scale = blocks.abs().amax((1, 3)) / 448
    wide = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return {"weight": (weight / wide).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def modelopt(weight: Tensor) -> Stored:
    stored = fp8(weight, False)
    return {**stored, "weight_scale": stored["weight_scale"].reshape(()), "input_scale": torch.tensor(0.02)}


def packed(values: Tensor) -> Tensor:
    """Eight numbers from 0 to 15 of each row, [rows, columns], as one word, the first in the lowest bits."""
    parts = values.long().unflatten(1, (-1, 8))
    words = (parts << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def grouped(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers from 0 to 15, of which 8 is zero [out, in], and a scale for each group of 8 [out, in / 8]."""
    groups = weight.unflatten(1, (-1, 8))
    scale = groups.abs().amax(2) / 7
    return (torch.round(groups / scale[..., None]) + 8).flatten(1), scale


def pack_quantised(weight: Tensor) -> Stored:
    values, scale = grouped(weight)
    return {"weight_packed": packed(values), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def pack_asymmetric(weight: Tensor) -> Stored:
    stored = pack_quantised(weight)
    zeros = packed(torch.full_like(stored["weight_scale"], 8).T).T.contiguous()
    return {**stored, "weight_zero_point": zeros}


def awq(weight: Tensor) -> Stored:
    values, scale = grouped(weight)
    zeros = packed(torch.full_like(scale, 8).T)
    return {"qweight": packed(values.T), "qzeros": zeros, "scales": scale.T.contiguous()}


def gptq(weight: Tensor) -> Stored:
    values, scale = grouped(weight)
    zeros = packed(torch.full_like(scale, 7).T)
    order = (torch.arange(weight.shape[1]) // 8).to(torch.int32)
    return {
        "qweight": packed(values).T.contiguous(), "qzeros": zeros, "scales": scale.T.contiguous(), "g_idx": order,
        "bias": torch.zeros(weight.shape[0]),
    }  # fmt: skip


def compressed(kind: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**common, "format": kind, "config_groups": {"group_0": group}, **more}


TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
FLOAT_TOKENS = {**TOKENS, "type": "float"}
FIXED = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CHANNEL = {"num_bits": 8, "type": "int", "strategy": "channel"}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
# name -> (how a weight is stored, quantization_config)
FORMATS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "int8": (int8, compressed("int-quantized", CHANNEL, TOKENS)),
    "FP8 dynamic": (fp8, compressed("float-quantized", {**CHANNEL, "type": "float"}, FLOAT_TOKENS)),
    "FP8 static": (fp8_static, compressed("float-quantized", FIXED, FIXED, kv_cache_scheme=FIXED)),
    "W4A16": (pack_quantised, compressed("pack-quantized", GROUPS, None)),
    "W4A16 asymmetric": (pack_asymmetric, compressed("pack-quantized", {**GROUPS, "symmetric": False}, None)),
    "FP8 blocks": (fp8_blocks, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}),
    "FP8 scalars": (fp8_static, {"quant_method": "fp8", "activation_scheme": "static"}),
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "AWQ": (awq, {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}),
    "GPTQ": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}),
}


def save_quantised(folder: Path, name: str, *, seed: int = 0, **extra: object) -> Path:
    """A random Llama in one of FORMATS. Its LM head stays as it is."""
    store, config = FORMATS[name]
    save_llama(folder, seed=seed, **{**SIZES, **extra})
    tensors: Stored = {}
    for key, value in load_file(folder / "model.safetensors").items():
        module, _, last = key.rpartition(".")
        if module.endswith("_proj") and last == "weight":
            tensors |= {f"{module}.{part}": tensor for part, tensor in store(value).items()}
        else:
            tensors[key] = value
        if "kv_cache_scheme" in config and module.endswith("k_proj"):
            attention = module.rpartition(".")[0]
            tensors |= {f"{attention}.{part}_scale": torch.full((1,), 0.1) for part in "kv"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}, indent=2))
    return folder


def dequantised(folder: Path, name: str) -> dict[str, Tensor]:
    """The floats that int8, FP8 dynamic or W4A16 weights stand for."""
    tensors: Stored = load_file(folder / "model.safetensors")
    plain = {key: value for key, value in tensors.items() if not key.split(".")[-1].startswith("weight_")}
    for key, scale in tensors.items():
        if not key.endswith("_scale"):
            continue
        module = key.removesuffix("_scale")
        if name == "W4A16":
            words = tensors[f"{module}_packed"].long() & 0xFFFFFFFF
            values = (words[..., None] >> (4 * torch.arange(8))).bitwise_and(15).flatten(1) - 8
            plain[module] = (values.unflatten(1, (-1, 8)) * scale[..., None]).flatten(1)
        else:
            plain[module] = tensors[module].float() * scale
    return plain
