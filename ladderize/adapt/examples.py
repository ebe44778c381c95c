"""Rows become examples: token ids, and a mask of those that the loss counts.

* ``input_ids``: taken as they are. ``loss_mask`` says which are scored; without it all are.
* Conversations: rendered by the chat template. The assistant's tokens are scored, but those of turns of weight 0.
* ``prompt`` and ``completion``: BOS comes before the prompt, EOS after the completion, which is scored.
* ``text``: tokenised with the special tokens, and EOS appended. Everything is scored.

An example longer than ``seq_len`` is cut: ids and texts into pieces, each an example; conversations and completions at
``seq_len``, and they are dropped if nothing scored is left. A row that cannot be used gives none.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import numpy as np

from ladderize.chat_template import Conversation, Span, chat_template_of, render
from ladderize.data.rows import EMPTY, Row, check_row, read_conversation, read_ids
from ladderize.data.windows import check_vocabulary, need_tokenizer, text_ids
from ladderize.errors import UserError

Scored = tuple[np.ndarray, np.ndarray]  # int64 ids and a bool mask of those that are scored: [tokens] each
# Columns of an example. row: the number of its row; shares_turns: the row has several examples, which share turns;
# problem: why its row gives none.
COLUMNS = ("input_ids", "scored", "length", "truncated", "row", "shares_turns", "problem")
PLACEHOLDER = "\ue000"  # a character of no language


@dataclass(frozen=True)
class EncodedRow:
    """The whole examples of a row."""

    examples: list[Scored] = field(default_factory=list)
    in_pieces: bool = False  # they may be cut into pieces
    problem: str = ""  # why there are none: ``EMPTY``, or a fault


@dataclass(frozen=True)
class Encoder:
    """Turns batches of rows into examples of at most ``seq_len`` tokens."""

    tokenizer: Any  # of transformers; None if all rows are ids
    seq_len: int
    vocab_size: int
    name: str  # of the source, for messages

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return the examples of the rows ``numbers``, by ``COLUMNS``; without tokens where nothing is scored."""
        examples: list[tuple[Any, ...]] = []
        for number, row in zip(numbers, self.encode(batch, numbers), strict=True):
            if row.problem:
                nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=bool)
                examples.append((*nothing, 0, False, number, False, row.problem))
            shares_turns = len(row.examples) > 1
            for ids, scored in row.examples:
                # a last piece of one token would have nothing to predict
                for start in range(0, len(ids) - 1 if row.in_pieces else 1, self.seq_len):
                    end = start + self.seq_len
                    piece = slice(start, end if scored[start + 1 : end].any() else start)
                    truncated = not row.in_pieces and 0 < len(ids[piece]) < len(ids)
                    length = len(ids[piece])
                    examples.append((ids[piece], scored[piece], length, truncated, number, shares_turns, ""))
        return dict(zip(COLUMNS, map(list, zip(*examples, strict=True)), strict=True))

    def encode(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[EncodedRow]:
        """Return what each row gives; UserError for unknown ids. A batch is tokenised together, which is faster."""
        columns = zip(*batch.values(), strict=True)
        rows = [
            Row(dict(zip(batch, values, strict=True)), f"{self.name}, row {number + 1}")
            for number, values in zip(numbers, columns, strict=True)
        ]
        encoders = {"text": self._texts, "prompt": self._completions, "conversation": self._chats}
        encoders["input_ids"] = lambda rows: [EncodedRow([read_ids(row)], in_pieces=True) for row in rows]
        encoded: dict[int, EncodedRow] = {}
        by_format: dict[str, list[int]] = {}
        for index, row in enumerate(rows):
            try:
                by_format.setdefault(check_row(row), []).append(index)
            except UserError as problem:
                encoded[index] = EncodedRow(problem=str(problem))
        for name, indices in by_format.items():
            encoded.update(zip(indices, encoders[name]([rows[index] for index in indices]), strict=True))
        for index, row in enumerate(rows):
            examples = encoded[index].examples
            check_vocabulary([ids for ids, _ in examples], self.vocab_size, row.origin)
            if not encoded[index].problem and not any(scored[1:].any() for _, scored in examples):
                lengths = " and ".join(str(len(ids)) for ids, _ in examples) or "0"
                reason = f"{row.origin}: gives {lengths} tokens, none of which the loss could score"
                encoded[index] = EncodedRow(problem=reason)
        return [encoded[index] for index in range(len(rows))]

    def _texts(self, rows: list[Row]) -> list[EncodedRow]:
        tokenizer = need_tokenizer(self.tokenizer, rows[0].origin)
        texts, encoded = [row.values["text"] for row in rows], []
        for text, ids in zip(texts, text_ids(tokenizer, texts), strict=True):
            whole = _with_eos(tokenizer, ids)
            example = whole, np.ones(len(whole), dtype=bool)
            encoded.append(EncodedRow([example], in_pieces=True) if text.strip() else EncodedRow(problem=EMPTY))
        return encoded

    def _completions(self, rows: list[Row]) -> list[EncodedRow]:
        """Tokenise prompts as when the model is asked, and their completions: both together where the prompt's ids are
        a prefix of these, since a completion tokenised alone may get a space put before it."""
        tokenizer, encoded = need_tokenizer(self.tokenizer, rows[0].origin), []
        prompts = [row.values["prompt"] for row in rows]
        completions = [row.values["completion"] for row in rows]
        joined = text_ids(tokenizer, [prompt + rest for prompt, rest in zip(prompts, completions, strict=True)])
        alone = tokenizer(completions, add_special_tokens=False, verbose=False)["input_ids"]
        for prompt, before, rest, both in zip(prompts, text_ids(tokenizer, prompts), alone, joined, strict=True):
            if before and before[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
                before = before[:-1]  # some tokenizers append it themselves
            ids = _with_eos(tokenizer, both if both[: len(before)] == before else [*before, *rest])
            encoded.append(EncodedRow([(ids, np.arange(len(ids)) >= len(before))]))
        return encoded

    def _chats(self, rows: list[Row]) -> list[EncodedRow]:
        """Tokenise conversations. Each text is tokenised as a whole, and only the template gives it a BOS."""
        tokenizer, origin = need_tokenizer(self.tokenizer, rows[0].origin), rows[0].origin
        if not tokenizer.is_fast:
            raise UserError(f"{origin}: a conversation, but the tokenizer is not a fast one, so positions are unknown")
        encoded: list[EncodedRow] = []
        texts: list[str] = []
        marks: list[tuple[EncodedRow, list[Span]]] = []
        for row in rows:
            try:
                marked = marked_texts(tokenizer, read_conversation(row), row.origin)
            except UserError as problem:
                encoded.append(EncodedRow(problem=str(problem)))
                continue
            encoded.append(EncodedRow())
            texts += [text for text, _ in marked]
            marks += [(encoded[-1], spans) for _, spans in marked]
        if texts:
            tokens = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            for (whole, spans), ids, offsets in zip(marks, tokens["input_ids"], tokens["offset_mapping"], strict=True):
                whole.examples.append(_scored(ids, offsets, spans))
        return encoded


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


def _with_eos(tokenizer: Any, ids: list[int]) -> np.ndarray:
    eos = tokenizer.eos_token_id
    return np.asarray([*ids, eos] if eos is not None and ids[-1:] != [eos] else ids, dtype=np.int64)


def marked_texts(tokenizer: Any, conversation: Conversation, origin: str) -> list[tuple[str, list[Span]]]:
    """Return the text of each example of a conversation, and the characters in it that the loss counts.

    Where the template has ``{% generation %}`` markers, a conversation is one example. Elsewhere an assistant's turn is
    what the template adds to the prompt, and where the template rewrites earlier turns (Qwen3's drops thoughts), the
    turn begins its own example.
    """
    messages = conversation.messages
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        template = chat_template_of(tokenizer, tools=conversation.tools)
        if re.search(r"\{%-?\s*generation\s*-?%\}", template):
            return [_generated(tokenizer, conversation, turns)]
        texts: list[tuple[str, list[Span]]] = []
        for number in turns:
            prompt, text = _asked_and_answered(tokenizer, conversation, number)
            spans = [(len(prompt), len(text))] if conversation.scored[number] else []
            earlier = texts.pop()[1] if texts and prompt.startswith(texts[-1][0]) else []
            texts.append((text, [*earlier, *spans]))
    except UserError as problem:
        raise UserError(f"{origin}: {problem}") from None
    return texts


def _generated(tokenizer: Any, conversation: Conversation, turns: Sequence[int]) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and the spans that its template marks in turns that the loss counts."""

    def spans_until(count: int) -> int:
        return len(render(tokenizer, conversation.until(count), as_data=True, marked=True)[1]) if count else 0

    text, spans = render(tokenizer, conversation, as_data=True, marked=True)
    for number in reversed([number for number in turns if not conversation.scored[number]]):
        del spans[spans_until(number) : spans_until(number + 1)]
    return text, spans


def _asked_and_answered(tokenizer: Any, conversation: Conversation, number: int) -> tuple[str, str]:
    """Return the prompt that an assistant's turn answers, and the text with the turn behind it.

    A template may write a finished turn otherwise than it asks for one: DeepSeek-R1's asks for a thought and leaves it
    out behind it. Then the turn's own text follows the prompt, and what the template puts behind a turn follows that.
    """
    finished, _ = render(tokenizer, conversation.until(number + 1), as_data=True)
    prompt = ""
    if number:
        prompt, _ = render(tokenizer, conversation.until(number), as_data=True, add_generation_prompt=True)
        if finished.startswith(prompt):
            return prompt, finished
    turn = conversation.messages[number]
    marked = replace(conversation, messages=[*conversation.messages[:number], {**turn, "content": PLACEHOLDER}])
    shown, _ = render(tokenizer, marked, as_data=True)
    ahead, mark, behind = shown.rpartition(PLACEHOLDER)
    is_shown = mark and isinstance(turn.get("content"), str)
    if is_shown and not number and finished.startswith(ahead):
        return ahead, finished
    if not is_shown or not number:
        raise UserError(
            f"turn {number + 1}: the chat template does not show what the assistant wrote; mark it there with"
            " {% generation %}"
        )
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ahead, strict=False))
    opening = prompt[len([*shared]) :].strip()
    text = turn["content"]
    if opening and text.lstrip().startswith(opening):  # the prompt has it already
        text = text.lstrip().removeprefix(opening)
        text = text.lstrip("\n") if prompt.endswith("\n") else text
    return prompt, prompt + text + behind
