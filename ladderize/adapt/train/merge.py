"""``ladderize merge``: make an ordinary checkpoint of a LoRA adapter and its base. PEFT decides on a model without
values what is adapted, and computes each module that is: neither of the two is in memory as a whole."""

import contextlib
import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn

from ladderize.adapt.lora import (
    ADAPTATION,
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    PEFT_PREFIX,
    AdapterBase,
    read_adapter_config,
)
from ladderize.adapt.options import METRICS, MergeOptions
from ladderize.adapt.train.run import Adaptation
from ladderize.checkpoint.config import EMBEDDING, HEAD, expected_tensors, is_tied
from ladderize.checkpoint.opening import have_same_values, open_checkpoint
from ladderize.checkpoint.reading import FLOAT_DTYPES, Checkpoint, TensorInfo, check_entries
from ladderize.checkpoint.tensors import fingerprint, locate_tensors, read_tensor, write_tensors
from ladderize.console import SILENT, Console, sentence
from ladderize.convert.pipeline import ConversionReport, convert_checkpoint
from ladderize.convert.plan import Changes, check_stays, without_code
from ladderize.convert.recipe import Recipe
from ladderize.data.files import file_sha256
from ladderize.errors import UserError
from ladderize.files import output
from ladderize.files.documents import read_document, read_json
from ladderize.files.regular import read_text, resolved
from ladderize.layout import Layout
from ladderize.modeling import skeleton

ENDS = (EMBEDDING, HEAD)
EMBEDDING_MODULE, HEAD_MODULE = (end.removesuffix(".weight") for end in ENDS)
# Parts of PEFT's names that stand for its wrappers.
WRAPPERS = re.compile(r"\.(base_layer|token_adapter|modules_to_save|original_module)(?=\.)")
# Without tokenizer.model, in which no token can be added.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"),
    "chat_template.jinja",
)


