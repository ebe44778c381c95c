"""The options of methods that rewrite layers one by one. Imports no torch and no numpy."""

from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from ladderize.adapt.data_specs import SourceSpec, parse_specs
from ladderize.adapt.methods import COMPUTE_DTYPE, TRAINING_SEED, WORK_DIR, Write, check_training
from ladderize.checkpoint.writing import parse_size
from ladderize.choices import DEVICE, SEQ_LEN, Dtype, check_options, option
from ladderize.errors import UsageError
from ladderize.files.records import Record
from ladderize.ranks.device import default_device

# The paper's learning rate at LLaMA2-7B's width; a step of Adam moves a sum over twice the width twice as far.
PAPERS_LR, PAPERS_WIDTH = 5e-5, 4096
TOKENS_PER_STEP = 2048  # the paper's: one sequence
DEFAULT_SAMPLES, DEFAULT_HELDOUT = 1024, 64  # windows at most
MAX_MEMORY = 8_000_000_000
memory_limit = partial(parse_size, option="--max-memory")


@dataclass(frozen=True)
class WindowOptions:
    """The windows of data that layers are rewritten from.

    write: best: nothing where the held-out KL did not fall; last: always.
    Raises UsageError for options that contradict each other.
    """

    data: str = option(
        "json, jsonl, parquet, txt, npy, npz:array, or a folder or glob of one kind.", ..., metavar="FILE"
    )
    samples: int | None = option("Windows to train on.", min=1, shown="what the data give, up to 1024")
    heldout: int | None = option(
        "Windows to hold out for early stopping and for the table.", min=1, shown="a tenth, up to 64"
    )
    seq_len: int | None = option(SEQ_LEN)
    layers: str | None = None  # ranges; None: the method's default
    dtype: Dtype = option(COMPUTE_DTYPE, "auto")
    device: str = option(DEVICE, default_device)
    work_dir: Path | None = option(WORK_DIR)
    write: Write = "best"  # best: nothing where the held-out KL did not fall; last: always

    def __post_init__(self) -> None:
        check_options(self)
        if self.source.is_streamed:
            raise UsageError(f"{self.source.name} is streamed, and this method reads its data whole; give a file")

    @property
    def source(self) -> SourceSpec:
        (spec,) = parse_specs([self.data])
        return spec

    def settings(self) -> Record:
        """Return the options that decide the result besides data, models and layers. They are recorded, and identify
        the work of a killed run."""
        raise NotImplementedError


@dataclass(frozen=True)
class DistillSettings(Record):
    """The options that decide a block's result."""

    epochs: int = option("blocks: most epochs per block.", 10, min=1)
    patience: int = option("blocks: stop a block after this many epochs without a better held-out loss.", 2, min=1)
    lr: float | None = option("Peak learning rate.", shown="5e-5 * 4096 / hidden size")
    batch_size: int | None = option("Windows per step.", min=1, shown="2048 tokens")
    seed: int = option(TRAINING_SEED, 0)


@dataclass(frozen=True)
class DistillOptions(DistillSettings):
    """All options of distillation.

    max_memory: bytes; it does not change the result.
    """

    max_memory: int = option(
        "Memory for the dense model's states, per process. What is beyond it goes to disk.",
        MAX_MEMORY,
        min=1,
        metavar="SIZE",
        parse=memory_limit,
        shown="8GB",
    )

    def resolve(self, hidden: int, seq_len: int) -> "DistillOptions":
        """Return the options with every default worked out."""
        return replace(
            self,
            lr=self.lr if self.lr is not None else PAPERS_LR * PAPERS_WIDTH / hidden,
            batch_size=self.batch_size or max(1, TOKENS_PER_STEP // seq_len),
        )


@dataclass(frozen=True)
class BlockwiseOptions(WindowOptions):
    """The options of ``ladderize adapt --method blocks``; see its --help.

    layers: None: every layer that differs from the teacher's.
    Raises UsageError for values that contradict each other.
    """

    distill: DistillOptions = field(default_factory=DistillOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self.distill)
        check_training(self.dtype, self.distill.lr)

    def settings(self) -> DistillSettings:
        return DistillSettings(**{own.name: getattr(self.distill, own.name) for own in fields(DistillSettings)})
