"""Which model a checkpoint holds, however it is sharded or written."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import TensorReader

FINGERPRINT_BYTES = 4096  # of each tensor


def dense_function(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config decides a Llama's function, defaults filled in, so that how it is written does not matter."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope = {"rope_type": rope.pop("type", "default"), "rope_theta": config.get("rope_theta", 10000.0), **rope}
    heads = config["num_attention_heads"]
    return {
        "heads": [
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or config["hidden_size"] // heads,
        ],
        "rope": {**rope, "rope_theta": float(rope["rope_theta"])},
        "norm": float(config.get("rms_norm_eps", 1e-6)),
        "activation": config.get("hidden_act", "silu"),
        "tied": bool(config.get("tie_word_embeddings", False)),
    }


def fingerprint(checkpoint: Checkpoint) -> str:
    """Which model this is, however it is sharded: a sha256 of names, dtypes, shapes and a few values of every tensor.

    The values are those in the middle of each, which tells two fine-tunes of one shape apart without reading gigabytes.
    Of the config counts what its dense function depends on; the layout does not.
    """
    digest = hashlib.sha256(json.dumps(dense_function(checkpoint.config), sort_keys=True).encode())
    with TensorReader(checkpoint.folder) as reader:
        for name, tensor in sorted(checkpoint.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(reader.middle(tensor, FINGERPRINT_BYTES))
    return digest.hexdigest()
