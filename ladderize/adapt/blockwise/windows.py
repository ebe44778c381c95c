"""Windows of token ids to distil on, from the rows that retraining reads, by the same rules.

Every row becomes ids as in retraining (chat templates, EOS after each text), but whole; the ids of all rows are joined
in order and cut into windows of ``seq_len``, and windows drawn at random train or are held out. Every token counts:
what a loss mask says is about the loss on the text, which is not taken here.
"""

import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ladderize.adapt.blockwise.options import DEFAULT_HELDOUT, DEFAULT_SAMPLES, BlockwiseOptions
from ladderize.adapt.data.examples import Encoder
from ladderize.adapt.data.sources import SourceSpec, open_rows
from ladderize.checkpoint.reading import Checkpoint
from ladderize.data import draw_windows, needs_tokenizer
from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer

ROWS_AT_ONCE = 128  # that are tokenised together


@dataclass(frozen=True)
class Windows:
    """Token ids for training, and others for the held-out loss and the perplexities: [windows, tokens] each."""

    train: Tensor
    heldout: Tensor

    @property
    def all(self) -> Tensor:
        return torch.cat([self.train, self.heldout])


def training_windows(checkpoint: Checkpoint, options: BlockwiseOptions) -> Windows:
    """Full windows for training and others that are held out. Raises UserError where the data give too few."""
    both = options.samples is not None and options.heldout is not None
    drawn = draw_windows(
        read_rows(checkpoint, options.source),
        spec=options.data,
        positions=int(checkpoint.config.get("max_position_embeddings") or 2048),
        seq_len=options.seq_len,
        samples=(options.samples or 0) + (options.heldout or 0) if both else None,
        seed=options.distill.seed,
    )
    heldout = options.heldout or min(DEFAULT_HELDOUT, max(1, len(drawn) // 10))
    samples = options.samples or min(DEFAULT_SAMPLES, len(drawn) - heldout)
    if samples < 1 or samples + heldout > len(drawn):
        raise UserError(
            f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens, too few for {max(1, samples)} to"
            f" train on and {heldout} held out; give more data, or lower --samples, --heldout or --seq-len"
        )
    ids = torch.from_numpy(drawn)
    return Windows(ids[:samples], ids[samples : samples + heldout])


def read_rows(checkpoint: Checkpoint, spec: SourceSpec) -> list[np.ndarray]:
    """The ids of every row of files, int64 [tokens] each; passages of a longer text or array are joined to one.

    Raises UserError for data that cannot be used, BadRow for a row that cannot.
    """
    tokenizer = load_tokenizer(checkpoint.folder) if needs_tokenizer(spec.text) else None
    encoder = Encoder(tokenizer, sys.maxsize, checkpoint.config["vocab_size"])  # of such a length nothing is cut
    rows, found, passages = open_rows(spec), [], False
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        batch = [rows.read(number) for number in range(begin, min(len(rows), begin + ROWS_AT_ONCE))]
        for row, encoded in zip(batch, encoder.encode(batch), strict=True):
            if encoded.problem is not None:
                raise encoded.problem
            found += [example.ids for example in encoded.examples]
            passages |= row.is_passage
    return [np.concatenate(found)] if passages else found
