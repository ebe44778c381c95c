"""Windows of token ids from the rows that retraining reads (chat templates, EOS after each text), whole and joined.
Every token counts: a loss mask is about the loss on the text, which is not taken here."""

import sys
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.examples import EncodedRow, Encoder
from ladderize.adapt.layers.options import DEFAULT_HELDOUT, DEFAULT_SAMPLES, LEAST_WINDOWS_HELDOUT, WindowOptions
from ladderize.adapt.training_data import ROWS_AT_ONCE, drawn_numbers, open_rows, usual_heldout
from ladderize.checkpoint.config import most_positions
from ladderize.checkpoint.reading import Checkpoint
from ladderize.console import SILENT, Console
from ladderize.data.rows import tell_left_out
from ladderize.data.windows import default_seq_len, draw_windows, needs_tokenizer
from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer


@dataclass(frozen=True)
class Windows:
    """Token ids [windows, tokens]: to learn from, and held out for the loss and the perplexities."""

    train: Tensor
    heldout: Tensor

    @property
    def all(self) -> Tensor:
        return torch.cat([self.train, self.heldout])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Their numbers, and the tokens of each."""
        return len(self.train), len(self.heldout), self.train.shape[1]


def training_windows(checkpoint: Checkpoint, options: WindowOptions, console: Console = SILENT) -> Windows:
    """Return full windows for training and others that are held out, drawn with ``options.seed``. To align, no more
    rows are read than its tokens need."""
    positions, tokens = most_positions(checkpoint.config), options.least_tokens(checkpoint.config)
    enough = None
    if tokens is not None:
        seq_len = options.seq_len or default_seq_len([options.data], positions)
        count = (options.samples or tokens // seq_len + 1) + (options.heldout or 0)
        enough = 2 * (count + LEAST_WINDOWS_HELDOUT) * seq_len
    drawn = draw_windows(
        read_rows(checkpoint, options.data, console, enough=enough, seed=options.seed, spare=options.spare),
        spec=options.data,
        positions=positions,
        seq_len=options.seq_len,
        seed=options.seed,
    )
    windows = split_windows(drawn, options.samples, options.heldout, tokens)
    if windows is None:
        raise UserError(
            f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens, too few for {options.samples or 1}"
            f" to train on and {options.heldout or 1} held out; give more data, or lower --samples, --heldout or"
            " --seq-len"
        )
    return windows


def split_windows(drawn: np.ndarray, samples: int | None, heldout: int | None, tokens: int | None) -> Windows | None:
    """Return the first of the drawn windows to learn from, and those after them to hold out; None where there are too
    few. Without numbers there are 1024 and 64, a tenth of all held out at most; with ``tokens`` to learn from, an
    eighth as many are held out."""
    there, tenth = len(drawn), max(1, len(drawn) // 10)
    most, held = DEFAULT_SAMPLES, DEFAULT_HELDOUT
    if tokens is not None:
        most = samples or max(1, tokens // drawn.shape[1])
        held = max(LEAST_WINDOWS_HELDOUT, most // 8)
    heldout = heldout or min(held, tenth)
    samples = samples or min(most, there - heldout)
    if samples < 1 or samples + heldout > there:
        return None
    ids = torch.from_numpy(drawn)
    return Windows(ids[:samples], ids[samples : samples + heldout])


def read_rows(
    checkpoint: Checkpoint,
    name: str,
    console: Console = SILENT,
    *,
    enough: int | None = None,
    seed: int = 0,
    spare: int | None = 0,
) -> list[np.ndarray]:
    """Return the ids of rows of files, int64 [tokens] each. It stops after ``enough`` tokens, in an order drawn with
    ``seed`` in which rows that a retraining with this seed holds out come last; None: all rows, in their order.
    ``spare`` usable rows at the end of that order are left out; None: as many as a retraining holds out by default."""
    tokenizer = load_tokenizer(checkpoint.folder) if needs_tokenizer(name) else None
    encoder = Encoder(tokenizer, sys.maxsize, checkpoint.config["vocab_size"], f"--data {name}")
    rows = open_rows(name)

    def encoded(numbers: np.ndarray) -> list[EncodedRow]:
        return encoder.encode(rows[numbers.tolist()], numbers.tolist())

    spare = usual_heldout(len(rows)) if spare is None else spare
    order = np.argsort(-drawn_numbers(len(rows), seed))
    end = len(rows)
    while spare > 0 and end > 1:  # a retraining holds out usable rows only
        end -= 1
        spare -= not encoded(order[end : end + 1])[0].problem
    order = order[:end] if enough is not None else np.sort(order[:end])
    read: list[np.ndarray] = []
    problems: list[str] = []
    batches = (order[begin : begin + ROWS_AT_ONCE] for begin in range(0, len(order), ROWS_AT_ONCE))
    for row in chain.from_iterable(map(encoded, batches)):
        problems.append(row.problem)
        if row.problem:
            continue
        read.append(row.examples[-1][0])  # a conversation may be several examples, of which the last has all turns
        enough = None if enough is None else enough - len(read[-1])
        if enough is not None and enough <= 0:
            break
    tell_left_out(f"--data {name}", problems, console)
    return read
