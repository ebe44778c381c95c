"""What the models for lm-eval that are our own have in common: which pairs of tokens they score."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ladderize.errors import UserError

Tokens = Sequence[int]
Pair = tuple[tuple[str, str] | None, Tokens, Tokens]  # (the texts, if any), context, continuation


def check_scorable(pair: Pair, max_length: int) -> None:
    """Raise UserError for a continuation that a model which reads ``max_length`` tokens cannot score: its last token is
    predicted, and never read."""
    texts, context, continuation = pair
    if not 0 < len(continuation) <= max_length or not context:
        shown = "" if texts is None else f" {texts[1][:80]!a}"
        raise UserError(
            f"the continuation{shown} has {len(continuation)} tokens after a context of {len(context)}; one of 1 to"
            f" {max_length} tokens can be scored, after a context of at least 1"
        )


def rolling_log_likelihoods(lm: Any, requests: list[Instance], disable_tqdm: bool) -> list[float]:
    """Log-likelihood in nats of whole texts, which ``lm`` reads in windows of ``max_length`` that do not overlap in
    what they score: those of lm-eval's HF class."""
    pairs: list[Pair] = []
    counts = []
    for request in requests:
        windows = get_rolling_token_windows(
            token_list=lm.tok_encode(request.args[0]),
            prefix_token=lm.prefix_token_id,
            max_seq_len=lm.max_length,
            context_len=1,
        )
        own = [(None, *make_disjoint_window(window)) for window in windows]
        counts.append(len(own))
        pairs += own
    scores = iter(lm._loglikelihood_tokens(pairs, disable_tqdm))
    sums = [float(sum(next(scores)[0] for _ in range(count))) for count in counts]
    for request, total in zip(requests, sums, strict=True):
        lm.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return sums
