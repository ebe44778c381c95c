"""A checkpoint as plain transformers takes it: the config keys that count, and the tensors that are the model's."""

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ladderize.checkpoint.config import (
    EMBEDDING,
    HEAD,
    LARGEST,
    check_config,
    check_quantised,
    check_size,
    check_tensors,
    expected_tensors,
    is_tied,
)
from ladderize.checkpoint.quantised import QUANTISATION_KEYS, plain_config
from ladderize.checkpoint.reading import Checkpoint, TensorInfo, fetch_weights, read_tensors, resolve_json
from ladderize.errors import UserError
from ladderize.families.registry import find_family
from ladderize.files.documents import read_json
from ladderize.files.regular import open_regular
from ladderize.layout import Layout

# These choose the code that computes; for a name such as attacker/kernel transformers fetches code from the hub.
IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation\w*|custom_pipelines")
NOT_ITS_CODE = "a checkpoint does not choose the code that runs it"
BUFFERS = re.compile(r"rotary_emb\.inv_freq")  # recomputed, even where an old checkpoint has them
BASE_PARTS = ("embed_tokens.", "layers.", "norm.")  # of the model without its LM head
COMPARED_BYTES = 4 << 20  # of two tensors at a time
Sound = Literal["floats", "any"]


@dataclass(frozen=True)
class Source:
    """A checkpoint by its name: a folder or a hub id, of which only the .json files are downloaded yet."""

    name: str
    folder: Path
    is_local: bool
    config: dict[str, Any]
    warnings: list[str]

    def open(self, sound: Sound = "floats") -> Checkpoint:
        """Return the checkpoint, downloaded where it is not local; ``open_checkpoint`` says more."""
        folder = self.folder if self.is_local else fetch_weights(self.name)
        checkpoint = _read(folder, self.config, self.warnings)
        if sound == "floats":
            check_config(checkpoint.config, self.name)
            check_tensors(checkpoint)
        elif find_family(checkpoint.config) is not None:
            Layout.from_config(checkpoint.config).check_model(checkpoint.config)
            check_quantised(checkpoint)
        return checkpoint


def find_source(model: str | Path) -> Source:
    folder, is_local = resolve_json(str(model))
    return Source(str(model), folder, is_local, *read_config_and_warnings(folder))


def open_checkpoint(model: str | Path, *, sound: Sound = "floats") -> Checkpoint:
    """Return a checkpoint (a folder or a hub id, which is downloaded) whose config and headers are sound: "floats" is
    of a supported family, and no quantised one; "any" takes those, too, and other families, whose tensors are not
    checked. Pickle weights, which are never opened, adapters and truncated files are a UserError."""
    return find_source(model).open(sound)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json as transformers takes it."""
    return read_config_and_warnings(folder)[0]


def read_config_and_warnings(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return config.json without keys that do not count and with one rotary embedding, and what was changed."""
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise UserError(
                f"{folder} is a PEFT adapter; `ladderize merge {folder} OUT` makes a checkpoint of it and its base"
            )
        raise UserError(f"{folder} holds no config.json; it is not a Hugging Face checkpoint")
    config = read_json(folder / "config.json")
    for key, most in LARGEST.items():
        if type(config.get(key)) is int and config[key] > most:  # transformers would exhaust memory
            check_size(config, key)
    if config.get("transformers_weights") is not None:
        raise UserError(
            f"{folder}: transformers_weights of config.json names the file of the weights; rename that file to"
            " model.safetensors, and remove the key"
        )
    warnings = []
    for key, value in list(config.items()):
        is_code = IMPLEMENTATIONS.fullmatch(key)
        if is_code or (key in QUANTISATION_KEYS and not value):
            del config[key]
            if value is not None:
                reason = NOT_ITS_CODE if is_code else "an empty one is none"
                warnings.append(f"{key} of config.json is left out: {reason}")
    # transformers' order: convert_rope_params_to_dict of modeling_rope_utils.py
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, dict):
        for key, value in (("rope_theta", rope.get("rope_theta", config.get("rope_theta"))), ("rope_parameters", rope)):
            if config.get(key) and config[key] != value:
                warnings.append(
                    f"config.json says {key} twice, {config[key]!r:.99} and {value!r:.99}; the second counts, as for"
                    " transformers"
                )
                config[key] = value
    return config, warnings


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder``, from its config, index and headers. Of a supported family the names are a
    Llama's, and ``tie_word_embeddings`` is what the weights say."""
    return _read(folder, *read_config_and_warnings(folder))


