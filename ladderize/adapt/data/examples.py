"""Rows become examples: token ids, and a mask of those that the loss counts.

* ``input_ids``: taken as they are. ``loss_mask`` says which are scored; without it all are.
* ``messages``, ``conversations``: rendered by the chat template. The assistant's tokens are scored.
* ``prompt`` and ``completion``: BOS comes before the prompt, EOS after the completion, which is scored.
* ``text``: tokenised with the special tokens, and EOS appended. Everything is scored.

An example longer than ``seq_len`` is cut: ids and texts into pieces, each an example; conversations and completions at
``seq_len``, and they are dropped if nothing scored is left.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ladderize.chat_template import DATE_OF_DATA, chat_template_of, refused_conversation
from ladderize.data import need_tokenizer, text_ids
from ladderize.errors import UserError
from ladderize.rows import Row, check_row, read_ids, read_messages

Span = tuple[int, int]  # [begin, end) in characters
Scored = tuple[np.ndarray, np.ndarray]  # int64 ids and a bool mask of those that are scored: [tokens] each
# Columns of an example. row: the number of its row; shares_turns: the row has several examples, which share turns.
COLUMNS = ("input_ids", "scored", "length", "truncated", "row", "shares_turns")


@dataclass(frozen=True)
class Encoder:
    """Turns batches of rows into examples of at most ``seq_len`` tokens.

    tokenizer: of transformers; None if all rows are ids.
    name: the source's, for messages.
    Raises UserError for a row that cannot be used, and where the model has no tokenizer, no chat template, or fewer
    ids.
    """

    tokenizer: Any
    seq_len: int
    vocab_size: int
    name: str

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return the examples of the rows ``numbers``, by ``COLUMNS``. One that lost all that is scored has no
        tokens."""
        found = []
        for number, (in_pieces, parts) in zip(numbers, self.encode(batch, numbers), strict=True):
            for ids, scored in parts:
                # a last piece of one token would have nothing to predict
                for start in range(0, len(ids) - 1 if in_pieces else 1, self.seq_len):
                    end = start + self.seq_len
                    piece = slice(start, end if scored[start + 1 : end].any() else start)
                    truncated = not in_pieces and 0 < len(ids[piece]) < len(ids)
                    found.append((ids[piece], scored[piece], len(ids[piece]), truncated, number, len(parts) > 1))
        return dict(zip(COLUMNS, map(list, zip(*found, strict=True)), strict=True))

    def encode(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[tuple[bool, list[Scored]]]:
        """Return for each row whether its examples may be cut into pieces, and the whole examples.

        A batch is tokenised together, which is faster.
        """
        values = zip(numbers, zip(*batch.values(), strict=True), strict=True)
        rows = [Row(dict(zip(batch, own, strict=True)), f"{self.name}, row {number + 1}") for number, own in values]
        formats = [check_row(row) for row in rows]
        readers: dict[str, Callable[[list[Row]], list[list[Scored]]]] = {
            "input_ids": lambda rows: [[read_ids(row)] for row in rows],
            "text": self._texts,
            "prompt": self._completions,
            "messages": partial(self._chats, column="messages"),
            "conversations": partial(self._chats, column="conversations"),
        }
        found: dict[int, list[Scored]] = {}
        for name in dict.fromkeys(formats):
            places = [place for place, other in enumerate(formats) if other == name]
            found.update(zip(places, readers[name]([rows[place] for place in places]), strict=True))
        for place, row in enumerate(rows):
            if not any(scored[1:].any() for _, scored in found[place]):
                lengths = " and ".join(str(len(ids)) for ids, _ in found[place]) or "0"
                raise UserError(f"{row.origin}: gives {lengths} tokens, none of which the loss could score")
            if (highest := max(int(ids.max()) for ids, _ in found[place])) >= self.vocab_size:
                beyond = f"the token id {highest}, but the model's vocabulary ends at {self.vocab_size - 1}"
                raise UserError(f"{row.origin}: holds {beyond}; were they made with another tokenizer?")
        return [(name in ("input_ids", "text"), found[place]) for place, name in enumerate(formats)]

    def _texts(self, rows: list[Row]) -> list[list[Scored]]:
        tokenizer = need_tokenizer(self.tokenizer, rows[0].origin)
        every = [_with_eos(tokenizer, ids) for ids in text_ids(tokenizer, [row.values["text"] for row in rows])]
        return [[(ids, np.ones(len(ids), dtype=bool))] for ids in every]

    def _completions(self, rows: list[Row]) -> list[list[Scored]]:
        """Tokenise prompts as when the model is asked, and their completions.

        The ids come from both texts together where those of the prompt are a prefix of them: a completion tokenised
        alone may get a space put before it.
        """
        tokenizer, found = need_tokenizer(self.tokenizer, rows[0].origin), []
        prompts, completions = ([row.values[key] for row in rows] for key in ("prompt", "completion"))
        joined = text_ids(tokenizer, [prompt + rest for prompt, rest in zip(prompts, completions, strict=True)])
        alone = tokenizer(completions, add_special_tokens=False, verbose=False)["input_ids"]
        for prompt, before, rest, both in zip(prompts, text_ids(tokenizer, prompts), alone, joined, strict=True):
            if before and before[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
                before = before[:-1]  # some tokenizers append it themselves
            ids = _with_eos(tokenizer, both if both[: len(before)] == before else [*before, *rest])
            found.append([(ids, np.arange(len(ids)) >= len(before))])
        return found

    def _chats(self, rows: list[Row], column: str) -> list[list[Scored]]:
        """Tokenise conversations. Each text is tokenised as a whole, and only the template gives it a BOS."""
        tokenizer, origin = need_tokenizer(self.tokenizer, rows[0].origin), rows[0].origin
        template = chat_template_of(tokenizer, f"{origin}: the tokenizer")
        if not tokenizer.is_fast:
            raise UserError(f"{origin}: a conversation, but the tokenizer is not a fast one, so positions are unknown")
        # in training data "today" is always the same day
        given = {**tokenizer.special_tokens_map, "date_string": DATE_OF_DATA}
        every = [marked_texts(template, read_messages(row, column), row.origin, **given) for row in rows]
        texts = [text for examples in every for text, _ in examples] or [""]
        encoding = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        return [[_scored(*next(tokens), spans) for _, spans in examples] for examples in every]


def _with_eos(tokenizer: Any, ids: list[int]) -> np.ndarray:
    eos = tokenizer.eos_token_id
    return np.asarray([*ids, eos] if eos is not None and ids[-1:] != [eos] else ids, dtype=np.int64)


def _scored(ids: list[int], offsets: list[tuple[int, int]], spans: list[Span]) -> Scored:
    """Score every token that begins, by its ``offsets`` in characters, in one of the ``spans``."""
    # transformers' ``return_assistant_tokens_mask`` scores nothing, or all the rest, where a turn begins or ends with a
    # space that the tokenizer's offsets leave out (Llama 3's do).
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    # A token of spaces only may have an empty offset: it begins where the token before it ended.
    empty = np.flatnonzero(begins[1:] == ends[1:]) + 1
    begins[empty] = ends[empty - 1]
    inside = [(begins >= begin) & (begins < end) for begin, end in spans]
    return np.asarray(ids, dtype=np.int64), np.any([np.zeros(len(ids), dtype=bool), *inside], axis=0)


def marked_texts(
    template: str, messages: list[dict[str, Any]], origin: str, **given: Any
) -> list[tuple[str, list[Span]]]:
    """Return the text of each example of a conversation, and the characters in it that the assistant wrote.

    Where the template has ``{% generation %}`` markers, a conversation is one example. Elsewhere an assistant's turn is
    what the template adds to the prompt. A turn continues the example of the turn before it if the template left that
    text unchanged. Where the template rewrites earlier turns (Qwen3's drops thoughts), the turn begins its own example.
    Raises UserError if the template refuses the conversation, or does not show where a turn is.
    """
    from transformers.utils import chat_template_utils as templates

    to_text: Any = templates.render_jinja_template  # it returns a tuple, but is annotated as a string

    def render(part: list[dict[str, Any]], **options: bool) -> tuple[str, list[Span]]:
        try:
            texts, spans = to_text(conversations=[part], chat_template=template, **options, **given)
        except Exception as error:  # a template may raise whatever Python can
            raise UserError(f"{origin}: {refused_conversation(error)}") from None
        return texts[0], spans[0] if spans else []

    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        return [render(messages, return_assistant_tokens_mask=True)]
    found: list[tuple[str, list[Span]]] = []
    for number in (number for number, message in enumerate(messages) if message["role"] == "assistant"):
        before, _ = render(messages[:number], add_generation_prompt=True)
        after, _ = render(messages[: number + 1])
        if not after.startswith(before):
            problem = "the chat template does not begin it with its prompt; mark it there with {% generation %}"
            raise UserError(f"{origin}: turn {number + 1}: {problem}")
        earlier = found.pop()[1] if found and before.startswith(found[-1][0]) else []
        found.append((after, [*earlier, (len(before), len(after))]))
    return found
