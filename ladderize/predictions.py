"""A model's predictions, kept on the disk, for another model's to be compared with: not the logits, which are vast, but
the states that its output layer reads, and that layer.

A folder of three files: ``predictions.json`` (``KeptPredictions``, written last: without it the others are worth
nothing), ``states.safetensors`` (``states`` [tokens, hidden], the normed final hidden states at all scored positions,
window after window) and ``head.safetensors`` (``weight`` [vocabulary, hidden] and perhaps ``bias``). Logits are
``states @ weight.T + bias``, in the dtype that both are stored in.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ladderize.checkpoint.reading import TensorInfo, read_header, stored_dtype_name
from ladderize.checkpoint.tensors import TensorReader, encode_header, infos_of, write_tensors
from ladderize.console import human_bytes, sentence
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, read_document, write_json
from ladderize.files.records import Record
from ladderize.files.temporaries import remove_abandoned

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEPT_ABOUT, KEPT_STATES, KEPT_HEAD = "predictions.json", "states.safetensors", "head.safetensors"


@dataclass(frozen=True)
class KeptPredictions(Record):
    """Whose predictions a folder holds, and of what. model: as it was named; fingerprint: see
    ``checkpoint.fingerprint``, None where the architecture has none. data_sha256, ids_sha256: of the file, and of the
    windows' ids. window_tokens: scored tokens of each window. dtype: of states and head, in safetensors' words."""

    model: str
    fingerprint: str | None
    data_sha256: str
    ids_sha256: str
    seq_len: int
    window_tokens: list[int]
    dtype: str
    hidden_size: int
    vocab_size: int

    @property
    def nbytes(self) -> int:
        """What the folder takes on the disk."""
        return kept_bytes(sum(self.window_tokens), self.vocab_size, self.hidden_size, 4 if self.dtype == "F32" else 2)


def kept_bytes(tokens: int, vocab_size: int, hidden_size: int, itemsize: int) -> int:
    """What a folder of predictions takes on the disk."""
    return (tokens + vocab_size) * hidden_size * itemsize


def disk_shortage(folder: Path, needed: int) -> str | None:
    """What to say if ``needed`` bytes are more than the disk of ``folder`` has free."""
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return f"the reference's predictions take {human_bytes(needed)}, and {folder} has {human_bytes(free)} free"


def prepare_folder(folder: Path) -> None:
    """Make ``folder`` ready to keep predictions in; earlier ones in it are no longer valid. Raises UserError for a
    folder that holds anything else."""
    if folder.is_dir():
        remove_abandoned(folder, f".{KEPT_ABOUT}.")  # of a killed run
    if folder.exists() and (
        not folder.is_dir() or {path.name for path in folder.iterdir()} - {KEPT_ABOUT, KEPT_STATES, KEPT_HEAD}
    ):
        raise UserError(f"{folder} is not an empty folder; name another to keep predictions in")
    if not folder.parent.is_dir():
        raise UserError(f"{folder}: the folder {folder.parent} does not exist")
    folder.mkdir(exist_ok=True)
    check_writable(folder / KEPT_ABOUT)
    (folder / KEPT_ABOUT).unlink(missing_ok=True)


class StatesWriter:
    """Writes ``states.safetensors`` of a folder, window by window in any order; a context.

    Several processes may write one file, each its own windows: all give the same window_tokens, hidden_size and dtype.
    Raises UserError where the disk is full.
    """

    def __init__(self, folder: Path, window_tokens: Sequence[int], hidden_size: int, dtype: "torch.dtype") -> None:
        self.path, self.dtype, self.hidden_size = folder / KEPT_STATES, dtype, hidden_size
        self.starts = [0, *accumulate(window_tokens)]
        header = encode_header([("states", stored_dtype_name(dtype), (self.starts[-1], hidden_size))])
        self.offset, self.row_bytes = len(header), hidden_size * dtype.itemsize
        with self._kept():
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            self._write(header, 0)
            os.ftruncate(self.descriptor, self.offset + self.starts[-1] * self.row_bytes)

    def write(self, window: int, states: "Tensor") -> None:
        """Keep the states [scored tokens, hidden] of a window."""
        import torch

        count = self.starts[window + 1] - self.starts[window]
        if tuple(states.shape) != (count, self.hidden_size) or states.dtype != self.dtype:
            raise ValueError(f"window {window} was declared as {self.dtype} {[count, self.hidden_size]}")
        raw = states.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        with self._kept():
            self._write(raw, self.offset + self.starts[window] * self.row_bytes)

    def _write(self, raw: "bytes | memoryview", offset: int) -> None:
        left = memoryview(raw)
        while left:
            count = os.pwrite(self.descriptor, left, offset)
            left, offset = left[count:], offset + count

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self.path}: the predictions cannot be kept ({sentence(error)}); name another folder"
            raise UserError(message) from error

    def __enter__(self) -> "StatesWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._kept():
                    os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)


def write_head(folder: Path, weight: "Tensor", bias: "Tensor | None" = None) -> None:
    """Keep an output layer: weight [vocabulary, hidden], bias [vocabulary]. Raises UserError where the disk is full."""
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    write_tensors(folder / KEPT_HEAD, infos_of(tensors), tensors.__getitem__)


def write_about(folder: Path, about: KeptPredictions) -> None:
    """Say what the folder holds, when all else is there."""
    write_json(folder / KEPT_ABOUT, about.to_dict())


class PredictionsReader(TensorReader):
    """Reads a folder of predictions; a context. Raises UserError for files that do not fit each other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.about = about = read_about(folder)
        self.starts = [0, *accumulate(about.window_tokens)]
        self._states = self._tensor(KEPT_STATES, "states", (self.starts[-1], about.hidden_size))
        self._weight = self._tensor(KEPT_HEAD, "weight", (about.vocab_size, about.hidden_size))
        has_bias = "bias" in read_header(folder, KEPT_HEAD)
        self._bias = self._tensor(KEPT_HEAD, "bias", (about.vocab_size,)) if has_bias else None

    def states(self, window: int, device: "torch.device") -> "Tensor":
        """The states [scored tokens, hidden] of a window."""
        start, stop = self.starts[window], self.starts[window + 1]
        return self.read(self._states, dim=0, start=start, stop=stop, device=device)

    def head(self, device: "torch.device", start: int, stop: int) -> "tuple[Tensor, Tensor | None]":
        """Weight [rows, hidden] and bias [rows] of the output layer, for the ids from ``start`` to ``stop``."""

        def rows(info: TensorInfo) -> "Tensor":
            return self.read(info, dim=0, start=start, stop=stop, device=device)

        return rows(self._weight), None if self._bias is None else rows(self._bias)

    def _tensor(self, file: str, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = read_header(self.folder, file).get(name)
        if info is None or tuple(info.shape) != shape or info.dtype != self.about.dtype:
            raise UserError(
                f"{self.folder / file} does not fit {self.folder / KEPT_ABOUT}; evaluate the reference again"
            )
        return info


def read_about(folder: Path) -> KeptPredictions:
    """What a folder of predictions holds; raises UserError for any other folder."""
    path = folder / KEPT_ABOUT
    if not path.is_file():
        raise UserError(
            f"{folder} holds no kept predictions (no {path.name}); evaluate the reference with them kept first"
        )
    about = KeptPredictions.from_dict(read_document(path, "file of kept predictions"), path)
    if about.hidden_size < 1 or about.vocab_size < 1 or not about.window_tokens or min(about.window_tokens) < 1:
        raise UserError(f"{path} says sizes that cannot be; evaluate the reference again")
    return about
