"""Predictions on the text of ``--perplexity``, kept to compare other models with.

The logits themselves would be vast. A folder holds ``window-N.safetensors`` (``states`` [scored tokens, hidden], the
normed final hidden states), ``head.safetensors`` (``weight`` [vocabulary, hidden] and perhaps ``bias``), and
``predictions.json`` (``PredictedText``), which is written last: without it the others are worth nothing. Logits are
``states @ weight.T + bias``, in the dtype that both have.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ladderize.console import sentence
from ladderize.errors import UserError
from ladderize.eval.options import EvalOptions
from ladderize.files.documents import check_writable, read_document, write_json
from ladderize.files.records import Record
from ladderize.files.regular import resolved
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.group import Ranks

DOCUMENT, HEAD, WINDOW = "predictions.json", "head", "window-{}"


@dataclass(frozen=True)
class PredictedText(Record):
    """Whose predictions a folder holds, and on which windows."""

    model: str
    ids_sha256: str
    vocab_size: int

    def difference(self, other: "PredictedText") -> str | None:
        """Return why predictions of ``other`` cannot be compared with these; None where they can."""
        if self.vocab_size != other.vocab_size:
            return f"their vocabulary has {self.vocab_size} tokens, and this one {other.vocab_size}"
        if self.ids_sha256 != other.ids_sha256:
            return "their windows are others (--perplexity, --seq-len, --windows, or the tokenizer differs)"
        return None


@dataclass
class KeptPredictions:
    """A folder of predictions; text: None until it is whole."""

    folder: Path
    text: PredictedText | None = None

    def save(self, name: str, tensors: Mapping[str, Tensor | None]) -> None:
        """Write a file. Raises UserError where the disk is full."""
        path = self.folder / f"{name}.safetensors"
        kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        try:
            save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in kept.items()}, path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path}: the predictions cannot be kept ({sentence(error)}); name another folder by --keep-predictions"
            ) from error

    def load(self, name: str, device: torch.device) -> dict[str, Tensor]:
        """Read a file. Raises UserError where that fails."""
        path = self.folder / f"{name}.safetensors"
        try:
            return load_file(path, device=str(device))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({sentence(error)}); evaluate the reference again") from None

    def finish(self, text: PredictedText, ranks: Ranks) -> None:
        """Write what the folder holds."""
        self.text = text
        if ranks.is_main:
            write_json(self.folder / DOCUMENT, text.to_dict())
        ranks.barrier()  # no rank goes on before it is written


@contextlib.contextmanager
def open_baseline(options: EvalOptions, ranks: Ranks) -> Iterator[KeptPredictions | None]:
    """Yield a folder for predictions of the first model, or with those of an earlier run; None where none are compared.

    All ranks write into one folder, which several machines must share: there, ``keep_predictions`` names one.
    Raises UserError for a folder that cannot be used.
    """
    if options.reference is not None:
        folder = resolved(options.reference, "--reference ")
        path = folder / DOCUMENT
        if not path.is_file():
            raise UserError(f"{folder} holds no kept predictions (no {DOCUMENT}); keep the reference's first")
        yield KeptPredictions(folder, PredictedText.from_dict(read_document(path, "file of kept predictions"), path))
    elif options.keep_predictions is not None:
        folder = resolved(options.keep_predictions, "--keep-predictions ")
        with ranks.main_first():
            if ranks.is_main:
                prepare_folder(folder)
        yield KeptPredictions(folder)
    elif len(options.models) > 1 and options.perplexity is not None and options.engine == "transformers":
        with temporary_folder("predictions") if ranks.is_main else contextlib.nullcontext() as temporary:
            yield KeptPredictions(ranks.broadcast(temporary))
            ranks.barrier()  # no rank reads in the folder any more
    else:
        yield None


def prepare_folder(folder: Path) -> None:
    """Make ``folder`` ready for predictions; earlier ones in it are removed. Raises UserError if it holds anything
    else."""
    if not folder.parent.is_dir():
        raise UserError(f"{folder}: the folder {folder.parent} does not exist")
    # the document first
    earlier = [folder / DOCUMENT, folder / f"{HEAD}.safetensors", *folder.glob(f"{WINDOW.format('*')}.safetensors")]
    if folder.exists() and (not folder.is_dir() or {*folder.iterdir()} - {*earlier}):
        raise UserError(f"{folder} is not an empty folder; name another to keep predictions in")
    folder.mkdir(exist_ok=True)
    check_writable(folder / DOCUMENT)
    for path in earlier:
        path.unlink(missing_ok=True)
