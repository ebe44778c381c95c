"""The tensors that a config promises, and checks that a checkpoint has them."""

import math
from collections.abc import Mapping
from typing import Any

from ladderize.checkpoint.quantised import QUANTISATION_KEYS, plain_view, quantisation_of
from ladderize.checkpoint.reading import FLOAT_DTYPES, Checkpoint
from ladderize.errors import UserError
from ladderize.families.base import FULL_ATTENTION, FUSED, SLIDING_ATTENTION, positive
from ladderize.families.registry import complete_config, family_of, known_family
from ladderize.files.records import shown

MOST, MOST_LAYERS, MOST_HEADS = 2**31, 10_000, 65_536  # no real model has more, which would only exhaust memory
MOST_LABELS = 1_000_000  # transformers makes two dictionaries of as many entries
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "num_labels")
LARGEST = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", *OPTIONAL_SIZES), MOST)
LARGEST |= {"num_hidden_layers": MOST_LAYERS, "num_attention_heads": MOST_HEADS, "num_labels": MOST_LABELS}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
STATED_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "auto")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check_config(config: Mapping[str, Any], model: str = "this checkpoint") -> None:
    """Raise UserError unless this is the config of an unquantised ``model`` of a supported family."""
    family = family_of(config)
    if quantised := next((config[key] for key in QUANTISATION_KEYS if config.get(key)), None):
        method = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"{model} is quantised with {method}; the runtime and what trains or measures layers do not run"
            " quantised weights; `ladderize eval --engine vllm` and `vllm serve` run them"
        )
    for key in LARGEST:
        check_size(config, key, is_optional=key in OPTIONAL_SIZES)
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is not None and str(value).removeprefix("torch.") not in STATED_DTYPES:
            raise UserError(f"config.json: {key} is {str(value)[:60]!r}, but must be one of {', '.join(STATED_DTYPES)}")
    heads, kv_heads = config["num_attention_heads"], kv_head_count(config)
    if heads % kv_heads:
        raise UserError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    check_rope(config)
    family.describe(config)


def check_size(config: Mapping[str, Any], key: str, *, is_optional: bool = False) -> None:
    value, most = config.get(key), LARGEST[key]
    is_size = type(value) is int and 1 <= value <= most
    if not is_size and not (value is None and is_optional):
        text = shown(value) if key in config else "missing"
        raise UserError(f"config.json: {key} is {text}, but must be a positive integer of at most {most:,}")


def stated_ropes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the config says of its rotary embeddings, each with a ``rope_type``; raises UserError for what is no
    object."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    ropes = [rope]
    if isinstance(rope, dict) and rope.keys() & {FULL_ATTENTION, SLIDING_ATTENTION}:  # one for each kind of layers
        ropes = list(rope.values())
    for stated in ropes:
        if not isinstance(stated, dict):
            raise UserError(
                f"config.json: rope_parameters is {str(stated)[:60]!r}, but must be an object; repair the file"
            )
    return [{"rope_type": stated.get("type", "default"), **stated} for stated in ropes]


def check_rope(config: Mapping[str, Any]) -> None:
    """Raise UserError unless the rotary embedding is of a known type; transformers names a number that it lacks."""
    for stated in stated_ropes(config):
        kind = stated["rope_type"]
        if kind not in ROPE_TYPES:
            raise UserError(
                f"config.json: the rope_type is {str(kind)[:60]!r}, which is not one of {', '.join(ROPE_TYPES)}; repair"
                " the file, or update transformers and ladderize"
            )
        figures = {**config, **stated}
        for key in figures.keys() & {"rope_theta", "rms_norm_eps"}:
            positive(figures, key)


def kv_head_count(config: Mapping[str, Any]) -> int:
    return known_family(config).kv_heads(config)


def head_dim(config: Mapping[str, Any]) -> int:
    return int(complete_config(config)["head_dim"])