def _read(folder: Path, config: dict[str, Any], warnings: list[str]) -> Checkpoint:
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} holds a PEFT adapter beside its weights; merge it first (merge_and_unload), then take the result"
        )
    tensors, more = read_tensors(folder)
    checkpoint = Checkpoint(folder, config, tensors, (*warnings, *more))
    if find_family(config) is None:
        return checkpoint
    check_config(plain_config(config))
    return with_zero_biases(with_tied_ends(with_model_names(checkpoint)))


def with_model_names(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with tensors under their names in the model, and without ignored buffers."""
    tensors: dict[str, TensorInfo] = {}
    for stored, info in checkpoint.tensors.items():
        name = f"model.{stored}" if stored.startswith(BASE_PARTS) else stored
        name = name.removeprefix("model.") if name.startswith(f"model.{HEAD}") else name
        if BUFFERS.search(name):
            continue
        if name in tensors:
            raise UserError(f"{checkpoint.folder}: {name} is stored as {tensors[name].name} and as {stored}")
        tensors[name] = info
    return replace(checkpoint, tensors=tensors)


def with_tied_ends(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with embedding and LM head tied as transformers ties them (``tie_weights``): the embedding
    alone is kept, where the config asks for it, unless both are stored and differ."""
    tensors = dict(checkpoint.tensors)
    if not is_tied(checkpoint.config) or HEAD not in tensors:
        return checkpoint
    head, embedding = tensors.pop(HEAD), tensors.get(EMBEDDING)
    if embedding is None:
        return replace(checkpoint, tensors={EMBEDDING: head, **tensors})
    if have_same_values(checkpoint.folder, embedding, head):
        return replace(checkpoint, tensors=tensors)
    warning = f"config.json ties {HEAD} to the embedding, but the two are stored and differ; both are kept, untied"
    config = {**checkpoint.config, "tie_word_embeddings": False}
    return replace(checkpoint, config=config, warnings=(*checkpoint.warnings, warning))


def with_zero_biases(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with zero, as in transformers, for the biases that the config asks for and no layer has."""
    tensors, missing = dict(checkpoint.tensors), []
    of_kind: dict[str, list[str]] = defaultdict(list)
    for name in expected_tensors(checkpoint.config):
        if name.endswith(".bias"):
            of_kind[name.split(".", 3)[3]].append(name)  # such as self_attn.o_proj.bias, of each layer
    for kind, names in of_kind.items():
        weights = {name: name.removesuffix("bias") + "weight" for name in names}
        if tensors.keys().isdisjoint(names) and tensors.keys() >= {*weights.values()}:
            missing.append(kind)
            for name, weight in weights.items():
                info = tensors[weight]
                tensors[name] = replace(info, name=name, shape=info.shape[:1], stop=info.start)
    if not missing:
        return checkpoint
    warning = f"config.json asks for {', '.join(missing)}, which no layer stores; zero, as in transformers"
    return replace(checkpoint, tensors=tensors, warnings=(*checkpoint.warnings, warning))


def have_same_values(folder: Path, left: TensorInfo, right: TensorInfo) -> bool:
    """Return whether two tensors are equal, byte for byte."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    with open_regular(folder / left.file) as first, open_regular(folder / right.file) as second:
        first.seek(left.start)
        second.seek(right.start)
        sizes = [min(COMPARED_BYTES, left.nbytes - at) for at in range(0, left.nbytes, COMPARED_BYTES)]
        return all(first.read(size) == second.read(size) for size in sizes)
