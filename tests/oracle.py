"""The oracle: a decoder with sync points, written line by line after docs/layouts.md and the equations that its family
was published with, for reading and not for speed.

Every rank is computed apart, with its own slices of the weights, in fp32 or fp64, without cache, without any code of
the package. It understands batches padded on the left through ``attention_mask``.
"""

import torch
from torch.nn.functional import gelu, linear, silu


def rms_norm(x, weight, eps):
    return x if weight is None else weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate(x, positions, theta, share=1.0, interleaved=False):
    """x: [batch, heads, tokens, head_dim]; the two halves of a head, or of its first ``share``, are the pairs that
    rotate, or ``interleaved`` its neighbours."""
    if share < 1:
        count = int(x.shape[-1] * share)
        return torch.cat([rotate(x[..., :count], positions, theta, 1.0, interleaved), x[..., count:]], -1)
    if interleaved:
        halves = rotate(torch.cat([x[..., ::2], x[..., 1::2]], -1), positions, theta)
        return torch.stack(halves.chunk(2, -1), -1).flatten(-2)
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions[:, None, :, None] * frequencies).to(torch.float32).to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def part(tensor, dim, rank, ranks):
    return tensor.chunk(ranks, dim)[rank] if tensor is not None else None


class Equations:
    """What a family computes otherwise than Llama, from its config: the window and the rotation of each layer, and
    factors. Norms of heads and biases are there where the weights are."""

    def __init__(self, config):
        layers = range(config.num_hidden_layers)
        self.windows, self.rotates = [None for _ in layers], [True for _ in layers]
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.of_scores, self.of_embedding, self.of_sums, self.of_logits = self.head_dim**-0.5, 1.0, 1.0, 1.0
        self.norms = {
            "attention": ("input_layernorm", None),
            "mlp": ("post_attention_layernorm", None),
        }  # before, behind
        self.more_of_norms, self.act, self.thetas = (
            0.0,
            silu,
            [config.rope_parameters.get("rope_theta") for _ in layers],
        )
        family = config.model_type.removeprefix("ladderized_")
        self.interleaved = family in ("glm", "glm4")
        self.share = config.rope_parameters.get("partial_rotary_factor", 1.0)
        if family in ("mistral", "phi3"):
            self.windows = [config.sliding_window for _ in layers]
        if family in ("ministral", "cwm") or (family in ("qwen2", "qwen3", "smollm3") and config.use_sliding_window):
            self.windows = [config.sliding_window if config.layer_types[i][0] == "s" else None for i in layers]
        if family == "smollm3":
            self.rotates = [config.no_rope_layers[i] == 1 for i in layers]
        if family == "granite":
            self.of_scores, self.of_embedding = config.attention_multiplier, config.embedding_multiplier
            self.of_sums, self.of_logits = config.residual_multiplier, 1 / config.logits_scaling
        if family in ("gemma3_text", "exaone4"):
            near = [kind == "sliding_attention" for kind in config.layer_types]
            self.windows = [config.sliding_window if near[i] else None for i in layers]
            self.norms = {"attention": (None, "post_attention_layernorm"), "mlp": (None, "post_feedforward_layernorm")}
        if family == "glm4":
            self.norms = {
                "attention": ("input_layernorm", "post_self_attn_layernorm"),
                "mlp": ("post_attention_layernorm", "post_mlp_layernorm"),
            }
        if family == "exaone4" and config.sliding_window is not None:
            self.rotates = near
        if family == "gemma3_text":
            self.norms = {
                "attention": ("input_layernorm", "post_attention_layernorm"),
                "mlp": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
            }
            self.more_of_norms, self.act = 1.0, lambda x: gelu(x, approximate="tanh")
            self.of_scores, self.of_embedding = config.query_pre_attn_scalar**-0.5, config.hidden_size**0.5
            self.thetas = [config.rope_parameters[config.layer_types[i]]["rope_theta"] for i in layers]

    def rotated(self, x, positions, layer):
        return rotate(x, positions, self.thetas[layer], self.share, self.interleaved)


