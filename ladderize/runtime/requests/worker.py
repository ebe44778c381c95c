"""One rank that keeps a model and answers requests with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ladderize.choices import THREADS, TP_SIZE, BackendName, Dtype, check_options, option
from ladderize.errors import UsageError, UserError
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import default_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.decode import rope_table
from ladderize.runtime.model import TPLlama
from ladderize.runtime.requests.reading import TextReader
from ladderize.runtime.spec import ModelSpec, WeightCache

BUDGETS = {"cpu": 2048, "cuda": 16384}
STATES_AT_ONCE = 2048  # that are scored
MESSAGE_BYTES = 4 * 3 * STATES_AT_ONCE  # the largest message of scoring


@dataclass(frozen=True)
class RequestOptions:
    """How to answer. Raises UsageError."""

    tp_size: int = option(TP_SIZE, 1)
    rows: int = option("Texts that are continued at a time.", 8, min=1)
    token_budget: int | None = option("Tokens of a forward pass, padding included; None: 2048, on a GPU 16384.", min=16)
    max_length: int | None = option("The longest text; None: what the config promises.", min=2)
    backend: BackendName = "auto"
    dtype: Dtype = "auto"
    device: str = field(default_factory=default_device)
    threads: int | None = option(THREADS)
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if self.backend == "none":
            raise UsageError("--backend none sums nothing, so scores would be meaningless; it is for bench")

    @property
    def budget(self) -> int:
        return self.token_budget or BUDGETS["cuda" if self.device.startswith("cuda") else "cpu"]


@dataclass
class Worker:
    """One rank of an opened model. backend: how its ranks communicate."""

    group: Ranks
    spec: ModelSpec
    options: RequestOptions
    reader: TextReader
    backend: str

    def tokenizer(self) -> Any:
        assert self.spec.folder is not None
        found = load_tokenizer(self.spec.folder, trust_remote_code=self.options.trust_remote_code)
        if found is None:
            raise UserError(f"{self.spec.name} has no tokenizer, and stop strings need one")
        return found


@contextmanager
def opened(
    group: Ranks, spec: ModelSpec, options: RequestOptions, advance: Callable[[int], None] = lambda count: None
) -> Iterator[Worker]:
    """A checked model on this rank, its weights loaded; all ranks enter and leave together. advance: told of layers
    that are loaded."""
    vocabulary = -(-spec.config["vocab_size"] // group.size)
    largest = max(options.budget, options.rows) * spec.config["hidden_size"], options.rows * vocabulary
    collectives, backend = choose(options.backend, group, max_bytes=max(4 * max(largest), MESSAGE_BYTES))
    shape, weights = WeightCache(group.device, pack=True).get(spec, group.size, group.rank, advance)
    model = TPLlama(shape, spec.layout, weights, collectives)
    rope = rope_table(spec.config, options.max_length or spec.positions, group.device)
    yield Worker(group, spec, options, TextReader(model, rope, options.budget, spec.torch_dtype), backend)
    collectives.close()
