"""LoRA by PEFT: the adapters on a model, and an adapter's folder. Imports neither torch nor peft."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladderize.checkpoint.reading import Checkpoint, split_revision
from ladderize.checkpoint.tensors import fingerprint, write_tensors
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.documents import read_json
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.layout import Layout

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch import Tensor

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
ADAPTATION = "adaptation.json"  # how an adapter, or a checkpoint, was trained
LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
PEFT_PREFIX = "base_model.model."  # PEFT's prefix of the names of the model that it wraps


@dataclass(frozen=True)
class AdapterBase(Record):
    """The key ``base`` of an adapter's adaptation.json: the checkpoint that the adapter belongs to."""

    model: str
    fingerprint: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None

    @classmethod
    def of(cls, base: Checkpoint, name: str) -> "AdapterBase":
        """Return the description of a checkpoint, which others get by ``name``: a folder or a hub id."""
        if Path(name).expanduser().is_dir():
            name = str(Path(name).expanduser().resolve())  # the next command may start in another folder
        layout = Layout.from_config(base.config)
        return cls(name, fingerprint(base), str(layout), **layout.to_config())


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return an adapter's adapter_config.json. Raises UserError where ``folder`` holds none."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder} is not the folder of a PEFT adapter; it holds no {ADAPTER_CONFIG}")
    return read_json(folder / ADAPTER_CONFIG)


def lora_config(
    layers: Sequence[int],
    rank: int,
    alpha: int | None = None,
    dropout: float = 0.0,
    targets: Sequence[str] = LORA_TARGETS,
) -> "LoraConfig":
    """Return PEFT's configuration of LoRA on these layers of a model. alpha: by default twice the rank."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha or 2 * rank,
        lora_dropout=dropout,
        target_modules=list(targets),
        layers_to_transform=sorted(set(layers)),
        layers_pattern="layers",  # else any number in a name would be a layer
    )


def add_adapters(model: Any, config: "LoraConfig", seed: int) -> "PeftModel":
    """Return ``model`` wrapped by PEFT: its parameters frozen, the adapters in float32, alike on every rank."""
    import torch
    from peft import get_peft_model

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses a deprecated name of transformers
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def not_an_adapter(folder: Path) -> str | None:
    """Return why --overwrite may not replace ``folder``; None if it is an adapter."""
    is_whole = all((folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_TENSORS))
    return None if is_whole and not (folder / "config.json").exists() else "is not an adapter, or a whole checkpoint"


def write_adapter(
    out: Path,
    config: "LoraConfig",
    tensors: Mapping[str, "Tensor"],
    base: AdapterBase,
    files: Mapping[str, str],
    *,
    overwrite: bool = False,
) -> None:
    """Write the adapter folder ``out``, whole or not at all: PEFT's files and ``files`` (name -> text).
    tensors: A [rank, in] and B [out, rank] of each projection, by PEFT's names in files."""
    config = copy.deepcopy(config)
    config.base_model_name_or_path, config.revision = split_revision(base.model)
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules or ())  # a set has another order in each run
    infos = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with output.atomic_folder(resolved(out, "OUT "), overwrite=overwrite) as folder:
        config.save_pretrained(str(folder))
        write_tensors(folder / ADAPTER_TENSORS, infos, tensors.__getitem__)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
