"""``ladderize merge``: a LoRA adapter and the checkpoint that it was trained on become one ordinary checkpoint."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ladderize.adapt.lora.config import ADAPTATION, ADAPTER_TENSORS
from ladderize.adapt.lora.merge_check import ComparedLogits, add_product, check_merged
from ladderize.adapt.lora.read import Adapter, check_adapter_fits, read_adapter
from ladderize.adapt.methods import METRICS
from ladderize.adapt.retrain.outcome import Adaptation
from ladderize.blocks import open_checkpoint
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.reading import Checkpoint, torch_dtype
from ladderize.checkpoint.tensors import TensorReader, fingerprint, locate_tensors, write_tensors
from ladderize.console import SILENT, Console, human_bytes
from ladderize.convert.pipeline import RECORD, THERE, convert_checkpoint
from ladderize.convert.plan import Changes, check_stays
from ladderize.convert.recipe import Recipe
from ladderize.convert.verify import Verification
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.parsing import read_yaml
from ladderize.files.regular import read_text, resolved
from ladderize.layout import Layout, format_ranges


@dataclass(frozen=True)
class MergeReport(ComparedLogits):
    """The document of ``ladderize merge --json``; docs/files.md says what the keys mean."""

    LEFT_OUT: ClassVar = ("verified",)

    adapter: str
    base: str
    out: str
    layout: str
    attention_sync: list[str]
    mlp_sync: list[str]
    sync_tp_size: int | None
    fingerprint: str
    layers: list[int]
    merged_tensors: list[str]
    weight_bytes: int
    weight_files: list[str]
    weight_files_rewritten: list[str]
    weights: dict[str, int]
    verified: Verification | None


def merge(
    adapter: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    console: Console = SILENT,
    overwrite: bool = False,
    verify: bool = True,
    revision: str | None = None,
) -> MergeReport:
    """Write ``out``: the adapter's base with W + scaling * B @ A instead of every adapted W; returns what was done.

    base, revision: where the base is now, if not where the adapter says. One matrix is in memory at a time, to check
    the result one layer; beside ``out`` the adapted matrices need their size on disk once more, meanwhile. The logits
    of ``out`` are compared with PEFT's before it appears; verify: it is loaded in plain transformers too. Raises
    UserError.
    """
    out = resolved(out, "OUT ")
    output.complete_journal(out)
    source = read_adapter(Path(adapter))
    name, revision = base_of(source, base, revision)
    checkpoint = open_checkpoint(name, revision)
    layout = Layout.from_config(checkpoint.config)
    found = fingerprint(checkpoint)
    check_base_is(source, name, layout, found)
    check_adapter_fits(source, checkpoint.config, name)
    if source.document is None:
        console.note(
            f"Note: {source.folder} has no {ADAPTATION}, so what it was trained on is unknown; its shapes fit {name}"
        )
    merged, record = sorted(f"{module}.weight" for module in source.modules), merge_record(source, found)
    documents = documents_of(source)

    def check(folder: Path) -> dict[str, Any]:
        return check_merged(source, checkpoint, folder, console).to_dict()

    if not overwrite and is_merged(out, name, record):
        console.note(f"{out} is complete: this command wrote it in an earlier run")
        output.clean_up(out)
        tensors = read_checkpoint(out).tensors
        files = sorted({info.file for info in tensors.values()})
        weights = {
            **check(out),
            "weight_bytes": sum(info.nbytes for info in tensors.values()),
            "weight_files": files,
            "weight_files_rewritten": sorted({tensors[changed].file for changed in merged if changed in tensors}),
            "weights": {THERE: len(files)},
            "verified": None,
        }
    else:
        for folder in (source.folder, checkpoint.folder):
            output.check_target(out, folder, overwrite=overwrite)
        check_merge_space(source, checkpoint, out)
        with output.scratch_folder(out) as scratch:
            file = scratch / "merged.safetensors"
            total = sum(checkpoint.tensors[changed].nbytes for changed in merged)
            with console.progress("merging", total, is_bytes=True) as advance:
                write_merged(source, checkpoint, file, advance)
            report = convert_checkpoint(
                name,
                out,
                Recipe(),
                revision=revision,
                overwrite=overwrite,
                verify=verify,
                changes=Changes(
                    replace=locate_tensors(file),
                    record={"merged_adapter": record},
                    extra_files=documents,
                    note=note_of(source),
                ),
                console=console,
                check=check,
            )
        told = ("weight_bytes", "weight_files", "weight_files_rewritten", "weights", "verified")
        weights = {**(report.checked or {}), **{key: getattr(report, key) for key in told}}
    return MergeReport(
        adapter=str(source.folder),
        base=name,
        out=str(out),
        layout=str(layout),
        **layout.to_config(),
        fingerprint=found,
        layers=source.layers,
        merged_tensors=merged,
        **weights,
    )


def documents_of(adapter: Adapter) -> dict[str, str]:
    """What the adapter says of its training; empty if it is not ours."""
    names = (ADAPTATION, METRICS) if adapter.document is not None else ()
    files = [path for name in names if (path := adapter.folder / name).is_file()]
    for path in files:
        check_stays(path, adapter.folder)
    return {path.name: read_text(path) for path in files}


def note_of(adapter: Adapter) -> str:
    """How the adapter came about, for the model card; empty where its adaptation.json does not say."""
    try:
        return Adaptation.from_dict(adapter.document, ADAPTATION).card_note()
    except UserError:  # there is none, or it is not one of a retraining
        return ""


def is_merged(out: Path, base: str, record: Mapping[str, Any]) -> bool:
    """Whether ``out`` says that this adapter was merged into this base: a run may be killed after OUT appeared."""
    path = out / RECORD
    try:
        found = read_yaml(path) if path.is_file() else None
    except UserError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("source"), dict):
        return False
    return found["source"].get("name") == base and found.get("merged_adapter") == record


def base_of(adapter: Adapter, base: str | None, revision: str | None) -> tuple[str, str | None]:
    """Name and revision of the base: what the user says, else what the adapter does."""
    if base is not None:
        return base, revision
    if adapter.base is None:
        raise UserError(
            f"{adapter.folder} has no {ADAPTATION}, so ladderize did not train it; name the checkpoint that it belongs"
            " to with --base"
        )
    name = adapter.base.model
    if Path(name).is_absolute() and not Path(name).exists():
        raise UserError(f"{name}, which {adapter.folder} was trained on, does not exist; give its location with --base")
    return name, revision or adapter.base.revision


def check_base_is(adapter: Adapter, name: str, layout: Layout, found: str) -> None:
    """Raise UserError unless this is the checkpoint that the adapter was trained on, or, where it does not say, a
    converted one."""
    trained = adapter.base
    if trained is None:
        if layout.is_dense:
            raise UserError(
                f"{name} is dense; merge an adapter for it with PEFT's merge_and_unload, or name a converted checkpoint"
                " with --base"
            )
        return
    if any(getattr(trained, key) != value for key, value in layout.to_config().items()):
        raise UserError(
            f"{adapter.folder} was trained on the layout {trained.layout}, but {name} has {layout}; name the"
            " checkpoint that it was trained on with --base"
        )
    if trained.fingerprint != found:
        raise UserError(
            f"{name} has other weights than the checkpoint that {adapter.folder} was trained on (their fingerprints"
            " differ); name that one with --base"
        )


def check_merge_space(adapter: Adapter, base: Checkpoint, out: Path) -> None:
    """Find a full disk before merging: the adapted matrices lie there twice for a while, once in the files of
    ``out``."""
    adapted = [base.tensors[f"{module}.weight"] for module in adapter.modules]
    files = {info.file for info in adapted}
    needed = sum(info.nbytes for info in adapted) + sum(
        info.nbytes for info in base.tensors.values() if info.file in files
    )
    if needed > (free := shutil.disk_usage(output.existing_parent(out)).free):
        raise UserError(
            f"OUT {out} temporarily needs {human_bytes(needed)}, but only {human_bytes(free)} are free there; choose"
            " another disk"
        )


def write_merged(adapter: Adapter, base: Checkpoint, path: Path, advance: Callable[[int], None]) -> None:
    """Write every W + scaling * B @ A into one safetensors file, in the dtype in which the base has W."""
    reader = TensorReader(base.folder)
    with torch.no_grad():

        def produce(name: str) -> Tensor:
            module, info = name.removesuffix(".weight"), base.tensors[name]
            a, b = (reader.read(part) for part in adapter.modules[module])
            if not (a.isfinite().all() and b.isfinite().all()):
                raise UserError(f"{adapter.folder}: the LoRA of {module} holds NaN or infinity; train it again")
            stored = reader.read(info)
            exact = add_product(stored, a, b, adapter.scaling(module))
            result = exact.to(stored.dtype)
            if not result.isfinite().all() and exact.isfinite().all() and stored.isfinite().all():
                raise UserError(
                    f"{name} with its LoRA is too large for {stored.dtype}; convert {base.folder} with --dtype bfloat16"
                    " first"
                )
            return result

        names = {f"{module}.weight": base.tensors[f"{module}.weight"] for module in adapter.modules}
        write_tensors(
            path,
            {name: (torch_dtype(info.dtype), info.shape) for name, info in names.items()},
            produce,
            advance=advance,
        )


def merge_record(adapter: Adapter, found: str) -> Mapping[str, Any]:
    """What ladderize.yaml says about the adapter."""
    return {
        "adapter": str(adapter.folder),
        "sha256": file_sha256(str(adapter.folder / ADAPTER_TENSORS)),
        "base_fingerprint": found,
        "layers": format_ranges(adapter.layers),
        "tensors": len(adapter.modules),
        "rank": adapter.config["r"],
        "alpha": adapter.config["lora_alpha"],
    }
