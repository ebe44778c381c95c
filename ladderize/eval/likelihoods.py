"""Log-likelihoods of continuations for lm-eval, whose own class reads the context again for every answer of a
multiple-choice question, and makes logits of the whole vocabulary for every token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

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
    """A context with continuations side by side, of which none sees another."""

    numbers: list[int]  # of the requests
    context: tuple[int, ...]
    continuations: list[list[int]]

    @property
    def starts(self) -> list[int]:
        """The columns where continuations begin, and the end: the last token of each is scored, but not read."""
        return [*accumulate((len(ids) - 1 for ids in self.continuations), initial=len(self.context))]

    @property
    def columns(self) -> list[tuple[int, int, int]]:
        """The id of each column, its position in its text, and the number of its continuation, -1 in the context."""
        columns = [(token, position, -1) for position, token in enumerate(self.context)]
        for number, ids in enumerate(self.continuations):
            columns += [(token, position, number) for position, token in enumerate(ids[:-1], len(self.context))]
        return columns

    @property
    def scored(self) -> list[int]:
        """The columns whose logits predict the tokens of the continuations, in their order."""
        last = len(self.context) - 1
        return [column for begin, end in pairwise(self.starts) for column in (last, *range(begin, end))]


def rows_of(requests: Sequence[Request], longest: int, *, share: bool) -> list[SharedRow]:
    """Return rows for requests, the longest first; with ``share`` continuations of one context may share a row. Of
    contexts beyond the ``longest`` text that the model reads the end is read."""
    rows: dict[tuple[int, ...], list[SharedRow]] = {}  # by context
    for number, (_, context, ids) in enumerate(requests):
        if len(ids) > longest:
            raise UserError(f"an answer of {len(ids)} tokens is longer than the {longest} that the model reads")
        read = tuple(context[-(longest + 1 - len(ids)) :])
        alike = rows.setdefault(read, [])
        if not alike or not share or alike[-1].starts[-1] + len(ids) - 1 > min(MOST_SHARED, longest):
            alike.append(SharedRow([], read, []))
        alike[-1].numbers.append(number)
        alike[-1].continuations.append(ids)
    return sorted(chain.from_iterable(rows.values()), key=lambda row: -row.starts[-1])


class LikelihoodLM(HFLM):
    """lm-eval's HF backend around a loaded model of a family that ladderize knows."""

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return for each request the log-likelihood of its continuation, and whether it is the greedy one."""
        windows = decoder_of(self.model.config.to_dict()).windows
        rows = rows_of(requests, self.max_length, share=not any(windows))  # a window would count columns, not positions
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        size = override_bs or self.batch_size
        # no row that needs a mask beside one that is too long for it
        longer = sum(row.starts[-1] > MOST_SHARED for row in rows)
        alike = (rows[:longer], rows[longer:])
        batches = [group[first : first + size] for group in alike for first in range(0, len(group), size)]
        hides_bar = disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=hides_bar, desc="Running loglikelihood requests") as bar:
            for batch in batches:
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
        shared: dict[str, Tensor] = {}
        if any(len(row.numbers) > 1 for row in rows):
            same_text = (texts[:, None, :] == -1) | (texts[:, None, :] == texts[:, :, None])
            mask = same_text & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            shared = {"attention_mask": mask[:, None].to(device), "position_ids": positions.to(device)}

        head = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][chosen[0], chosen[1]],))  # the scored
        try:
            logits = self.model(ids.to(device), use_cache=False, **shared).logits
        finally:
            hook.remove()
        continuations = [continuation for row in rows for continuation in row.continuations]
        targets = torch.tensor([*chain.from_iterable(continuations)], device=device)
        likelihoods = logits.log_softmax(-1, dtype=self.softmax_dtype).gather(-1, targets[:, None])[:, 0]
        greedy, sizes = logits.argmax(-1) == targets, [*map(len, continuations)]
        numbers = chain.from_iterable(row.numbers for row in rows)
        for number, scores, same in zip(numbers, likelihoods.split(sizes), greedy.split(sizes), strict=True):
            yield number, (float(scores.sum()), bool(same.all()))
