"""What block-to-block distillation is asked to do."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from ladderize.adapt.data.sources import SourceSpec, parse_specs
from ladderize.adapt.methods import Write, check_training
from ladderize.choices import Dtype, check_at_least, check_choices
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.ranks.device import default_device

# The paper's learning rate at LLaMA2-7B's width; a step of Adam moves a sum over twice the width twice as far.
PAPERS_LR, PAPERS_WIDTH = 5e-5, 4096
TOKENS_PER_STEP = 2048  # the paper's: one sequence
# Without --samples: so many windows at most, since a block sees each several times.
DEFAULT_SAMPLES, DEFAULT_HELDOUT = 1024, 64


@dataclass(frozen=True)
class DistillSettings(Record):
    """What decides a block's result: for the record, and for a killed run to know its work.

    epochs: at most; training ends when ``patience`` epochs brought no better held-out loss. lr, batch_size: None takes
    the default for the model's width and the windows' length.
    """

    epochs: int = 10
    patience: int = 2
    lr: float | None = None
    batch_size: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class DistillOptions(DistillSettings):
    """max_memory: bytes of teacher states before they go to disk, which decides nothing."""

    max_memory: int = 8_000_000_000

    def settings(self) -> DistillSettings:
        return DistillSettings(**{field.name: getattr(self, field.name) for field in fields(DistillSettings)})

    def resolve(self, hidden: int, seq_len: int) -> "DistillOptions":
        """The same with every default worked out."""
        return replace(
            self,
            lr=self.lr if self.lr is not None else PAPERS_LR * PAPERS_WIDTH / hidden,
            batch_size=self.batch_size or max(1, TOKENS_PER_STEP // seq_len),
        )


@dataclass(frozen=True)
class BlockwiseOptions:
    """See ``ladderize adapt --help``. data: one --data. samples, heldout: windows to train on and others to measure on;
    None: what the data give, up to ``DEFAULT_SAMPLES`` and ``DEFAULT_HELDOUT``. layers: ranges; None: every layer that
    computes something else than the teacher's. write: ``best`` refuses to write where the held-out perplexity did not
    get better; ``last`` writes the blocks all the same. Raises UsageError for data that cannot be meant."""

    data: str
    samples: int | None = None
    heldout: int | None = None
    seq_len: int | None = None
    layers: str | None = None
    distill: DistillOptions = field(default_factory=DistillOptions)
    dtype: Dtype = "auto"
    device: str = field(default_factory=default_device)
    work_dir: Path | None = None
    write: Write = "best"

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "samples", "heldout")
        check_at_least(self, 2, "seq_len")
        check_at_least(self.distill, 1, "epochs", "patience", "batch_size", "max_memory")
        check_training(self.dtype, self.distill.lr)
        if self.source.is_streamed:
            raise UsageError(
                f"{self.source.name} is streamed, and block-to-block distillation reads its data whole; give a file"
            )

    @property
    def source(self) -> SourceSpec:
        (spec,) = parse_specs([self.data])
        return spec