def stored_dtype(checkpoint: Checkpoint, other: str = "auto") -> str:
    """Return torch's name of the embedding's dtype, since norms may be in float32; ``other`` where there is none."""
    embedding = checkpoint.tensors.get(EMBEDDING)
    return FLOAT_DTYPES.get(embedding.dtype, other) if embedding is not None else other


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether the embedding is also the LM head."""
    return bool(complete_config(config)["tie_word_embeddings"])


def most_positions(config: Mapping[str, Any]) -> int:
    """Return the most tokens, of prompt and continuation together, that the config promises to handle."""
    return int(complete_config(config)["max_position_embeddings"] or 2048)


def column_rows(heads: int, kv_heads: int, head_dim: int, inner: int) -> dict[str, int]:
    """Return the rows of each column-parallel projection of a layer, by its name."""
    return {
        "self_attn.q_proj": heads * head_dim,
        **dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), kv_heads * head_dim),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), inner),
    }


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a model with this config, by name; a tied LM head has none. An unsupported
    family gets the parameters of a Llama of the same sizes."""
    family = known_family(config)
    full, decoder = family.complete(config), family.describe(config)
    hidden, inner, dim = full["hidden_size"], full["intermediate_size"], full["head_dim"]
    columns = column_rows(full["num_attention_heads"], full["num_key_value_heads"], dim, inner)
    projections = {
        name: (rows, hidden, decoder.mlp_bias if name.startswith("mlp.") else decoder.qkv_bias)
        for name, rows in columns.items()
    }
    projections["self_attn.o_proj"] = hidden, columns["self_attn.q_proj"], decoder.o_bias
    projections["mlp.down_proj"] = hidden, inner, decoder.mlp_bias
    for name in decoder.fused:
        rows = sum(projections.pop(projection)[0] for projection in FUSED[name])
        projections[name] = (rows, hidden, False)
    of_layer: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, has_bias) in projections.items():
        of_layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            of_layer[f"{name}.bias"] = (rows,)
    if decoder.head_norms:
        of_layer |= dict.fromkeys(("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (dim,))
    of_layer |= {f"{name}.weight": (hidden,) for name in decoder.norms if name is not None}
    tensors: dict[str, tuple[int, ...]] = {EMBEDDING: (full["vocab_size"], hidden)}
    for layer in range(full["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not full["tie_word_embeddings"]:
        tensors[HEAD] = (full["vocab_size"], hidden)
    return tensors


def check_quantised(checkpoint: Checkpoint) -> None:
    """Raise UserError where a tensor, or one of a quantised projection's tensors, is missing or does not fit."""
    quantisation = quantisation_of(checkpoint.config, checkpoint.folder)
    check_tensors(plain_view(checkpoint, quantisation, expected_tensors(checkpoint.config)))


def parameter_count(config: Mapping[str, Any]) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(config).values())


def check_tensors(checkpoint: Checkpoint) -> None:
    """Compare every tensor with the config; raises UserError where one is missing or does not fit."""
    folder, config, stored = checkpoint.folder, checkpoint.config, checkpoint.tensors
    expected = expected_tensors(config)
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    has_other_head = "For" in architecture and not architecture.endswith("ForCausalLM")
    if has_other_head and expected.keys() != stored.keys():
        raise UserError(
            f"{folder}: config.json says {architecture}, a model with another head than a language model's,"
            " such as a reward model; ladderize converts ...ForCausalLM"
        )
    for name, shape in expected.items():
        if name not in stored:
            untied = ", or should set tie_word_embeddings to true" if name in (EMBEDDING, HEAD) else ""
            raise UserError(
                f"{folder}: the tensor {name} is missing; the checkpoint is incomplete (it begins with"
                f" {next(iter(stored), 'nothing')}), or its config.json is another model's{untied}"
            )
        if stored[name].shape != shape:
            shapes = f"{list(stored[name].shape)}, but config.json asks for {list(shape)}"
            raise UserError(f"{folder}: {name} has shape {shapes}")
    for name, tensor in stored.items():
        if name not in expected:
            raise UserError(
                f"{folder}: {tensor.file} holds {name} {list(tensor.shape)}, which is not a tensor of a"
                f" {family_of(config).class_prefix} with this config.json, and which transformers would leave out;"
                " repair config.json, or take the tensor out of the file"
            )
        if tensor.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"{folder}: {name} is stored as {tensor.dtype}, which quantised weights are, but config.json"
                " says of no such quantisation; take the unquantised model"
            )
