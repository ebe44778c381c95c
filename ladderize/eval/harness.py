"""Two changes of lm-eval's models: ranks share out the requests, and every answer has tokens to score."""

from collections.abc import Callable, Sequence
from typing import Any

from ladderize.errors import UserError
from ladderize.ranks.group import Ranks

REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")  # the methods that lm-eval calls


def share_requests(harness: Any, ranks: Ranks) -> None:
    """Let each rank answer the requests of its documents, and return all answers.

    lm-eval sees one process on every rank. So its sampler draws the few-shot examples of all documents in turn, and
    metrics are over all answers.

    harness: an ``lm_eval.api.model.LM``.
    """

    def shared(answer: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def answer_all(requests: Sequence[Any], **options: Any) -> list[Any]:
            numbers = [i for i, request in enumerate(requests) if request.doc_id % ranks.size == ranks.rank]
            answers = answer([requests[i] for i in numbers], **options) if numbers else []
            gathered: dict[int, Any] = {}
            for numbered in ranks.gather([*zip(numbers, answers, strict=True)]):
                gathered.update(numbered)
            return [gathered[i] for i in range(len(requests))]

        return answer_all

    for name in REQUESTS if ranks.size > 1 else ():
        setattr(harness, name, shared(getattr(harness, name)))


def encode_joined(harness: Any) -> list[tuple[str, str]]:
    """Encode an answer alone where its text joins the context's last token, so that it would have no token.

    So does lm-eval's pull request 4055. Returns a list that gets each such pair.

    harness: an ``lm_eval.api.model.TemplateLM``.
    """
    encode_pair, joined = harness._encode_pair, list[tuple[str, str]]()

    def encode(context: str, answer: str) -> tuple[list[int], list[int]]:
        context_ids, answer_ids = encode_pair(context, answer)
        if not answer_ids:
            spaces = context[len(context.rstrip()) :]  # which lm-eval scores with the answer
            answer_ids = harness.tok_encode(spaces + answer, add_special_tokens=False)
            joined.append((context, answer))
        if not answer_ids:
            raise UserError(f"an answer has no token: its text is {answer!r}, behind {context[-40:]!r}; mend the task")
        return context_ids, answer_ids

    harness._encode_pair = encode
    return joined
