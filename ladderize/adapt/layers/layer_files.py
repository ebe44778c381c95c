"""The files of finished layers, from which a killed run resumes."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ladderize.checkpoint.reading import TensorInfo, read_header
from ladderize.checkpoint.tensors import locate_tensors, read_tensor
from ladderize.errors import UserError
from ladderize.files.parsing import parse_json
from ladderize.files.records import OwnRecord, Record
from ladderize.files.temporaries import fsync
from ladderize.files.work import WorkFolder
from ladderize.layout import Layout


@dataclass(frozen=True)
class StudentBlocks:
    """The layers of a model of ``layout`` that are to be rewritten.

    weights: returns the initial weights of a layer, in the dtype that is stored.
    """

    layout: Layout
    layers: tuple[int, ...]
    weights: Callable[[int], Mapping[str, Tensor]]

    def key(self, layer: int, about: Mapping[str, Any]) -> str:
        """Return a hash of everything that a layer's result depends on: its modes, its initial weights, and
        ``about``."""
        layout = self.layout
        modes = [layout.entering(layer), layout.attention_sync[layer], layout.mlp_sync[layer], layout.sync_tp_size]
        digest = hashlib.sha256(json.dumps([modes, about], sort_keys=True).encode())
        for name, tensor in sorted(self.weights(layer).items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class LayerFiles:
    """One safetensors file for each finished layer, with its report and the key of what it was made from."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix

    def path(self, layer: int) -> Path:
        return self.folder / f"{self.prefix}-{layer:05d}.safetensors"

    def has(self, layer: int, key: Callable[[], str]) -> bool:
        """Return whether this layer was finished from inputs with this key.

        key: is only called where there is a file to compare.
        """
        try:
            read_header(self.folder, self.path(layer).name)  # the file may be cut off, for example by a power failure
            return self._metadata(layer)["key"] == key()
        except (FileNotFoundError, UserError, SafetensorError, KeyError):
            return False

    def save(self, layer: int, weights: Mapping[str, Tensor], report: Record, key: str) -> None:
        """Save a layer, whole or not at all: it is written under another name, then renamed.

        Raises UserError where it cannot be written.
        """
        temporary = self.path(layer).with_suffix(".part")
        tensors = {f"model.layers.{layer}.{name}": tensor.contiguous().cpu() for name, tensor in weights.items()}
        try:
            save_file(tensors, temporary, metadata={"report": json.dumps(report.to_dict()), "key": key})
        except SafetensorError as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"block {layer} cannot be saved in {self.folder}: {error}") from None
        fsync(temporary)
        temporary.rename(self.path(layer))

    def _metadata(self, layer: int) -> dict[str, str]:
        with safe_open(self.path(layer), framework="pt") as file:
            return file.metadata() or {}

    def report(self, kind: type[OwnRecord], layer: int) -> OwnRecord:
        """Return the report that this layer was saved with."""
        return kind.from_dict(parse_json(self._metadata(layer)["report"].encode()), f"the report in {self.path(layer)}")

    def weights(self, layer: int) -> dict[str, Tensor]:
        """Return a layer's weights by their names within it."""
        prefix = f"model.layers.{layer}."
        infos = read_header(self.folder, self.path(layer).name)
        return {name.removeprefix(prefix): read_tensor(self.folder, info) for name, info in infos.items()}

    def tensors(self, layers: Sequence[int]) -> dict[str, TensorInfo]:
        """Return the place of every tensor of these layers, for the converter."""
        return {name: info for layer in layers for name, info in locate_tensors(self.path(layer)).items()}


class BlockFolder(WorkFolder):
    """The work folder of finished layers: distilled and aligned ones, and the other results of ``ladderize spd``."""

    COMMAND = "adapt --method align or blocks, or spd"

    @property
    def distilled(self) -> LayerFiles:
        return LayerFiles(self.folder, "block")

    @property
    def aligned(self) -> LayerFiles:
        """The aligned layers, which may then be distilled."""
        return LayerFiles(self.folder, "aligned")
