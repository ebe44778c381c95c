"""Alignment, written line by line after its definition, for reading and not for speed.

Whole models and all windows are in memory, in float64; every virtual rank is computed apart; a bias is a column of the
weights that reads an appended one. No code of the package is used.
"""

import torch
from torch.nn.functional import linear

from tests.oracle import Equations, part, rms_norm


class AlignOracle:
    """``AlignOracle(dense, student, config, ridge, trained)(ids, layers)`` -> the student's weights, aligned.

    dense, student: state dicts, of which the dense one's heads are in the student's order. config: the student's.
    Windows from number ``trained`` on are held out: a projection keeps its weights unless its error on them falls.
    """

    def __init__(self, dense, student, config, ridge, trained):
        self.config, self.ridge, self.trained, self.family = config, ridge, trained, Equations(config)
        self.dense = self.unfused({name: weight.double() for name, weight in dense.items()})
        self.student = self.unfused({name: weight.double() for name, weight in student.items()})
        self.stored = set(student)

    def unfused(self, weights):
        """Each projection by itself."""
        heads, kv_heads, inner = (
            getattr(self.config, key) for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        )
        sizes = {
            "qkv_proj": [n * self.family.head_dim for n in (heads, kv_heads, kv_heads)],
            "gate_up_proj": [inner] * 2,
        }
        apart = {}
        for name, weight in weights.items():
            prefix, _, last = name.removesuffix(".weight").rpartition(".")
            names = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(last)
            rows = [weight] if names is None else weight.split(sizes[last])
            apart |= dict(
                zip([name] if names is None else [f"{prefix}.{one}.weight" for one in names], rows, strict=True)
            )
        return apart

    def fused(self, weights):
        """The student's weights under the names that they are stored by."""
        joined = dict(weights)
        for layer in range(self.config.num_hidden_layers):
            for fused, names in (("self_attn.qkv", ("q", "k", "v")), ("mlp.gate_up", ("gate", "up"))):
                whole = f"model.layers.{layer}.{fused}_proj.weight"
                if whole in self.stored:
                    prefix = whole.removesuffix(".weight").rpartition(".")[0]
                    joined[whole] = torch.cat([joined.pop(f"{prefix}.{name}_proj.weight") for name in names])
        return joined

    def __call__(self, ids, layers):
        """``closest`` is then by how much a projection's error on held-out windows changes at least, as a share of it:
        near 0 rounding decides whether it keeps its weights."""
        self.closest = 1.0
        config = self.config
        scale = self.family.of_sums
        dense = self.dense["model.embed_tokens.weight"][ids] * self.family.of_embedding
        complete = self.student["model.embed_tokens.weight"][ids] * self.family.of_embedding
        visible = [complete]  # by virtual rank, or one for all
        for layer in range(config.num_hidden_layers):
            attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
            solve = layer in layers
            # what reads the stream for attention
            x_dense, inputs = self.normed("dense", layer, dense), [self.normed("student", layer, x) for x in visible]
            readers, kv_heads = len(inputs), config.num_key_value_heads
            for name, blocks in (("q_proj", readers), ("k_proj", kv_heads), ("v_proj", kv_heads)):
                if solve:  # ranks that share a KV head are as many more tokens
                    blocks, sharing = min(blocks, readers), readers // min(blocks, readers)
                    xs = [torch.cat(inputs[k * sharing : (k + 1) * sharing], 1) for k in range(blocks)]
                    targets = self.apply(self.dense, attention + name, x_dense).chunk(blocks, -1)
                    self.solve(attention + name, xs, [y.repeat(1, sharing, 1) for y in targets])
            # what writes attention's output: the target is the dense model's stream
            h_dense = self.heads(self.dense, layer, x_dense)
            by_rank = [part(self.heads(self.student, layer, x), -1, k, readers) for k, x in enumerate(inputs)]
            h = torch.cat(by_rank, -1)
            dense_sum = self.apply(self.dense, attention + "o_proj", h_dense)
            attended = dense + scale * self.behind("dense", layer, dense_sum, "attention")
            if solve:
                self.solve(attention + "o_proj", [h], [self.aim(dense_sum, (attended - complete) / scale)])
            # each virtual rank has a part of the heads; the bias is nobody's
            modes = config.attention_sync[layer], config.mlp_sync[layer]
            ranks = config.sync_tp_size if modes[0] in ("delayed", "dropped") else 1
            o_proj = self.student[attention + "o_proj.weight"]
            partials = [scale * linear(part(h, -1, k, ranks), part(o_proj, 1, k, ranks)) for k in range(ranks)]
            bias = scale * self.student.get(attention + "o_proj.bias", torch.zeros(()))
            if self.family.norms["attention"][1] is not None:  # of one rank, whose sum is complete
                partials, bias = [self.behind("student", layer, partials[0] + bias, "attention")], torch.zeros(())
            if modes[0] == "blocking":
                reads = [complete + partials[0] + bias]
            elif modes[0] == "overlapped":
                reads = [complete]
            else:
                reads = [complete + partial + bias for partial in partials]
            # what reads the stream for the MLP: each virtual rank's rows with the input of its own
            m_dense = self.normed("dense", layer, attended, "mlp")
            inputs = [self.normed("student", layer, stream, "mlp") for stream in reads]
            for name in ("gate_proj", "up_proj"):
                if solve:
                    targets = self.apply(self.dense, mlp + name, m_dense).chunk(ranks, -1)
                    self.solve(mlp + name, inputs, targets)
            inner = [
                self.family.act(self.apply(self.student, mlp + "gate_proj", x, k, ranks))
                * self.apply(self.student, mlp + "up_proj", x, k, ranks)
                for k, x in enumerate(inputs)
            ]
            inner = torch.cat(inner, -1)
            # what writes the MLP's output
            gate, up = (self.apply(self.dense, mlp + name, m_dense) for name in ("gate_proj", "up_proj"))
            dense_sum = self.apply(self.dense, mlp + "down_proj", self.family.act(gate) * up)
            dense = attended + scale * self.behind("dense", layer, dense_sum, "mlp")
            summed = complete + sum(partials) + bias
            if solve:
                self.solve(mlp + "down_proj", [inner], [self.aim(dense_sum, (dense - summed) / scale)])
            before = complete + bias if modes[0] == "dropped" else summed  # a dropped sum is in flight with the MLP's
            own = [complete + partial + bias if modes[0] == "dropped" else summed for partial in partials]
            complete = summed + scale * self.behind(
                "student", layer, self.apply(self.student, mlp + "down_proj", inner), "mlp"
            )
            visible = [complete if modes[1] == "blocking" else before]
            if modes[1] == "delayed":  # each virtual rank reads its own part
                n, weight = config.sync_tp_size, self.student[mlp + "down_proj.weight"]
                downs = [scale * linear(part(inner, -1, k, n), part(weight, 1, k, n)) for k in range(n)]
                bias = scale * self.student.get(mlp + "down_proj.bias", torch.zeros(()))
                visible = [own[k % len(own)] + down + bias for k, down in enumerate(downs)]
        return self.fused(self.student)

    def aim(self, dense_sum, missing):
        """A sum that is normed before it is added is to be the dense one; another fills what the stream lacks."""
        return missing if self.family.norms["attention"][1] is None else dense_sum

    def solve(self, name, inputs, targets):
        """argmin of sum |W x - y|^2 + l |W - W_0|^2 over the first windows, for each virtual rank's rows of W."""
        before = self.matrix(self.student, name).chunk(len(inputs))
        after = []
        for prior, x, y in zip(before, inputs, targets, strict=True):
            x, y = self.with_one(name, x)[: self.trained].flatten(0, 1), y[: self.trained].flatten(0, 1)
            gram = x.T @ x
            penalty = self.ridge * gram.diagonal().mean()
            left = gram + penalty * torch.eye(len(gram), dtype=torch.float64)
            after.append(torch.linalg.solve(left, (y.T @ x + penalty * prior).T).T)
        found, known = (float(self.error(name, parts, inputs, targets)) for parts in (after, before))
        if known:
            self.closest = min(self.closest, abs(found / known - 1))
        if found >= known:
            return
        matrix = torch.cat(after)
        width = self.student[name + ".weight"].shape[1]
        self.student[name + ".weight"] = matrix[:, :width]
        if name + ".bias" in self.student:
            self.student[name + ".bias"] = matrix[:, width]

    def error(self, name, parts, inputs, targets):
        """Squared, on held-out windows."""
        return sum(
            (linear(self.with_one(name, x), weights) - y)[self.trained :].square().sum()
            for weights, x, y in zip(parts, inputs, targets, strict=True)
        )

    def matrix(self, weights, name):
        bias = weights.get(name + ".bias")
        return weights[name + ".weight"] if bias is None else torch.cat([weights[name + ".weight"], bias[:, None]], 1)

    def with_one(self, name, x):
        return x if name + ".bias" not in self.student else torch.cat([x, torch.ones_like(x[..., :1])], -1)

    def apply(self, weights, name, x, rank=0, ranks=1):
        return linear(self.with_one(name, x), part(self.matrix(weights, name), 0, rank, ranks))

    def normed(self, model, layer, stream, of="attention"):
        return self.norm({"dense": self.dense, "student": self.student}[model], layer, stream, self.family.norms[of][0])

    def behind(self, model, layer, total, of):
        return self.norm({"dense": self.dense, "student": self.student}[model], layer, total, self.family.norms[of][1])

    def norm(self, weights, layer, x, name):
        if name is None:
            return x
        weight = weights[f"model.layers.{layer}.{name}.weight"] + self.family.more_of_norms
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def heads(self, weights, layer, x):
        """What o_proj reads: [windows, tokens, heads * head_dim]."""
        config, attention = self.config, f"model.layers.{layer}.self_attn."
        tokens = x.shape[1]
        allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        positions = torch.arange(tokens)[None]
        q, k, v = (
            self.apply(weights, f"{attention}{name}_proj", x).unflatten(-1, (-1, self.family.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        if f"{attention}q_norm.weight" in weights:
            q, k = self.norm(weights, layer, q, "self_attn.q_norm"), self.norm(weights, layer, k, "self_attn.k_norm")
        if self.family.rotates[layer]:
            q, k = (self.family.rotated(t, positions, layer) for t in (q, k))
        if (window := self.family.windows[layer]) is not None:
            allowed = allowed & (positions.T - positions < window)
        outputs = []
        for head in range(config.num_attention_heads):
            group = head // (config.num_attention_heads // config.num_key_value_heads)
            scores = q[:, head] @ k[:, group].transpose(-1, -2) * self.family.of_scores
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
            outputs.append(scores.softmax(-1) @ v[:, group])
        return torch.cat(outputs, -1)
