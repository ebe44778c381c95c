"""Continuous batching: a row of the batch whose text has ended goes on with a prompt that waits.

Texts begin in column 0 of their row of the cache, so a token's column is its position and no row is padded on the left.
What a row holds beyond its own length is never looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ladderize.errors import UserError
from ladderize.runtime.decode import are_sound, sample
from ladderize.runtime.kv_cache import CacheRows, KVCache
from ladderize.runtime.model import Step
from ladderize.runtime.requests.reading import TextReader, padded
from ladderize.runtime.requests.scoring import OutputLayer
from ladderize.runtime.requests.worker import Worker
from ladderize.runtime.sampling import Sampling
from ladderize.runtime.spec import eos_ids


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


@dataclass(eq=False)
class _Slot:
    """One row at work. draws: random numbers for its tokens; None: greedy."""

    index: int
    prompt: Prompt
    stops: StopStrings
    draws: Tensor | None
    new: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Columns of its row that hold the text: all of it but the newest token."""
        return len(self.prompt.ids) + max(0, len(self.new) - 1)


@dataclass
class ContinuousBatch:
    """Rows of one KV cache at work on prompts. All ranks do the same in the same order, and decide alike.

    eos: tokens that end a text. tokenizer: to see stop strings; None where no prompt has any.
    """

    reader: TextReader
    cache: KVCache
    eos: frozenset[int]
    tokenizer: Any
    slots: list[_Slot] = field(default_factory=list)
    _stops: dict[tuple[str, ...], StopStrings] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        reader: TextReader,
        *,
        rows: int,
        longest_prompt: int,
        longest_text: int,
        eos: Sequence[int],
        tokenizer: Any,
    ) -> "ContinuousBatch":
        """With a cache for ``rows`` texts of so many tokens. Raises UserError where memory does not do."""
        columns = max(padded(longest_prompt), longest_text)
        cache = KVCache.allocate(reader.model.shape, rows, columns, reader.dtype, reader.device)
        return cls(reader, cache, frozenset(eos), tokenizer)

    def run(self, prompts: Sequence[Prompt], advance: Callable[[int], None] = lambda n: None) -> list[list[int]]:
        """The new tokens of each prompt, the one that ends it included. advance: told how many more are done."""
        made: list[list[int]] = [[] for _ in prompts]
        # the longest are read first: memory runs out at once or never, and the last rows are not the slowest ones
        waiting = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        rows = self.cache.keys.shape[1]
        while waiting or self.slots:
            entering = [waiting.pop() for _ in range(min(rows - len(self.slots), len(waiting)))]
            if entering:
                longer = [self._slot(index, prompts[index]) for index in entering]
                self.slots += longer
                self._prefill(len(self.slots) - len(longer))
            else:
                longer = self.slots
                self._decode()
            ended = [slot for slot in longer if self._has_ended(slot)]
            for slot in ended:
                made[slot.index] = slot.new
            self._remove(ended)
            advance(len(ended))
        return made

    def _slot(self, index: int, prompt: Prompt) -> _Slot:
        if prompt.stops not in self._stops:
            self._stops[prompt.stops] = StopStrings(self.tokenizer, prompt.stops)
        draws = None
        if prompt.sampling.temperature:
            draws = prompt.sampling.draws(1, prompt.max_new_tokens, prompt.number)[0].to(self.reader.device)
        return _Slot(index, prompt, self._stops[prompt.stops], draws)

    def _has_ended(self, slot: _Slot) -> bool:
        full = len(slot.new) >= slot.prompt.max_new_tokens
        return full or slot.new[-1] in self.eos or slot.stops.end(slot.new)

    def _remove(self, ended: list[_Slot]) -> None:
        """Take rows out; the last ones move into their places, so that rows at work stand side by side."""
        for slot in ended:
            place, last = self.slots.index(slot), len(self.slots) - 1
            moved = self.slots.pop()
            if place != last:
                self.slots[place] = moved
                self.cache.keys[:, place, :, : moved.length] = self.cache.keys[:, last, :, : moved.length]
                self.cache.values[:, place, :, : moved.length] = self.cache.values[:, last, :, : moved.length]

    def _prefill(self, first: int) -> None:
        """Read the prompts of the rows from ``first`` on, and give each its first new token."""
        budget = self.reader.budget
        while first < len(self.slots):
            length, count = padded(len(self.slots[first].prompt.ids)), 1
            while first + count < len(self.slots) and (count + 1) * length <= budget:  # the first is the longest
                count += 1
            group = self.slots[first : first + count]
            cache = CacheRows(self.cache, torch.arange(first, first + count, device=self.reader.device))
            self._choose(group, self._read(group, length, cache))
            first += count

    def _read(self, group: list[_Slot], length: int, cache: KVCache) -> Tensor:
        """The states after the last token of each prompt [prompts, hidden]."""
        device, rope = self.reader.device, self.reader.rope
        ids = torch.tensor([s.prompt.ids + [0] * (length - len(s.prompt.ids)) for s in group], device=device)
        last = torch.tensor([len(slot.prompt.ids) - 1 for slot in group], device=device)
        columns = torch.arange(length, device=device)
        found = None
        step_tokens = length if len(group) > 1 else min(length, self.reader.budget)
        for start in range(0, length, step_tokens):
            end = min(start + step_tokens, length)
            factors = rope[columns[start:end].clamp(max=len(rope) - 1)][None, :, None]
            if end - start == length:
                step = Step(factors, 0, 0, causal=True)
            else:
                step = Step(factors, start, end, (columns[None, :end] <= columns[start:end, None])[None, None])
            hidden = self.reader.forward(ids[:, start:end], step, cache)
            here = hidden[torch.arange(len(group), device=device), (last - start).clamp(0, end - start - 1)]
            found = here if found is None else torch.where(((last >= start) & (last < end))[:, None], here, found)
        assert found is not None
        return found

    def _decode(self) -> None:
        """One token more for every row."""
        count, device = len(self.slots), self.reader.device
        ids = torch.tensor([slot.new[-1] for slot in self.slots], device=device)[:, None]
        positions = torch.tensor([slot.length for slot in self.slots], device=device)
        view = max(slot.length for slot in self.slots) + 1
        seen = torch.arange(view, device=device) <= positions[:, None]
        step = Step(self.reader.rope[positions][:, None, None], positions[:, None], view, seen[:, None, None])
        cache = KVCache(self.cache.keys[:, :count], self.cache.values[:, :count])
        self._choose(self.slots, self.reader.forward(ids, step, cache)[:, 0])

    def _choose(self, slots: list[_Slot], states: Tensor) -> None:
        """Give each row the token that follows its state [rows, hidden]."""
        model = self.reader.model
        if all(slot.draws is None for slot in slots):
            layer = OutputLayer.of_rank(model)
            tokens, normaliser = layer.summary(layer.logits(states))
            sound = normaliser.isfinite().all()
        else:
            logits = model.logits(states)
            sound, tokens = are_sound(logits), logits.argmax(-1)
            for sampling in dict.fromkeys(slot.prompt.sampling for slot in slots):
                rows = [row for row, slot in enumerate(slots) if slot.prompt.sampling == sampling]
                if sampling.temperature:
                    draws = [slots[row].draws[len(slots[row].new)] for row in rows]  # type: ignore[index]
                    tokens[rows] = sample(logits[rows], sampling, torch.stack(draws))
        if not sound:
            raise UserError(
                "the model's logits are NaN or infinite, so nothing was generated from them; check its weights, or"
                " compute in float32"
            )
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            slot.new.append(token)


def continue_prompts(worker: Worker, prompts: Sequence[Prompt], advance: Callable[[int], None]) -> list[list[int]]:
    """The new tokens of each prompt, ``worker.options.rows`` texts at a time; equal on all ranks. advance: told how
    many more are done. Raises UserError where memory does not do."""
    if not prompts:
        return []
    batch = ContinuousBatch.allocate(
        worker.reader,
        rows=min(worker.options.rows, len(prompts)),
        longest_prompt=max(len(prompt.ids) for prompt in prompts),
        longest_text=max(len(prompt.ids) + prompt.max_new_tokens for prompt in prompts),
        eos=eos_ids(worker.spec),
        tokenizer=worker.tokenizer() if any(prompt.stops for prompt in prompts) else None,
    )
    return batch.run(prompts, advance)