def merge(options: MergeOptions, *, console: Console = SILENT) -> ConversionReport:
    """Write ``options.out``: the adapter's base with the adapter merged into it by PEFT. One module is in memory at a
    time, in float32 (or float64, if stored so). Changed weights are rounded once, to their stored dtype."""
    folder, out = Path(options.adapter).expanduser(), resolved(options.out, "OUT ")
    output.clean_up(out)
    document = check_adapter(folder)
    trained = AdapterBase.from_dict(document.get("base"), f"{folder / ADAPTATION}: base") if document else None
    if options.base is None:
        base, checkpoint = open_named_base(folder, trained)
    else:
        base, checkpoint = options.base, open_checkpoint(options.base)
    layout, digest = Layout.from_config(checkpoint.config), fingerprint(checkpoint)
    if trained and (trained.fingerprint != digest or trained != replace(trained, **layout.to_config())):
        raise UserError(
            f"{base} has other weights or another layout ({layout}) than the checkpoint that {folder} was trained on"
            f" ({trained.layout}); name that one with --base"
        )
    for source in (folder, checkpoint.folder):
        output.check_target(out, source, overwrite=options.overwrite)
    with output.scratch_folder(out) as scratch:
        try:
            with console.stage("merging"), console.contained(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tensors, config = write_merged(folder, checkpoint, base, scratch)
        except UserError:
            raise
        except Exception as error:  # any, to which a stranger's adapter leads PEFT
            raise UserError(f"PEFT cannot merge {folder} into {base}: {sentence(error)[:400]}") from error
        files = texts(folder, (ADAPTATION, METRICS)) if document else {}
        if "vocab_size" in config:  # the tokenizer knows the tokens that the adapter adds
            tokenizer = texts(folder, TOKENIZER_FILES)
            files |= tokenizer | without_code(folder, list(tokenizer))
        note = ""
        with contextlib.suppress(UserError):  # there may be no document, or another tool's
            note = Adaptation.from_dict(document, ADAPTATION).card_note()
        sha256 = file_sha256(str(folder / ADAPTER_TENSORS))
        record = {"adapter": str(folder), "sha256": sha256, "base_fingerprint": digest}
        changes = Changes(
            replace=tensors, config=config, record={"merged_adapter": record}, extra_files=files, note=note
        )
        overwrite, verify = options.overwrite, options.verify
        return convert_checkpoint(base, out, Recipe(), changes, overwrite=overwrite, verify=verify, console=console)


def open_named_base(folder: Path, trained: AdapterBase | None) -> tuple[str, Checkpoint]:
    """Return name and checkpoint of the base that adaptation.json (``trained``), or adapter_config.json names."""
    config = read_json(folder / ADAPTER_CONFIG)
    name = trained.model if trained else config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name.strip():
        raise UserError(f"{folder} does not say what it was trained on; name that checkpoint with --base")
    if trained is None and config.get("revision") is not None and not Path(name).expanduser().exists():
        name = f"{name}@{config['revision']}"
    try:
        return name, open_checkpoint(name)
    except UserError as error:
        raise UserError(
            f"{name}, which {folder} was trained on, cannot be opened; give its location with --base ({error})"
        ) from None


def check_adapter(folder: Path) -> dict[str, Any]:
    """Return an adapter's adaptation.json, or {}; UserError where PEFT cannot read it safely or correctly."""
    path, config = folder / ADAPTER_CONFIG, read_adapter_config(folder)
    check_entries(folder)
    if config.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {config.get('peft_type')!r}; only LORA can be merged here")
    # PEFT would ignore keys that it does not know, and import any module that a megatron_config names.
    understood = {field.name for field in fields(LoraConfig)} - {"megatron_config"}
    if config.get("layer_replication"):
        raise UserError(f"{path}: layer_replication makes a model of other layers, which is not merged here")
    if other := [key for key, value in config.items() if value and key not in understood]:
        raise UserError(f"{path}: {other[0]} is set, which the PEFT installed here cannot merge; upgrade peft")
    if not (folder / ADAPTER_TENSORS).is_file():
        raise UserError(
            f"{folder} holds no {ADAPTER_TENSORS}; pickle weights (adapter_model.bin) can run code when opened and are"
            " not read here: save them again with PEFT's save_pretrained"
        )
    return read_document(folder / ADAPTATION, ADAPTATION) if (folder / ADAPTATION).is_file() else {}


def texts(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the contents of those files that are there. Raises UserError for a link that leads out of the folder."""
    there = [name for name in names if (folder / name).is_file()]
    for name in there:
        check_stays(folder / name, folder)
    return {name: read_text(folder / name) for name in there}


# ---- the merging ----


@dataclass(frozen=True)
class AdaptedModel:
    """A base with the adapter in ``folder``.

    vocab_size: the rows of both ends; the adapter may hold more than the base has.
    tensors: of the adapter, by PEFT's names in files.
    lora: the modules with LoRA, without values, and the keys of their tensors.
    tokens: the modules of which it replaces rows: the rows, and the name of the tensor that holds them.
    stored: the base's tensors by name; a tied LM head is one of them.
    sources: the same, or what the adapter holds in their stead.
    ends_are_one: PEFT trained both ends of a tied model as one.
    """

    folder: Path
    base: Checkpoint
    vocab_size: int
    config: LoraConfig
    tensors: Mapping[str, TensorInfo]
    lora: Mapping[str, tuple[nn.Module, list[str]]]
    tokens: Mapping[str, tuple[list[int], str]]
    stored: Mapping[str, TensorInfo]
    sources: Mapping[str, TensorInfo]
    ends_are_one: bool

    def read(self, name: str) -> Tensor:
        """Return a tensor without its LoRA: float64 where the base stores it so, else float32."""
        dtype = torch.float64 if self.stored[name].dtype == "F64" else torch.float32
        return read_tensor(self.base.folder, self.sources[name], dtype=dtype)


@torch.no_grad()
def write_merged(
    folder: Path, base: Checkpoint, name: str, scratch: Path
) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Write the tensors that merging changes into ``scratch``, each in a file of its own; return them, and the keys of
    config.json that change."""
    model, changed = adapted_model(folder, base), dict[str, TensorInfo]()
    for number, (tensor, values) in enumerate(merged_tensors(model)):
        stored = read_tensor(base.folder, model.stored[tensor])
        rounded = values.to(stored.dtype)
        if not rounded.isfinite().all():
            too_large = f"too large for {stored.dtype}; convert {name} to bfloat16 first"
            problem = too_large if values.isfinite().all() else f"NaN or infinite; {folder} is broken"
            raise UserError(f"{tensor} with its LoRA is {problem}")
        if not torch.equal(rounded, stored):
            file = scratch / f"{number}.safetensors"
            write_tensors(file, {tensor: (rounded.dtype, rounded.shape)}, {tensor: rounded}.__getitem__)
            changed |= locate_tensors(file)
        del values, stored, rounded  # before the next one is computed
    config: dict[str, Any] = {}
    if model.vocab_size != base.config["vocab_size"]:
        config["vocab_size"] = model.vocab_size
    if is_tied(base.config) and not changed.keys().isdisjoint(ENDS):
        in_folder = {end: replace(model.stored[end], file=str(base.folder / model.stored[end].file)) for end in ENDS}
        embedding, head = (changed.get(end, in_folder[end]) for end in ENDS)
        changed.pop(HEAD, None)
        if not model.ends_are_one and not have_same_values(base.folder, embedding, head):
            changed[HEAD] = head
            config["tie_word_embeddings"] = False
    return changed, config


def adapted_model(folder: Path, base: Checkpoint) -> AdaptedModel:
    """Return the base with the adapter, of which no tensor is missing or left over; UserError where they do not fit."""
    tensors = locate_tensors(folder / ADAPTER_TENSORS)
    # PEFT may store copies of a tensor. It loads the one with the plain name, which is the shortest.
    whole = {plain_name(key): tensors[key] for key in sorted(tensors, key=len, reverse=True)}
    ends = [whole[end] for end in ENDS if end in whole]
    vocab_size = max((end.shape[0] for end in ends if end.shape), default=base.config["vocab_size"])
    config = {**base.config, "vocab_size": vocab_size}

    # PEFT's modules, without the base's values
    adapter = LoraConfig.from_pretrained(str(folder))
    structure = copy.deepcopy(adapter)
    structure.init_lora_weights = True  # others compute with the base's values
    with torch.device("meta"):
        injected = get_peft_model(skeleton(replace(base, config=config)), structure)
    adapter.target_modules = structure.target_modules  # "all-linear" is resolved
    state = get_peft_model_state_dict(injected, save_embedding_layers=False)
    plain_shapes = expected_tensors({**config, "tie_word_embeddings": False})
    shapes = {key: plain_shapes[plain_name(key)] for key in tensors if plain_name(key) in plain_shapes}
    shapes |= {key: tuple(tensor.shape) for key, tensor in state.items()}
    lora: dict[str, tuple[nn.Module, list[str]]] = {}
    tokens: dict[str, tuple[list[int], str]] = {}
    saved = set()
    for name, module in injected.get_base_model().named_modules():
        if isinstance(module, LoraLayer) and ".base_layer" not in name:  # PEFT wraps a module again for each parameter
            lora[name] = module.get_base_layer(), [key for key in state if key.startswith(f"{PEFT_PREFIX}{name}.")]
        elif isinstance(module, ModulesToSaveWrapper):
            saved.add(f"{name}.weight")
        elif isinstance(module, TrainableTokensWrapper):
            is_tied_to = module.token_adapter.tied_adapter is not None
            owner = EMBEDDING_MODULE if is_tied_to else name
            key, kept = (f"{PEFT_PREFIX}{each}.token_adapter.trainable_tokens_delta" for each in (name, owner))
            tokens[name] = module.token_adapter.token_indices["default"], kept
            if key in tensors:  # of a tied head PEFT may store a copy
                shapes.setdefault(key, shapes[kept])
    check_adapter_tensors(folder, tensors, shapes, vocab_size)

    tied = dict.fromkeys(ENDS, base.tensors[EMBEDDING]) if is_tied(base.config) else {}
    stored = {**base.tensors, **tied}
    separate, shared = {}, {}
    for name in whole.keys() & plain_shapes.keys():
        if name in tied and name not in saved:
            shared = dict.fromkeys(ENDS, whole[name])  # the two are one parameter
        else:
            separate[name] = whole[name]
    sources = {**stored, **shared, **separate}
    for end in ENDS:
        check_rows(folder, sources[end].shape[0], vocab_size)
    for rows, _ in tokens.values():
        check_rows(folder, max([*rows, vocab_size - 1]) + 1, vocab_size)
    ends_are_one = bool(tied) and adapter.ensure_weight_tying
    if ends_are_one:  # the embedding's changes are the head's
        lora.pop(HEAD_MODULE, None)
        tokens.pop(HEAD_MODULE, None)
        sources[HEAD] = stored[HEAD]
    return AdaptedModel(folder, base, vocab_size, adapter, tensors, lora, tokens, stored, sources, ends_are_one)


def plain_name(key: str) -> str:
    """Return the name in the base of a tensor that PEFT stores as ``key``."""
    return WRAPPERS.sub("", key.removeprefix(PEFT_PREFIX))


def check_adapter_tensors(
    folder: Path, tensors: Mapping[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]], vocab_size: int
) -> None:
    """Raise UserError unless an adapter's tensors are those of its config, in number and shape."""
    if differing := sorted(tensors.keys() ^ shapes.keys()):
        raise UserError(
            f"{folder}: {ADAPTER_CONFIG} and {ADAPTER_TENSORS} differ, or the base is another model: only one of them"
            f" has {differing[0]}"
        )
    for key, tensor in tensors.items():
        for size, wanted in zip(tensor.shape, shapes[key], strict=False):
            if wanted == vocab_size:
                check_rows(folder, size, vocab_size)
        if tensor.shape != shapes[key] or tensor.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"{folder}: {key} is {tensor.dtype} {list(tensor.shape)}, but its config and the base ask for floats"
                f" {list(shapes[key])}; it was made for another model, or one of its files was"
            )


