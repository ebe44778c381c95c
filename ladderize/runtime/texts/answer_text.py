"""The ids of an answer to text: where it begins, and where it ends."""

from collections.abc import Sequence
from typing import Any

from ladderize.runtime.requests.continuous import StopStrings


class AnswerEnds:
    """Where an answer ends: before EOS, or before the first stop string in it."""

    def __init__(self, tokenizer: Any, eos: Sequence[int], stops: tuple[str, ...]) -> None:
        self.tokenizer, self.eos, self.stops = tokenizer, frozenset(eos), stops
        self._seen = StopStrings(tokenizer, stops)

    def text(self, prompt: Sequence[int], new: Sequence[int]) -> tuple[str, str]:
        """The text of the ids ``new`` behind those of a prompt, and why it ended: stop or length."""
        ids = list(new)
        # a stop string that is a special token is seen in the ids, and not in the text
        ended = ids[-1] in self.eos or self._seen.end(ids)
        if ids[-1] in self.eos:
            ids.pop()
        text = text_after(self.tokenizer, prompt, ids)
        cut = min((place for stop in self.stops if (place := text.find(stop)) >= 0), default=None)
        return text[:cut], "length" if cut is None and not ended else "stop"


def text_after(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text that ``ids`` add behind the ids ``before``, without special tokens.

    Decoded alone they may lose the space that they begin with (SentencePiece).
    """
    first = str(tokenizer.decode(list(before), skip_special_tokens=True))
    both = str(tokenizer.decode([*before, *ids], skip_special_tokens=True))
    return both[len(first) :] if both.startswith(first) else str(tokenizer.decode(list(ids), skip_special_tokens=True))
