"""Quantised checkpoints, which pass through a conversion unchanged. The checks only decide whether the output can be
served: every quantised projection has its scales, and no virtual rank splits a group."""

import dataclasses
import importlib.util
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ladderize.checkpoint.reading import FLOAT_DTYPES, Checkpoint, TensorInfo
from ladderize.errors import UserError
from ladderize.families.registry import complete_config
from ladderize.files.documents import read_json

QUANTISATION_KEYS = ("quantization_config", "compression_config")
MODELOPT_FILE = "hf_quant_config.json"  # older releases of modelopt write this instead of a key in config.json
LM_HEAD = "lm_head"
ROW_PARALLEL = ("o_proj", "down_proj")  # split by columns under tensor parallelism, the others by rows
KV_SCALE = re.compile(r"(model\.layers\.\d+\.self_attn)\.(?:[kv]_proj\.)?(?:[qkv]_(?:scale|zero_point)|kv_scale)")
ACTIVATION_SCALES = ("input_scale", "activation_scale", "output_scale")
STATIC_SCALES = (
    "the static scales of activations or of the KV cache were measured on the model before this conversion, whose"
    " activations are others; measure the converted model, and calibrate anew where it is worse"
)
QUANTISE_LAST = "convert and retrain the unquantised model, then quantise the result"


# method -> groups of a quantised projection's tensors, of each of which one must be there
QUANTISATION_METHODS: dict[str, tuple[tuple[str, ...], ...]] = {
    "compressed-tensors": (("weight", "weight_packed"), ("weight_scale",)),
    "fp8": (("weight",), ("weight_scale", "weight_scale_inv")),
    "modelopt": (("weight",), ("weight_scale",)),
    "awq": (("qweight",), ("qzeros",), ("scales",)),
    "gptq": (("qweight",), ("qzeros",), ("scales",)),
}
TRANSPOSED = ("awq", "gptq")  # their tensors are stored as [in, out]
PACKAGES = {"compressed-tensors": "compressed_tensors", "awq": "gptqmodel", "gptq": "gptqmodel"}  # for transformers


@dataclass(frozen=True)
class Quantisation:
    """The quantisation that a config states in its ``quantization_config``."""

    method: str
    stated: Mapping[str, Any]

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The groups of projections, in the method compressed-tensors."""
        groups = self.stated.get("config_groups")
        return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []

    @property
    def words(self) -> str:
        """The method and format in words, for example ``compressed-tensors int-quantized``."""
        nested = self.stated.get("quantization")
        options = {**(nested if isinstance(nested, dict) else {}), **self.stated}
        kind = options.get("format") or options.get("quant_algo") or ""
        bits = f"{options['bits']} bits" if "bits" in options else ""
        return " ".join(str(word)[:60] for word in (self.method, kind, bits) if word)

    @property
    def is_fp8(self) -> bool:
        """True if all products are of 8-bit floats, in weights and activations."""
        if self.method == "compressed-tensors":
            operands = [group.get(key) or {} for group in self.groups for key in ("weights", "input_activations")]
            return {(operand.get("type"), operand.get("num_bits")) for operand in operands} == {("float", 8)}
        return self.method == "fp8" or (self.method == "modelopt" and "FP8" in self.words)

    @property
    def problem_in_transformers(self) -> str | None:
        """The reason for which transformers does not run it here; None where it does."""
        if self.method == "modelopt" or (self.method == "fp8" and not self.stated.get("weight_block_size")):
            return f"transformers does not run weights quantised as {self.words}"
        package = PACKAGES.get(self.method)
        if package is not None and importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            return f"transformers needs {name} for weights quantised as {self.words} (pip install {name})"
        return None

    @property
    def not_run(self) -> str | None:
        """The reason for which no forward pass on a CPU can prove anything here; None where one can: transformers was
        only seen to run compressed-tensors without zero points."""
        weights = [group.get("weights") or {} for group in self.groups]
        with_zeros = "" if all(weight.get("symmetric", True) for weight in weights) else " with zero points"
        problem = self.problem_in_transformers
        if problem is None and (self.method != "compressed-tensors" or with_zeros):
            return f"transformers was not seen to run weights quantised as {self.words}{with_zeros} on a CPU"
        return problem


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without its quantisation, as of a model whose weights are floats."""
    return {key: value for key, value in config.items() if key not in QUANTISATION_KEYS}


