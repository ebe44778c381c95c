"""A checkpoint as plain transformers takes it: the config keys that count, and the tensors that are the model's.

Everything that reads a checkpoint begins here, so all of ladderize computes what transformers does.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladderize.checkpoint.config import EMBEDDING, HEAD, check_config, check_largest, check_quantised, is_tied
from ladderize.checkpoint.quantised import QUANTISATION_KEYS, plain_config
from ladderize.checkpoint.reading import Checkpoint, TensorInfo, fetch_weights, read_tensors, resolve_json
from ladderize.errors import UserError
from ladderize.families.registry import find_family
from ladderize.files.documents import read_json
from ladderize.files.regular import is_there, open_regular
from ladderize.layout import Layout

# These choose the code that computes; for a name such as attacker/kernel transformers fetches code from the hub.
IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation\w*")
BUFFERS = re.compile(r"rotary_emb\.inv_freq")  # recomputed, even where an old checkpoint has them
COMPARED_BYTES = 4 << 20  # of two tensors at a time


def open_sound_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Return a checkpoint (a folder or a hub id, which is downloaded) whose config and headers are sound.

    Of a supported family every tensor's shape is checked too.
    Raises UserError or LayoutError, also for pickle weights, which are never opened, for an adapter, and for a
    truncated file.
    """
    folder, is_local = resolve_json(str(model), revision)
    read_config(folder)
    checkpoint = read_checkpoint(folder if is_local else fetch_weights(str(model), revision))
    if find_family(checkpoint.config) is not None:
        Layout.from_config(checkpoint.config).check_model(checkpoint.config)
        check_quantised(checkpoint)
    return checkpoint


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json without the keys that do not count; raises UserError with one sentence for any error.

    A checkpoint does not choose the code that runs it, and an empty ``quantization_config`` is none.
    """
    if not is_there(folder / "config.json"):
        if (folder / "adapter_config.json").exists():
            raise UserError(
                f"{folder} is a PEFT adapter; `ladderize merge {folder} OUT` makes a checkpoint of it and its base"
            )
        raise UserError(f"{folder} holds no config.json; it is not a Hugging Face checkpoint")
    config = read_json(folder / "config.json")
    check_largest(config)
    return {
        key: value
        for key, value in config.items()
        if not IMPLEMENTATIONS.fullmatch(key) and (value or key not in QUANTISATION_KEYS)
    }


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder``, from its config, index and headers; raises UserError with one sentence for
    any error.

    Of a supported family ``tie_word_embeddings`` is what the weights say.
    """
    config = read_config(folder)
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} holds a PEFT adapter beside its weights; merge it first (merge_and_unload), then take the result"
        )
    checkpoint = Checkpoint(folder, config, read_tensors(folder))
    if find_family(config) is None:
        return checkpoint
    check_config(plain_config(config))
    tensors = {name: info for name, info in checkpoint.tensors.items() if not BUFFERS.search(name)}
    return with_tied_ends(replace(checkpoint, tensors=tensors))


def with_tied_ends(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with embedding and LM head tied as transformers ties them (``tie_weights``).

    They are tied where the config asks for it, unless both are stored and differ. The tensors then hold the embedding
    only.
    """
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
    return replace(checkpoint, config=config, warnings=(warning,))


def have_same_values(folder: Path, one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether two tensors are equal, byte for byte."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open_regular(folder / one.file) as first, open_regular(folder / other.file) as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = [min(COMPARED_BYTES, one.nbytes - at) for at in range(0, one.nbytes, COMPARED_BYTES)]
        return all(first.read(size) == second.read(size) for size in sizes)
