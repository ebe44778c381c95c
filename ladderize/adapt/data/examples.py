"""Rows -> examples: token ids, and which of them the loss counts as targets.

* ``input_ids``: as they are; ``loss_mask`` says what is scored, without it everything.
* ``messages``, ``conversations``: through the chat template; the assistant's tokens are scored (``ChatTemplate``).
  Where the template rewrites earlier turns, every turn of the assistant is an example of its own.
* ``prompt`` and ``completion``: the completion is scored, and the EOS appended to it. BOS comes before the prompt.
* ``text``: with the tokenizer's special tokens, and EOS appended. Everything is scored.

Ids and texts longer than ``seq_len`` are cut into pieces, each an example of its own; conversations and completions are
cut off there, and dropped if nothing is left to score.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.chat_template import DATE_OF_DATA, Span
from ladderize.data import need_tokenizer, text_ids
from ladderize.errors import UserError
from ladderize.rows import BadRow, Row, check_row, read_ids, read_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scored = tuple[np.ndarray, np.ndarray]  # int64 ids, and bool, which of them are scored: [tokens] each
# of an example. conversation: its row's number, where others of this row have the same turns; else -1
COLUMNS = ("input_ids", "scored", "length", "truncated", "conversation")


@dataclass(frozen=True)
class Encoder:
    """Turns batches of rows into examples of at most ``seq_len`` tokens.

    tokenizer: None, if all rows are ids. name: of the source, for messages. Every method raises BadRow for a row that
    cannot be used, and UserError where the model has no tokenizer or no chat template.
    """

    tokenizer: "PreTrainedTokenizerBase | None"
    seq_len: int
    vocab_size: int
    name: str

    def __call__(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
        """The examples of the rows ``numbers``, by ``COLUMNS``. One that lost all that is scored has no tokens."""
        found = []
        for number, (in_pieces, parts) in zip(numbers, self.encode(batch, numbers), strict=True):
            for ids, scored in parts:
                # a last piece of one token would have nothing to predict
                for start in range(0, len(ids) - 1 if in_pieces else 1, self.seq_len):
                    piece = slice(
                        start, start + self.seq_len if scored[start + 1 : start + self.seq_len].any() else start
                    )
                    length = len(ids[piece])
                    truncated = not in_pieces and 0 < length < len(ids)
                    found.append((ids[piece], scored[piece], length, truncated, number if len(parts) > 1 else -1))
        return dict(zip(COLUMNS, map(list, zip(*found, strict=True)), strict=True))

    def encode(self, batch: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> list[tuple[bool, list[Scored]]]:
        """Of each row its examples, whole, and whether they may be cut into pieces. Texts are tokenised together, which
        is several times as fast."""
        rows = [
            Row(dict(zip(batch, values, strict=True)), f"{self.name}, row {number + 1}")
            for number, values in zip(numbers, zip(*batch.values(), strict=True), strict=True)
        ]
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
            self._check(found[place], row.origin)
        return [(name in ("input_ids", "text"), found[place]) for place, name in enumerate(formats)]

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

    def _with_eos(self, tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> np.ndarray:
        eos = tokenizer.eos_token_id
        # some tokenizers append it themselves
        return np.asarray([*ids, eos] if eos is not None and ids[-1:] != [eos] else ids, dtype=np.int64)

    def _texts(self, rows: list[Row]) -> list[list[Scored]]:
        tokenizer = need_tokenizer(self.tokenizer, rows[0].origin)
        texts = text_ids(tokenizer, [row.values["text"] for row in rows])
        every = [self._with_eos(tokenizer, ids) for ids in texts]
        return [[(ids, np.ones(len(ids), dtype=bool))] for ids in every]

    def _completions(self, rows: list[Row]) -> list[list[Scored]]:
        """Prompts as they are tokenised when the model is asked, and their completions.

        A completion's ids come from both together where the prompt's are a prefix of that, since alone it may get a
        space put before it.
        """
        tokenizer = need_tokenizer(self.tokenizer, rows[0].origin)
        prompts, completions = ([row.values[key] for row in rows] for key in ("prompt", "completion"))
        joined = text_ids(tokenizer, [prompt + rest for prompt, rest in zip(prompts, completions, strict=True)])
        found = []
        texts = zip(prompts, completions, text_ids(tokenizer, prompts), joined, strict=True)
        for prompt, completion, before, both in texts:
            if before and before[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token or ""):
                before = before[:-1]
            if both[: len(before)] != before:
                both = [*before, *tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]]
            ids = self._with_eos(tokenizer, both)
            found.append([(ids, np.arange(len(ids)) >= len(before))])
        return found

    def _chats(self, rows: list[Row], column: str) -> list[list[Scored]]:
        """Conversations; every text is tokenised as a whole, and only the template gives it a BOS."""
        tokenizer = need_tokenizer(self.tokenizer, rows[0].origin)
        template = ChatTemplate(tokenizer, rows[0].origin)
        every = [template.examples(read_messages(row, column), row.origin) for row in rows]
        texts = [text for examples in every for text, _ in examples]
        if not texts:
            return [[] for _ in rows]
        given = {"add_special_tokens": False, "return_attention_mask": False, "return_offsets_mapping": True}
        encoding = tokenizer(texts, **given, verbose=False)
        tokens = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
        return [[_marked(*next(tokens), spans) for _, spans in examples] for examples in every]


def _marked(ids: list[int], offsets: list[tuple[int, int]], spans: list[Span]) -> Scored:
    """Every token that begins in one of the ``spans`` is scored. offsets: the characters of each token.

    transformers' own ``return_assistant_tokens_mask`` is not used: where a turn begins or ends in a space, and the
    tokenizer's offsets leave spaces out (Llama 3's do), it scores nothing or all the rest.
    """
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T.copy()
    # a token of spaces alone may have lost them all: it begins where the token before it ended
    empty = np.flatnonzero(begins[1:] == ends[1:]) + 1
    begins[empty] = ends[empty - 1]
    scored = np.zeros(len(begins), dtype=bool)
    for begin, end in spans:
        scored |= (begins >= begin) & (begins < end)
    return np.asarray(ids, dtype=np.int64), scored


class ChatTemplate:
    """A conversation -> texts through a tokenizer's chat template, and what of them the assistant wrote. Raises
    UserError if there is no template, or if the tokenizer cannot say which characters a token stands for.

    Where the template has ``{% generation %}`` markers, a conversation is one example, and they say what is scored.
    Else it is what the template adds to the prompt for a turn of the assistant: the turn and what ends it. A turn goes
    on with the example of the turn before it if the template has left that as it was; where it writes earlier turns
    anew (Qwen3's leaves out what was thought), the turn is an example of its own, with the prompt as the model gets it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", origin: str) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"{origin}: a conversation, but the tokenizer has no chat template; put a chat_template.jinja into the"
                " model's folder"
            )
        if not tokenizer.is_fast:
            raise UserError(f"{origin}: a conversation, but the tokenizer is not a fast one, so positions are unknown")
        try:
            self.template = tokenizer.get_chat_template()
        except ValueError as error:  # several, none of which is the default
            raise UserError(f"{origin}: the chat template cannot be chosen: {' '.join(str(error).split())}") from None
        # in training data "today" is always the same day
        self.given = {**tokenizer.special_tokens_map, "date_string": DATE_OF_DATA.strftime("%d %b %Y")}
        self.has_markers = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None

    def examples(self, messages: list[dict[str, Any]], origin: str) -> list[tuple[str, list[Span]]]:
        """The text of each example, and the characters in it that the assistant wrote. Raises BadRow if the template
        refuses the conversation, or does not show where a turn is."""
        if self.has_markers:
            return [self._render(messages, origin, return_assistant_tokens_mask=True)]
        found: list[tuple[str, list[Span]]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:number], origin, add_generation_prompt=True)
            after, _ = self._render(messages[: number + 1], origin)
            if not after.startswith(before):
                raise BadRow(
                    f"{origin}: turn {number + 1}: the chat template does not begin it with the prompt for it, so the"
                    " assistant's text cannot be located; put {% generation %} and {% endgeneration %} around it in the"
                    " template"
                )
            earlier = found.pop()[1] if found and before.startswith(found[-1][0]) else []
            found.append((after, [*earlier, (len(before), len(after))]))
        return found

    def _render(self, messages: list[dict[str, Any]], origin: str, **options: Any) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        given: dict[str, Any] = {"chat_template": self.template, **self.given, **options}
        try:
            texts, spans = render_jinja_template(conversations=[messages], **given)
        except Exception as error:  # a template may raise whatever Python can
            problem = " ".join(str(error).split())[:200] or type(error).__name__
            raise BadRow(f"{origin}: the chat template refuses the conversation ({problem})") from None
        return texts[0], spans[0] if spans else []


def tokenizer_identity(tokenizer: "PreTrainedTokenizerBase | None") -> str:
    """What decides the ids that a tokenizer makes, the same in every process."""
    if tokenizer is None:
        return ""
    ids = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    return json.dumps(
        [type(tokenizer).__name__, ids, tokenizer.special_tokens_map, tokenizer.chat_template], default=str
    )