class Oracle:
    """``Oracle(state_dict, config)(input_ids)`` -> logits and the complete streams entering each layer, then the normed
    end."""

    def __init__(self, weights, config, ranks=None, read=lambda x: x):
        """read: what a projection of a layer does with its rank's input first, such as quantising it."""
        self.weights = dict(weights)
        self.config = config
        self.read = read
        self.family = Equations(config)
        self.ranks = ranks or config.sync_tp_size or 1

    def get(self, layer, name):
        return self.weights.get(f"model.layers.{layer}.{name}")

    def projection(self, layer, fused, names, sizes):
        """Weights and biases of projections, which may be rows of one tensor."""
        joined = self.get(layer, f"{fused}.weight")
        if joined is not None:
            return [(weight, None) for weight in joined.split(sizes)]
        return [(self.get(layer, f"{name}.weight"), self.get(layer, f"{name}.bias")) for name in names]

    def norm(self, x, layer, name):
        weight = self.get(layer, f"{name}.weight")
        return rms_norm(x, None if weight is None else weight + self.family.more_of_norms, self.config.rms_norm_eps)

    def attention(self, layer, x, positions, allowed, rank):
        """One rank's product with its columns of o_proj, without the bias."""
        config = self.config
        heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, self.family.head_dim
        first = rank * heads // self.ranks
        own = range(first, first + heads // self.ranks)
        x = self.read(x)
        names, sizes = [f"self_attn.{name}_proj" for name in "qkv"], [heads * d, kv_heads * d, kv_heads * d]
        projections = self.projection(layer, "self_attn.qkv_proj", names, sizes)
        q, k, v = (linear(x, weight, bias) for weight, bias in projections)
        q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
        q, k = self.norm(q, layer, "self_attn.q_norm"), self.norm(k, layer, "self_attn.k_norm")
        if self.family.rotates[layer]:
            q, k = (self.family.rotated(t, positions, layer) for t in (q, k))
        if (window := self.family.windows[layer]) is not None:
            token = torch.arange(x.shape[1])
            allowed = allowed & (token[:, None] - token[None, :] < window)
        outputs = []
        for head in own:
            group = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, group].transpose(-1, -2) * self.family.of_scores
            outputs.append(scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1) @ v[:, group])
        o_proj = part(self.get(layer, "self_attn.o_proj.weight"), 1, rank, self.ranks)
        return linear(self.read(torch.cat(outputs, -1)), o_proj)

    def mlp(self, layer, x, rank):
        """One rank's product with its columns of down_proj, without the bias."""
        down = self.get(layer, "mlp.down_proj.weight")
        names, sizes = ("mlp.gate_proj", "mlp.up_proj"), [down.shape[1]] * 2
        (gate, gate_bias), (up, up_bias) = self.projection(layer, "mlp.gate_up_proj", names, sizes)
        n, x = self.ranks, self.read(x)
        gated = self.family.act(linear(x, part(gate, 0, rank, n), part(gate_bias, 0, rank, n)))
        heads = gated * linear(x, part(up, 0, rank, n), part(up_bias, 0, rank, n))
        return linear(self.read(heads), part(down, 1, rank, n))

    def __call__(self, input_ids, attention_mask=None):
        config, ranks = self.config, range(self.ranks)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        tokens = input_ids.shape[1]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril() & mask.bool()[:, None, :]

        residual = self.weights["model.embed_tokens.weight"][input_ids] * self.family.of_embedding
        nothing = torch.zeros_like(residual)
        carry = ahead = [nothing for _ in ranks]
        pending = None  # (the sum of an all-reduce in flight, the bias that goes with it)
        streams = []
        for layer in range(config.num_hidden_layers):
            streams.append(residual if pending is None else residual + pending[0] + pending[1])
            for name, mode in (("attention", config.attention_sync[layer]), ("mlp", config.mlp_sync[layer])):
                before, behind = self.family.norms[name]
                bias = self.get(layer, "self_attn.o_proj.bias" if name == "attention" else "mlp.down_proj.bias")
                bias = nothing if bias is None else bias * self.family.of_sums
                partial = []
                for rank in ranks:
                    x = self.norm(residual + carry[rank] + ahead[rank], layer, before)
                    if name == "attention":
                        product = self.attention(layer, x, positions, allowed, rank)
                    else:
                        product = self.mlp(layer, x, rank)
                    partial.append(product * self.family.of_sums + carry[rank])
                carry = ahead = [nothing for _ in ranks]
                if pending is not None:
                    residual = residual + pending[0] + pending[1]
                    pending = None
                if mode == "blocking":
                    residual = residual + self.norm(sum(partial) + bias, layer, behind)
                elif mode == "overlapped":
                    pending = (self.norm(sum(partial) + bias, layer, behind), nothing)  # normed when it arrives
                elif mode == "delayed":
                    pending, ahead = (sum(partial), nothing), partial
                    residual = residual + bias
                elif mode == "dropped":
                    carry = partial
                    residual = residual + bias
        if pending is not None:
            residual = residual + pending[0] + pending[1]
        weight = self.weights["model.norm.weight"] + self.family.more_of_norms
        hidden = rms_norm(residual, weight, config.rms_norm_eps)
        streams.append(hidden)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return linear(hidden, head) * self.family.of_logits, streams


def assert_likeliest(logits_of, prompt, tokens, tolerance=1e-3):
    """Each token has the highest logit after the prompt and the tokens before it, or one as high but for rounding.

    Which of two nearly equal logits is the higher one depends on their last bits, and the texts differ from there on:
    so each token is judged after those that were chosen. logits_of: ids [n] -> [n, vocab].
    """
    logits = logits_of([*prompt, *tokens])[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.as_tensor(tokens)[:, None])[:, 0]
    behind = (logits.amax(-1) - chosen).tolist()
    assert max(behind, default=0.0) < tolerance, f"logits behind the highest ones: {behind}"
