"""Held-out perplexities and divergences of a model before and after its layers were rewritten, computed layer by
layer."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ladderize.adapt.layers.layer_files import LayerFiles, StudentBlocks
from ladderize.adapt.layers.options import TOKENS_PER_STEP
from ladderize.blocks import Blocks, window_streams
from ladderize.eval.results import Perplexity, perplexity_from_nlls
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks

LayerAt = Callable[[int], torch.nn.Module]


@dataclass(frozen=True)
class HeldoutMeasures:
    """Measures of held-out windows, by the name of the step.

    perplexity: of each step and of the dense model.
    divergence: mean KL(dense || model) in nats per token.
    """

    perplexity: dict[str, Perplexity]
    divergence: dict[str, float]


def before_and_after(
    teacher: Blocks,
    own: Blocks,
    student: StudentBlocks,
    files: LayerFiles,
    heldout: torch.Tensor,
    result: str,
    ranks: Ranks,
) -> HeldoutMeasures:
    """Return held-out measures of the dense model, of the converted one, and of the latter with rewritten layers.

    result: the name of the last.
    """
    dense, layout = Layout.dense(own.num_layers), student.layout

    def rewritten(layer: int) -> torch.nn.Module:
        return own.layer(layer, layout, loaded(files, layer, own) if layer in student.layers else None)

    variants: dict[str, tuple[Blocks, LayerAt]] = {
        "dense": (teacher, lambda layer: teacher.layer(layer, dense)),
        "before": (own, lambda layer: own.layer(layer, layout)),
        result: (own, rewritten),
    }
    return heldout_measures(variants, heldout, ranks)


def heldout_measures(
    variants: Mapping[str, tuple[Blocks, LayerAt]], ids: torch.Tensor, ranks: Ranks
) -> HeldoutMeasures:
    """Return the perplexity of held-out windows under variants of a model, and their divergence from the first, dense
    one.

    One layer is in memory at a time. Ranks share the batches of one process, so the results are equal, bit by bit, on
    every rank and for every number of ranks.

    variants: blocks and layers, by name.
    ids: [windows, tokens].
    """
    batch_size = max(1, 2 * TOKENS_PER_STEP // ids.shape[1])
    batches = ids.split(batch_size)
    mine = batches[ranks.rank :: ranks.size]
    perplexities, divergences, reference = {}, {}, None
    for name, (blocks, layer_at) in variants.items():
        begin = time.perf_counter()
        streams = window_streams(blocks, layer_at, torch.cat(mine), batch_size=batch_size) if mine else []
        nlls: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        with torch.no_grad():
            for number, batch in enumerate(mine):
                own = streams[number].to(blocks.device)
                nlls.append(blocks.nll(own, batch).cpu())
                if reference is not None:
                    sums.append(blocks.divergence(reference[number].to(blocks.device), own).cpu())
        nlls, sums = (in_order(ranks.gather(values)) for values in (nlls, sums))
        seconds = time.perf_counter() - begin
        perplexities[name] = perplexity_from_nlls(torch.cat(nlls).numpy(), list(ids.numpy()), seconds)
        if reference is None:
            reference = streams
        else:
            divergences[name] = float(torch.cat(sums).sum()) / ids[:, 1:].numel()
    return HeldoutMeasures(perplexities, divergences)


def in_order(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the values of all batches in order, from ranks that each had every size-th batch."""
    return [value for values in itertools.zip_longest(*parts) for value in values if value is not None]


def loaded(files: LayerFiles, layer: int, blocks: Blocks) -> dict[str, torch.Tensor]:
    """Return a rewritten layer's weights on the device and in the dtype of ``blocks``."""
    return {name: tensor.to(blocks.device, blocks.dtype) for name, tensor in files.weights(layer).items()}
