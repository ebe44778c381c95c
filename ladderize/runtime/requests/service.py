"""A checked model that is opened on a rank."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import check_device
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.choose import check_backend, choose
from ladderize.runtime.cpu_operations import choose_operations
from ladderize.runtime.decode import GrowingRope
from ladderize.runtime.launch import check_group_size
from ladderize.runtime.model import TPLlama
from ladderize.runtime.requests.options import RankOptions, RequestOptions
from ladderize.runtime.requests.reading import TextReader
from ladderize.runtime.spec import ModelSpec, WeightCache, checkpoint_spec

STATES_AT_ONCE = 2048  # that are scored
MESSAGE_BYTES = 4 * 3 * STATES_AT_ONCE  # the largest message of scoring


def check_request(model: str, options: RankOptions) -> ModelSpec:
    """Everything that can be known before weights are read or ranks started. Raises UserError or LayoutError."""
    check_device(options.device)
    check_backend(options.backend, options.tp_size, options.device)
    check_group_size(options.tp_size, options.device)
    spec = checkpoint_spec(model, tp_size=options.tp_size, dtype=options.dtype, revision=options.revision)
    longest = getattr(options, "max_length", None)
    if longest is not None and longest > spec.positions:
        raise UserError(f"max_length {longest} exceeds the {spec.positions} positions of {model}")
    return spec


# ---- one rank ----


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


@contextlib.contextmanager
def opened(
    group: Ranks, spec: ModelSpec, options: RequestOptions, advance: Callable[[int], None] = lambda count: None
) -> Iterator[Worker]:
    """A checked model on this rank, its weights loaded; all ranks enter and leave together. advance: told of layers
    that are loaded."""
    vocabulary = -(-spec.config["vocab_size"] // group.size)
    largest = max(options.budget, options.rows) * spec.config["hidden_size"], options.rows * vocabulary
    collectives, backend = choose(options.backend, group, max_bytes=max(4 * max(largest), MESSAGE_BYTES))
    shape, weights = WeightCache(group.device, pack=True).get(spec, group.size, group.rank, advance)
    operations = choose_operations(group, spec.torch_dtype)
    model = TPLlama(shape, spec.layout, weights, collectives, operations)
    rope = GrowingRope(spec.config, options.max_length or spec.positions, group.device)
    yield Worker(group, spec, options, TextReader(model, rope, options.budget, spec.torch_dtype), backend)
    collectives.close()
