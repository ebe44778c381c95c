"""A Llama in training on the runtime's one forward: packed texts, losses over a vocabulary that the ranks share."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ladderize.errors import UserError
from ladderize.layout import Layout
from ladderize.runtime.collectives.base import Collectives
from ladderize.runtime.collectives.differentiable import Stream, whole
from ladderize.runtime.decode import rope_table
from ladderize.runtime.kv_cache import KVCache, NoCache
from ladderize.runtime.model import TPLlama
from ladderize.runtime.schedule import SEQUENTIAL, Schedule
from ladderize.runtime.shards import check_activation
from ladderize.runtime.step import Step
from ladderize.runtime.training.batch import Batch
from ladderize.runtime.training.vocab_losses import LossModule
from ladderize.runtime.training.weights import TrainedWeights, UsedWeights


def check_trainable(config: Mapping[str, Any]) -> None:
    """Raise UserError for a config.json that transformers would train otherwise than the runtime does."""
    check_activation(config)
    rope_table(dict(config), 1, torch.device("cpu"))  # raises it for a rope that changes with the text's length
    if dropout := config.get("attention_dropout"):
        raise UserError(
            f"config.json: attention_dropout is {dropout!r}, which training with --tp-size does not have; set it to 0,"
            " or leave --tp-size out"
        )


class TPTraining(LossModule):
    """One rank of a model in training (or of a frozen teacher). With ``gradient_checkpointing`` sub-modules are
    computed again in the backward pass instead of kept; no message is sent again."""

    def __init__(
        self,
        weights: TrainedWeights,
        config: Mapping[str, Any],
        layout: Layout,
        collectives: Collectives,
        *,
        schedule: Schedule = SEQUENTIAL,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.weights, self.layout, self.collectives = weights, layout, collectives
        self.schedule, self.recompute = schedule, gradient_checkpointing
        self.shape = weights.shape
        self.vocabulary = collectives, self.shape.vocab_start, self.shape.vocab
        self.config, self.rope = dict(config), rope_table(dict(config), 1, weights.norm.device)

    def scored_logits(self, batch: Batch) -> Tensor:
        """Return this rank's columns of the logits where a target counts: [tokens that count, own vocab]."""
        used = UsedWeights(self.weights)
        model = _TrainedLlama(self.shape, self.layout, used, self.collectives, recompute=self.recompute)
        tokens = batch.input_ids.shape[1]
        if len(self.rope) < tokens:  # it grows few times; configs promise millions of positions, of which few are used
            self.rope = rope_table(self.config, 1 << (tokens - 1).bit_length(), self.rope.device)
        factors = self.rope[batch.position_ids].unsqueeze(2)
        step = Step(factors, 0, 0, batch.mask, causal=batch.mask is None)
        cache = NoCache(self.weights.compute, batch.input_ids.device)
        return model.head(batch.scored_states(model.forward(batch.input_ids, step, cache, self.schedule)))


class _TrainedLlama(TPLlama):
    def __init__(self, *arguments: Any, recompute: bool) -> None:
        super().__init__(*arguments)
        self.recompute = recompute

    def partials(
        self, index: int, weights: Any, x: Stream, apart: list[Tensor] | None, step: Step, cache: KVCache
    ) -> list[Tensor]:
        compute = super().partials
        if not self.recompute:
            return compute(index, weights, x, apart, step, cache)

        def again(x: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
            return tuple(compute(index, weights, x, list(streams) or None, step, cache))

        return list(checkpoint(again, whole(x), *apart or (), use_reentrant=False))
