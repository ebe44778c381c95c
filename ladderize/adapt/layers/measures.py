"""Held-out perplexities and divergences of a model before and after its layers were rewritten, computed layer by
layer."""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ladderize.adapt.layers.layer_files import LayerWeights
from ladderize.adapt.layers.options import TOKENS_PER_STEP
from ladderize.blocks import Blocks, window_streams
from ladderize.checkpoint.config import parameter_count
from ladderize.console import SILENT, Console
from ladderize.eval.results import Perplexity, perplexity_from_nlls
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks


class Contender(NamedTuple):
    """A model to measure: ``blocks`` in ``layout``, with a layer's ``weights``."""

    blocks: Blocks
    layout: Layout
    weights: LayerWeights

    def layer(self, index: int) -> torch.nn.Module:
        return self.blocks.layer(index, self.layout, self.weights(index))


def heldout_measures(
    contenders: Mapping[str, Contender], ids: torch.Tensor, ranks: Ranks, console: Console = SILENT
) -> tuple[dict[str, Perplexity], dict[str, float]]:
    """Return the perplexity of held-out windows under each model, and the mean KL(first || model) in nats per token of
    all but the first, dense one.

    One layer is in memory at a time. Ranks share the batches of one process, so the results are equal, bit by bit, on
    every rank and for every number of ranks.

    ids: [windows, tokens].
    """
    batch_size = max(1, 2 * TOKENS_PER_STEP // ids.shape[1])
    batches = ids.split(batch_size)[ranks.rank :: ranks.size]
    dense, perplexities, divergences, reference = next(iter(contenders.values())).blocks, {}, {}, None
    windows, head = sum(map(len, batches)), int(dense.config["vocab_size"]) * int(dense.config["hidden_size"])
    logits = 1 + head * dense.num_layers // max(1, parameter_count(dense.config) - head)  # in layers of as many weights
    work = len(contenders) * dense.num_layers + (3 * len(contenders) - 2) * logits  # a divergence takes them of both
    with torch.no_grad(), console.progress("measuring held-out windows, by layer", windows * work) as advance:
        for name, contender in contenders.items():
            blocks = contender.blocks

            def layer_at(index: int, contender: Contender = contender) -> torch.nn.Module:
                advance(windows)
                return contender.layer(index)

            streams = window_streams(blocks, layer_at, torch.cat(batches), batch_size=batch_size) if batches else []
            nlls: list[torch.Tensor] = []
            sums: list[torch.Tensor] = []
            for number, batch in enumerate(batches):
                stream = streams[number].to(blocks.device)
                nlls.append(blocks.nll(stream, batch).cpu())
                advance(logits * len(batch))
                if reference is not None:
                    sums.append(blocks.divergence(dense, reference[number].to(blocks.device), stream).cpu())
                    advance(2 * logits * len(batch))
            perplexities[name] = perplexity_from_nlls(in_order(ranks.gather(nlls)).numpy(), list(ids.numpy()))
            total = float(in_order(ranks.gather(sums)).sum())
            if reference is None:
                reference = streams
            else:
                divergences[name] = total / ids[:, 1:].numel()
    return perplexities, divergences


def in_order(values: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return the values of all batches in order, from ranks that each had every size-th batch."""
    batches = [batch for rounds in itertools.zip_longest(*values) for batch in rounds if batch is not None]
    return torch.cat(batches) if batches else torch.empty(0)
