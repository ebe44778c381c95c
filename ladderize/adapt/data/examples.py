"""Rows -> examples: token ids, and which of them the loss counts as targets.

* ``input_ids``: as they are; ``loss_mask`` says what is scored, without it everything.
* ``messages``, ``conversations``: through the chat template; the assistant's tokens are scored (``ChatTemplate``).
  Where the template rewrites earlier turns, every turn of the assistant is an example of its own.
* ``prompt`` and ``completion``: the completion is scored, and the EOS appended to it. BOS comes before the prompt.
* ``text``: with the tokenizer's special tokens, and EOS appended unless it is a passage of something longer. Everything
  is scored.

Ids and texts longer than ``seq_len`` are cut into pieces, each an example of its own; conversations and completions are
cut off there, and dropped if nothing is left to score.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.chat_template import DATE_OF_DATA, ChatRenderer, RefusedConversation, Span
from ladderize.data import need_tokenizer, text_ids
from ladderize.errors import UserError
from ladderize.rows import BadRow, Row, check_row, read_ids, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Scored = tuple[np.ndarray, np.ndarray]  # int64 ids, and bool, which of them are scored: [tokens] each


@dataclass(frozen=True)
class Example:
    """ids: int64 [tokens]; scored: bool [tokens], whether the loss counts a token as a target. The first is never one:
    nothing precedes it.

    origin: the row it comes from, for people.
    """

    ids: np.ndarray
    scored: np.ndarray
    origin: str


@dataclass(frozen=True)
class Encoded:
    """What one row gives. problem: why it gives nothing. truncated, dropped: how many examples were cut off, or lost
    what is scored."""

    examples: tuple[Example, ...] = ()
    problem: BadRow | None = None
    truncated: int = 0
    dropped: int = 0

    @property
    def tokens(self) -> int:
        return sum(len(example.ids) for example in self.examples)


class Encoder:
    """Turns rows into examples of at most ``seq_len`` tokens. tokenizer: None, if all rows are ids."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None", seq_len: int, vocab_size: int) -> None:
        if seq_len < 2:
            raise UserError(f"--seq-len {seq_len} leaves nothing to predict; give at least 2")
        self.tokenizer, self.seq_len, self.vocab_size = tokenizer, seq_len, vocab_size
        self.eos: int | None = tokenizer.eos_token_id if tokenizer is not None else None
        self._chat: ChatTemplate | None = None

    def encode(self, rows: Sequence[Row]) -> list[Encoded]:
        """One result for each row. Texts are tokenised together, which is several times as fast.

        Raises UserError for what is wrong with the model rather than with a row: ids outside its vocabulary, no
        tokenizer, no chat template.
        """
        formats = [_format(row) for row in rows]
        texts = [row for row, name in zip(rows, formats, strict=True) if name == "text"]
        ids_of_texts: Iterator[list[int]] = iter(())
        if texts:
            tokenizer = need_tokenizer(self.tokenizer, texts[0].origin)
            ids_of_texts = iter(text_ids(tokenizer, [str(row.values["text"]) for row in texts]))
        found = []
        for row, name in zip(rows, formats, strict=True):
            try:
                if isinstance(name, BadRow):
                    raise name
                parts = self._ids(row, name, ids_of_texts)
                self._check(parts, row.origin)
                cut = self._pieces if name in ("input_ids", "text") else self._cut_off
                names = [f", example {number}" for number in range(1, len(parts) + 1)] if len(parts) > 1 else [""]
                found.append(_joined([cut(*part, row.origin + name) for part, name in zip(parts, names, strict=True)]))
            except BadRow as problem:
                found.append(Encoded(problem=problem))
        return found

    def _ids(self, row: Row, name: str, ids_of_texts: Iterator[list[int]]) -> list[Scored]:
        """Of each of a row's examples the ids and which are scored, whole. name: the row's format."""
        if name == "input_ids":
            return [read_ids(row)]
        if name == "text":
            ids = self._with_eos(next(ids_of_texts), add=not row.is_passage)
            return [(ids, np.ones(len(ids), dtype=bool))]
        if name == "prompt":
            return [self._completion(row)]
        if self._chat is None:
            self._chat = ChatTemplate(need_tokenizer(self.tokenizer, row.origin), row.origin)
        return self._chat.encode(read_messages(row, name), row.origin, self.seq_len)

    def _with_eos(self, ids: list[int], *, add: bool = True) -> np.ndarray:
        # some tokenizers append it themselves
        end = [self.eos] if add and self.eos is not None and ids[-1:] != [self.eos] else []
        return np.asarray([*ids, *end], dtype=np.int64)

    def _completion(self, row: Row) -> Scored:
        """A prompt as it is tokenised when the model is asked, and its completion.

        The completion's ids come from both together where the prompt's are a prefix of that, since alone it may get a
        space put before it.
        """
        tokenizer = need_tokenizer(self.tokenizer, row.origin)
        prompt, completion = str(row.values["prompt"]), str(row.values["completion"])
        before, both = text_ids(tokenizer, [prompt, prompt + completion])
        if before and before[-1] == self.eos and not prompt.endswith(tokenizer.eos_token or ""):
            before = before[:-1]
        if both[: len(before)] != before:
            both = [*before, *tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]]
        ids = self._with_eos(both)
        return ids, np.arange(len(ids)) >= len(before)

    def _check(self, parts: Sequence[Scored], origin: str) -> None:
        if few := [len(ids) for ids, _ in parts if len(ids) < 2]:
            raise BadRow(f"{origin}: gives {few[0]} tokens, too few for one to be predicted from another")
        if not any(scored[1:].any() for _, scored in parts):
            raise BadRow(f"{origin}: has no token that the loss could score")
        if (highest := max(int(ids.max()) for ids, _ in parts)) >= self.vocab_size:
            raise UserError(
                f"{origin}: holds the token id {highest}, but the model's vocabulary ends at {self.vocab_size - 1}; "
                "were they made with another tokenizer?"
            )

    def _pieces(self, ids: np.ndarray, scored: np.ndarray, origin: str) -> Encoded:
        if len(ids) <= self.seq_len:
            return Encoded((Example(ids, scored, origin),))
        parts = [slice(start, start + self.seq_len) for start in range(0, len(ids) - 1, self.seq_len)]
        pieces = [Example(ids[part], scored[part], f"{origin}, piece {n}") for n, part in enumerate(parts, start=1)]
        kept = tuple(piece for piece in pieces if piece.scored[1:].any())
        return Encoded(kept, dropped=len(pieces) - len(kept))

    def _cut_off(self, ids: np.ndarray, scored: np.ndarray, origin: str) -> Encoded:
        kept = Example(ids[: self.seq_len], scored[: self.seq_len], origin)
        if not kept.scored[1:].any():
            return Encoded(dropped=1)
        return Encoded((kept,), truncated=int(len(ids) > self.seq_len))


