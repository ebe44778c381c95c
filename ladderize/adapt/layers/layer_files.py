"""The work of a method that rewrites layers, and the files of finished layers, from which a killed run resumes."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ladderize.adapt.layers.windows import Windows
from ladderize.blocks import Blocks
from ladderize.checkpoint.reading import TensorInfo, read_header
from ladderize.checkpoint.tensors import locate_tensors, read_tensor
from ladderize.console import SILENT, Console
from ladderize.convert.assignment import RankAssignment
from ladderize.errors import UserError
from ladderize.files.documents import parse_json
from ladderize.files.output import fsync
from ladderize.files.records import OwnRecord, Record
from ladderize.layout import Layout
from ladderize.ranks.group import Ranks

LayerWeights = Callable[[int], Mapping[str, Tensor]]  # of a layer, by their names within it


def assigned_weights(
    blocks: Blocks, assignment: RankAssignment | None, layer: int, *, as_stored: bool = False
) -> dict[str, Tensor]:
    """Return a layer's weights, maybe in the dtypes that they are stored in, with heads and neurons where the
    assignment puts them."""
    weights = blocks.weights(layer, as_stored=as_stored)
    return weights if assignment is None else assignment.permuted(layer, weights, blocks.config)


class LayerFiles:
    """One safetensors file for each finished layer, with its report."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05d}.safetensors"

    def has(self, layer: int) -> bool:
        return self.path(layer).is_file()

    def save(self, layer: int, weights: Mapping[str, Tensor], report: Record) -> None:
        """Save a layer, whole or not at all: it is written under another name, then renamed."""
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
        return self.ranks.broadcast([layer for layer in self.layers if files is not None and files.has(layer)])
