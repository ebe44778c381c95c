"""A folder that holds what a run has finished so far, so that a killed one goes on."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ladderize.adapt.blockwise.documents import BlockReport
from ladderize.checkpoint.reading import TensorInfo, read_header
from ladderize.checkpoint.tensors import TensorReader, locate_tensors
from ladderize.errors import UserError
from ladderize.files.parsing import parse_json
from ladderize.files.records import OwnRecord, Record
from ladderize.files.temporaries import fsync
from ladderize.files.work import WorkFolder


class LayerFiles:
    """One safetensors file for each finished layer, with its report and the key of what it was made from."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, prefix

    def path(self, layer: int) -> Path:
        return self.folder / f"{self.prefix}-{layer:05d}.safetensors"

    def has(self, layer: int, key: Callable[[], str]) -> bool:
        """Whether this block is done, from just what ``key()`` says (asked for only if there is something to
        compare)."""
        try:
            read_header(self.folder, self.path(layer).name)  # cut off by a power failure, say
            return self._metadata(layer)["key"] == key()
        except (FileNotFoundError, UserError, SafetensorError, KeyError):
            return False

    def save(self, layer: int, weights: Mapping[str, Tensor], report: Record, key: str) -> None:
        """Whole or not at all: written beside its place, then renamed."""
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

    def report_as(self, kind: type[OwnRecord], layer: int) -> OwnRecord:
        """What ``save`` was told about this layer."""
        return kind.from_dict(parse_json(self._metadata(layer)["report"].encode()), f"the report in {self.path(layer)}")

    def weights(self, layer: int) -> dict[str, Tensor]:
        """The trained weights by their names within the layer."""
        prefix, reader = f"model.layers.{layer}.", TensorReader(self.folder)
        infos = read_header(self.folder, self.path(layer).name)
        return {name.removeprefix(prefix): reader.read(info) for name, info in infos.items()}

    def tensors(self, layers: Sequence[int]) -> dict[str, TensorInfo]:
        """Where every trained tensor lies, for the converter."""
        found: dict[str, TensorInfo] = {}
        for layer in layers:
            found |= locate_tensors(self.path(layer))
        return found


class BlockFolder(WorkFolder, LayerFiles):
    """Distilled blocks; and of ``ladderize spd`` what else it has finished."""

    prefix = "block"
    CONTENT = (
        *WorkFolder.CONTENT,
        "block-*.safetensors",
        "block-*.part",
        "aligned-*.safetensors",
        "aligned-*.part",
        "states-*.bin",
        "sensitivity.json",
        "head_map.json",
    )

    @property
    def aligned(self) -> LayerFiles:
        """Layers that were aligned, of which blocks may then be distilled."""
        return LayerFiles(self.folder, "aligned")

    def report(self, layer: int) -> BlockReport:
        """What ``save`` was told about this block."""
        return self.report_as(BlockReport, layer)
