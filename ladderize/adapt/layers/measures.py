"""Held-out perplexities and divergences of a model before and after its layers were rewritten, computed layer by
layer."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ladderize.adapt.layers.layer_files import LayerFiles, LayerWeights
from ladderize.adapt.layers.options import TOKENS_PER_STEP
from ladderize.blocks import Blocks, window_streams
from ladderize.eval.results import Perplexity, perplexity_from_nlls
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks


@dataclass(frozen=True)
class Contender:
    """A model to measure: ``blocks`` in ``layout``.

    weights: returns those of a layer; None: the checkpoint's.
    """

    blocks: Blocks
    layout: Layout
    weights: LayerWeights | None = None

    def layer(self, index: int) -> torch.nn.Module:
        return self.blocks.layer(index, self.layout, (self.weights or self.blocks.weights)(index))


@dataclass(frozen=True)
class HeldoutMeasures:
    """Measures of held-out windows, by the name of the step.

    perplexity: of each step and of the dense model.
    divergence: mean KL(dense || model) in nats per token.
    """

    perplexity: dict[str, Perplexity]
    divergence: dict[str, float]


def heldout_measures(variants: Mapping[str, Contender], ids: torch.Tensor, ranks: Ranks) -> HeldoutMeasures:
    """Return the perplexity of held-out windows under variants of a model, and their divergence from the first, dense
    one.

    One layer is in memory at a time. Ranks share the batches of one process, so the results are equal, bit by bit, on
    every rank and for every number of ranks.

    ids: [windows, tokens].
    """
    batch_size = max(1, 2 * TOKENS_PER_STEP // ids.shape[1])
    batches = ids.split(batch_size)[ranks.rank :: ranks.size]
    perplexities, divergences, reference = {}, {}, None
    for name, variant in variants.items():
        blocks = variant.blocks
        streams = window_streams(blocks, variant.layer, torch.cat(batches), batch_size=batch_size) if batches else []
        nlls: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        with torch.no_grad():
            for number, batch in enumerate(batches):
                stream = streams[number].to(blocks.device)
                nlls.append(blocks.nll(stream, batch).cpu())
                if reference is not None:
                    sums.append(blocks.divergence(reference[number].to(blocks.device), stream).cpu())
        nll, total = (in_order(ranks.gather(values)) for values in (nlls, sums))
        perplexities[name] = perplexity_from_nlls(nll.numpy(), list(ids.numpy()))
        if reference is None:
            reference = streams
        else:
            divergences[name] = float(total.sum()) / ids[:, 1:].numel()
    return HeldoutMeasures(perplexities, divergences)


def in_order(parts: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return the values of all batches in order, from ranks that each had every size-th batch."""
    values = [value for values in itertools.zip_longest(*parts) for value in values if value is not None]
    return torch.cat(values) if values else torch.empty(0)


def loaded(files: LayerFiles, layer: int, blocks: Blocks) -> dict[str, torch.Tensor]:
    """Return a rewritten layer's weights on the device and in the dtype of ``blocks``."""
    return {name: tensor.to(blocks.device, blocks.dtype) for name, tensor in files.weights(layer).items()}
