"""The dense model's answers on the rows of a retraining, kept in a folder, so that no training holds that model.

A token's answer is the KEPT likeliest next tokens with their log-probabilities, and the probability of all others
together (``teacher_from_answers`` in runtime/training/vocab_losses.py makes a teacher's logits of it).

Rows are numbered in the order in which the first epoch reads them, so that a short training asks for few. A file holds
those of PART_TOKENS tokens, and appears whole or not at all: a killed run goes on with the next file, and a longer
training adds files. ``answers.json`` says what the answers belong to.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ladderize.adapt.data.packing import collate
from ladderize.adapt.data.training_data import ORDER
from ladderize.adapt.train.loop import Order
from ladderize.adapt.train.options import TrainOptions
from ladderize.blocks import LOGITS_AT_ONCE
from ladderize.console import Console, sentence
from ladderize.errors import UserError
from ladderize.files.documents import check_writable, read_document, write_json
from ladderize.files.regular import resolved
from ladderize.files.temporaries import fsync, lock_folder
from ladderize.ranks.group import Ranks
from ladderize.runtime.training.batch import ANSWERS, LIKELIEST, Batch

KEPT = 64  # tokens of an answer
PART_TOKENS = 16384  # tokens of a file, if its rows are full
LEAST = -1e4  # a logarithm that 16 bits hold, of a probability of 0
ABOUT = "answers.json"
TRAINED, HELD_OUT = "train", "heldout"
DECIDES = ("teacher", "tokenizer", "data", "seq_len", "heldout", "seed", "dtype")  # of ``run_identity``


class TeacherCache:
    """A folder of answers, made if it is not there.

    identity: of the training (``run_identity``). Only the main process has it, makes the folder and checks it.
    Raises UserError for a folder of something else, or of answers that belong to another training.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], seq_len: int, ranks: Ranks) -> None:
        self.folder, self.rows_of_part = resolved(folder), max(1, PART_TOKENS // seq_len)
        with ranks.main_first():
            if ranks.is_main:
                form = {"order": ORDER, "kept": KEPT, "rows_of_part": self.rows_of_part}
                self._open({**{key: identity[key] for key in DECIDES}, **form})
        if not self.folder.is_dir():
            raise UserError(f"--teacher-cache {folder} is visible to the main process only; name one that all can see")

    def _open(self, identity: dict[str, Any]) -> None:
        path = self.folder / ABOUT
        if not path.is_file():
            if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
                raise UserError(f"--teacher-cache {self.folder} is no folder of answers, and not empty; name another")
            check_writable(self.folder, "--teacher-cache")
            self.folder.mkdir()
            write_json(path, identity)
        earlier = read_document(path, "folder of the dense model's answers")
        if different := [key for key in identity if earlier.get(key) != identity[key]]:
            raise UserError(
                f"--teacher-cache {self.folder} holds answers for another {' and '.join(different)}; give the old value"
                " again, or name another folder"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs from adding answers. Raises UserError where one is doing so. The main process alone calls
        it."""
        try:
            lock = lock_folder(self.folder)
        except BlockingIOError:
            raise UserError(f"another run is adding answers to {self.folder}; wait for it") from None
        try:
            yield
        finally:
            if lock is not None:
                os.close(lock)

    def path(self, kind: str, part: int) -> Path:
        return self.folder / f"{kind}-{part:06d}.safetensors"

    def missing(self, kind: str, rows: int) -> list[int]:
        """Return the numbers of the parts that the first ``rows`` rows need and that are not there."""
        return [part for part in range(-(-rows // self.rows_of_part)) if not self.path(kind, part).is_file()]

    def save(self, kind: str, part: int, answers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Save a part: of each of its rows the two tensors that ``answer`` returns. Raises UserError where the disk is
        full."""
        path = self.path(kind, part)
        temporary = path.with_suffix(".part")
        starts = torch.tensor([0, *np.cumsum([len(likeliest) for likeliest, _ in answers])])
        likeliest, scores = (torch.cat(tensors) for tensors in zip(*answers, strict=True))
        try:
            save_file({"starts": starts, LIKELIEST: likeliest, ANSWERS: scores}, temporary)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise UserError(f"{path}: the dense model's answers cannot be kept ({sentence(error)})") from None
        fsync(temporary)
        temporary.rename(path)

    def read(self, kind: str, row: int) -> dict[str, Tensor]:
        """Return a row's answers, as ``Batch`` has them. Raises UserError for a file that cannot be read."""
        part, place = divmod(row, self.rows_of_part)
        path = self.path(kind, part)
        try:
            with safe_open(path, framework="pt") as file:
                start, stop = file.get_slice("starts")[place : place + 2].tolist()
                return {name: file.get_slice(name)[start:stop] for name in (LIKELIEST, ANSWERS)}
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({sentence(error)}); delete it, and run again") from None


class AnsweredRows(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of a training with the dense model's answers.

    rows: a ``datasets.Dataset``.
    order: the numbers of the rows, in the order in which the first epoch reads them.
    """

    def __init__(self, rows: Any, order: Sequence[int], cache: TeacherCache) -> None:
        self.rows, self.cache = rows, cache
        self.places = np.argsort(order)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number] | self.cache.read(TRAINED, int(self.places[number]))


@torch.no_grad()
def answer(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the answers of tokens: the likeliest next tokens, int32 [tokens, kept], and logarithms, float16
    [tokens, kept + 2].

    The logarithms are those of their probabilities, of the probability of all others together, and of the target's.

    logits: [tokens, vocab].
    targets: [tokens].
    """
    known = logits.float().log_softmax(-1)
    top = known.topk(min(KEPT, known.shape[1]), -1)
    rest = known.scatter(1, top.indices, -math.inf).logsumexp(-1, keepdim=True)
    scores = torch.cat([top.values, rest, known.gather(1, targets[:, None])], -1).clamp_min(LEAST)
    return top.indices.int().cpu(), scores.half().cpu()


def rows_needed(rows: Any, options: TrainOptions) -> int:
    """Return how many rows the first epoch of a training reads, with a step's more, since its loader reads ahead."""
    if options.max_steps:
        return min(len(rows), (options.max_steps + 1) * options.batch_size)
    lengths, tokens = rows.select_columns("lengths"), 0
    for count, number in enumerate(islice(Order(len(rows), options.seed, 0), len(rows)), 1):
        tokens += sum(lengths[number]["lengths"])
        if tokens >= (options.max_tokens or 0):
            return min(len(rows), (-(-count // options.batch_size) + 1) * options.batch_size)
    return len(rows)


def with_answers(
    rows: Any,
    heldout: Sequence[Mapping[str, Any]],
    options: TrainOptions,
    cache: TeacherCache,
    open_teacher: Callable[[], Callable[[Batch], Tensor]],
    ranks: Ranks,
    device: torch.device,
    console: Console,
) -> tuple[AnsweredRows, list[dict[str, Any]]]:
    """Return the rows to train on and those held out with the dense model's answers. Missing ones are asked for first;
    each process answers a share. All ranks call it.

    open_teacher: loads the dense model, and returns a function from a batch to its logits [scored tokens, vocab].
    """
    order = [*islice(Order(len(rows), options.seed, 0), len(rows))]
    sources = {TRAINED: (rows, order[: rows_needed(rows, options)]), HELD_OUT: (heldout, range(len(heldout)))}
    asked = [(kind, part) for kind, (_, numbers) in sources.items() for part in cache.missing(kind, len(numbers))]
    asked = ranks.broadcast(asked)  # another machine may see an older state of the folder
    if asked:
        with (
            cache.locked() if ranks.is_main else nullcontext(),
            console.progress("asking the dense model, parts", len(asked)) as advance,
        ):
            teacher, size = open_teacher(), cache.rows_of_part
            for kind, part in asked[ranks.rank :: ranks.size]:
                source, numbers = sources[kind]
                # a part is whole even where the training reads only some of its rows
                numbers = order if kind == TRAINED else numbers
                own = [source[number] for number in numbers[part * size : (part + 1) * size]]
                cache.save(kind, part, [*_answered(own, teacher, options.micro_batch_size, device)])
                advance(ranks.size)
            ranks.barrier()
    return AnsweredRows(rows, order, cache), [dict(row) | cache.read(HELD_OUT, at) for at, row in enumerate(heldout)]


def _answered(
    rows: Sequence[Mapping[str, Any]], teacher: Callable[[Batch], Tensor], at_once: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each row's answers."""
    for first in range(0, len(rows), at_once):
        batch = Batch.of(collate(rows[first : first + at_once]), device)
        with torch.no_grad():
            logits = teacher(batch)
        tokens = max(1, LOGITS_AT_ONCE // logits.shape[1])
        parts = zip(logits.split(tokens), batch.scored_targets.split(tokens), strict=True)
        answers = [torch.cat(tensors) for tensors in zip(*(answer(*part) for part in parts), strict=True)]
        counts = (batch.targets >= 0).sum(1).tolist()
        yield from zip(*(tensor.split(counts) for tensor in answers), strict=True)
