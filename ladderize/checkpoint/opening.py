"""A checkpoint as plain transformers takes it: the config keys that count, and the tensors that are the model's.

Everything that reads a checkpoint begins here, so all of ladderize computes what transformers does.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladderize.checkpoint.config import (
    EMBEDDING,
    HEAD,
    check_config,
    check_largest,
    check_quantised,
    expected_tensors,
    is_tied,
)
from ladderize.checkpoint.quantised import QUANTISATION_KEYS, plain_config
from ladderize.checkpoint.reading import (
    Checkpoint,
    TensorInfo,
    fetch_weights,
    read_stated_config,
    read_tensors,
    resolve_json,
    second_weights,
)
from ladderize.errors import UserError
from ladderize.families.registry import find_family
from ladderize.files.documents import read_json
from ladderize.files.regular import open_regular
from ladderize.layout import Layout

# Files that transformers reads besides config.json and the weights.
OTHER_JSON = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)
# These choose the code that computes; for a name such as attacker/kernel transformers fetches code from the hub.
IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation\w*")
BUFFERS = re.compile(r"rotary_emb\.inv_freq")  # recomputed, even where an old checkpoint has them
BASE_PARTS = ("embed_tokens.", "layers.", "norm.")  # of the model without its LM head
COMPARED_BYTES = 4 << 20  # of two tensors at a time


def check_model(model: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a checkpoint that ``open_sound_checkpoint`` accepts; raises UserError or LayoutError
    otherwise."""
    return open_sound_checkpoint(model, revision).folder


def open_sound_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Return a checkpoint (a folder or a hub id, which is downloaded) whose config, headers and other JSON are sound.

    Of a supported family every tensor's shape is checked too.
    Raises UserError or LayoutError, also for pickle weights, which are never opened, for an adapter, and for a
    truncated file.
    """
    folder, is_local = resolve_json(str(model), revision)
    read_config(folder)
    checkpoint = read_checkpoint(folder if is_local else fetch_weights(str(model), revision))
    for name in OTHER_JSON:
        if (checkpoint.folder / name).exists():
            read_json(checkpoint.folder / name)
    if find_family(checkpoint.config) is not None:
        Layout.from_config(checkpoint.config).check_model(checkpoint.config)
        check_quantised(checkpoint)
    return checkpoint


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json as transformers takes it; raises UserError with one sentence for any error."""
    return taken_config(read_stated_config(folder))[0]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder``, from its config, index and headers; raises UserError with one sentence for
    any error.

    Of a supported family, the names are a Llama's, and ``tie_word_embeddings`` is what the weights say.
    """
    config, config_remarks = taken_config(read_stated_config(folder))
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} holds a PEFT adapter beside its weights; merge it first (merge_and_unload), then take the result"
        )
    tensors, tensor_remarks = read_tensors(folder)
    warning = second_weights(folder)
    checkpoint = Checkpoint(
        folder, config, tensors, (*config_remarks, *tensor_remarks), () if warning is None else (warning,)
    )
    if find_family(config) is None:
        return checkpoint
    check_config(plain_config(config))
    return with_zero_biases(with_tied_ends(with_model_names(checkpoint)))


def taken_config(stated: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the config without keys that do not count, and with one value of what it states twice; and remarks.

    Raises UserError for a number that is too large.
    """
    check_largest(stated)
    config, remarks = dict(stated), []
    for key in [key for key in config if IMPLEMENTATIONS.fullmatch(key)]:
        if config.pop(key) is not None:
            remarks.append(f"config.json: {key} is left out; a checkpoint does not choose the code that runs it")
    for key in QUANTISATION_KEYS:
        if key in config and not config[key] and config.pop(key) is not None:
            remarks.append(f"config.json: {key} is empty, which is taken as none")
    # transformers' order: convert_rope_params_to_dict of modeling_rope_utils.py
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, dict):
        twice = {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}
        twice |= {"rope_parameters": rope} if config.get("rope_parameters") else {}
        for key, value in twice.items():
            if config.get(key) not in (None, value):
                remarks.append(
                    f"config.json says {key} twice, {config[key]} and {value}; transformers takes the second"
                )
                config[key] = value
    return config, remarks


def with_model_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with tensors under their names in the model, as transformers renames them, without ignored
    buffers.

    Raises UserError where two tensors get one name.
    """
    tensors: dict[str, TensorInfo] = {}
    for stored, info in checkpoint.tensors.items():
        name = f"model.{stored}" if stored.startswith(BASE_PARTS) else stored
        name = name.removeprefix("model.") if name.startswith(f"model.{HEAD}") else name
        if BUFFERS.search(name):
            continue
        if name in tensors:
            raise UserError(f"{checkpoint.folder}: {name} is stored as {tensors[name].name} and as {stored}")
        tensors[name] = info
    remarks = [*checkpoint.remarks]
    if other := next((name for name, info in tensors.items() if name != info.name), None):
        remarks.append(f"tensors get the names that they have in the model, such as {other} for {tensors[other].name}")
    return replace(checkpoint, tensors=tensors, remarks=tuple(remarks))


def with_tied_ends(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with embedding and LM head tied as transformers ties them (``tie_weights``).

    They are tied where the config asks for it, unless both are stored and differ. The tensors then hold the embedding
    only.
    """
    tensors, remarks = dict(checkpoint.tensors), [*checkpoint.remarks]
    if not is_tied(checkpoint.config) or HEAD not in tensors:
        return checkpoint
    head, embedding = tensors.pop(HEAD), tensors.get(EMBEDDING)
    if embedding is None:
        remarks.append(f"{HEAD} alone is stored of the two that are tied; it is {EMBEDDING}")
        return replace(checkpoint, tensors={EMBEDDING: head, **tensors}, remarks=tuple(remarks))
    if have_same_values(checkpoint.folder, embedding, head):
        return replace(checkpoint, tensors=tensors)
    remarks.append(
        f"config.json ties {HEAD} to the embedding, but the two are stored and differ; both are kept, untied"
    )
    config = {**checkpoint.config, "tie_word_embeddings": False}
    return replace(checkpoint, config=config, remarks=tuple(remarks))


def have_same_values(folder: Path, one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether two tensors are equal, byte for byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open_regular(folder / one.file) as first, open_regular(folder / other.file) as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = [min(COMPARED_BYTES, one.nbytes - at) for at in range(0, one.nbytes, COMPARED_BYTES)]
        return all(first.read(size) == second.read(size) for size in sizes)


def with_zero_biases(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with zero for the biases that the config asks for and no layer stores.

    transformers initialises them with zero, as llamafied models without a bias of o_proj mean it.
    """
    tensors, of_kind = dict(checkpoint.tensors), defaultdict(list)
    for name in expected_tensors(checkpoint.config):
        if name.endswith(".bias"):
            of_kind[name.split(".", 3)[3]].append(name)  # such as self_attn.o_proj.bias, of each layer
    missing = []
    for kind, names in of_kind.items():
        weights = [checkpoint.tensors.get(name.removesuffix("bias") + "weight") for name in names]
        if not any(name in checkpoint.tensors for name in names):
            missing.append(kind)
            tensors |= {
                name: replace(weight, name=name, shape=weight.shape[:1], stop=weight.start)
                for name, weight in zip(names, weights, strict=True)
                if weight is not None
            }
    if not missing:
        return checkpoint
    remark = f"config.json asks for {', '.join(missing)}, which no layer stores; zero, as in transformers"
    return replace(checkpoint, tensors=tensors, remarks=(*checkpoint.remarks, remark))
