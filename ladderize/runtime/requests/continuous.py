"""Continuous batching: a row of the batch whose text has ended goes on with a prompt that waits.

Texts begin in column 0 of their row of the cache, so a token's column is its position and no row is padded on the left.
What a row holds beyond its own length is never looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ladderize.runtime.decode import are_sound, captured_step, sample, unsound_logits, view_length
from ladderize.runtime.kv_cache import CacheRows, KVCache
from ladderize.runtime.requests.reading import TextReader, padded
from ladderize.runtime.requests.service import Worker
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import eos_ids
from ladderize.runtime.step import Step


@dataclass(frozen=True)
class Prompt:
    """A text to continue. number: by which ``sampling`` knows it. stops: strings that end the text."""

    number: int
    ids: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()


class StopStrings:
    """Sees a stop string in the tokens that were just made, however it was cut into tokens."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        # a token spells a byte at least; one more, since some tokenizers drop the space that a text begins with
        self.window = 1 + max((len(stop.encode()) for stop in stops), default=0)

    def end(self, ids: list[int]) -> bool:
        """Whether the last tokens hold one of the strings; special tokens are spelled too."""
        if not self.stops:
            return False
        text = self.tokenizer.decode(ids[-self.window :])
        return any(stop in text for stop in self.stops)


class _Row:
    """A text at work. index: of its prompt."""

    def __init__(self, index: int, prompt: Prompt, tokenizer: Any, device: torch.device) -> None:
        self.index, self.prompt, self.stops = index, prompt, StopStrings(tokenizer, prompt.stops)
        self.new: list[int] = []
        self.draws: Tensor | None = None  # random numbers for its tokens; None: greedy
        if prompt.sampling.temperature:
            self.draws = prompt.sampling.draws(1, prompt.max_new_tokens, prompt.number)[0].to(device)

    @property
    def length(self) -> int:
        """Columns of the cache that hold the text: all of it but the newest token."""
        return len(self.prompt.ids) + max(0, len(self.new) - 1)

    def has_ended(self, eos: frozenset[int]) -> bool:
        return len(self.new) >= self.prompt.max_new_tokens or self.new[-1] in eos or self.stops.end(self.new)


