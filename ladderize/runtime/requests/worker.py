"""One rank that keeps a model and answers jobs with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ladderize.errors import UserError
from ladderize.modeling import load_tokenizer
from ladderize.ranks.group import Ranks
from ladderize.runtime.collectives.choose import choose
from ladderize.runtime.decode import rope_table
from ladderize.runtime.model import TPLlama
from ladderize.runtime.requests.continuous import Prompt, continue_prompts
from ladderize.runtime.requests.options import RequestOptions
from ladderize.runtime.requests.reading import TextReader
from ladderize.runtime.requests.scoring import MESSAGE_BYTES, Ending, EndingScores, score_endings
from ladderize.runtime.spec import ModelSpec, WeightCache, eos_ids


@dataclass
class Worker:
    """One rank of an opened model. backend: how its ranks communicate. positions: of the longest text."""

    group: Ranks
    spec: ModelSpec
    options: RequestOptions
    reader: TextReader
    backend: str

    @property
    def positions(self) -> int:
        return longest_text(self.spec, self.options)

    def answer(self, job: "Job", advance: Callable[[int], None]) -> Any:
        """Run a job; all ranks run the same one."""
        with torch.inference_mode():
            return job.run(self, advance)

    def tokenizer(self) -> Any:
        assert self.spec.folder is not None
        found = load_tokenizer(self.spec.folder, trust_remote_code=self.options.trust_remote_code)
        if found is None:
            raise UserError(f"{self.spec.name} has no tokenizer, and stop strings need one")
        return found


class Job(Protocol):
    """What a worker is asked for. It is pickled, and every rank runs it."""

    def run(self, worker: Worker, advance: Callable[[int], None]) -> Any:
        """The answer, equal on all ranks. advance: told how much more of the job is done."""


@dataclass(frozen=True)
class ScoreJob:
    """Log-likelihoods of endings."""

    endings: list[Ending]

    def run(self, worker: Worker, advance: Callable[[int], None]) -> EndingScores:
        return score_endings(worker.reader, self.endings, advance)


@dataclass(frozen=True)
class ContinueJob:
    """New tokens of prompts."""

    prompts: list[Prompt]

    def run(self, worker: Worker, advance: Callable[[int], None]) -> list[list[int]]:
        tokenizer = worker.tokenizer() if any(prompt.stops for prompt in self.prompts) else None
        return continue_prompts(
            worker.reader,
            self.prompts,
            rows=worker.options.rows,
            eos=eos_ids(worker.spec),
            tokenizer=tokenizer,
            advance=advance,
        )


def longest_text(spec: ModelSpec, options: RequestOptions) -> int:
    return options.max_length or spec.positions


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
    rope = rope_table(spec.config, longest_text(spec, options), group.device)
    yield Worker(group, spec, options, TextReader(model, rope, options.budget, spec.torch_dtype), backend)
    collectives.close()
