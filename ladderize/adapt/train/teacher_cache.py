"""The dense model's answers on the rows of a retraining, kept in a folder, so that no training holds that model.

A token's answer is the KEPT likeliest next tokens with their log-probabilities, and the probability of all others
together (``teacher_from_answers`` in runtime/training/vocab_losses.py makes a teacher's logits of it). All that decides
rows and answers names a subfolder. Rows are numbered in the order of the first epoch: a short training asks for few,
and a longer one adds files. Of each row there is a hash beside its answers.
"""

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ladderize.adapt.train.loop import row_order
from ladderize.adapt.train.task import Pace, Task
from ladderize.adapt.train.training_model import make_teacher, open_model, place_teacher
from ladderize.adapt.training_data import ORDER, collate
from ladderize.blocks import LOGITS_AT_ONCE, check_finite
from ladderize.checkpoint.tensors import write_tensors
from ladderize.console import Console, sentence
from ladderize.data.files import split_weight
from ladderize.errors import UserError
from ladderize.files.regular import resolved, split_name
from ladderize.files.unfinished import run_digest
from ladderize.layout import Layout
from ladderize.memory import release
from ladderize.ranks.group import Ranks
from ladderize.runtime.training.batch import ANSWERS, LIKELIEST, Batch

KEPT = 64  # tokens of an answer
PART_TOKENS = 16384  # tokens of a file, if its rows are full
LEAST = -1e4  # a logarithm that 16 bits hold, of a probability of 0
TRAINED, HELD_OUT = "train", "heldout"
DECIDES = ("teacher", "tokenizer", "seq_len", "heldout", "seed", "dtype")  # of a task's identity, beside its data
PackedRow = Mapping[str, Any]


def check_apart(folder: str, taken: Iterable[Path]) -> None:
    """Raise UserError unless the folder of answers can be made, apart from folders that a run replaces or reads."""
    path = resolved(folder, "--teacher-cache ")
    for other in taken:
        if path.is_relative_to(other):
            raise UserError(f"--teacher-cache {folder} lies in {other}; name a folder apart from models and OUT")
    if not path.parent.is_dir() or (path.exists() and not path.is_dir()):
        raise UserError(f"--teacher-cache {folder} is no folder, and none can be made there; name another")


