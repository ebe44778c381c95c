"""One layer of a model, cut where it reads and writes the residual stream."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ladderize.adapt.align.reports import READS_MLP
from ladderize.blocks import Blocks
from ladderize.layout import BLOCKING, DROPPED, Layout


class Side:
    """Layer ``index`` of ``layout`` with ``weights``. Streams are float32, weights may be; products are computed in the
    dtype of ``blocks``. ``virtual_ranks``: how many inputs its MLP has."""

    def __init__(self, blocks: Blocks, index: int, layout: Layout, weights: Mapping[str, Tensor]) -> None:
        # of a layer whose sum is dropped, attention ends before o_proj: here that of every layer does
        apart = Layout((DROPPED,) * blocks.num_layers, (BLOCKING,) * blocks.num_layers, 1)
        self.layer = blocks.layer(index, apart, weights)
        self.blocks, self.index = blocks, index
        self.attention_sync, self.mlp_sync = layout.attention_sync[index], layout.mlp_sync[index]
        self.virtual_ranks = (layout.sync_tp_size or 1) if self.attention_sync == DROPPED else 1

    def projection(self, name: str) -> nn.Linear:
        """By its name within the layer, such as ``self_attn.q_proj``."""
        found = self.layer.get_submodule(name)
        assert isinstance(found, nn.Linear)
        return found

    def attention_input(self, stream: Tensor) -> Tensor:
        """[batch, tokens, hidden] -> the same, normed."""
        normed: Tensor = self.layer.get_submodule("input_layernorm")(stream)
        return normed

    def heads(self, stream: Tensor) -> Tensor:
        """What o_proj reads: [batch, tokens, heads * head_dim]."""
        with self._narrow():
            rope = self.blocks.position_embeddings(stream.shape[1])
            heads: Tensor = self.layer.get_submodule("self_attn")(self.attention_input(stream), rope)[0]
        return heads

    def after_attention(self, complete: Tensor, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the complete stream before attention and o_proj's inputs: the streams that the MLP of each virtual rank
        reads [virtual ranks, batch, tokens, hidden], the complete stream after attention, and that without what is
        only summed together with the MLP's output (dropped)."""
        from ladderize.convert.remote_code.modeling_ladderized_llama import row_parallel

        with self._narrow():
            partials, bias = row_parallel(self.projection("self_attn.o_proj"), heads, self.virtual_ranks)
        partials = partials.float()
        base = complete if bias is None else complete + bias
        attended = base + partials.sum(0)
        if self.attention_sync == DROPPED:
            return base + partials, attended, base
        return (attended if self.attention_sync == BLOCKING else complete)[None], attended, attended

    def mlp_input(self, streams: Tensor) -> Tensor:
        """[..., hidden] -> the same, normed."""
        normed: Tensor = self.layer.get_submodule("post_attention_layernorm")(streams)
        return normed

    def inner(self, streams: Tensor) -> Tensor:
        """What down_proj reads [batch, tokens, intermediate], of the streams that each virtual rank reads."""
        from ladderize.convert.remote_code.modeling_ladderized_llama import column_parallel

        inputs, ranks = self.mlp_input(streams), self.virtual_ranks
        with self._narrow():
            gate, up = (column_parallel(self.projection(name), inputs, ranks) for name in READS_MLP)
            inner: Tensor = self.layer.get_submodule("mlp.act_fn")(gate) * up
        return inner

    def mlp_output(self, inner: Tensor) -> Tensor:
        """[batch, tokens, intermediate] -> [batch, tokens, hidden], float32."""
        with self._narrow():
            output: Tensor = self.projection("mlp.down_proj")(inner)
        return output.float()

    def _narrow(self) -> torch.autocast:
        dtype = self.blocks.dtype
        return torch.autocast(self.blocks.device.type, dtype=dtype, enabled=dtype != torch.float32)
