"""The description of a family of models: everything that computing needs besides a Llama's sizes. Imports no torch.

All families here have a Llama's layer, ``x + attention(norm(x))``, then ``x + mlp(norm(x))``, the MLP with a gate, and
a Llama's names of projections. So both sums of a layer are sync points. In some a norm comes behind each sum, ``x +
norm(attention(...))``: it needs the complete sum, which may arrive later, but not be delayed or dropped.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ladderize.errors import UserError

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
ROPE = "rope"  # the rotation of a model that has one
SILU, GELU = "silu", "gelu_pytorch_tanh"
QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
# a fused projection of a layer, and those whose rows it has
FUSED = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
}


class Norms(NamedTuple):
    """The names of a layer's norms, before and behind each sub-module; None where there is none."""

    before_attention: str | None
    behind_attention: str | None
    before_mlp: str | None
    behind_mlp: str | None


LLAMAS_NORMS = Norms("input_layernorm", None, "post_attention_layernorm", None)


@dataclass(frozen=True)
class Decoder:
    """One model of a family, as its config.json describes it.

    windows: for each layer the number of tokens that a token sees, itself and those just before it; None: all.
    rope: for each layer the rotation of queries and keys, ``ROPE`` or one of several of the config's
    ``rope_parameters``; None: they do not rotate.
    fused: the projections, of ``FUSED``, that are the rows of several ones.
    norm_offset: is added to the weights of all norms.
    activation: of the MLP's gate; ``Family.describe`` reads it.
    rotary_share: of each head's numbers, how many rotate.
    interleaved: numbers that rotate together are neighbours; else they lie in the two halves of what rotates.
    head_norms: an RMSNorm of each query head and key head before they rotate, one weight [head_dim] for all query heads
    and one for all key heads.
    embedding_scale, attention_scale, residual_scale, logits_scale: factors of the embedding, of the scores before their
    softmax (None: head_dim ** -0.5), of what attention and MLP add to the stream, and of the logits.
    rounds_scale: the embedding's factor is rounded to its dtype before it is applied.
    """

    windows: tuple[int | None, ...]
    rope: tuple[str | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    fused: tuple[str, ...] = ()
    norms: Norms = LLAMAS_NORMS
    norm_offset: float = 0.0
    activation: str = SILU
    embedding_scale: float = 1.0
    rounds_scale: bool = False
    rotary_share: float = 1.0
    interleaved: bool = False
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logits_scale: float = 1.0

    @cached_property  # read in every layer of every pass
    def rotations(self) -> list[str]:
        """The rotations that layers have, in the order of their tables."""
        return sorted({name for name in self.rope if name is not None})

    @property
    def norms_sums(self) -> bool:
        """True if a norm comes behind each sum."""
        return self.norms.behind_attention is not None


@dataclass(frozen=True)
class Family:
    """A family of models that ladderize converts.

    class_prefix: the beginning of transformers' class names.
    read: returns the decoder of a config with defaults filled in; raises UserError.
    defaults: transformers' values for keys that a config leaves out.
    other_types: more model_types of dense or converted models.
    """

    model_type: str
    class_prefix: str
    read: Callable[[Mapping[str, Any]], Decoder]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    other_types: tuple[str, ...] = ()

    @property
    def ladderized_type(self) -> str:
        """The model_type of a converted checkpoint."""
        return f"ladderized_{self.model_type}"

    @property
    def types(self) -> tuple[str, ...]:
        """Every model_type of the family."""
        return (self.model_type, self.ladderized_type, *self.other_types)

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with the family's defaults; ``num_key_value_heads`` and ``head_dim`` are then numbers."""
        full = {**COMMON_DEFAULTS, **self.defaults, **config}
        full["num_key_value_heads"] = self.kv_heads(config)
        full["head_dim"] = full["head_dim"] or full["hidden_size"] // full["num_attention_heads"]
        return full

    def kv_heads(self, config: Mapping[str, Any]) -> int:
        """Return the number of key-value heads: as many as query heads where it is null."""
        stated = config.get("num_key_value_heads", self.defaults.get("num_key_value_heads"))
        return int(stated or config["num_attention_heads"])

    def describe(self, config: Mapping[str, Any]) -> Decoder:
        """Return the decoder that this config describes; raises UserError for one that makes no sense."""
        full = self.complete(config)
        return replace(self.read(full), activation=str(full.get("hidden_activation", full["hidden_act"])))


COMMON_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


# ---- what several families' configs say in the same way ----


def everywhere(config: Mapping[str, Any], window: int | None = None) -> dict[str, Any]:
    """Return ``windows`` and ``rope`` of a model whose layers all have this window and rotate."""
    layers = config["num_hidden_layers"]
    return {"windows": (window,) * layers, "rope": (ROPE,) * layers}


def window_of(config: Mapping[str, Any]) -> int | None:
    """Return ``sliding_window``; raises UserError unless it is null or a positive integer."""
    window = config["sliding_window"]
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(
            f"config.json: sliding_window is {repr(window)[:60]}, but must be null or a positive number of tokens"
        )
    return window


def layer_windows(
    config: Mapping[str, Any], window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Return the window of each layer, None for one without; ``is_sliding`` decides where no ``layer_types`` do."""
    layers, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is None:
        return tuple(window if is_sliding(layer) else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError(
            f"config.json: layer_types is {repr(kinds)[:60]}, but must be a list of {layers} kinds, one for each layer"
        )
    if unknown := [kind for kind in kinds if kind not in (FULL_ATTENTION, SLIDING_ATTENTION)]:
        raise UserError(
            f"config.json: layer_types has {repr(unknown[0])[:60]}, but layers of other kinds than {FULL_ATTENTION} and"
            f" {SLIDING_ATTENTION} are not supported"
        )
    if window is None and SLIDING_ATTENTION in kinds:
        raise UserError(
            f"config.json: layer_types names layers of {SLIDING_ATTENTION}, but no window is in force (sliding_window,"
            " and use_sliding_window where the family has it); repair the file"
        )
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


def positive(config: Mapping[str, Any], key: str) -> float:
    """Return the factor ``key``; raises UserError unless it is a positive number."""
    value = config[key]
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise UserError(f"config.json: {key} is {repr(value)[:60]}, but must be a positive number")
    return float(value)
