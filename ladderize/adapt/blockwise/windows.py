"""Windows of token ids to distil on, from the same rows and with the same rules as retraining."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ladderize.adapt.blockwise.options import (
    DEFAULT_HELDOUT,
    DEFAULT_SAMPLES,
    BlockwiseOptions,
)
from ladderize.blocks import (
    read_windows,
)
from ladderize.console import UserError
from ladderize.convert.checkpoint import Checkpoint


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
    seed = options.distill.seed
    if options.samples is not None and options.heldout is not None:
        drawn = read_windows(
            checkpoint, options.data, seq_len=options.seq_len, samples=options.samples + options.heldout, seed=seed
        )
    else:
        drawn = read_windows(checkpoint, options.data, seq_len=options.seq_len, samples=None, seed=seed)
    heldout = options.heldout or min(DEFAULT_HELDOUT, max(1, len(drawn) // 10))
    samples = options.samples or min(DEFAULT_SAMPLES, len(drawn) - heldout)
    if samples < 1 or samples + heldout > len(drawn):
        raise UserError(
            f"{options.data} gives {len(drawn)} windows of {drawn.shape[1]} tokens, too few for {max(1, samples)} to"
            f" train on and {heldout} held out; give more data, or lower --samples, --heldout or --seq-len"
        )
    ids = torch.from_numpy(drawn)
    return Windows(ids[:samples], ids[samples : samples + heldout])
