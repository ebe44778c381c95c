"""The reference's predictions, which those of the other models are compared with."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ladderize.blocks import check_finite
from ladderize.checkpoint.reading import DTYPE_BYTES, STORED_NAMES, read_checkpoint, read_header
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.eval.backends.base import EvalModel
from ladderize.eval.results import Perplexity, Predictions
from ladderize.files.regular import resolved
from ladderize.files.temporaries import temporary_folder
from ladderize.predictions import (
    KEPT_HEAD,
    KeptPredictions,
    disk_shortage,
    kept_bytes,
    prepare_folder,
    read_about,
    write_about,
)
from ladderize.ranks.group import Ranks
from ladderize.runtime.requests.scoring import WindowScores


@dataclass
class Baseline:
    """Where the reference's predictions lie. keep: the folder for those of the first model; None: they
    are not asked for. about: what is kept by now. strict: whether a model that cannot be compared, or a reference that
    cannot be kept, is an error: the user has named a folder; else a warning tells what is left out."""

    keep: Path | None
    about: KeptPredictions | None
    folder: Path | None
    strict: bool
    ranks: Ranks
    console: Console

    def folder_to_fill(self, model: EvalModel, dtype: str, windows: list[np.ndarray]) -> Path | None:
        """The folder for this model's predictions, if it is the one whose predictions are kept, and can be."""
        folder, self.keep = self.keep, None
        if folder is None:
            return None
        tokens = sum(len(window) - 1 for window in windows)
        needed = kept_bytes(tokens, model.vocab_size, model.hidden_size, DTYPE_BYTES[STORED_NAMES[dtype]])
        # one answer for all ranks, whatever the disk has free a moment later
        reason = self.ranks.broadcast(model.no_predictions or disk_shortage(folder, needed))
        if reason is not None:
            self._refuse(f"the predictions of {model.name} are not kept: {reason}")
            return None
        return folder

    def filled(self, folder: Path, model: EvalModel, checkpoint: Path, measured: Perplexity) -> None:
        """Say in the folder what it holds, after the model was scored."""
        about = None
        if self.ranks.is_main:
            weight = read_header(folder, KEPT_HEAD)["weight"]
            assert measured.data_sha256 is not None
            assert measured.ids_sha256 is not None
            assert measured.window_tokens is not None
            about = KeptPredictions(
                model=model.name,
                fingerprint=_fingerprint(checkpoint),
                data_sha256=measured.data_sha256,
                ids_sha256=measured.ids_sha256,
                seq_len=measured.seq_len,
                window_tokens=measured.window_tokens,
                dtype=weight.dtype,
                hidden_size=weight.shape[1],
                vocab_size=weight.shape[0],
            )
            write_about(folder, about)
        self.about = self.ranks.broadcast(about)  # also says that it was written
        self.folder = folder

    def folder_to_compare(self, model: EvalModel, data_sha256: str, ids_sha256: str) -> Path | None:
        """The folder of the reference's predictions, if this model's can be compared with them."""
        about = self.about
        if about is None:
            return None
        if about.data_sha256 != data_sha256:
            reason = "they are of another --perplexity file (data_sha256)"
        elif about.ids_sha256 != ids_sha256:
            reason = "their windows are others (--seq-len, --windows, or the tokenizer differs)"
        elif about.vocab_size != model.vocab_size:
            reason = f"their vocabulary has {about.vocab_size} tokens, and this one {model.vocab_size}"
        else:
            return self.folder
        self._refuse(f"the predictions of {model.name} are not compared with those of {about.model}: {reason}")
        return None

    def _refuse(self, sentence: str) -> None:
        if self.strict:
            raise UserError(sentence)
        self.console.warn(sentence)


@contextlib.contextmanager
def open_baseline(
    models: int, keep_predictions: Path | None, reference: Path | None, ranks: Ranks, console: Console
) -> Iterator[Baseline]:
    """Where predictions of ``models`` models are kept, and what was kept before; checked before any work.

    Several models are compared with the first without being asked, through a temporary folder. All ranks write into one
    folder, which those of several machines must share.
    """
    with contextlib.ExitStack() as stack:
        if reference is not None:
            reference = resolved(reference, "--reference ")
            yield Baseline(None, read_about(reference), reference, True, ranks, console)
        elif keep_predictions is not None:
            folder = resolved(keep_predictions, "--keep-predictions ")
            with ranks.main_first():
                if ranks.is_main:
                    prepare_folder(folder)
            yield Baseline(folder, None, None, True, ranks, console)
        else:
            yield Baseline(_temporary(models, ranks, stack, console), None, None, False, ranks, console)
            ranks.barrier()  # no rank reads in the folder any more


def _temporary(models: int, ranks: Ranks, stack: contextlib.ExitStack, console: Console) -> Path | None:
    """A folder for the first model's predictions, which ends with the stack; None for a single model."""
    if models < 2:
        return None
    if ranks.local_size < ranks.size:
        console.warn(
            "predictions are not compared on several machines; name a folder that all share with --keep-predictions"
        )
        return None
    own = stack.enter_context(temporary_folder("predictions")) if ranks.is_main else None
    shared: Path = ranks.broadcast(own)
    return shared


def predictions_of(scores: WindowScores, reference: str) -> Predictions | None:
    """The figures of a model whose windows were compared with the reference's."""
    if scores.kl is None or scores.same_top is None:
        return None
    tokens = np.concatenate(scores.kl).astype(np.float64)
    check_finite(tokens.sum(), "the divergence from the reference's predictions")
    return Predictions(
        reference=reference,
        mean_kl=float(tokens.mean()),
        p99_kl=float(np.quantile(tokens, 0.99)),
        same_top_share=float(np.concatenate(scores.same_top).mean()),
        tokens=len(tokens),
        window_kl=[float(window.sum(dtype=np.float64)) for window in scores.kl],
    )


def _fingerprint(folder: Path) -> str | None:
    """Of Llamas, dense or converted; None for another architecture."""
    checkpoint = read_checkpoint(folder)
    known = checkpoint.config.get("model_type") in ("llama", "ladderized_llama")
    return fingerprint(checkpoint) if known else None