def _joined(parts: Sequence[Encoded]) -> Encoded:
    return Encoded(
        tuple(chain.from_iterable(part.examples for part in parts)),
        truncated=sum(part.truncated for part in parts),
        dropped=sum(part.dropped for part in parts),
    )


def _format(row: Row) -> str | BadRow:
    try:
        return check_row(row)
    except BadRow as problem:
        return problem


class ChatTemplate:
    """A conversation -> ids through a tokenizer's chat template, and which of them the assistant wrote. Raises
    UserError if there is no template, or if the tokenizer cannot say which characters a token stands for.

    Where the template has ``{% generation %}`` markers, a conversation is one example, and they say what is scored.
    Else it is what the template adds to the prompt for a turn of the assistant: the turn and what ends it. A turn goes
    on with the example of the turn before it if the template has left that as it was; where it writes earlier turns
    anew (Qwen3's leaves out what was thought), the turn is an example of its own, with the prompt as the model gets it.

    transformers' own ``return_assistant_tokens_mask`` is not used: where a turn begins or ends in a space, and the
    tokenizer's offsets leave spaces out (Llama 3's do), it scores nothing or all the rest. Here every token that begins
    in an assistant's turn is scored.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", origin: str) -> None:
        renderer = ChatRenderer.of(tokenizer, date=DATE_OF_DATA)
        if renderer is None:
            raise UserError(
                f"{origin}: a conversation, but the tokenizer has no chat template; put a chat_template.jinja into the"
                " model's folder"
            )
        if not tokenizer.is_fast:
            raise UserError(
                f"{origin}: a conversation, but the tokenizer is not a fast one, so token positions are unknown"
            )
        self.tokenizer, self.renderer = tokenizer, renderer
        self.has_markers = re.search(r"\{%-?\s*generation\s*-?%\}", renderer.template) is not None

    def encode(self, messages: list[dict[str, Any]], origin: str, most: int = sys.maxsize) -> list[Scored]:
        """The examples. Each text is tokenised as a whole, and only the template gives it a BOS. most: tokens of an
        example that are of use; those behind them are left open.

        Raises BadRow if the template refuses the conversation, or does not show where a turn is.
        """
        text, spans = self._render(messages, origin, return_assistant_tokens_mask=self.has_markers)
        tokens = {text: self._tokens(text)}
        if self.has_markers:
            found = [(text, spans)]
        else:
            found = self._turns(messages, text, origin, int(tokens[text][1][:most].max(initial=0)))
        for one, _ in found:
            if one not in tokens:
                tokens[one] = self._tokens(one)
        return [(tokens[one][0], _inside(tokens[one][1], spans)) for one, spans in found]

    def _tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Its ids, and the characters that each stands for: int64 [tokens], [tokens, 2]."""
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoding["input_ids"], dtype=np.int64), offsets

    def _render(self, messages: list[dict[str, Any]], origin: str, **options: Any) -> tuple[str, list[Span]]:
        try:
            return self.renderer.render(messages, **options)
        except RefusedConversation as problem:
            raise BadRow(f"{origin}: {problem}") from None
        except UserError as problem:
            raise UserError(f"{origin}: {problem}") from None

    def _turns(self, messages: list[dict[str, Any]], text: str, origin: str, end: int) -> list[tuple[str, list[Span]]]:
        """The examples of a conversation whose whole is ``text``, and where the assistant's turns are in each.

        All prefixes of thousands of turns take minutes to render. So where a prompt is the beginning of ``text`` beyond
        its character ``end``, behind which nothing is of use, it and the turns after it are only counted.
        """
        found: list[tuple[str, list[Span]]] = []
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        for done, number in enumerate(turns):
            before, _ = self._render(messages[:number], origin, add_generation_prompt=True)
            goes_on = bool(found) and before.startswith(found[-1][0])
            beyond = bool(found) and len(before) > end and text.startswith(before)
            after = text if beyond else self._render(messages[: number + 1], origin)[0]
            if not after.startswith(before):
                raise BadRow(
                    f"{origin}: turn {number + 1}: the chat template does not begin it with the prompt for it, so the"
                    " assistant's text cannot be located; put {% generation %} and {% endgeneration %} around it in the"
                    " template"
                )
            spans = found.pop()[1] if goes_on else []
            found.append((after, [*spans, (len(before), len(after))]))
            if beyond:
                return found if goes_on else [*found, *[found[-1]] * (len(turns) - done - 1)]
        return found


def _inside(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Whether each token begins inside a span. offsets: [tokens, 2], of characters."""
    begins = offsets[:, 0].copy()
    # a token of spaces alone may have lost them all: it begins where the token before it ended
    empty = np.flatnonzero(offsets[:, 0] == offsets[:, 1])
    begins[empty[empty > 0]] = offsets[empty[empty > 0] - 1, 1]
    inside = np.zeros(len(offsets), dtype=bool)
    for begin, end in spans:
        inside |= (begins >= begin) & (begins < end)
    return inside
