"""The job of a method that rewrites layers, the files of finished ones, and what a model is before and after."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ladderize.adapt.layers.options import TOKENS_PER_STEP
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, window_streams
from ladderize.console import SILENT, Console
from ladderize.convert.assignment import RankAssignment
from ladderize.errors import UserError
from ladderize.eval.results import Perplexity, perplexity_from_nlls
from ladderize.files.output import fsync
from ladderize.files.records import OwnRecord, Record
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks

LayerWeights = Callable[[int], Mapping[str, Tensor]]  # of a layer, by their names within it


def assigned_weights(
    blocks: Blocks, assignment: RankAssignment | None, layer: int, *, as_stored: bool = False
) -> dict[str, Tensor]:
    """Return a layer's weights with heads and neurons where the assignment puts them."""
    weights = blocks.weights(layer, as_stored=as_stored)
    return weights if assignment is None else assignment.permuted(layer, weights, blocks.config)


@dataclass(frozen=True)
class LayerFiles:
    """One safetensors file in ``folder`` for each finished layer, with its report."""

    folder: Path

    def path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05d}.safetensors"

    def save(self, layer: int, weights: Mapping[str, Tensor], report: Record) -> None:
        """Save a layer, whole or not at all."""
        temporary = self.path(layer).with_suffix(".part")
        tensors = {f"model.layers.{layer}.{name}": tensor.contiguous().cpu() for name, tensor in weights.items()}
        try:
            save_file(tensors, temporary, metadata={"report": json.dumps(report.to_dict())})
        except SafetensorError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"layer {layer} cannot be saved in {self.folder}: {error}") from None
        fsync(temporary)
        temporary.rename(self.path(layer))

    def report(self, kind: type[OwnRecord], layer: int) -> OwnRecord:
        with safe_open(self.path(layer), framework="pt") as file:
            return kind.from_dict(json.loads(file.metadata()["report"]), f"the report in {self.path(layer)}")

    def weights(self, layer: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{layer}."
        return {name.removeprefix(prefix): tensor for name, tensor in load_file(self.path(layer)).items()}


@dataclass(frozen=True)
class LayerJob:
    """The work of a method, which rewrites ``layers`` of a converted model that are not among the files yet, for
    ``layout``. Both models compute in one dtype; weights come as stored, in the same order of heads and neurons."""

    teacher: Blocks
    converted: Blocks
    layout: Layout
    layers: tuple[int, ...]
    weights: LayerWeights
    dense_weights: LayerWeights
    windows: Windows
    ranks: Ranks
    files: LayerFiles
    console: Console = SILENT

    def finished(self) -> list[int]:
        """Return the layers that an earlier run has rewritten, the same on all ranks."""
        return self.ranks.broadcast([layer for layer in self.layers if self.files.path(layer).is_file()])


class Contender(NamedTuple):
    """A model to measure: ``blocks`` in ``layout``, with a layer's ``weights``."""

    blocks: Blocks
    layout: Layout
    weights: LayerWeights


def heldout_measures(
    contenders: Mapping[str, Contender], ids: Tensor, ranks: Ranks, console: Console = SILENT
) -> tuple[dict[str, Perplexity], dict[str, float]]:
    """Return the perplexity of held-out windows, ids [windows, tokens], under each model, and the mean KL(first ||
    model) in nats per token of all but the first, dense one. One layer is in memory at a time. Ranks share the batches
    of one process, so the results are equal, bit by bit, for every number of ranks."""
    batch_size = max(1, 2 * TOKENS_PER_STEP // ids.shape[1])
    batches = torch.arange(len(ids)).split(batch_size)[ranks.rank :: ranks.size]
    dense, perplexities, divergences = next(iter(contenders.values())).blocks, {}, {}
    reference: list[Tensor] | None = None
    count = len(batches) * len(contenders) * (dense.num_layers + 1)  # the LM head as a layer
    with torch.no_grad(), console.progress("measuring held-out windows, by layer", count) as advance:
        for name, model in contenders.items():

            def layer_at(index: int, model: Contender = model) -> torch.nn.Module:
                advance(len(batches))
                return model.blocks.layer(index, model.layout, model.weights(index))

            streams: list[Tensor] = []
            if batches:
                streams = window_streams(model.blocks, layer_at, ids[torch.cat(batches)], batch_size=batch_size)
            nll, divergence = torch.zeros(2, len(ids), dtype=torch.float64)  # 0 where other ranks measure
            for number, rows in enumerate(batches):
                stream = streams[number].to(model.blocks.device)
                nll[rows] = model.blocks.nll(stream, ids[rows]).cpu()
                if reference is not None:
                    target = reference[number].to(model.blocks.device)
                    divergence[rows] = model.blocks.divergence(dense, target, stream).cpu()
                advance(1)
            perplexities[name] = perplexity_from_nlls(ranks.sum(nll).numpy(), list(ids.numpy()))
            if reference is None:
                reference = streams
            else:
                divergences[name] = float(ranks.sum(divergence).sum()) / ids[:, 1:].numel()
    return perplexities, divergences
