"""What block-to-block distillation is asked to do."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# The paper's learning rate at LLaMA2-7B's width; a step of Adam moves a sum over twice the width twice as far.
PAPERS_LR, PAPERS_WIDTH = 5e-5, 4096
TOKENS_PER_STEP = 2048  # the paper's: one sequence
# Without --samples: so many windows at most, since a block sees each several times.
DEFAULT_SAMPLES, DEFAULT_HELDOUT = 1024, 64


@dataclass(frozen=True)
class DistillOptions:
    """epochs: at most; training ends when ``patience`` epochs brought no better held-out loss. lr, batch_size: None
    takes the default for the model's width and the windows' length. max_memory: bytes of teacher states before they go
    to disk."""

    epochs: int = 10
    patience: int = 2
    lr: float | None = None
    batch_size: int | None = None
    max_memory: int = 8_000_000_000
    seed: int = 0

    def record(self) -> dict[str, Any]:
        """What decides the result, for the record and for resuming: not how much memory it may take."""
        return {key: value for key, value in asdict(self).items() if key != "max_memory"}

    def resolve(self, hidden: int, seq_len: int) -> "DistillOptions":
        """The same with every default worked out."""
        return replace(
            self,
            lr=self.lr if self.lr is not None else PAPERS_LR * PAPERS_WIDTH / hidden,
            batch_size=self.batch_size or max(1, TOKENS_PER_STEP // seq_len),
        )


@dataclass(frozen=True)
class BlockwiseOptions:
    """See ``ladderize adapt --help``. samples, heldout: windows to train on and others to measure on; None: what the
    data give, up to ``DEFAULT_SAMPLES`` and ``DEFAULT_HELDOUT``. layers: ranges; None: every layer that computes
    something else than the teacher's."""

    data: str
    samples: int | None = None
    heldout: int | None = None
    seq_len: int | None = None
    layers: str | None = None
    distill: DistillOptions = field(default_factory=DistillOptions)
    dtype: str = "auto"
    device: str = "cpu"
    work_dir: Path | None = None
