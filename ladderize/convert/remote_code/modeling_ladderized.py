"""Decoders whose sync points are blocking, overlapped (Ladder Residual), delayed, or dropped (Sync-Point Drop).

Under tensor parallelism every layer has two sync points, where the partial outputs of all ranks are summed into the
residual stream: after attention and after the MLP. This file computes, on one device, what such a group of ranks
computes. The classes of a family, such as LadderizedLlamaForCausalLM, are made when one is first asked for, of this
file's and transformers' own. It needs only torch and transformers.
"""

import re
import sys
from inspect import signature

import torch
import transformers
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward
from transformers.utils import logging

from .configuration_ladderized import family_config

logger = logging.get_logger(__name__)
# Since transformers 5.24 attention updates any cache, by the name `cache`. Before it updates `past_key_values`, and
# `cache` is the paged one of continuous batching, which the attention function updates.
UPDATES_EVERY_CACHE = "cache" in signature(LlamaAttention.forward).parameters


# The norms behind a layer's sums, attention's and the MLP's, in families that have some. Before the MLP is a norm of
# its own name, or the one of this name that is not behind attention.
NORMS_BEHIND = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),
    ("post_self_attn_layernorm", "post_mlp_layernorm"),
)
BEFORE_MLP = ("pre_feedforward_layernorm", "post_attention_layernorm")


