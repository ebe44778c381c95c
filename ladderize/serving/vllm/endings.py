"""Log-likelihoods of the ends of token sequences, by vLLM's engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ladderize.serving.vllm.engine import VLLMEngine

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


@dataclass(frozen=True)
class EndingScore:
    """Summed log-likelihood in nats of a sequence's last tokens; greedy: whether each was the most likely one."""

    log_likelihood: float
    greedy: bool


def score_ends(
    engine: VLLMEngine,
    sequences: Sequence[Sequence[int]],
    counts: Sequence[int],
    advance: Callable[[int], object] = lambda n: None,
) -> list[EndingScore]:
    """Score the last ``counts[i]`` >= 1 tokens of each sequence of ids, given all tokens before them.

    A sequence has at least one token more than is scored, and at most one more than the model has positions: its last
    token is not read. It is the one token that vLLM may generate, and its log-probability, taken before that rule, is
    that of a free choice. The others are tokens of the prompt. All are of the softmax over the whole vocabulary, in
    fp32.
    """
    prompts = [list(sequence[:-1]) for sequence in sequences]
    sampling = [_forced(sequence[-1]) for sequence in sequences]
    outputs = engine.generate(prompts, sampling, advance)
    return [_score(output, sequence, count) for output, sequence, count in zip(outputs, sequences, counts, strict=True)]


def _forced(token: int) -> "SamplingParams":
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=1,
        allowed_token_ids=[int(token)],
        logprobs=1,
        prompt_logprobs=1,
        ignore_eos=True,
        detokenize=False,
    )


def _score(output: "RequestOutput", sequence: Sequence[int], count: int) -> EndingScore:
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    # one entry for each token of the sequence: the most likely one, and its own
    found = [*output.prompt_logprobs, *output.outputs[0].logprobs][-count:]
    total, greedy = 0.0, True
    for token, known in zip(sequence[-count:], found, strict=True):
        own = known[int(token)].logprob
        total += own
        greedy &= own >= max(entry.logprob for entry in known.values())
    return EndingScore(total, greedy)
