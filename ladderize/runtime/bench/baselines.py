"""Models that are timed beside the layouts and never generate text: what else could be done about the all-reduces."""

from torch import Tensor

from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.model import Step, TPLlama, add_bias


class ParallelLlama(TPLlama):
    """Attention and MLP of a layer read the same input, and one blocking all-reduce sums both (GPT-J's and PaLM's
    block).

    With a Llama's weights its output means nothing: it was trained for something else. For timing only.
    """

    def forward(self, ids: Tensor, step: Step, cache: KVCache) -> Tensor:
        residual = self.embed(ids)
        for index, layer in enumerate(self.weights.layers):
            (partial,) = self.attention(index, layer, residual, step, cache)
            partial = partial + self.mlp(layer, residual, None)
            residual = add_bias(
                add_bias(residual + self.collectives.all_reduce(partial), layer.o_bias), layer.down_bias
            )
        return self.weights.norm(residual)
