"""The perplexity of a text, and the distance of predictions on it from the reference's."""

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
from ladderize.checkpoint.reading import DTYPE_BYTES, STORED_NAMES
from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.eval.model import EvalModel, WindowScores
from ladderize.eval.options import EvalOptions
from ladderize.eval.predictions import KeptPredictions, disk_shortage, prepare_folder, read_about, write_about
from ladderize.eval.results import Perplexity, Predictions, perplexity_from_nlls
from ladderize.files.regular import resolved
from ladderize.files.temporaries import temporary_folder
from ladderize.ranks.group import Ranks


@dataclass
class Baseline:
    """The reference's predictions, with which those of other models are compared.

    folder: holds them; None: predictions are not compared.
    about: the description of what is kept there; None until the first model was scored.
    strict: the user named the folder, so a model that cannot be compared, or a reference that cannot be kept, is an
    error; otherwise a warning says what is left out.
    """

    folder: Path | None
    about: KeptPredictions | None
    strict: bool
    ranks: Ranks
    console: Console

    def score_text(self, model: EvalModel, options: EvalOptions) -> tuple[Perplexity, Predictions | None]:
        """Return the perplexity of ``options.perplexity``, and predictions where there is a reference.

        Raises UserError for a text that cannot be scored, and with ``strict`` for one that cannot be compared.
        """
        assert options.perplexity is not None
        windows = text_windows(model, options)
        tokens = [len(window) - 1 for window in windows]
        about = KeptPredictions(
            model=model.name,
            data_sha256=data.file_sha256(options.perplexity),
            ids_sha256=ids_sha256(windows),
            window_tokens=tokens,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
        )
        reference = self.folder if self.about is not None and self._is_comparable(about) else None
        keep = self.folder if self.about is None and self.folder is not None and self._can_keep(model, about) else None
        start = time.perf_counter()
        with self.console.progress("perplexity", len(windows)) as advance:
            scores = model.score(
                windows, batch_size=options.batch_size, keep=keep, reference=reference, advance=advance
            )
        measured = replace(
            perplexity_from_nlls(scores.nll, windows, time.perf_counter() - start),
            data_sha256=about.data_sha256,
            ids_sha256=about.ids_sha256,
            window_nll=scores.nll.tolist(),
            window_tokens=tokens,
        )
        if keep is not None:
            if self.ranks.is_main:
                write_about(keep, about)
            self.ranks.barrier()  # no rank goes on before it is written
            self.about = about
            return measured, None
        return measured, predictions_of(scores, self.about.model) if reference and self.about else None

    def _can_keep(self, model: EvalModel, about: KeptPredictions) -> bool:
        assert self.folder is not None
        itemsize = DTYPE_BYTES[STORED_NAMES[model.described.dtype]]
        needed = (sum(about.window_tokens) + about.vocab_size) * about.hidden_size * itemsize
        # One answer for all ranks: free disk space may differ a moment later.
        reason = self.ranks.broadcast(model.no_predictions or disk_shortage(self.folder, needed))
        if reason is not None:
            self._refuse(f"the predictions of {model.name} are not kept: {reason}")
            self.folder = None
        return reason is None

    def _is_comparable(self, about: KeptPredictions) -> bool:
        kept = self.about
        assert kept is not None
        if kept.data_sha256 != about.data_sha256:
            reason = "they are of another --perplexity file"
        elif kept.ids_sha256 != about.ids_sha256 or kept.window_tokens != about.window_tokens:
            reason = "their windows are others (--seq-len, --windows, or the tokenizer differs)"
        elif kept.vocab_size != about.vocab_size:
            reason = f"their vocabulary has {kept.vocab_size} tokens, and this one {about.vocab_size}"
        else:
            return True
        self._refuse(f"the predictions of {about.model} are not compared with those of {kept.model}: {reason}")
        return False

    def _refuse(self, sentence: str) -> None:
        if self.strict:
            raise UserError(sentence)
        self.console.warn(sentence)


@contextlib.contextmanager
def open_baseline(
    models: int, keep_predictions: Path | None, reference: Path | None, ranks: Ranks, console: Console
) -> Iterator[Baseline]:
    """Yield the baseline with a folder for predictions of the first of ``models`` models, or with those of an earlier
    run.

    Several models are compared with the first by default, through a temporary folder. All ranks write into one folder,
    which several machines must share.
    Raises UserError for a folder that cannot be used.
    """
    if reference is not None:
        reference = resolved(reference, "--reference ")
        yield Baseline(reference, read_about(reference), True, ranks, console)
    elif keep_predictions is not None:
        folder = resolved(keep_predictions, "--keep-predictions ")
        with ranks.main_first():
            if ranks.is_main:
                prepare_folder(folder)
        yield Baseline(folder, None, True, ranks, console)
    elif models > 1 and ranks.local_size == ranks.size:
        with temporary_folder("predictions") if ranks.is_main else contextlib.nullcontext() as temporary:
            yield Baseline(ranks.broadcast(temporary), None, False, ranks, console)
            ranks.barrier()  # no rank reads in the folder any more
    else:
        if models > 1:
            console.warn(
                "predictions are not compared on several machines; name a folder that all share with --keep-predictions"
            )
        yield Baseline(None, None, False, ranks, console)


def text_windows(model: EvalModel, options: EvalOptions) -> list[np.ndarray]:
    """Return the windows of ``options.perplexity`` in this model's ids, ``options.seq_len`` long.

    Raises UserError for a text that cannot be read, or a length that the model does not support.
    """
    assert options.perplexity is not None
    documents = data.read_documents(options.perplexity, model.tokenizer, vocab_size=model.vocab_size)
    seq_len = options.seq_len or data.default_seq_len(documents, options.perplexity, model.positions)
    if not 2 <= seq_len <= model.positions:
        raise UserError(f"--seq-len {seq_len} must be between 2 and the {model.positions} positions of {model.name}")
    return data.windows(documents, seq_len)[: options.windows]


def ids_sha256(windows: list[np.ndarray]) -> str:
    """Return a hash of the ids of windows and of their lengths."""
    digest = hashlib.sha256(json.dumps([len(window) for window in windows]).encode())
    for window in windows:
        digest.update(np.ascontiguousarray(window, dtype="<i8").tobytes())
    return digest.hexdigest()


def predictions_of(scores: WindowScores, reference: str) -> Predictions | None:
    """Return the figures of a model whose windows were compared with the reference's; None where they were not.

    Raises UserError where they are NaN or infinite.
    """
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
