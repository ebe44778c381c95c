"""The job of a method that rewrites layers, the files of finished ones, and what a model is before and after."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ladderize.adapt.layers.options import TOKENS_PER_STEP
from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks, window_streams
from ladderize.checkpoint.config import parameter_count
from ladderize.checkpoint.reading import TensorInfo, read_header
from ladderize.checkpoint.tensors import locate_tensors, read_tensor
from ladderize.console import SILENT, Console
from ladderize.convert.assignment import RankAssignment
from ladderize.errors import UserError
from ladderize.eval.results import Perplexity, perplexity_from_nlls
from ladderize.files.documents import parse_json
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


class LayerFiles:
    """One safetensors file for each finished layer, with its report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

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
        path = self.path(layer)
        with safe_open(path, framework="pt") as file:
            return kind.from_dict(parse_json(file.metadata()["report"].encode()), f"the report in {path}")

    def weights(self, layer: int) -> dict[str, Tensor]:
        prefix = f"model.layers.{layer}."
        infos = read_header(self.folder, self.path(layer).name)
        return {name.removeprefix(prefix): read_tensor(self.folder, info) for name, info in infos.items()}

    def tensors(self, layers: Sequence[int]) -> dict[str, TensorInfo]:
        """Return the place of every tensor of these layers, for the converter."""
        return {name: info for layer in layers for name, info in locate_tensors(self.path(layer)).items()}


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
    files: LayerFiles | None = None
    console: Console = SILENT

    def finished(self) -> list[int]:
        """Return the layers that an earlier run has rewritten, the same on all ranks."""
        files = self.files
        return self.ranks.broadcast([layer for layer in self.layers if files and files.path(layer).is_file()])


class Contender(NamedTuple):
    """A model to measure: ``blocks`` in ``layout``, with a layer's ``weights``."""

    blocks: Blocks
    layout: Layout
    weights: LayerWeights


def heldout_measures(
    contenders: Mapping[str, Contender], ids: torch.Tensor, ranks: Ranks, console: Console = SILENT
) -> tuple[dict[str, Perplexity], dict[str, float]]:
    """Return the perplexity of held-out windows, ids [windows, tokens], under each model, and the mean KL(first ||
    model) in nats per token of all but the first, dense one. One layer is in memory at a time. Ranks share the batches
    of one process, so the results are equal, bit by bit, for every number of ranks."""
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
                return contender.blocks.layer(index, contender.layout, contender.weights(index))

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