class HeadsOnlyAttention:
    """A family's attention up to, but without, `o_proj`, whose product may stay split by rank.

    Its input may be apart for each rank, [ranks, batch, tokens, hidden]: rank k's heads are then of the k-th, and where
    there are more ranks than KV heads each rank has keys and values of its own. A class of it names `rotate`, the
    family's rotation of queries and keys.
    """

    def query_key_value(self, hidden_states, position_embeddings):
        """[batch, heads, tokens, head_dim] each, as attention reads them."""
        kv_heads = self.config.num_key_value_heads
        counts = (self.config.num_attention_heads, kv_heads, kv_heads)
        blocks = [min(count, len(hidden_states)) for count in counts] if hidden_states.ndim == 4 else None
        sizes = [count * self.head_dim for count in counts]
        query, key, value = projected(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"), sizes, hidden_states, blocks)
        query, key, value = (tensor.unflatten(-1, (-1, self.head_dim)) for tensor in (query, key, value))
        if hasattr(self, "q_norm"):  # of each head
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        # SmolLM3 says which layers rotate; in EXAONE 4 those without a window do not, where others have one
        is_near = getattr(self, "is_sliding", True) or self.sliding_window is None
        if getattr(self, "use_rope", is_near):
            query, key = self.rotate(query, key, *position_embeddings)
        return query, key, value

    def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
        query, key, value = self.query_key_value(hidden_states, position_embeddings)
        cache = kwargs.pop("cache", None) if UPDATES_EVERY_CACHE else None
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        elif past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        # that of the layer, or of all layers
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        kwargs = {"sliding_window": window if getattr(self, "is_sliding", True) else None, **kwargs}
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return output.flatten(-2), weights


class LadderizedDecoderLayer:
    """One layer. `hidden_states` is the complete residual stream; `visible` is what this layer's attention may read
    of it while the MLP's all-reduce is still in flight (None: nothing is in flight): the stream without it, and where
    that is delayed with each rank's own part of it, [ranks, batch, tokens, hidden].

    Returns the complete stream, or, when the own MLP sync point is overlapped or delayed, the pair (complete, visible).
    A class of it names `heads_only`, the family's attention without `o_proj`.
    """

    residual_multiplier = 1.0  # of what attention and the MLP add to the stream; some families have another

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.lay_out(config, layer_idx)

    def lay_out(self, config, layer_idx):
        """Make of the family's own layer, whose attributes are there, one of the layout."""
        self.attention_sync = config.attention_sync[layer_idx]
        self.mlp_sync = config.mlp_sync[layer_idx]
        self.sync_tp_size = config.sync_tp_size
        reads_apart = layer_idx > 0 and config.mlp_sync[layer_idx - 1] == "delayed"
        self.keeps_apart = self.attention_sync in ("delayed", "dropped")
        self.norms_behind = next((names for names in NORMS_BEHIND if hasattr(self, names[1])), ())
        norms_before = (name for name in BEFORE_MLP if hasattr(self, name) and name not in self.norms_behind)
        self.norm_before_mlp = next(norms_before, None)
        if self.norms_behind and (self.keeps_apart or self.mlp_sync == "delayed"):
            raise ValueError("a norm behind a sum needs all of it, so its sync point cannot be delayed or dropped")
        if self.keeps_apart or reads_apart:
            self.self_attn.__class__ = self.heads_only
        if reads_apart:
            kv_heads = max(config.num_key_value_heads, self.sync_tp_size)
            self.self_attn.num_key_value_groups = config.num_attention_heads // kv_heads

    def __call__(self, hidden_states, *args, **kwargs):
        # The model hands on what the layer before returned. Reentrant checkpointing wants bare tensors as arguments.
        state = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        return super().__call__(*state, *args, **kwargs)

    def forward(self, hidden_states, visible=None, **kwargs):
        attention_input = self.read_by_attention(hidden_states if visible is None else visible)
        attention_output, _ = self.self_attn(attention_input, **kwargs)
        mlp_input, stream, visible = self.after_attention(hidden_states, attention_output)
        inputs = self.read_by_mlp(mlp_input)
        if self.mlp_sync != "delayed" and not self.keeps_apart:
            return self.after_mlp(stream, visible, None, None, self.added_by_mlp(self.mlp(inputs)))
        return self.after_mlp(stream, visible, *self.mlp_products(self.mlp_slices(inputs)))

    def read_by_attention(self, stream):
        """Return what attention reads of the stream."""
        return self.input_layernorm(stream) if hasattr(self, "input_layernorm") else stream

    def read_by_mlp(self, stream):
        """Return what the MLP reads of the stream."""
        return stream if self.norm_before_mlp is None else getattr(self, self.norm_before_mlp)(stream)

    def added_by_attention(self, output):
        """Return what attention's sum adds to the stream."""
        return getattr(self, self.norms_behind[0])(output) if self.norms_behind else self.scaled(output)

    def added_by_mlp(self, output):
        """Return what the MLP's sum adds to the stream."""
        return getattr(self, self.norms_behind[1])(output) if self.norms_behind else self.scaled(output)

    def after_attention(self, hidden_states, attention_output):
        """Return the stream that the MLP reads, where sums are kept apart [ranks, ...]; the complete stream; and what
        is visible of it while the MLP's sum is in flight, of an MLP after a dropped sum only to its own rank.

        attention_output: what `self_attn` returned, with or without `o_proj`.
        """
        if self.keeps_apart:
            apart, bias = row_parallel(self.self_attn.o_proj, attention_output, self.sync_tp_size)
            apart = self.scaled(apart)
            before = hidden_states if bias is None else hidden_states + self.scaled(bias)
            stream, mlp_input = before + apart.sum(0), before + apart
            if self.attention_sync == "delayed":
                return mlp_input, stream, stream
            return mlp_input, stream, mlp_input if self.mlp_sync == "delayed" else before
        if isinstance(self.self_attn, HeadsOnlyAttention):
            attention_output = self.self_attn.o_proj(attention_output)
        stream = hidden_states + self.added_by_attention(attention_output)
        return stream if self.attention_sync == "blocking" else hidden_states, stream, stream

    def mlp_slices(self, inputs):
        """Return the inputs of `down_proj`, the ranks' slices side by side.

        inputs: [..., hidden], or apart for each rank, [ranks, ..., hidden]: rank k's MLP reads the k-th alone.
        """
        mlp = self.mlp
        blocks = [self.sync_tp_size] * 2 if self.keeps_apart else None
        sizes = [mlp.down_proj.in_features] * 2
        gate, up = projected(mlp, "gate_up_proj", ("gate_proj", "up_proj"), sizes, inputs, blocks)
        return self.activation(gate) * up

    def mlp_products(self, slices):
        """Return the MLP's products by rank [ranks, ..., hidden] and its bias, both None unless its sum is delayed, and
        the sum of both."""
        down_proj = self.mlp.down_proj
        if self.mlp_sync != "delayed" and not (self.keeps_apart and reads_otherwise(base_linear(down_proj))):
            return None, None, self.added_by_mlp(down_proj(slices))  # already the sum of the ranks' products
        by_rank, bias = row_parallel(down_proj, slices, self.sync_tp_size)
        by_rank, bias = self.scaled(by_rank), None if bias is None else self.scaled(bias)
        output = by_rank.sum(0)
        return by_rank, bias, output if bias is None else output + bias

    def after_mlp(self, stream, visible, by_rank, bias, output):
        """Return the state that leaves the layer: what `after_attention` left, with the MLP's products."""
        complete = stream + output
        if self.mlp_sync == "blocking":
            return complete
        if self.mlp_sync == "delayed":
            visible = (visible if bias is None else visible + bias) + by_rank
        return complete, visible

    @property
    def activation(self):
        return self.mlp.act_fn if hasattr(self.mlp, "act_fn") else self.mlp.activation_fn

    def scaled(self, output):
        """Return the part of what attention or the MLP computed that is added to the stream."""
        return output if self.residual_multiplier == 1 else output * self.residual_multiplier


def projected(module, fused, names, sizes, inputs, blocks=None):
    """Return the outputs of the column-parallel projections `names` of a module, or of the rows of its `fused` one.

    sizes: the outputs of each.
    blocks: where the inputs are apart for each rank, [ranks, ...]: see `column_parallel`.
    """
    is_fused = hasattr(module, fused)
    linears = [getattr(module, fused if is_fused else name) for name in names]
    if blocks is None and is_fused:
        return linears[0](inputs).split(sizes, -1)
    if blocks is None:
        return [linear(inputs) for linear in linears]
    outputs, begin = [], 0
    for linear, size, block in zip(linears, sizes, blocks):
        rows = slice(begin, begin + size) if is_fused else slice(None)
        outputs.append(column_parallel(linear, inputs, len(inputs), block, rows))
        begin += size
    return outputs


def row_parallel(projection, inputs, ranks):
    """Return the ranks' partial products of a row-parallel projection, and its bias, which belongs to no rank.

    inputs: [..., in]; rank k owns the k-th contiguous part of them. Returns [ranks, ..., out], whose sum is the product
    without bias, and the bias or None.
    """

    def multiply(weight, inputs):
        return torch.einsum("...nd,hnd->n...h", inputs.unflatten(-1, (ranks, -1)), weight.unflatten(1, (ranks, -1)))

    weights = sliceable(projection, inputs)
    if weights is None:
        slices = inputs.unflatten(-1, (ranks, -1))
        alone = (
            nn.functional.pad(slices[..., k : k + 1, :], (0, 0, k, ranks - 1 - k)).flatten(-2) for k in range(ranks)
        )
        bias = projection(torch.zeros_like(inputs))
        return torch.stack([projection(masked) for masked in alone]) - bias, bias
    weight, adapters = weights
    output = multiply(weight, inputs)
    for dropout, lora_a, lora_b, scaling in adapters:
        low = multiply(lora_a, dropout(inputs.to(lora_a.dtype)))
        output = output + (nn.functional.linear(low, lora_b) * scaling).to(output.dtype)
    return output, base_linear(projection).bias


def column_parallel(projection, inputs, ranks, blocks, rows=slice(None)):
    """Return the ranks' outputs of some rows of a column-parallel projection, side by side, bias included.

    inputs: [ranks, ..., in], one for each rank; rank k computes the k-th contiguous part of the outputs.
    blocks: the parts of the outputs; where these are fewer than the ranks, neighbours compute the same one.
    Returns [..., out].
    """

    def owned(weight):
        return weight[rows].unflatten(0, (blocks, -1)).repeat_interleave(ranks // blocks, 0)

    def multiply(weight, inputs):
        return torch.einsum("n...h,noh->...no", inputs, owned(weight)).flatten(-2)

    weights = sliceable(projection, inputs)
    if weights is None:
        whole = (projection(inputs[k])[..., rows].unflatten(-1, (blocks, -1)) for k in range(ranks))
        return torch.cat([output[..., k * blocks // ranks, :] for k, output in enumerate(whole)], dim=-1)
    weight, adapters = weights
    output = multiply(weight, inputs)
    bias = base_linear(projection).bias
    output = output if bias is None else output + owned(bias).flatten()
    for dropout, lora_a, lora_b, scaling in adapters:
        kept = dropout(torch.ones_like(inputs[0], dtype=lora_a.dtype))  # drawn once: real ranks share their seed
        low = nn.functional.linear(inputs.to(lora_a.dtype) * kept, lora_a)
        output = output + (multiply(lora_b, low) * scaling).to(output.dtype)
    return output


def base_linear(projection):
    """Return the nn.Linear under `projection`, which PEFT may have wrapped. Nothing else can be split by rank."""
    linear = projection.get_base_layer() if hasattr(projection, "get_base_layer") else projection
    if not isinstance(linear, nn.Linear) or type(linear.weight).__name__ == "DTensor":
        raise RuntimeError(
            f"this layout has delayed or dropped sync points, which need whole weights, but {type(linear).__name__} is"
            " sharded or replaced by another framework's layer: run it in vLLM with ladderize's plugin, on ladderize's"
            " own runtime, or in plain transformers on one device"
        )
    return linear


def reads_otherwise(linear):
    """Return whether a linear layer may quantise what it reads: each rank then quantises its own part. Its forward was
    exchanged, as compressed-tensors does, or its weight is a tensor made of others, as torchao's are."""
    is_exchanged = "forward" in vars(linear) and not hasattr(linear, "_hf_hook")
    return is_exchanged or hasattr(linear.weight, "__tensor_flatten__")


def sliceable(projection, inputs):
    """Return the weight of `projection` and its adapters as [(dropout, A, B, scaling)], for multiplying slice by slice.

    None where only the module itself knows its product: quantised or offloaded weights, adapters other than plain
    LoRA, somebody's hooks. Then the caller calls it once for each rank: exact, but `ranks` times the work.
    """
    linear = base_linear(projection)
    weight = linear.weight
    resident = (
        weight.is_floating_point()
        and not reads_otherwise(linear)
        and weight.device == inputs.device
        and weight.shape == (linear.out_features, linear.in_features)
        and not any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in (linear, projection))
    )
    adapters = [] if projection is linear else plain_lora(projection)
    if resident and type(linear) is nn.Linear and adapters is not None:
        return weight, adapters
    logger.warning_once(
        f"{type(projection).__name__}: weight or adapter cannot be sliced by virtual rank; calling the whole module"
        " once for each rank instead (the same result, slower)"
    )
    return None


def plain_lora(layer):
    """[(dropout, A, B, scaling)] of the active adapters if `layer` is PEFT's LoRA without variants, else None."""
    if not type(layer).__module__.startswith("peft.tuners.lora.") or (layer.disable_adapters and layer.merged):
        return None
    if layer.disable_adapters or layer.merged:
        return []
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if any(name in layer.lora_variant or layer.lora_bias[name] for name in active):
        return None
    return [
        (layer.lora_dropout[name], layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
        for name in active
    ]


class LadderizedModel:
    """A class of it names `layer_class`, the family's layer with a layout."""

    def __init__(self, config):
        check_engine(config)
        super().__init__(config)
        for index, layer in enumerate(self.layers):  # made of the family's own, which are not built twice
            layer.__class__ = self.layer_class
            layer.lay_out(config, index)

    def __setattr__(self, name, value):
        if name == "layers" and len(value) != self.config.num_hidden_layers:
            raise ValueError(
                f"the layout names {self.config.num_hidden_layers} layers, one by one, so the model cannot be given"
                f" {len(value)}: PEFT's layer_replication, and pruning, are for dense models"
            )
        super().__setattr__(name, value)


class LadderizedForCausalLM:
    """A class of it names `model_class`, the family's model with a layout."""

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)  # the family's own would build its dense model
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


def check_engine(config):
    """Raise ValueError where another engine will replace every nn.Linear, at any tensor-parallel size, of a layout that
    has delayed or dropped sync points. Engines name their attention before they build a model."""
    engine = config._attn_implementation if config._attn_implementation in ("vllm", "vllm_mla", "sglang") else None
    if getattr(getattr(config, "distributed_config", None), "tp_size", None) not in (None, 1):
        engine = "transformers' tensor parallelism"
    if config.sync_tp_size is not None and engine is not None:
        raise ValueError(
            f"this layout delays or drops sync points for {config.sync_tp_size} virtual ranks, and {engine} cannot run"
            " it: use vLLM with ladderize's plugin, ladderize's own runtime, or plain transformers on one device"
        )


def make_family(prefix):
    """Return the classes of a family with a layout, by name, and tell transformers about them.

    prefix: the beginning of its class names in transformers, such as Llama.
    """
    dense = vars(sys.modules[getattr(transformers, f"{prefix}ForCausalLM").__module__])
    classes = {}

    def make(suffix, *bases, **attributes):
        name = f"Ladderized{prefix}{suffix}"
        # a text model that has a multimodal brother, whose name it would be, is called so
        names = {"Model": "TextModel"} if f"{prefix}TextModel" in dense else {}
        bases = [base if isinstance(base, type) else dense[f"{prefix}{names.get(base, base)}"] for base in bases]
        classes[name] = type(name, tuple(bases), {"__module__": __name__, **attributes})
        return classes[name]

    rotate = staticmethod(dense["apply_rotary_pos_emb"])
    config, attention = family_config(prefix), make("Attention", HeadsOnlyAttention, "Attention", rotate=rotate)
    layer = make("DecoderLayer", LadderizedDecoderLayer, "DecoderLayer", heads_only=attention)
    base = make("PreTrainedModel", "PreTrainedModel", config_class=config, _no_split_modules=[layer.__name__])
    model = make("Model", LadderizedModel, base, "Model", layer_class=layer)
    causal = make("ForCausalLM", LadderizedForCausalLM, base, "ForCausalLM", model_class=model)
    make("ForSequenceClassification", GenericForSequenceClassification, base)
    make("ForTokenClassification", GenericForTokenClassification, base)
    make("ForQuestionAnswering", GenericForQuestionAnswering, base)
    # where the classes for sequences, tokens and questions find their base model
    AutoModel.register(config, model, exist_ok=True)
    # by this list transformers' Trainer shifts the labels of label smoothing, and lm-eval knows a causal model
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type] = causal.__name__
    return classes


def __getattr__(name):
    match = re.fullmatch(r"Ladderized(\w+?)(Attention|DecoderLayer|PreTrainedModel|Model|For[A-Z]\w+)", name)
    if match is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(make_family(match[1]))
    return globals()[name]
