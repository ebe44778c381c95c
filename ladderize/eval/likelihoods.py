"""Log-likelihoods of continuations for lm-eval: those of one context in one row, and logits only where they are scored.

lm-eval's own class reads the context again for every answer of a multiple-choice question, and makes logits of the
whole vocabulary for every token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ladderize.errors import UserError
from ladderize.families.registry import decoder_of

MOST_SHARED = 1024  # tokens of a row of several continuations: the cost of its mask grows with their square
Request = tuple[tuple[str, str], list[int], list[int]]  # the texts, and the ids of context and continuation


@dataclass(frozen=True)
class SharedRow:
    """A context with continuations side by side, of which none sees another.

    numbers: of the requests.
    """

    numbers: tuple[int, ...]
    context: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]

    @property
    def starts(self) -> list[int]:
        """The columns where continuations begin, and the end: the last token of each is scored, but not read."""
        return [*accumulate((len(one) - 1 for one in self.continuations), initial=len(self.context))]

    @property
    def columns(self) -> list[tuple[int, int, int]]:
        """The id of each column, its position in its text, and the number of its continuation, -1 in the context."""
        context = [(token, place, -1) for place, token in enumerate(self.context)]
        numbered = enumerate(self.continuations)
        return context + [(t, i, k) for k, one in numbered for i, t in enumerate(one[:-1], len(context))]

    @property
    def scored(self) -> list[int]:
        """The columns whose logits predict the tokens of the continuations, in their order."""
        last = len(self.context) - 1
        return [column for begin, end in pairwise(self.starts) for column in (last, *range(begin, end))]


def rows_of(requests: Sequence[Request], longest: int, *, share: bool) -> list[SharedRow]:
    """Return rows for requests, the longest first.

    longest: tokens that the model reads; of longer contexts the end is read.
    share: continuations of one context may share a row.
    Raises UserError for a continuation that is longer than that.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (_, context, continuation) in enumerate(requests):
        if len(continuation) > longest:
            raise UserError(
                f"an answer of {len(continuation)} tokens is longer than the {longest} that the model reads"
            )
        groups.setdefault(tuple(context[-(longest + 1 - len(continuation)) :]), []).append(number)
    rows = []
    for kept, numbers in groups.items():
        parts: list[list[int]] = []
        size = 0
        for number in numbers:
            more = len(requests[number][2]) - 1
            if not parts or not share or size + more > min(MOST_SHARED, longest):
                parts.append([])
                size = len(kept)
            parts[-1].append(number)
            size += more
        rows += [SharedRow(tuple(part), kept, tuple(tuple(requests[one][2]) for one in part)) for part in parts]
    return sorted(rows, key=lambda row: -row.starts[-1])


def batches_of(rows: Sequence[SharedRow], size: int) -> Iterator[Sequence[SharedRow]]:
    """Yield ``size`` rows at a time; none that needs a mask beside one that is too long for it."""
    longer = [row for row in rows if row.starts[-1] > MOST_SHARED]
    for part in (longer, rows[len(longer) :]):
        yield from (part[first : first + size] for first in range(0, len(part), size))


class LikelihoodLM(HFLM):
    """lm-eval's HF backend around a loaded model of a family that ladderize knows."""

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and whether it is the greedy one."""
        windows = decoder_of(self.model.config.to_dict()).windows
        rows = rows_of(requests, self.max_length, share=not any(windows))  # a window would count columns, not positions
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        with bar:
            for batch in batches_of(rows, override_bs or self.batch_size):
                for number, answer in self._answers(batch):
                    answers[number] = answer
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                    bar.update(1)
        return answers

    @torch.no_grad()
    def _answers(self, rows: Sequence[SharedRow]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Yield the number and the answer of each request of a batch of rows."""
        device = self.device
        # behind a row's end nothing is scored, and nothing before it sees that
        ids, positions, texts = pad_sequence([torch.tensor(row.columns) for row in rows], batch_first=True).unbind(-1)
        chosen = torch.tensor([[i, column] for i, row in enumerate(rows) for column in row.scored], device=device).T
        how: dict[str, Any] = {}
        if any(len(row.numbers) > 1 for row in rows):
            own = (texts[:, None, :] == -1) | (texts[:, None, :] == texts[:, :, None])
            mask = own & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            how = {"attention_mask": mask[:, None].to(device), "position_ids": positions.to(device)}

        def keep_scored(_: torch.nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (inputs[0][chosen[0], chosen[1]],)

        hook = self.model.get_output_embeddings().register_forward_pre_hook(keep_scored)
        try:
            logits = self.model(ids.to(device), use_cache=False, **how).logits
        finally:
            hook.remove()
        targets = torch.tensor([token for row in rows for one in row.continuations for token in one], device=device)
        likelihoods = logits.log_softmax(-1, dtype=self.softmax_dtype).gather(-1, targets[:, None])[:, 0]
        greedy = logits.argmax(-1) == targets
        sizes = [len(one) for row in rows for one in row.continuations]
        numbers = [number for row in rows for number in row.numbers]
        for number, part, same in zip(numbers, likelihoods.split(sizes), greedy.split(sizes), strict=True):
            yield number, (float(part.sum()), bool(same.all()))
