"""The layers of a checkpoint one by one, in any mode of their sync points, by the class that every converted checkpoint
carries: nothing here defines a second time what a layout computes, and a whole model need not fit in memory."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, linear

from ladderize.checkpoint.config import column_rows, is_tied, most_positions
from ladderize.checkpoint.reading import Checkpoint
from ladderize.checkpoint.tensors import read_tensor
from ladderize.data.windows import draw_windows, needs_tokenizer, read_documents
from ladderize.errors import UserError
from ladderize.families.base import FUSED, ROPE
from ladderize.families.registry import complete_config, family_of
from ladderize.layout import Layout
from ladderize.modeling import dense_class, ladderized_class, load_tokenizer
from ladderize.ranks.device import avoid_cudnn_attention

# The numbers of logits in memory at once, in float32: with a vocabulary of 128,000, 2048 tokens would take a gigabyte.
LOGITS_AT_ONCE = 1 << 26

# The state between two layers: the complete residual stream [batch, tokens, hidden], or, where the MLP sync point
# before is overlapped or delayed, (complete, visible). The visible stream lacks that MLP's output; of a delayed one it
# has each virtual rank's own part, [ranks, batch, tokens, hidden].
State = Tensor | tuple[Tensor, Tensor]


def complete(state: State) -> Tensor:
    return state[0] if isinstance(state, tuple) else state


def to_device(state: State, device: torch.device) -> State:
    return (state[0].to(device), state[1].to(device)) if isinstance(state, tuple) else state.to(device)


def compute_dtype(asked: str, stored: str) -> torch.dtype:
    """Return the dtype to train in. ``auto`` is float32 where weights are stored in it (or float64), else bfloat16."""
    auto = "float32" if stored in ("float32", "float64") else "bfloat16"
    return getattr(torch, auto if asked == "auto" else asked)


def read_windows(checkpoint: Checkpoint, file: str, *, seq_len: int | None, seed: int) -> np.ndarray:
    """Return all full windows of a data file, in an order drawn with ``seed``: int64 [windows, seq_len]."""
    config = checkpoint.config
    tokenizer = load_tokenizer(checkpoint.folder) if needs_tokenizer(file) else None
    documents = read_documents(file, tokenizer, vocab_size=config["vocab_size"])
    return draw_windows(documents, spec=file, positions=most_positions(config), seq_len=seq_len, seed=seed)


class Blocks:
    """The layers, embedding and LM head of ``checkpoint``, computed in ``dtype`` on ``device``."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        avoid_cudnn_attention()
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.config, self.layout = checkpoint.config, Layout.from_config(checkpoint.config)
        self.num_layers = self.layout.num_layers
        self.family = family_of(checkpoint.config)
        self.decoder = self.family.describe(checkpoint.config)
        self._rope: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._ends: dict[str, Tensor] = {}

    def read(self, name: str, *, as_stored: bool = False) -> Tensor:
        """Return a whole tensor on ``device``, as ``dtype`` or in the dtype that it is stored in."""
        info, dtype = self.checkpoint.tensors[name], None if as_stored else self.dtype
        return read_tensor(self.checkpoint.folder, info, dtype=dtype, device=self.device)

    def weights(self, layer: int, *, as_stored: bool = False) -> dict[str, Tensor]:
        """Return the parameters of one layer by their names within it, such as ``self_attn.q_proj.weight``."""
        prefix = f"model.layers.{layer}."
        names = [name for name in self.checkpoint.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.read(name, as_stored=as_stored) for name in names}

    def layer(self, index: int, layout: Layout, weights: Mapping[str, Tensor] | None = None) -> torch.nn.Module:
        """Return layer ``index`` of ``layout``, in eval mode, with these weights, which are not copied, or the
        checkpoint's."""
        with torch.device("meta"):
            layer = ladderized_class(self.family, "DecoderLayer")(self.model_config(layout), index)
        layer.load_state_dict(dict(self.weights(index) if weights is None else weights), assign=True)
        return layer.eval()

    def model_config(self, layout: Layout) -> Any:
        stated = {**self.config, "model_type": self.family.ladderized_type, **layout.to_config()}
        for key in ("auto_map", "architectures", "ladder_layers"):
            stated.pop(key, None)
        config = ladderized_class(self.family, "Config").from_dict(stated)
        config._attn_implementation = "sdpa"
        return config

    def embed(self, ids: Tensor) -> Tensor:
        """Return the state that enters layer 0, [batch, tokens, hidden], from ids [batch, tokens]."""
        embedded = torch.nn.functional.embedding(ids.to(self.device), self._end("model.embed_tokens.weight"))
        scale = self.decoder.embedding_scale
        return embedded * (torch.tensor(scale, dtype=embedded.dtype) if self.decoder.rounds_scale else scale)

    def run(self, layer: Any, state: State) -> State:
        """Return the state that leaves ``layer``. Every row is a full window with causal attention."""
        tokens = complete(state).shape[1]
        positions = torch.arange(tokens, device=self.device)[None]
        return layer(
            state,
            attention_mask=self.mask(layer.self_attn.layer_idx, tokens),
            position_ids=positions,
            position_embeddings=self.position_embeddings(layer.self_attn.layer_idx, tokens),
        )

    def heads(self, layer: Any, stream: Tensor) -> Tensor:
        """Return o_proj's inputs, [batch, tokens, heads * head_dim], of a layer whose attention ends before it, from
        the stream that it reads, [batch, tokens, hidden], or that each virtual rank does, [ranks, batch, ...]."""
        attention, tokens = layer.self_attn, stream.shape[-2]
        rope, mask = self.position_embeddings(attention.layer_idx, tokens), self.mask(attention.layer_idx, tokens)
        return attention(layer.read_by_attention(stream), rope, mask)[0]

    def autocast(self) -> torch.autocast:
        """Return a context in which products of wider streams and weights are computed in ``dtype``."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def mask(self, layer: int, tokens: int) -> Tensor | None:
        """Return the tokens that each token sees in this layer, bool [1, 1, tokens, tokens]; None: all up to itself."""
        window = self.decoder.windows[layer]
        if window is None or window >= tokens:
            return None
        return torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=self.device).tril().triu(1 - window)

    def position_embeddings(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the positions 0 .. tokens - 1 in a layer: [1, tokens, numbers that rotate] each."""
        name = self.decoder.rope[layer] or ROPE
        if (name, tokens) not in self._rope:
            config = self.model_config(Layout.dense(self.num_layers))
            rotary = dense_class(self.family, "RotaryEmbedding")(config).to(self.device)
            probe, positions = torch.empty(1, dtype=self.dtype, device=self.device), torch.arange(tokens)[None]
            self._rope[name, tokens] = rotary(probe, positions.to(self.device), *(() if name == ROPE else (name,)))
        return self._rope[name, tokens]

    def nll(self, complete: Tensor, ids: Tensor) -> Tensor:
        """Return the summed negative log-likelihood of each window in nats, float64 [batch], of all its tokens but the
        first, from the stream that leaves the last layer, [batch, tokens, hidden]."""
        targets, losses = ids[:, 1:].to(self.device).flatten(), []
        for rows, logits in self._logits(complete[:, :-1]):
            losses.append(cross_entropy(logits, targets[rows], reduction="none"))
        return torch.cat(losses).view(len(ids), -1).double().sum(1)

    def logits(self, complete: Tensor) -> Tensor:
        """Return the logits, float32 [batch, tokens, vocab], from the stream that leaves the last layer."""
        return torch.cat([logits for _, logits in self._logits(complete)]).unflatten(0, complete.shape[:2])

    def divergence(self, dense: "Blocks", reference: Tensor, complete: Tensor) -> Tensor:
        """Return the summed KL(dense || model) of each window's predictions but the last in nats, float64 [batch], from
        the streams [batch, tokens, hidden] that leave the last layer of either. Each has its own norm and LM head."""
        pieces = zip(dense._logits(reference[:, :-1]), self._logits(complete[:, :-1]), strict=True)
        sums = [
            kl_div(model.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True).sum(-1)
            for (_, target), (_, model) in pieces
        ]
        return torch.cat(sums).view(len(complete), -1).double().sum(1)

    def _logits(self, stream: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield which tokens of a stream [batch, tokens, hidden], of ``batch * tokens``, and their float32 logits [some
        tokens, vocab]; at most ``LOGITS_AT_ONCE`` numbers at a time."""
        eps = complete_config(self.config)["rms_norm_eps"]
        norm = dense_class(self.family, "RMSNorm")(stream.shape[-1], eps=eps)
        norm.weight = torch.nn.Parameter(self._end("model.norm.weight"), requires_grad=False)
        head = self._end("model.embed_tokens.weight" if is_tied(self.config) else "lm_head.weight")
        rows = norm(stream).flatten(0, 1).to(head.dtype)
        at_once = max(1, LOGITS_AT_ONCE // head.shape[0])
        for first in range(0, len(rows), at_once):
            some = slice(first, first + at_once)
            yield some, linear(rows[some], head).float().mul_(self.decoder.logits_scale)

    def _end(self, name: str) -> Tensor:
        """Return the embedding, the final norm or the LM head, read once and kept."""
        if name not in self._ends:
            self._ends[name] = self.read(name)
        return self._ends[name]


def window_streams(
    blocks: Blocks, layer_at: Callable[[int], torch.nn.Module], windows: Tensor, *, batch_size: int
) -> list[Tensor]:
    """Return the complete streams that leave the last layer for windows [windows, tokens], one tensor per batch, on the
    CPU. ``layer_at`` returns a layer by its number; one is in memory at a time."""
    with torch.no_grad():
        host = torch.device("cpu")  # the states of all windows lie on the host, those of one batch on the device
        states = [to_device(blocks.embed(batch), host) for batch in windows.split(batch_size)]
        for index in range(blocks.num_layers):
            layer = layer_at(index)
            for number, state in enumerate(states):
                states[number] = to_device(blocks.run(layer, to_device(state, blocks.device)), host)
    return [complete(state) for state in states]


def window_nlls(
    blocks: Blocks, layer_at: Callable[[int], torch.nn.Module], windows: Tensor, *, batch_size: int
) -> Tensor:
    """Return the summed negative log-likelihood of each window in nats, float64 [windows]; see ``window_streams``."""
    streams = window_streams(blocks, layer_at, windows, batch_size=batch_size)
    with torch.no_grad():
        batches = zip(streams, windows.split(batch_size), strict=True)
        return torch.cat([blocks.nll(stream.to(blocks.device), batch) for stream, batch in batches]).cpu()


def check_finite(value: float, name: str) -> None:
    if not math.isfinite(value):
        raise UserError(f"{name} is NaN or infinite; check the model's weights, or compute in float32")


def projection_of(layer: Any, name: str) -> torch.nn.Linear:
    """Return a projection of a layer, such as ``self_attn.q_proj``; of a fused one a view of its rows."""
    module, _, last = name.rpartition(".")
    if hasattr(layer.get_submodule(module), last):
        projection: torch.nn.Linear = layer.get_submodule(name)
        return projection
    fused = fused_of(name)
    whole, config = layer.get_submodule(fused), layer.self_attn.config
    heads = config.num_attention_heads, config.num_key_value_heads, layer.self_attn.head_dim
    rows = column_rows(*heads, config.intermediate_size)
    number, sizes = FUSED[fused].index(name), [rows[projection] for projection in FUSED[fused]]
    view = torch.nn.Linear(whole.in_features, rows[name], bias=False, device="meta")
    view.weight = torch.nn.Parameter(whole.weight.detach().split(sizes)[number], requires_grad=False)
    return view


def fused_of(name: str) -> str:
    """Return the fused projection that has the rows of another in some families; of o_proj and down_proj the name."""
    return next((fused for fused, names in FUSED.items() if name in names), name)
