"""What methods that rewrite layers one by one are asked to do. Imports no torch."""

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
DEFAULT_SAMPLES, DEFAULT_HELDOUT = 1024, 64  # windows at most
MAX_MEMORY = 8_000_000_000


@dataclass(frozen=True)
class WindowOptions:
    """What layers are rewritten from: windows of data. Raises UsageError for options that contradict each other."""

    data: str  # one --data
    samples: int | None = None  # windows to learn from; None: what the data give, up to a default of the method
    heldout: int | None = None  # windows to measure on; None: a tenth, up to a default
    seq_len: int | None = None  # tokens of a window; None: as in ``data.default_seq_len``
    layers: str | None = None  # ranges; None: the method's default
    dtype: Dtype = "auto"
    device: str = field(default_factory=default_device)
    work_dir: Path | None = None
    write: Write = "best"  # best: nothing where the held-out perplexity did not get better; last: all the same

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, 1, "samples", "heldout")
        check_at_least(self, 2, "seq_len")
        if self.source.is_streamed:
            raise UsageError(f"{self.source.name} is streamed, and this method reads its data whole; give a file")

    @property
    def source(self) -> SourceSpec:
        (spec,) = parse_specs([self.data])
        return spec

    def settings(self) -> Record:
        """What decides the result besides data, models and layers: for the record, and for a killed run to know its
        work."""
        raise NotImplementedError


@dataclass(frozen=True)
class DistillSettings(Record):
    """What decides a block's result.

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

    max_memory: int = MAX_MEMORY

    def resolve(self, hidden: int, seq_len: int) -> "DistillOptions":
        """The same with every default worked out."""
        return replace(
            self,
            lr=self.lr if self.lr is not None else PAPERS_LR * PAPERS_WIDTH / hidden,
            batch_size=self.batch_size or max(1, TOKENS_PER_STEP // seq_len),
        )


@dataclass(frozen=True)
class BlockwiseOptions(WindowOptions):
    """See ``ladderize adapt --help``. layers: None: every layer that computes something else than the teacher's."""

    distill: DistillOptions = field(default_factory=DistillOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self.distill, 1, "epochs", "patience", "batch_size", "max_memory")
        check_training(self.dtype, self.distill.lr)

    def settings(self) -> DistillSettings:
        return DistillSettings(**{own.name: getattr(self.distill, own.name) for own in fields(DistillSettings)})
