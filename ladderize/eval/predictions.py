"""A model's predictions on disk, for comparing another model's with: the input states of its output layer, and that
layer.

The logits themselves would be vast. A folder holds ``window-N.safetensors`` (``states`` [scored tokens, hidden], the
normed final hidden states), ``head.safetensors`` (``weight`` [vocabulary, hidden] and perhaps ``bias``), and
``predictions.json`` (``KeptPredictions``), which is written last: without it the others are worth nothing. Logits are
``states @ weight.T + bias``, in the dtype that both have.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ladderize.console import human_bytes, sentence
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, read_document, write_json
from ladderize.files.records import Record

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ABOUT_NAME, HEAD_NAME, WINDOW_FILES = "predictions.json", "head.safetensors", "window-*.safetensors"


@dataclass(frozen=True)
class KeptPredictions(Record):
    """The description of a folder of predictions.

    model: as it was named.
    data_sha256: of the file.
    ids_sha256: of the windows' ids.
    window_tokens: scored tokens of each window.
    """

    model: str
    data_sha256: str
    ids_sha256: str
    window_tokens: list[int]
    hidden_size: int
    vocab_size: int


def disk_shortage(folder: Path, needed: int) -> str | None:
    """Return a message if ``needed`` bytes are more than the disk of ``folder`` has free; else None."""
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return f"the reference's predictions take {human_bytes(needed)}, and {folder} has {human_bytes(free)} free"


def prepare_folder(folder: Path) -> None:
    """Make ``folder`` ready for predictions; earlier ones in it are removed. Raises UserError if it holds anything
    else."""
    if not folder.parent.is_dir():
        raise UserError(f"{folder}: the folder {folder.parent} does not exist")
    earlier = [*folder.glob(WINDOW_FILES), folder / HEAD_NAME, folder / ABOUT_NAME]
    if folder.exists() and (not folder.is_dir() or {*folder.iterdir()} - {*earlier}):
        raise UserError(f"{folder} is not an empty folder; name another to keep predictions in")
    folder.mkdir(exist_ok=True)
    check_writable(folder / ABOUT_NAME)
    for path in reversed(earlier):  # the document first
        path.unlink(missing_ok=True)


def write_states(folder: Path, window: int, states: "Tensor") -> None:
    """Write the states [scored tokens, hidden] of a window. Raises UserError where the disk is full."""
    _save(_window_path(folder, window), states=states)


def write_head(folder: Path, weight: "Tensor", bias: "Tensor | None" = None) -> None:
    """Write an output layer: weight [vocabulary, hidden], bias [vocabulary]. Raises UserError where the disk is
    full."""
    _save(folder / HEAD_NAME, weight=weight, **({} if bias is None else {"bias": bias}))


def write_about(folder: Path, about: KeptPredictions) -> None:
    """Write the description of the folder, after everything else."""
    write_json(folder / ABOUT_NAME, about.to_dict())


def read_about(folder: Path) -> KeptPredictions:
    """Return the description of a folder of predictions; raises UserError for any other folder."""
    path = folder / ABOUT_NAME
    if not path.is_file():
        raise UserError(
            f"{folder} holds no kept predictions (no {path.name}); evaluate the reference with them kept first"
        )
    return KeptPredictions.from_dict(read_document(path, "file of kept predictions"), path)


class KeptReference:
    """The predictions of another model. Raises UserError for files that do not fit each other."""

    def __init__(self, folder: Path, device: "torch.device") -> None:
        self.folder, self.device, self.about = folder, device, read_about(folder)
        self.head = self._load(folder / HEAD_NAME, "weight", [self.about.vocab_size, self.about.hidden_size])

    def states(self, window: int) -> "Tensor":
        """Return the states [scored tokens, hidden] of a window."""
        shape = [self.about.window_tokens[window], self.about.hidden_size]
        return self._load(_window_path(self.folder, window), "states", shape)["states"]

    def logits(self, states: "Tensor") -> "Tensor":
        """Return the logits [n, vocabulary] of states [n, hidden], in float32."""
        from torch.nn.functional import linear

        return linear(states, self.head["weight"], self.head.get("bias")).float()

    def _load(self, path: Path, name: str, shape: list[int]) -> dict[str, "Tensor"]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors = load_file(path, device=str(self.device))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({sentence(error)}); evaluate the reference again") from None
        if name not in tensors or list(tensors[name].shape) != shape:
            raise UserError(f"{path} does not fit {self.folder / ABOUT_NAME}; evaluate the reference again")
        return tensors


def _window_path(folder: Path, window: int) -> Path:
    return folder / WINDOW_FILES.replace("*", str(window))


def _save(path: Path, **tensors: "Tensor") -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        message = f"{path}: the predictions cannot be kept ({sentence(error)}); name another folder"
        raise UserError(message) from error
