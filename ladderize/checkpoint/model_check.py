"""Everything about a model that can be checked without its weights, of any architecture: before the first of several
is computed with, and before transformers opens it."""

from pathlib import Path

from ladderize.checkpoint.llama import check_config, check_tensors
from ladderize.checkpoint.reading import Checkpoint, fetch_weights, read_config, read_tensors, resolve_json
from ladderize.errors import UserError
from ladderize.files.documents import read_json
from ladderize.layout import Layout

# what transformers reads as it is, beside config.json and the weights
OTHER_JSON = (
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
)


def check_model(model: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint (a folder or a hub id, which is downloaded), whose config, headers and other JSON were
    read and found sound; of a Llama every tensor's shape too.

    Raises UserError or LayoutError: for pickle weights, which are never opened, for an adapter, for what is truncated.
    """
    folder, is_local = resolve_json(str(model), revision)
    config = read_config(folder)
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{model} holds a PEFT adapter beside its weights; merge it first (merge_and_unload), then take the result"
        )
    if not is_local:
        folder = fetch_weights(str(model), revision)
    tensors = read_tensors(folder)
    for name in OTHER_JSON:
        if (folder / name).exists():
            read_json(folder / name)
    is_llama = config.get("model_type") in ("llama", "ladderized_llama")
    if is_llama and not (config.get("quantization_config") or config.get("compression_config")):
        check_config(config)
        Layout.from_config(config).check_model(config)
        check_tensors(Checkpoint(folder, config, tensors))
    return folder
