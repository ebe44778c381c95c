"""LoRA on the projections of a checkpoint's layers: its options, and the folder, an ordinary PEFT adapter, that it is
written to."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ladderize import __version__
from ladderize.console import UsageError, UserError, sentence, to_json
from ladderize.convert.card import TAGS
from ladderize.convert.checkpoint import Checkpoint, fingerprint
from ladderize.convert.llama import expected_tensors
from ladderize.convert.tensor_file import infos_of, write_tensors
from ladderize.files import output
from ladderize.layout import Layout, format_ranges

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

CONFIG, TENSORS, DOCUMENT, CARD = "adapter_config.json", "adapter_model.safetensors", "adaptation.json", "README.md"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."  # what PEFT puts before the names of the model that it wraps


@dataclass(frozen=True)
class LoraOptions:
    """rank: of every pair of matrices. alpha: their product is multiplied by alpha / rank; None is 2 * rank. dropout:
    of what enters them, in training. targets: the projections of each layer that get them. Raises UsageError for what
    fits no model.
    """

    rank: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UsageError(f"--lora-rank must be at least 1, not {self.rank}")
        if self.alpha is not None and not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise UsageError(f"--lora-alpha must be above 0 and finite, not {self.alpha:g}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"--lora-dropout must be at least 0 and below 1, not {self.dropout:g}")
        if unknown := [name for name in self.targets if name not in TARGETS]:
            raise UsageError(f"--lora-targets: {', '.join(unknown)} is no projection; a layer has {', '.join(TARGETS)}")
        if not self.targets:
            raise UsageError(f"--lora-targets names no projection; name some of {', '.join(TARGETS)}")

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
            f"--lora-rank {options.rank} is more than {narrowest} has itself, the smaller side of which is"
            f" {sizes[narrowest]}; take at most {sizes[narrowest]}, or leave {narrowest} out"
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


def not_an_adapter(folder: Path) -> str | None:
    """What tells ``folder`` from the adapters that --overwrite may replace; None if it is one."""
    if (folder / CONFIG).is_file() and (folder / TENSORS).is_file() and not (folder / "config.json").exists():
        return None
    return f"is not an adapter (no {CONFIG} with {TENSORS}, or a whole checkpoint)"


def check_adapter_target(out: Path, base: Checkpoint, *, overwrite: bool) -> Path:
    """``out`` resolved; raises UserError unless an adapter may be written there. For before the training, too."""
    return output.check_target(out, base.folder, overwrite=overwrite, foreign=not_an_adapter)


def write_adapter(
    out: Path,
    lora: "LoraConfig",
    tensors: Mapping[str, "Tensor"],
    *,
    base: Checkpoint,
    base_name: str,
    document: Mapping[str, Any],
    revision: str | None = None,
    extra_files: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the adapter folder ``out``, whole or not at all; returns the content of its adaptation.json.

    tensors: A [rank, in] and B [out, rank] of each projection, by PEFT's names, as ``get_peft_model_state_dict`` or
    ``state_dict`` has them. base_name, revision: where people get ``base`` from, a folder or a hub id. document: what
    adaptation.json says besides ``base``. extra_files: more files, name -> text. Raises UserError if ``out`` cannot be
    written or holds what is no adapter.
    """
    output.complete_journal(Path(out).expanduser().resolve())
    out = check_adapter_target(Path(out), base, overwrite=overwrite)
    local = Path(base_name).expanduser().is_dir()
    model = str(Path(base_name).expanduser().resolve()) if local else base_name  # wherever the next command is started
    layout = Layout.from_config(base.config)
    content = {
        **document,
        "base": {
            "model": model,
            "revision": revision,
            "fingerprint": fingerprint(base),
            "layout": str(layout),
            **layout.to_config(),
        },
    }
    config = lora.to_dict() | {"base_model_name_or_path": model, "revision": revision, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    stored = {stored_name(name): tensor for name, tensor in tensors.items()}
    texts = {
        CONFIG: json.dumps(plain, indent=2, sort_keys=True, allow_nan=False) + "\n",
        DOCUMENT: to_json(content) + "\n",
        CARD: make_card(out.name, model, None if local else model, plain, adapted_layers(stored), layout),
    }
    check_extra_files(extra_files or {})
    try:
        with output.atomic_folder(out, overwrite=overwrite) as folder:
            write_tensors(folder / TENSORS, infos_of(stored), stored.__getitem__)
            for name, text in {**(extra_files or {}), **texts}.items():
                (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"writing OUT {out} failed ({sentence(error)}); nothing was left there") from error
    written: dict[str, Any] = json.loads(texts[DOCUMENT])
    return written


def stored_name(name: str) -> str:
    """A tensor's name in an adapter's file, whether or not PEFT's prefix is there and the adapter's own name in it."""
    name = re.sub(r"\.(lora_[AB])\.default\.weight$", r".\1.weight", name)
    return name if name.startswith(PREFIX) else PREFIX + name


def check_extra_files(files: Mapping[str, str]) -> None:
    """Raise ValueError unless these are plain names of files that are neither ours nor weights."""
    for name in files:
        if (
            not re.fullmatch(r"[\w-][\w.-]*", name)
            or name in (CONFIG, TENSORS, DOCUMENT, CARD, "config.json")
            or "safetensors" in name
        ):
            raise ValueError(f"{name!r} is no plain name of a file that may be added to an adapter")


def adapted_layers(names: Iterable[str]) -> list[int]:
    """The layers that tensors of an adapter, or what they adapt, belong to; sorted."""
    return sorted({int(match[1]) for name in names if (match := re.search(r"model\.layers\.(\d+)\.", name))})


def make_card(
    name: str, base: str, hub_id: str | None, config: Mapping[str, Any], layers: Sequence[int], layout: Layout
) -> str:
    """README.md of an adapter. hub_id: of its base, if that is on the hub, which takes no folders for a model's
    base."""
    tags = ["ladderize", "lora", *(tag for kind, tag in TAGS.items() if kind in str(layout))]
    front = {"library_name": "peft", **({"base_model": hub_id} if hub_id else {}), "tags": tags}
    targets = ", ".join(target for target in TARGETS if target in config["target_modules"])
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---

# {name}

A LoRA adapter for `{base}`, trained with ladderize {__version__}: rank {config["r"]}, alpha {config["lora_alpha"]},
on {targets} of layers {format_ranges(layers)}. `adaptation.json` says how.

**It belongs to this layout.** {layout}. On the dense model, or on another layout, it is of no use.

**Loading**, over its base:

```python
import ladderize
from peft import PeftModel
model = PeftModel.from_pretrained(ladderize.load("{base}"), "{name}")
```

**Merging** it into an ordinary checkpoint, which needs neither PEFT nor ladderize to run:

```
ladderize merge {name} OUT
```
"""
