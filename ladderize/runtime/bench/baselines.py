"""Models that are timed beside the layouts and never generate text: what else could be done about the all-reduces."""

from collections.abc import Generator

from torch import Tensor

from ladderize.runtime.collectives.differentiable import PendingSum
from ladderize.runtime.kv_cache import KVCache
from ladderize.runtime.model import Step, TPLlama


class ParallelLlama(TPLlama):
    """Attention and MLP of a layer read the same input, and one blocking all-reduce sums both (GPT-J's and PaLM's
    block).

    With a Llama's weights its output means nothing: it was trained for something else. For timing only.
    """

    def walk(self, ids: Tensor, step: Step, cache: KVCache, columns: int = 1) -> Generator[None, None, Tensor]:
        pending = self.embed(ids)
        yield
        residual, x = pending.wait()
        for index in range(self.shape.layers):
            attention, mlp = self.weights.attention(index), self.weights.mlp(index)
            (partial,) = self.attention_products(index, attention, x, step, cache, 1)
            (partial_mlp,) = self.mlp_products(mlp, x, None, 1)
            for bias in (attention.o_bias, mlp.down_bias):
                residual = residual if bias is None else residual + bias
            pending = PendingSum(self.collectives, residual, None, [partial + partial_mlp])
            yield
            residual, x = pending.wait()
        return self.weights.norm(x)
