"""The folder that a trained LoRA is written to: an ordinary PEFT adapter, with a record of how it came about."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ladderize import __version__
from ladderize.adapt.lora.config import (
    ADAPTATION,
    ADAPTER_CARD,
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    LORA_TARGETS,
    PEFT_PREFIX,
    AdapterBase,
    adapted_layers,
)
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import fingerprint, infos_of, write_tensors
from ladderize.console import code_span, sentence, to_json
from ladderize.convert.card import TAGS
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.regular import resolved
from ladderize.layout import Layout, format_ranges

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor


def not_an_adapter(folder: Path) -> str | None:
    """What tells ``folder`` from the adapters that --overwrite may replace; None if it is one."""
    if (
        (folder / ADAPTER_CONFIG).is_file()
        and (folder / ADAPTER_TENSORS).is_file()
        and not (folder / "config.json").exists()
    ):
        return None
    return f"is not an adapter (no {ADAPTER_CONFIG} with {ADAPTER_TENSORS}, or a whole checkpoint)"


def check_adapter_target(out: Path, base: Checkpoint, *, overwrite: bool) -> Path:
    """``out`` resolved; raises UserError unless an adapter may be written there. For before the training, too."""
    return output.check_target(out, base.folder, overwrite=overwrite, foreign=not_an_adapter)


def adapter_base(base: Checkpoint, name: str, revision: str | None) -> AdapterBase:
    """What an adapter belongs to. name, revision: where people get ``base`` from, a folder or a hub id."""
    if Path(name).expanduser().is_dir():
        name = str(Path(name).expanduser().resolve())  # wherever the next command is started
    layout = Layout.from_config(base.config)
    return AdapterBase(name, revision, fingerprint(base), str(layout), **layout.to_config())


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
) -> None:
    """Write the adapter folder ``out``, whole or not at all.

    tensors: A [rank, in] and B [out, rank] of each projection, by PEFT's names, as ``get_peft_model_state_dict`` or
    ``state_dict`` has them. base_name, revision: where people get ``base`` from, a folder or a hub id. document: what
    adaptation.json says besides ``base``. extra_files: more files, name -> text. Raises UserError if ``out`` cannot be
    written or holds what is no adapter.
    """
    output.complete_journal(resolved(out, "OUT "))
    out = check_adapter_target(Path(out), base, overwrite=overwrite)
    layout, belongs = Layout.from_config(base.config), adapter_base(base, base_name, revision)
    model, local = belongs.model, Path(base_name).expanduser().is_dir()
    content = {**document, "base": belongs.to_dict()}
    config = lora.to_dict() | {"base_model_name_or_path": model, "revision": revision, "inference_mode": True}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    stored = {adapter_tensor_name(name): tensor for name, tensor in tensors.items()}
    texts = {
        ADAPTER_CONFIG: json.dumps(plain, indent=2, sort_keys=True, allow_nan=False) + "\n",
        ADAPTATION: to_json(content) + "\n",
        ADAPTER_CARD: adapter_card(out.name, model, None if local else model, plain, adapted_layers(stored), layout),
    }
    try:
        with output.atomic_folder(out, overwrite=overwrite) as folder:
            write_tensors(folder / ADAPTER_TENSORS, infos_of(stored), stored.__getitem__)
            for name, text in {**(extra_files or {}), **texts}.items():
                (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"writing OUT {out} failed ({sentence(error)}); nothing was left there") from error


def adapter_tensor_name(name: str) -> str:
    """A tensor's name in an adapter's file, whether or not PEFT's prefix is there and the adapter's own name in it."""
    name = re.sub(r"\.(lora_[AB])\.default\.weight$", r".\1.weight", name)
    return name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name


def adapter_card(
    name: str, base: str, hub_id: str | None, config: Mapping[str, Any], layers: Sequence[int], layout: Layout
) -> str:
    """README.md of an adapter. hub_id: of its base, if that is on the hub, which takes no folders for a model's
    base."""
    tags = ["ladderize", "lora", *(tag for kind, tag in TAGS.items() if kind in str(layout))]
    front = {"library_name": "peft", **({"base_model": hub_id} if hub_id else {}), "tags": tags}
    others = "another layout" if layout.is_dense else "the dense model, or on another layout"
    targets = ", ".join(target for target in LORA_TARGETS if target in config["target_modules"])
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---

# {name}

A LoRA adapter for {code_span(base)}, trained with ladderize {__version__}: rank {config["r"]}, alpha
{config["lora_alpha"]}, on {targets} of layers {format_ranges(layers)}. `adaptation.json` says how.

**It belongs to this layout.** {layout}. On {others}, it does not work.

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
