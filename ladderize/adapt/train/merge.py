"""``ladderize merge``: make an ordinary checkpoint of a LoRA adapter and the checkpoint that it was trained on."""

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladderize.adapt.lora import ADAPTATION, ADAPTER_CONFIG, ADAPTER_TENSORS, AdapterBase
from ladderize.adapt.methods import METRICS
from ladderize.blocks import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint, check_entries, torch_dtype
from ladderize.checkpoint.tensors import fingerprint, locate_tensors, read_tensor, write_tensors
from ladderize.console import SILENT, Console, sentence
from ladderize.convert.pipeline import ConversionReport, convert_checkpoint
from ladderize.convert.plan import Changes, check_stays
from ladderize.convert.recipe import Recipe
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.documents import read_document, read_json
from ladderize.files.regular import read_text, resolved
from ladderize.layout import Layout
from ladderize.modeling import load


def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    console: Console = SILENT,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
) -> ConversionReport:
    """Write ``out``: the adapter's base with the adapter merged into it by PEFT. Returns a report.

    The whole model is in memory, in float32 (or float64, if stored so). Changed weights are rounded once, to their
    stored dtype.

    base, revision: the base, where it is not where the adapter says.
    verify: load ``out`` in plain transformers.
    Raises UserError.
    """
    folder, out = Path(adapter).expanduser(), resolved(out, "OUT ")
    output.clean_up(out)
    document = check_adapter(folder)
    trained = AdapterBase.from_dict(document.get("base"), f"{folder / ADAPTATION}: base") if document else None
    if base is None and trained is not None:
        base = trained.model
        if Path(base).is_absolute() and not Path(base).exists():
            raise UserError(f"{base}, which {folder} was trained on, does not exist; give its location with --base")
    if base is None:
        raise UserError(f"{folder} has no {ADAPTATION}, so its base is unknown; name the checkpoint with --base")
    checkpoint = open_checkpoint(base, revision)
    layout, found = Layout.from_config(checkpoint.config), fingerprint(checkpoint)
    if trained and (trained.fingerprint != found or trained != replace(trained, **layout.to_config())):
        raise UserError(
            f"{base} has other weights or another layout ({layout}) than the checkpoint that {folder} was trained on"
            f" ({trained.layout}); name that one with --base"
        )
    digest = file_sha256(str(folder / ADAPTER_TENSORS))
    record = {"merged_adapter": {"adapter": str(folder), "sha256": digest, "base_fingerprint": found}}
    for source in (folder, checkpoint.folder):
        output.check_target(out, source, overwrite=overwrite)
    with output.scratch_folder(out) as scratch:
        merged = scratch / "merged.safetensors"
        with console.stage("merging"):
            merge_tensors(folder, checkpoint, base, merged, console)
        return convert_checkpoint(
            base,
            out,
            Recipe(),
            Changes(replace=locate_tensors(merged), record=record, **story_of(folder, document)),
            revision=revision,
            overwrite=overwrite,
            verify=verify,
            console=console,
        )


def check_adapter(folder: Path) -> dict[str, Any]:
    """Return an adapter's adaptation.json, or {}. Raises UserError for an adapter that PEFT cannot read safely or
    correctly."""
    from peft import LoraConfig

    if not (path := folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{folder} is not the folder of a PEFT adapter; it holds no {ADAPTER_CONFIG}")
    check_entries(folder)
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA can be merged here")
    # PEFT would ignore keys that it does not know, and import any module that a megatron_config names.
    known = {field.name for field in fields(LoraConfig)} - {"megatron_config"}
    if other := [key for key, value in config.items() if value and key not in known]:
        raise UserError(f"{path}: {other[0]} is set, which the PEFT installed here cannot merge; upgrade peft")
    if not (folder / ADAPTER_TENSORS).is_file():
        raise UserError(
            f"{folder} holds no {ADAPTER_TENSORS}; pickle weights (adapter_model.bin) can run code when opened and are"
            " not read here: save them again with PEFT's save_pretrained"
        )
    return read_document(folder / ADAPTATION, ADAPTATION) if (folder / ADAPTATION).is_file() else {}


def merge_tensors(folder: Path, checkpoint: Checkpoint, name: str, file: Path, console: Console) -> None:
    """Write the tensors that merging changes into ``file``, in their stored dtype.

    name: the base's, for messages.
    Raises UserError where PEFT cannot merge.
    """
    from peft import LoraConfig, get_peft_model

    dtype = "float64" if any(info.dtype == "F64" for info in checkpoint.tensors.values()) else "float32"
    locate_tensors(folder / ADAPTER_TENSORS)  # raises UserError where the file is broken
    with console.contained():
        model: Any = load(checkpoint.folder, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = get_peft_model(model, LoraConfig.from_pretrained(str(folder)))
            # The same as PeftModel.from_pretrained, which does not say which tensors are left over.
            loaded = model.load_adapter(str(folder), "default", torch_device="cpu")
            model = model.merge_and_unload(safe_merge=True)
        except Exception as error:  # a stranger's config may lead PEFT to any error
            raise UserError(f"PEFT cannot merge {folder} into {name}: {sentence(error)[:400]}") from error
    if other := [*loaded.missing_keys, *loaded.unexpected_keys]:
        raise UserError(f"{folder}: {ADAPTER_CONFIG} and {ADAPTER_TENSORS} differ: only one of them has {other[0]}")
    state, changed = model.state_dict(), {}
    for tensor, info in checkpoint.tensors.items():
        if not torch.equal(read_tensor(checkpoint.folder, info, dtype=state[tensor].dtype), state[tensor]):
            changed[tensor] = (torch_dtype(info.dtype), info.shape)

    def round_once(tensor: str) -> Tensor:
        values = state[tensor].to(changed[tensor][0])
        if not values.isfinite().all():
            raise UserError(f"{tensor} with its LoRA is too large for {values.dtype}; convert {name} to bfloat16 first")
        return values

    write_tensors(file, changed, round_once)


def story_of(folder: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an adapter's training, as fields of ``Changes``."""
    from ladderize.adapt.train.outcome import Adaptation

    files = [folder / name for name in (ADAPTATION, METRICS) if document and (folder / name).is_file()]
    for path in files:
        check_stays(path, folder)
    story: dict[str, Any] = {"extra_files": {path.name: read_text(path) for path in files}}
    with contextlib.suppress(UserError):  # there may be none, or another tool's
        story["note"] = Adaptation.from_dict(document, ADAPTATION).card_note()
    return story
