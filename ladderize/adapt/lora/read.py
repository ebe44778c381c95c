"""Reading an adapter folder without loading it. Adapters come from strangers too: nothing is believed, nothing
unpickled."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ladderize.adapt.lora.config import (
    ADAPTATION,
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    PEFT_PREFIX,
    AdapterBase,
    adapted_layers,
)
from ladderize.checkpoint.config import expected_tensors
from ladderize.checkpoint.quantised import takes_for_ever
from ladderize.checkpoint.reading import FLOAT_DTYPES, PICKLES, TensorInfo, check_entries
from ladderize.checkpoint.tensors import locate_tensors
from ladderize.errors import UserError
from ladderize.files.documents import read_document, read_json
from ladderize.files.records import Record

KEY = re.compile(re.escape(PEFT_PREFIX) + r"(model\.layers\.\d+\.\w+\.\w+)\.lora_([AB])\.weight")
# What a config may say of plain LoRA, whose product is W + scaling * B @ A. Any other key has to be off: PEFT grows new
# variants.
KNOWN = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
    *("megatron_core", "qalora_group_size", "eva_config"),
}
PATTERNS = ("target_modules", "exclude_modules", "layers_pattern")  # each one name or pattern, or a list of them
OFF: tuple[Any, ...] = (None, False, "none", "", [], {})
# The others, such as pissa, change the base's weights too when they are loaded.
INITIALISATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
FLOAT32_MAX = float(np.finfo(np.float32).max)  # weights are merged in float32

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class LoraNumbers(Record):
    """What a config says of ranks and scalings; a pattern is of the end of a module's name."""

    r: int
    lora_alpha: float
    use_rslora: bool | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter on disk. modules: A [rank, in] and B [out, rank] by the name of what they adapt, such as
    ``model.layers.0.self_attn.q_proj``. document, base: adaptation.json, and what it says that the adapter belongs to;
    None where ladderize did not train it."""

    folder: Path
    config: dict[str, Any]
    numbers: LoraNumbers
    modules: dict[str, tuple[TensorInfo, TensorInfo]]
    document: dict[str, Any] | None = None
    base: AdapterBase | None = None

    @property
    def layers(self) -> list[int]:
        """The layers with anything adapted, sorted."""
        return adapted_layers(self.modules)

    def rank(self, module: str) -> int:
        return _of_module(module, self.numbers.rank_pattern, self.numbers.r)

    def scaling(self, module: str) -> float:
        """What B @ A is multiplied by."""
        rank = self.rank(module)
        alpha = _of_module(module, self.numbers.alpha_pattern, self.numbers.lora_alpha)
        return alpha / (math.sqrt(rank) if self.numbers.use_rslora else rank)


def _of_module(module: str, patterns: Mapping[str, Number] | None, default: Number) -> Number:
    """As PEFT looks it up: the first pattern that matches the end of the module's name."""
    matching = (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(matching, default)


def read_adapter(folder: Path) -> Adapter:
    """Read config, tensor headers and adaptation.json; raises UserError for what is no plain LoRA of a Llama's
    projections."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the folder of a PEFT adapter")
    check_entries(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder} holds no {ADAPTER_CONFIG}; it is not a PEFT adapter")
    config = read_json(folder / ADAPTER_CONFIG)
    numbers = check_adapter_config(config, folder / ADAPTER_CONFIG)
    if not (folder / ADAPTER_TENSORS).is_file():
        pickles = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(PICKLES))
        if pickles:
            raise UserError(
                f"{folder} has pickle weights only ({pickles[0]}), which can run code when opened and is not"
                " read here; save them again with PEFT's save_pretrained(safe_serialization=True)"
            )
        raise UserError(f"{folder} holds no {ADAPTER_TENSORS}; the adapter is incomplete")
    document = base = None
    if (folder / ADAPTATION).is_file():
        document = read_document(folder / ADAPTATION, ADAPTATION)
        base = read_base(document, folder / ADAPTATION)
    modules = pair_up(locate_tensors(folder / ADAPTER_TENSORS), folder / ADAPTER_TENSORS)
    return Adapter(folder, config, numbers, modules, document, base)


def check_adapter_config(config: Mapping[str, Any], path: Path) -> LoraNumbers:
    """Its ranks and scalings; raises UserError unless this is plain LoRA, which merges into W + scaling * B @ A."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{path}: peft_type is {kind!r}; only LORA can be merged here")
    on = [key for key in config if key not in KNOWN and config[key] not in OFF and key != "runtime_config"]
    if on:
        raise UserError(
            f"{path}: {on[0]} is {_short(config[on[0]])}, so this is not plain LoRA; merge it with PEFT's"
            " merge_and_unload"
        )
    if config.get("init_lora_weights") not in INITIALISATIONS:
        raise UserError(
            f"{path}: init_lora_weights is {_short(config['init_lora_weights'])}, which changes the base's weights too;"
            " make the adapter plain LoRA with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    numbers = LoraNumbers.from_dict(config, path)
    ranks, alphas = numbers.rank_pattern or {}, numbers.alpha_pattern or {}
    if min([numbers.r, *ranks.values()]) < 1:
        raise UserError(f"{path}: r and rank_pattern must give positive integers, not {_short([numbers.r, ranks])}")
    largest = max((numbers.lora_alpha, *alphas.values()), key=abs)
    if abs(largest) > FLOAT32_MAX:
        raise UserError(
            f"{path}: lora_alpha and alpha_pattern must give numbers that float32 can hold, not {_short(largest)};"
            " correct it, or train the adapter again"
        )
    patterns = [*ranks, *alphas]
    for key in PATTERNS:
        stated = config.get(key)
        patterns += [stated] if isinstance(stated, str) else stated if isinstance(stated, list) else []
    for pattern in map(str, patterns):
        if takes_for_ever(pattern):
            raise UserError(
                f"{path}: the pattern {_short(pattern)} repeats too much to be matched safely; merge it with PEFT's"
                " merge_and_unload"
            )
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            raise UserError(f"{path}: {_short(pattern)} is no pattern of module names ({error})") from None
    return numbers


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


def read_base(document: Mapping[str, Any], path: Path) -> AdapterBase:
    """``base`` of adaptation.json, which lies at ``path``; raises UserError unless it says what the adapter was trained
    on."""
    try:
        return AdapterBase.from_dict(document.get("base"), "base")
    except UserError as error:
        raise UserError(
            f"{path} does not say in `base` which model, fingerprint and layout the adapter was trained on ({error});"
            " train it again"
        ) from None


def pair_up(tensors: Mapping[str, TensorInfo], path: Path) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """A and B of every module. Raises UserError for any other tensor, and for one without the other."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        match = KEY.fullmatch(name)
        if match is None:
            raise UserError(
                f"{path} holds {name}, which is not LoRA on a projection of a Llama's layers; it cannot be merged here"
            )
        if info.dtype not in FLOAT_DTYPES or len(info.shape) != 2:
            raise UserError(f"{path}: {name} is {info.dtype} {list(info.shape)}, but should be a matrix of floats")
        found.setdefault(match[1], {})[match[2]] = info
    for module, pair in found.items():
        if len(pair) < 2:
            missing = "B" if "A" in pair else "A"
            raise UserError(f"{path}: lora_{missing} of {module} is missing; the adapter is incomplete")
    if not found:
        raise UserError(f"{path} holds no tensors; the adapter is empty")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def check_adapter_fits(adapter: Adapter, config: Mapping[str, Any], name: str) -> None:
    """Raise UserError unless every A and B fits the model ``name`` with this config.json, and the rank that the
    adapter's says."""
    shapes = expected_tensors(config)
    for module, (a, b) in adapter.modules.items():
        shape, rank = shapes.get(f"{module}.weight"), adapter.rank(module)
        if shape is None:
            raise UserError(f"{adapter.folder} adapts {module}, which {name} does not have; name another --base")
        for key, info, wanted in (("lora_A", a, (rank, shape[1])), ("lora_B", b, (shape[0], rank))):
            if info.shape != wanted:
                raise UserError(
                    f"{adapter.folder}: {key} of {module} has shape {list(info.shape)}, but {list(wanted)} fits {name}"
                    f" and the rank in {ADAPTER_CONFIG}"
                )
