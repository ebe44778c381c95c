"""The perplexity of a text, and how far predictions on it are from the reference's."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ladderize import data
from ladderize.blocks import check_finite
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.reading import DTYPE_BYTES, STORED_NAMES, read_header
from ladderize.checkpoint.tensors import fingerprint
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.eval.backends.base import EvalModel
from ladderize.eval.options import EvalOptions
from ladderize.eval.results import Perplexity, Predictions, perplexity_from_nlls
from ladderize.families.registry import find_family
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
    """The reference's predictions. keep: the folder for those of the first model; None: they are not asked for. folder:
    where they lie; about: what is kept there by now. strict: whether a model that cannot be compared, or a reference
    that cannot be kept, is an error: the user has named a folder; else a warning tells what is left out."""

    keep: Path | None
    about: KeptPredictions | None
    folder: Path | None
    strict: bool
    ranks: Ranks
    console: Console

    def score_text(
        self, model: EvalModel, checkpoint: Path, options: EvalOptions
    ) -> tuple[Perplexity, Predictions | None]:
        """The perplexity of ``options.perplexity``, and predictions where there is a reference. checkpoint: the model's
        folder."""
        assert options.perplexity is not None
        windows = text_windows(model, options)
        data_sha, ids_sha = data.file_sha256(options.perplexity), ids_sha256(windows)
        tokens = [len(window) - 1 for window in windows]
        reference = self._folder_to_compare(model, data_sha, ids_sha)
        keep = self._folder_to_fill(model, sum(tokens))
        start = time.perf_counter()
        with self.console.progress("perplexity", len(windows)) as advance:
            scores = model.score(
                windows, batch_size=options.batch_size, keep=keep, reference=reference, advance=advance
            )
        measured = replace(
            perplexity_from_nlls(scores.nll, windows, time.perf_counter() - start),
            data_sha256=data_sha,
            ids_sha256=ids_sha,
            window_nll=scores.nll.tolist(),
            window_tokens=tokens,
        )
        predictions = None
        if reference is not None and self.about is not None:
            predictions = predictions_of(scores, self.about.model)
        if keep is not None:
            about = None
            if self.ranks.is_main:
                weight = read_header(keep, KEPT_HEAD)["weight"]
                found = read_checkpoint(checkpoint)
                about = KeptPredictions(
                    model=model.name,
                    fingerprint=fingerprint(found) if find_family(found.config) is not None else None,
                    data_sha256=data_sha,
                    ids_sha256=ids_sha,
                    seq_len=measured.seq_len,
                    window_tokens=tokens,
                    dtype=weight.dtype,
                    hidden_size=weight.shape[1],
                    vocab_size=weight.shape[0],
                )
                write_about(keep, about)
            self.about, self.folder = self.ranks.broadcast(about), keep  # also says that it was written
        return measured, predictions

    def _folder_to_fill(self, model: EvalModel, tokens: int) -> Path | None:
        """The folder for this model's predictions, if it is the one whose predictions are kept, and can be."""
        folder, self.keep = self.keep, None
        if folder is None:
            return None
        itemsize = DTYPE_BYTES[STORED_NAMES[model.described.dtype]]
        needed = kept_bytes(tokens, model.vocab_size, model.hidden_size, itemsize)
        # one answer for all ranks, whatever the disk has free a moment later
        reason = self.ranks.broadcast(model.no_predictions or disk_shortage(folder, needed))
        if reason is not None:
            self._refuse(f"the predictions of {model.name} are not kept: {reason}")
            return None
        return folder

    def _folder_to_compare(self, model: EvalModel, data_sha256: str, ids_sha256: str) -> Path | None:
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
            temporary = None
            if models > 1 and ranks.local_size < ranks.size:
                console.warn(
                    "predictions are not compared on several machines; name a folder that all share with"
                    " --keep-predictions"
                )
            elif models > 1:
                own = stack.enter_context(temporary_folder("predictions")) if ranks.is_main else None
                temporary = ranks.broadcast(own)
            yield Baseline(temporary, None, None, False, ranks, console)
            ranks.barrier()  # no rank reads in the folder any more


def text_windows(model: EvalModel, options: EvalOptions) -> list[np.ndarray]:
    """The windows of ``options.perplexity`` in this model's ids, ``options.seq_len`` long."""
    assert options.perplexity is not None
    documents = data.read_documents(options.perplexity, model.tokenizer, vocab_size=model.vocab_size)
    seq_len = options.seq_len or data.default_seq_len(documents, options.perplexity, model.positions)
    if not 2 <= seq_len <= model.positions:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {model.positions} positions of {model.name}")
    return data.windows(documents, seq_len)[: options.windows]


def ids_sha256(windows: list[np.ndarray]) -> str:
    """A hash of the ids of windows and of where each ends."""
    digest = hashlib.sha256(json.dumps([len(window) for window in windows]).encode())
    for window in windows:
        digest.update(np.ascontiguousarray(window, dtype="<i8").tobytes())
    return digest.hexdigest()


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