def quantisation_of(config: Mapping[str, Any], folder: Path | None = None) -> Quantisation | None:
    """Return the quantisation that a config, or modelopt's own file in ``folder``, states; None of floats. An unknown
    method, and rotated or sparse weights, are a UserError."""
    stated = next((config[key] for key in QUANTISATION_KEYS if config.get(key)), None)
    if stated is None and folder is not None and (folder / MODELOPT_FILE).is_file():
        stated = {"quant_method": "modelopt", **read_json(folder / MODELOPT_FILE)}
    if stated is None:
        return None
    if not isinstance(stated, dict):
        _refuse(f"is {str(stated)[:60]!r}, but must be an object")
    is_bitsandbytes = stated.get("load_in_4bit") or stated.get("load_in_8bit")  # which need not say so
    method = stated.get("quant_method", "bitsandbytes" if is_bitsandbytes else None)
    if not isinstance(method, str) or method not in QUANTISATION_METHODS:
        name = "no quant_method" if method is None else f"the method {str(method)[:60]!r}"
        _refuse(f"names {name}, but a conversion knows {', '.join(QUANTISATION_METHODS)}")
    for key in ("sparsity_config", "transform_config"):
        value = stated.get(key) or {"format": "dense"}
        if not isinstance(value, dict) or value.get("format") != "dense":
            _refuse(f"has a {key}, which a conversion does not know")
    return Quantisation(method, stated)


def _refuse(problem: str) -> NoReturn:
    raise UserError(
        f"config.json: quantization_config {problem}; convert the unquantised model, and quantise the result"
    )


def plain_view(
    checkpoint: Checkpoint, quantisation: Quantisation | None, expected: Mapping[str, tuple[int, ...]]
) -> Checkpoint:
    """Return the checkpoint as if its projections held floats, for the checks that all checkpoints pass: a weight of
    the projection's ``expected`` shape, of which nothing can be read, stands for the tensors of each quantised one."""
    if quantisation is None:
        return checkpoint
    tensors = {name: info for name, info in checkpoint.tensors.items() if not KV_SCALE.fullmatch(name)}
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        modules[module][last] = info
    stored = next((info.dtype for name, info in tensors.items() if name.endswith("norm.weight")), "BF16")
    needed, quantised = QUANTISATION_METHODS[quantisation.method], 0
    for name, shape in expected.items():
        module = name.removesuffix(".weight")
        if not name.endswith(("_proj.weight", LM_HEAD + ".weight")):
            continue
        stored_tensors = modules[module]
        if f"{module}.bias" in expected:
            stored_tensors.pop("bias", None)
        weight = stored_tensors.get("weight")
        is_plain = weight is not None and len(stored_tensors) == 1 and weight.dtype in FLOAT_DTYPES
        if not stored_tensors or is_plain:
            continue
        quantised += 1
        missing = [names[0] for names in needed if stored_tensors.keys().isdisjoint(names)]
        if missing:
            raise UserError(
                f"{checkpoint.folder}: the tensor {module}.{missing[0]} is missing; a projection that is quantised with"
                f" {quantisation.method} needs it"
            )
        for last in stored_tensors:
            del tensors[f"{module}.{last}"]
        if weight is not None and weight.dtype != "U8":  # in a byte two numbers of 4 bits share their place
            shape = weight.shape
        tensors[name] = TensorInfo(name, next(iter(stored_tensors.values())).file, stored, shape, 0, 0)
    if not quantised:
        raise UserError(
            "config.json: quantization_config is there, but no projection is quantised; one of them is another model's"
        )
    return dataclasses.replace(checkpoint, config=plain_config(checkpoint.config), tensors=tensors)


def has_measured_scales(tensors: Iterable[str]) -> bool:
    """Return whether any of these names is a scale of activations or of the KV cache."""
    return any(name.rpartition(".")[2] in ACTIVATION_SCALES or KV_SCALE.fullmatch(name) for name in tensors)


def check_ranks(checkpoint: Checkpoint, quantisation: Quantisation, ranks: int) -> None:
    """Raise UserError unless each of ``ranks`` has whole groups, blocks and packed words of every projection, whose
    weights, scales and zero points all have its two dimensions, in units of their own."""
    kv_heads = complete_config(checkpoint.config)["num_key_value_heads"]
    for name, info in checkpoint.tensors.items():
        module = name.rpartition(".")[0]
        if not module.endswith("_proj") or len(info.shape) != 2:
            continue
        columns = module.endswith(ROW_PARALLEL)
        size = info.shape[columns != (quantisation.method in TRANSPOSED)]
        shares = min(ranks, kv_heads) if module.endswith(("k_proj", "v_proj")) else ranks
        if size > 1 and size % shares:
            raise UserError(
                f"{name} has {size} groups or words of {'columns' if columns else 'rows'}, which do not divide"
                f" among {shares} of the {ranks} virtual ranks; choose a smaller --sync-tp-size, or overlap instead"
            )
