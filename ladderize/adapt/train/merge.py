"""``ladderize merge``: make an ordinary checkpoint of a LoRA adapter and the checkpoint that it was trained on."""

import contextlib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ladderize.adapt.lora import ADAPTATION, ADAPTER_CONFIG, ADAPTER_TENSORS, AdapterBase, read_adapter_config
from ladderize.adapt.methods import METRICS
from ladderize.adapt.options import MergeOptions
from ladderize.adapt.train.adapter import write_merged
from ladderize.blocks import open_checkpoint
from ladderize.checkpoint.reading import Checkpoint, check_entries
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import SILENT, Console
from ladderize.convert.pipeline import ConversionReport, convert_checkpoint
from ladderize.convert.plan import Changes, check_stays, without_code
from ladderize.convert.recipe import Recipe
from ladderize.data import file_sha256
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.documents import read_document, read_json
from ladderize.files.regular import read_text, resolved
from ladderize.layout import Layout

# Without tokenizer.model, in which no token can be added.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"),
    "chat_template.jinja",
)


def merge(options: MergeOptions, *, console: Console = SILENT) -> ConversionReport:
    """Write ``options.out``: the adapter's base with the adapter merged into it by PEFT. Returns a report. One
    module is in memory at a time, in float32 (or float64, if stored so). Changed weights are rounded once, to
    their stored dtype; until OUT is written they lie beside it a second time."""
    folder, out = Path(options.adapter).expanduser(), resolved(options.out, "OUT ")
    output.clean_up(out)
    document = check_adapter(folder)
    trained = AdapterBase.from_dict(document.get("base"), f"{folder / ADAPTATION}: base") if document else None
    if options.base is None:
        base, revision, checkpoint = open_named_base(folder, trained, options.revision)
    else:
        base, revision, checkpoint = options.base, options.revision, open_checkpoint(options.base, options.revision)
    layout, digest = Layout.from_config(checkpoint.config), fingerprint(checkpoint)
    if trained and (trained.fingerprint != digest or trained != replace(trained, **layout.to_config())):
        raise UserError(
            f"{base} has other weights or another layout ({layout}) than the checkpoint that {folder} was trained on"
            f" ({trained.layout}); name that one with --base"
        )
    for source in (folder, checkpoint.folder):
        output.check_target(out, source, overwrite=options.overwrite)
    with output.scratch_folder(out) as scratch:
        with console.stage("merging"), console.contained():
            tensors, config = write_merged(folder, checkpoint, base, scratch)
        files, note = story_of(folder, document)
        if "vocab_size" in config:
            files |= adapter_tokenizer(folder)
        sha256 = file_sha256(str(folder / ADAPTER_TENSORS))
        record = {"adapter": str(folder), "sha256": sha256, "base_fingerprint": digest}
        changes = Changes(
            replace=tensors, config=config, record={"merged_adapter": record}, extra_files=files, note=note
        )
        return convert_checkpoint(
            base,
            out,
            Recipe(),
            changes,
            revision=revision,
            overwrite=options.overwrite,
            verify=options.verify,
            console=console,
        )


def open_named_base(
    folder: Path, trained: AdapterBase | None, revision: str | None
) -> tuple[str, str | None, Checkpoint]:
    """Return name, revision and checkpoint of the base that an adapter names; raises UserError where it cannot
    be opened. trained: what adaptation.json says of it. Other tools leave its name in adapter_config.json."""
    config = read_json(folder / ADAPTER_CONFIG)
    name = trained.model if trained else config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"{folder} does not say what it was trained on; name that checkpoint with --base")
    if trained is None and revision is None and not Path(name).expanduser().exists():
        revision = config.get("revision")
    try:
        return name, revision, open_checkpoint(name, revision)
    except UserError as error:
        raise UserError(
            f"{name}, which {folder} was trained on, cannot be opened; give its location with --base ({error})"
        ) from None


def check_adapter(folder: Path) -> dict[str, Any]:
    """Return an adapter's adaptation.json, or {}. Raises UserError for an adapter that PEFT cannot read safely or
    correctly."""
    from peft import LoraConfig

    path, config = folder / ADAPTER_CONFIG, read_adapter_config(folder)
    check_entries(folder)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA can be merged here")
    # PEFT would ignore keys that it does not know, and import any module that a megatron_config names.
    known = {field.name for field in fields(LoraConfig)} - {"megatron_config"}
    if config.get("layer_replication"):
        raise UserError(f"{path}: layer_replication makes a model of other layers, which is not merged here")
    if other := [key for key, value in config.items() if value and key not in known]:
        raise UserError(f"{path}: {other[0]} is set, which the PEFT installed here cannot merge; upgrade peft")
    if not (folder / ADAPTER_TENSORS).is_file():
        raise UserError(
            f"{folder} holds no {ADAPTER_TENSORS}; pickle weights (adapter_model.bin) can run code when opened and are"
            " not read here: save them again with PEFT's save_pretrained"
        )
    return read_document(folder / ADAPTATION, ADAPTATION) if (folder / ADAPTATION).is_file() else {}


def adapter_tokenizer(folder: Path) -> dict[str, str]:
    """Return the texts of the adapter's tokenizer, which knows the tokens that the adapter adds, without code."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for name in names:
        check_stays(folder / name, folder)
    return {name: read_text(folder / name) for name in names} | without_code(folder, names)


def story_of(folder: Path, document: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Return the files that tell of an adapter's training, and a note for the model card."""
    from ladderize.adapt.train.outcome import Adaptation

    files = [folder / name for name in (ADAPTATION, METRICS) if document and (folder / name).is_file()]
    for path in files:
        check_stays(path, folder)
    note = ""
    with contextlib.suppress(UserError):  # there may be none, or another tool's
        note = Adaptation.from_dict(document, ADAPTATION).card_note()
    return {path.name: read_text(path) for path in files}, note