@dataclass(frozen=True)
class TeacherCache:
    """The answers for one training, in files of ``rows_of_file`` rows each."""

    folder: Path
    rows_of_file: int

    @classmethod
    def make(cls, folder: str, identity: Mapping[str, Any]) -> "TeacherCache":
        """Return the answers for a training of this identity, whose subfolder is made if it is not there."""
        rows_of_file = max(1, PART_TOKENS // identity["seq_len"])
        decides = {key: identity[key] for key in DECIDES}
        decides |= {"order": ORDER, "kept": KEPT, "rows_of_part": rows_of_file}
        for key in ("data", "eval_data"):  # wherever the files lie
            decides[key] = []
            for source in identity[key]:
                files = [(split_name(name)[1], *seen) for name, seen in source["files"].items()]
                decides[key].append([split_weight(source["data"])[1], *files])
        subfolder = resolved(folder) / f"answers-{run_digest(decides)[:16]}"
        subfolder.mkdir(parents=True, exist_ok=True)
        return cls(subfolder, rows_of_file)

    def path(self, kind: str, number: int) -> Path:
        return self.folder / f"{kind}-{number:06d}.safetensors"

    def save(self, path: Path, rows: Sequence[PackedRow], answers: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Save a file: of each of its rows the two tensors that ``answer`` returns."""
        likeliest, scores = zip(*answers, strict=True)
        tensors = {
            "hashes": torch.tensor([row_hash(row) for row in rows]),
            "starts": torch.tensor([0, *map(len, likeliest)]).cumsum(0),
            LIKELIEST: torch.cat(likeliest),
            ANSWERS: torch.cat(scores),
        }
        check_finite(tensors[ANSWERS].float().sum().item(), "the dense model's log-probability of --data")
        temporary = path.with_suffix(f".{secrets.token_hex(8)}")  # another run may write the same
        infos = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        write_tensors(temporary, infos, tensors.__getitem__)
        temporary.rename(path)

    def answered(self, kind: str, number: int, row: PackedRow) -> dict[str, Any]:
        """Return a row with its answers, as ``collate`` takes them. number: in the order of the first epoch."""
        path, index = self.path(kind, number // self.rows_of_file), number % self.rows_of_file
        try:
            with safe_open(path, framework="pt") as file:
                hashes = file.get_slice("hashes")[index : index + 1].tolist()
                start, stop = file.get_slice("starts")[index : index + 2].tolist()
                answers = {name: file.get_slice(name)[start:stop] for name in (LIKELIEST, ANSWERS)}
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({sentence(error)}); delete it, and run again") from None
        if hashes != [row_hash(row)]:
            raise UserError(f"{path} holds answers for other rows: --data changed; delete {self.folder}, and run again")
        return {**row, **answers}


def row_hash(row: PackedRow) -> int:
    """Return a hash of a row's ids and targets, a signed 64-bit integer."""
    content = np.asarray([row["input_ids"], row["targets"]], dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


class AnsweredRows:
    """The rows of a training (a ``datasets.Dataset``) with the dense model's answers. order: of the first epoch."""

    def __init__(self, rows: Any, order: Sequence[int], cache: TeacherCache) -> None:
        self.rows, self.cache, self.positions = rows, cache, np.argsort(order)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.cache.answered(TRAINED, int(self.positions[number]), self.rows[number])


@torch.no_grad()
def answer(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the answers of tokens: the likeliest next tokens, int32 [tokens, kept], and logarithms, float16
    [tokens, kept + 2]: of their probabilities, of the probability of all others together, and of the target's."""
    logs = logits.float().log_softmax(-1)
    top = logs.topk(min(KEPT, logs.shape[1]), -1)
    rest = logs.scatter(1, top.indices, -math.inf).logsumexp(-1, keepdim=True)
    scores = torch.cat([top.values, rest, logs.gather(1, targets[:, None])], -1).clamp_min(LEAST)
    return top.indices.int().cpu(), scores.half().cpu()


def rows_needed(rows: Any, order: Sequence[int], pace: Pace) -> int:
    if pace.options.max_steps:
        return min(len(rows), pace.options.max_steps * pace.batch_size)
    lengths, tokens = rows.select_columns("lengths"), 0
    for count, number in enumerate(order, 1):
        tokens += sum(lengths[number]["lengths"])
        if tokens >= (pace.options.max_tokens or 0):
            return min(len(rows), -(-count // pace.batch_size) * pace.batch_size)
    return len(rows)


def with_answers(
    task: Task,
    rows: Any,
    heldout: Sequence[PackedRow],
    identity: Mapping[str, Any],
    accelerator: Accelerator,
    ranks: Ranks,
    console: Console,
) -> tuple[AnsweredRows, list[dict[str, Any]]]:
    """Return the rows to train on and those held out with the dense model's answers. If some are missing, each process
    loads the dense model and asks it for a share. The main process alone has the task's ``identity``."""
    pace, device, dense = task.pace, accelerator.device, task.teacher
    order = [*islice(row_order(len(rows), pace.options.seed), len(rows))]
    cache, missing = None, []
    if ranks.is_main:
        cache = TeacherCache.make(str(pace.options.teacher_cache), identity)
        for kind, count in ((TRAINED, rows_needed(rows, order, pace)), (HELD_OUT, len(heldout))):
            files = [(kind, number) for number in range(-(-count // cache.rows_of_file))]
            missing += [(kind, number) for kind, number in files if not cache.path(kind, number).is_file()]
    cache, missing = ranks.broadcast((cache, missing))
    if missing and dense is not None:
        with console.stage("loading the dense model"):
            model = open_model(dense, Layout.dense(task.layout.num_layers), device, task.compute)
            teacher = place_teacher(make_teacher(model, task.compute, None), accelerator)
        with console.progress("asking the dense model, parts", len(missing)) as advance:
            for kind, number in missing[ranks.rank :: ranks.size]:
                # whole, also where a training reads some rows only
                within = slice(number * cache.rows_of_file, (number + 1) * cache.rows_of_file)
                asked = heldout[within] if kind == HELD_OUT else [rows[index] for index in order[within]]
                cache.save(cache.path(kind, number), asked, _answers(asked, teacher, pace.micro_batch_size, device))
                advance(ranks.size)
        ranks.barrier()
        del model, teacher
        release(device)
    answered = [cache.answered(HELD_OUT, number, row) for number, row in enumerate(heldout)]
    return AnsweredRows(rows, order, cache), answered


def _answers(
    rows: Sequence[PackedRow], teacher: Callable[[Batch], Tensor], at_once: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(rows), at_once):
        batch = Batch.of(collate(rows[first : first + at_once]), device)
        with torch.no_grad():
            logits = teacher(batch)
        tokens = max(1, LOGITS_AT_ONCE // logits.shape[1])
        chunks = zip(logits.split(tokens), batch.scored_targets.split(tokens), strict=True)
        likeliest, scores = map(torch.cat, zip(*(answer(*chunk) for chunk in chunks), strict=True))
        counts = (batch.targets >= 0).sum(1).tolist()
        yield from zip(likeliest.split(counts), scores.split(counts), strict=True)
