"""LoRA on the projections of a checkpoint's layers: its options, PEFT's configuration of it, and the names
in an adapter's folder."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ladderize.checkpoint.config import expected_tensors
from ladderize.choices import check_options, option, split_names
from ladderize.errors import UsageError, UserError
from ladderize.files.records import Record
from ladderize.layout import format_ranges

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_CONFIG, ADAPTER_TENSORS, ADAPTER_CARD = "adapter_config.json", "adapter_model.safetensors", "README.md"
ADAPTATION = "adaptation.json"  # how an adapter, or a checkpoint, was trained
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT_PREFIX = "base_model.model."  # what PEFT puts before the names of the model that it wraps


@dataclass(frozen=True)
class AdapterBase(Record):
    """``base`` of an adapter's adaptation.json: the checkpoint that it belongs to. model: a folder or a hub id."""

    model: str
    revision: str | None
    fingerprint: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None


@dataclass(frozen=True)
class LoraOptions(Record):
    """How adapters are made. Raises UsageError for what fits no model."""

    rank: int = option("lora: rank.", 16, flags="--lora-rank", min=1)
    alpha: float | None = option(
        "lora: alpha; adapters are scaled by alpha / rank.", flags="--lora-alpha", shown="twice the rank"
    )
    dropout: float = option(
        "lora: dropout of the adapters' input.", 0.0, flags="--lora-dropout", min=0.0, max=0.99, shown="0"
    )
    targets: tuple[str, ...] = option(
        "lora: projections that get adapters.",
        LORA_TARGETS,
        flags="--lora-targets",
        metavar="A,B",
        parse=split_names,
        shown="all seven of a layer",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.alpha == 0:
            raise UsageError("--lora-alpha must be above 0, not 0")
        if unknown := [name for name in self.targets if name not in LORA_TARGETS]:
            raise UsageError(
                f"--lora-targets: {', '.join(unknown)} is not a projection; a layer has {', '.join(LORA_TARGETS)}"
            )
        if not self.targets:
            raise UsageError(f"--lora-targets names no projection; name some of {', '.join(LORA_TARGETS)}")

    @property
    def scale(self) -> float:
        """Alpha, its default filled in."""
        return 2 * self.rank if self.alpha is None else self.alpha


def lora_config(config: Mapping[str, Any], layers: Sequence[int], options: LoraOptions) -> "LoraConfig":
    """PEFT's configuration of LoRA on exactly these layers of a Llama with this config.json.

    Raises UserError for a layer that there is not, and for a rank that is no low one.
    """
    from peft import LoraConfig

    if not layers or min(layers) < 0 or max(layers) >= config["num_hidden_layers"]:
        raise UserError(
            f"LoRA on layers {format_ranges(layers)}: the model has 0 to {config['num_hidden_layers'] - 1}; name some"
            " of them"
        )
    first = {
        name.split(".")[-2]: shape
        for name, shape in expected_tensors(config).items()
        if name.startswith("model.layers.0.")
    }
    sizes = {name: min(first[name]) for name in options.targets}
    narrowest = min(sizes, key=lambda name: sizes[name])
    if options.rank > sizes[narrowest]:
        raise UserError(
            f"--lora-rank {options.rank} is larger than the smaller side of {narrowest},"
            f" {sizes[narrowest]}; give at most {sizes[narrowest]}, or leave {narrowest} out"
        )
    # PEFT has no default targets for our model type, and without layers_pattern would take any number in a name for a
    # layer
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=int(options.scale) if options.scale % 1 == 0 else options.scale,
        lora_dropout=options.dropout,
        target_modules=list(options.targets),
        layers_to_transform=sorted(set(layers)),
        layers_pattern="layers",
        bias="none",
    )


def adapted_layers(names: Iterable[str]) -> list[int]:
    """The layers that tensors of an adapter, or what they adapt, belong to; sorted."""
    return sorted({int(match[1]) for name in names if (match := re.search(r"model\.layers\.(\d+)\.", name))})