def check_rows(folder: Path, rows: int, vocab_size: int) -> None:
    """Raise UserError unless ``rows`` of the embedding or LM head, which something has, are those of the base."""
    if rows != vocab_size:
        raise UserError(
            f"{folder} was trained on a base with another vocabulary: embedding and LM head have {rows} rows here and"
            f" {vocab_size} there; resize the base as it was"
            f" (model.resize_token_embeddings({max(rows, vocab_size)}), save_pretrained) and name it with --base"
        )


def merged_tensors(model: AdaptedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are not the base's by name, one module's at a time."""
    for module in model.lora:
        yield from merge_lora(model, module)
    for module, (rows, key) in model.tokens.items():
        values = model.read(f"{module}.weight")
        values[rows] = read_tensor(model.base.folder, model.tensors[key], dtype=values.dtype)
        yield f"{module}.weight", values
    for tensor, source in model.sources.items():
        is_computed = tensor.rpartition(".")[0] in {*model.lora, *model.tokens}
        if source is not model.stored[tensor] and not is_computed:
            yield tensor, model.read(tensor)


def merge_lora(model: AdaptedModel, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's tensors with its LoRA: PEFT adapts a model of this module alone."""
    base_layer, keys = model.lora[name]
    module = copy.deepcopy(base_layer)
    module.load_state_dict({key: model.read(f"{name}.{key}") for key in module.state_dict()}, assign=True)
    for level in reversed(name.split(".")):
        holder = nn.Module()
        holder.add_module(level, module)
        module = holder
    config = copy.copy(model.config)
    config.task_type = config.modules_to_save = config.trainable_token_indices = None
    config.ensure_weight_tying = False
    adapted = get_peft_model(module, config)
    tensors = {key: read_tensor(model.base.folder, model.tensors[key]) for key in keys}
    loaded = set_peft_model_state_dict(adapted, tensors)
    if loaded.unexpected_keys:
        raise UserError(f"PEFT leaves out {loaded.unexpected_keys[0]} of {model.folder}")
    merged = adapted.merge_and_unload().get_submodule(name)
    for key, values in merged.state_dict().items():
        yield f"{name}.{key}", values
    merged.to("meta")  # PEFT's modules refer to each other, so they live until the garbage collection
