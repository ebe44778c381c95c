"""A folder that holds what a run has finished so far, so that a killed one goes on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ladderize.console import UserError
from ladderize.convert.checkpoint import TensorInfo, read_header

CONTENT = ("block-*.safetensors", "block-*.part", "states-*.bin", "sensitivity.json", "head_map.json", "run.json")


class WorkFolder:
    """What a run has finished so far: one safetensors file for each block, with its report inside, and what the run is about.

    Raises UserError if ``folder`` holds the work of a run that was about something else.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        about = json.loads(json.dumps(identity))
        path = folder / "run.json"
        if folder.exists() and not path.is_file() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is no folder of unfinished work, and not empty; choose another --work-dir")
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            found = _read(path)
            different = " and ".join(sorted(key for key in about if found.get(key) != about[key]))
            if different:
                raise UserError(
                    f"{folder} holds unfinished work of a run with another {different}; delete it, or choose another --work-dir"
                )
        else:
            path.write_text(json.dumps(about, indent=2) + "\n")

    def path(self, layer: int) -> Path:
        return self.folder / f"block-{layer:05d}.safetensors"

    def has(self, layer: int) -> bool:
        return self.path(layer).is_file()

    def save(self, layer: int, weights: Mapping[str, Tensor], report: Mapping[str, Any]) -> None:
        """Whole or not at all: written beside its place, then renamed."""
        temporary = self.path(layer).with_suffix(".part")
        tensors = {f"model.layers.{layer}.{name}": tensor.contiguous().cpu() for name, tensor in weights.items()}
        save_file(tensors, temporary, metadata={"report": json.dumps(report)})
        temporary.rename(self.path(layer))

    def report(self, layer: int) -> dict[str, Any]:
        with safe_open(self.path(layer), framework="pt") as file:
            report: dict[str, Any] = json.loads(file.metadata()["report"])
        return report

    def weights(self, layer: int) -> dict[str, Tensor]:
        """The trained weights by their names within the layer."""
        with safe_open(self.path(layer), framework="pt") as file:
            return {name.removeprefix(f"model.layers.{layer}."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def tensors(self, layers: Sequence[int]) -> dict[str, TensorInfo]:
        """Where every trained tensor lies, for the converter."""
        found: dict[str, TensorInfo] = {}
        for layer in layers:
            path = self.path(layer).resolve()
            found |= {name: replace(info, file=str(path)) for name, info in read_header(path.parent, path.name).items()}
        return found

    def remove(self) -> None:
        """Delete what was written here, and the folder if nothing else is in it."""
        for pattern in CONTENT:
            for path in self.folder.glob(pattern):
                path.unlink()
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}
