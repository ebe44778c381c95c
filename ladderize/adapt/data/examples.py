"""Rows -> examples: token ids, and which of them the loss counts as targets.

* ``input_ids``: as they are; ``loss_mask`` says what is scored, without it everything.
* ``messages``, ``conversations``: through the chat template; the assistant's tokens are scored (chat.py).
* ``prompt`` and ``completion``: the completion is scored, and the EOS appended to it. BOS comes before the prompt.
* ``text``: with the tokenizer's special tokens, and EOS appended unless it is a passage of something longer. Everything
  is scored.

Ids and texts longer than ``seq_len`` are cut into pieces, each an example of its own; conversations and completions are
cut off there, and dropped if nothing is left to score.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ladderize.adapt.data.chat import ChatTemplate
from ladderize.data import need_tokenizer, text_ids
from ladderize.errors import UserError
from ladderize.rows.formats import BadRow, Row, check_row, read_ids, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        results: dict[int, Encoded] = {}
        texts: list[int] = []
        for number, row in enumerate(rows):
            try:
                if (name := check_row(row)) == "text":
                    texts.append(number)
                else:
                    results[number] = self._one(row, name)
            except BadRow as problem:
                results[number] = Encoded(problem=problem)
        for number, ids in zip(texts, self._texts([rows[number] for number in texts]), strict=True):
            try:
                results[number] = self._pieces(ids, np.ones(len(ids), dtype=bool), rows[number].origin)
            except BadRow as problem:
                results[number] = Encoded(problem=problem)
        return [results[number] for number in range(len(rows))]

    def _one(self, row: Row, name: str) -> Encoded:
        if name == "input_ids":
            return self._pieces(*read_ids(row), row.origin)
        if name == "prompt":
            return self._cut_off(*self._completion(row), row.origin)
        if self._chat is None:
            self._chat = ChatTemplate(need_tokenizer(self.tokenizer, row.origin), row.origin)
        return self._cut_off(*self._chat.encode(read_messages(row, name), row.origin), row.origin)

    def _texts(self, rows: Sequence[Row]) -> list[np.ndarray]:
        if not rows:
            return []
        tokenizer = need_tokenizer(self.tokenizer, rows[0].origin)
        lists = text_ids(tokenizer, [str(row.values["text"]) for row in rows])
        return [self._with_eos(ids, add=not row.is_passage) for ids, row in zip(lists, rows, strict=True)]

    def _with_eos(self, ids: list[int], *, add: bool = True) -> np.ndarray:
        # some tokenizers append it themselves
        end = [self.eos] if add and self.eos is not None and ids[-1:] != [self.eos] else []
        return np.asarray([*ids, *end], dtype=np.int64)

    def _completion(self, row: Row) -> tuple[np.ndarray, np.ndarray]:
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

    def _check(self, ids: np.ndarray, scored: np.ndarray, origin: str) -> None:
        if len(ids) < 2:
            raise BadRow(f"{origin}: gives {len(ids)} tokens, too few for one to be predicted from another")
        if not scored[1:].any():
            raise BadRow(f"{origin}: has no token that the loss could score")
        if (highest := int(ids.max())) >= self.vocab_size:
            raise UserError(
                f"{origin}: holds the token id {highest}, but the model's vocabulary ends at {self.vocab_size - 1}; "
                "were they made with another tokenizer?"
            )

    def _pieces(self, ids: np.ndarray, scored: np.ndarray, origin: str) -> Encoded:
        self._check(ids, scored, origin)
        if len(ids) <= self.seq_len:
            return Encoded((Example(ids, scored, origin),))
        starts = range(0, len(ids) - 1, self.seq_len)  # a last piece of one token would have nothing to predict
        pieces = [
            Example(
                ids[start : start + self.seq_len], scored[start : start + self.seq_len], f"{origin}, piece {number}"
            )
            for number, start in enumerate(starts, start=1)
        ]
        kept = tuple(piece for piece in pieces if piece.scored[1:].any())
        return Encoded(kept, dropped=len(pieces) - len(kept))

    def _cut_off(self, ids: np.ndarray, scored: np.ndarray, origin: str) -> Encoded:
        self._check(ids, scored, origin)
        if len(ids) <= self.seq_len:
            return Encoded((Example(ids, scored, origin),))
        ids, scored = ids[: self.seq_len], scored[: self.seq_len]
        if not scored[1:].any():
            return Encoded(dropped=1)
        return Encoded((Example(ids, scored, origin),), truncated=1)