class ContinuousBatch:
    """``rows`` rows of one KV cache that work on prompts. All ranks do the same in the same order, and decide alike.

    longest_prompt, longest_text: in tokens. eos: tokens that end a text. tokenizer: to see stop strings; None where no
    prompt has any. Raises UserError where memory does not do.
    """

    def __init__(
        self,
        reader: TextReader,
        *,
        rows: int,
        longest_prompt: int,
        longest_text: int,
        eos: Sequence[int],
        tokenizer: Any,
    ) -> None:
        self.reader, self.eos, self.tokenizer = reader, frozenset(eos), tokenizer
        columns = max(padded(longest_prompt), longest_text)
        self.cache = KVCache.allocate(reader.model.shape, rows, columns, reader.dtype, reader.device)
        self.rows: list[_Row] = []
        self.steps = CapturedSteps(reader, self.cache) if reader.device.type == "cuda" else None

    def run(self, prompts: Sequence[Prompt], advance: Callable[[int], None] = lambda n: None) -> list[list[int]]:
        """The new tokens of each prompt, the one that ends it included. advance: told how many more are done."""
        made: list[list[int]] = [[] for _ in prompts]
        # the longest are read first: memory runs out at once or never, and the last rows are not the slowest ones
        waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        capacity = self.cache.keys.shape[1]
        while waiting or self.rows:
            longer = self.rows
            if waiting and (free := capacity - len(self.rows)):
                entering = [waiting.pop() for _ in range(min(free, len(waiting)))]
                longer = [_Row(index, prompts[index], self.tokenizer, self.reader.device) for index in entering]
                self.rows += longer
                self._prefill(len(self.rows) - len(longer))
            else:
                self._decode()
            ended = [row for row in longer if row.has_ended(self.eos)]
            for row in ended:
                made[row.index] = row.new
                self._remove(row)
            advance(len(ended))
        return made

    def _remove(self, row: _Row) -> None:
        """Take a row out; the last one moves into its place, so that rows at work stand side by side."""
        place, last = self.rows.index(row), len(self.rows) - 1
        moved = self.rows.pop()
        if place != last:
            self.rows[place] = moved
            for kept in (self.cache.keys, self.cache.values):
                kept[:, place, :, : moved.length] = kept[:, last, :, : moved.length]

    def _prefill(self, first: int) -> None:
        """Read the prompts of the rows from ``first`` on, and give each its first new token."""
        while first < len(self.rows):
            length, count = padded(len(self.rows[first].prompt.ids)), 1
            while first + count < len(self.rows) and (count + 1) * length <= self.reader.budget:  # the first is longest
                count += 1
            group = self.rows[first : first + count]
            cache = CacheRows(self.cache, torch.arange(first, first + count, device=self.reader.device))
            self._choose(group, self._read(group, length, cache))
            first += count

    def _read(self, group: list[_Row], length: int, cache: KVCache) -> Tensor:
        """The states after the last token of each prompt [prompts, hidden]."""
        device = self.reader.device
        ids = torch.tensor([row.prompt.ids + [0] * (length - len(row.prompt.ids)) for row in group], device=device)
        last = torch.tensor([len(row.prompt.ids) - 1 for row in group], device=device)
        found = None
        for start, hidden in self.reader.pieces(ids, cache, length if len(group) > 1 else self.reader.budget):
            end = start + hidden.shape[1]
            here = hidden[torch.arange(len(group), device=device), (last - start).clamp(0, end - start - 1)]
            found = here if found is None else torch.where(((last >= start) & (last < end))[:, None], here, found)
        assert found is not None
        return found

    def _decode(self) -> None:
        """One token more for every row."""
        count = len(self.rows)
        ids, positions = torch.tensor([[row.new[-1] for row in self.rows], [row.length for row in self.rows]])
        longest = max(row.length for row in self.rows) + 1
        view = view_length(longest, self.cache)
        if self.steps is not None:
            states = self.steps.run(ids, positions, view)
        else:
            step, cache = row_step(self.reader.rope(longest), positions, view), self.cache.batch_rows(0, count)
            states = self.reader.forward(ids[:, None], step, cache)[:, 0]
        self._choose(self.rows, states)

    def _choose(self, rows: list[_Row], states: Tensor) -> None:
        """Give each row the token that follows its state [rows, hidden]."""
        model = self.reader.model
        logits = model.logits(states)
        sound, tokens = are_sound(logits), logits.argmax(-1)
        samplings = dict.fromkeys(row.prompt.sampling for row in rows)
        for sampling in samplings:
            places = [place for place, row in enumerate(rows) if row.prompt.sampling == sampling]
            if sampling.temperature:
                draws = [rows[place].draws[len(rows[place].new)] for place in places]  # type: ignore[index]
                own = places if len(samplings) > 1 else slice(None)  # the host would wait for indices to arrive
                tokens[own] = sample(logits[own], sampling, torch.stack(draws))
        # in one piece: each answer that the host asks of a GPU keeps the GPU idle
        *new, is_sound = torch.cat((tokens, sound.to(tokens.dtype)[None])).tolist()
        if not is_sound:
            raise unsound_logits("generated from")
        for row, token in zip(rows, new, strict=True):
            row.new.append(token)


def row_step(rope: Tensor, positions: Tensor, view: int) -> Step:
    """One token of each row, in its own column: positions [rows]."""
    seen = torch.arange(view, device=positions.device) <= positions[:, None]
    return Step(rope[positions][:, None, None], positions[:, None], view, seen[:, None, None])


class CapturedSteps:
    """Steps of all rows of a cache as CUDA graphs, one for each number of columns in view: started one by one, the
    kernels of a step take longer than they run."""

    def __init__(self, reader: TextReader, cache: KVCache) -> None:
        self.model, self.rope, self.cache = reader.model, reader.rope(cache.columns), cache
        self.inputs = torch.zeros(2, cache.keys.shape[1], dtype=torch.long, device=reader.device)
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def run(self, ids: Tensor, positions: Tensor, view: int) -> Tensor:
        """ids, positions: [rows at work], on the host. Returns their states [rows at work, hidden], until the next
        run."""
        if view not in self.graphs:
            self.inputs.zero_()

            def step() -> Tensor:
                ids, positions = self.inputs
                return self.model.forward(ids[:, None], row_step(self.rope, positions, view), self.cache)[:, 0]

            self.graphs[view] = captured_step(step, self.cache, self.pool)
        graph, states = self.graphs[view]
        # the other rows write into a column that is read by nobody before it is written again
        self.inputs[:, : len(ids)] = torch.stack((ids, positions)).to(self.inputs.device)
        graph.replay()
        return states[: len(ids)]


def continue_prompts(worker: Worker, prompts: Sequence[Prompt], advance: Callable[[int], None]) -> list[list[int]]:
    """The new tokens of each prompt, ``worker.options.rows`` texts at a time; equal on all ranks. advance: told how
    many more are done."""
    if not prompts:
        return []
    batch = ContinuousBatch(
        worker.reader,
        rows=min(worker.options.rows, len(prompts)),
        longest_prompt=max(len(prompt.ids) for prompt in prompts),
        longest_text=max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts),
        eos=eos_ids(worker.spec),
        tokenizer=worker.tokenizer() if any(prompt.stops for prompt in prompts) else None,
    )
    return batch.run(prompts, advance)
