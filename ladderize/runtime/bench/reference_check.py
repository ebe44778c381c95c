"""The check before any timing: is this really the model? Logits and greedy tokens against transformers in float32.

A fast wrong model is worth nothing, so a benchmark of a checkpoint first compares teacher-forced logits at every
position, and the tokens that decoding step by step chooses, with an fp32 forward of the Hugging Face model.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ladderize.checkpoint.llama import parameter_count
from ladderize.console import UserError, human_bytes
from ladderize.files.records import Record
from ladderize.memory import available_bytes
from ladderize.ranks.threads import cores
from ladderize.runtime.decode import Generator, Sampling, sample
from ladderize.runtime.launch import end_with_parent, start_context
from ladderize.runtime.spec import ModelSpec

PROMPT_TOKENS, NEW_TOKENS = 32, 32
# The largest difference of any logit that rounding explains, in standard deviations of the reference's logits.
_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True)
class Reference:
    """ids: prompt and greedy continuation [tokens]; logits: after each of them [tokens, vocab], float32."""

    ids: list[int]
    prompt: int
    logits: np.ndarray[Any, Any]


@dataclass(frozen=True)
class ReferenceAgreement(Record):
    """How far a model is off the reference: its largest difference of a logit, and greedy tokens until the first other
    one."""

    logit_difference: float
    tolerance: float
    equal_greedy_tokens: int
    greedy_tokens: int


def references(specs: list[ModelSpec], device: str) -> dict[str, Reference]:
    """The reference of each checkpoint, computed in a process of its own, so that this one's memory stays what the
    runtime needs."""
    for spec in specs:
        _check_memory(spec, device)
    with ProcessPoolExecutor(1, mp_context=start_context(), initializer=end_with_parent) as pool:
        return {spec.name: pool.submit(_reference, spec, device).result() for spec in specs}


def _check_memory(spec: ModelSpec, device: str) -> None:
    need, free = 4 * parameter_count(spec.config), available_bytes(torch.device(device))
    if free is not None and need > free:
        raise UserError(
            f"{spec.name}: the fp32 reference of the correctness check takes {human_bytes(need)}, and"
            f" {human_bytes(free)} are free; --no-check leaves it out and labels the results unchecked"
        )


def _reference(spec: ModelSpec, device: str) -> Reference:
    from transformers.utils import logging

    from ladderize.modeling import load

    logging.disable_progress_bar()
    torch.set_num_threads(len(cores()))
    assert spec.folder is not None
    model = load(spec.folder, dtype="float32", device=device)
    length = min(PROMPT_TOKENS, spec.positions // 2)
    prompt = torch.randint(0, spec.config["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0)).to(
        device
    )
    new = min(NEW_TOKENS, spec.positions - length)
    with torch.inference_mode():
        ids, cache, past = prompt, None, prompt
        for _ in range(new):
            output = model(past, past_key_values=cache, use_cache=True)
            cache, past = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, past), 1)
        logits = model(ids, use_cache=False).logits[0]
    return Reference(ids[0].tolist(), length, logits.float().cpu().numpy())


def check_against_reference(generator: Generator, reference: Reference, spec: ModelSpec) -> ReferenceAgreement:
    """Raise UserError unless the model's logits and greedy tokens are the reference's; returns the differences seen.

    All ranks call it. generator: of one row. A first different token is allowed only where the reference's two best
    logits are nearer to each other than the tolerance; in float32 none is.
    """
    expected = torch.from_numpy(reference.logits)
    tolerance = _TOLERANCE[spec.dtype] * float(expected.std())
    ids = torch.tensor([reference.ids], device=generator.device)
    logits = generator.model.logits(generator.read(ids))[0].float().cpu()
    difference = float((logits - expected).abs().max())
    model = f"{spec.name}: with {generator.model.collectives.ranks} ranks in {spec.dtype}"
    if not difference <= tolerance:
        raise UserError(
            f"{model} a logit is {difference:.3g} off the fp32 reference, over the tolerance of {tolerance:.3g}: this"
            " is not the model that was converted, so nothing was timed"
        )
    tokens = sample(generator.prefill([reference.ids[: reference.prompt]]), Sampling(), torch.zeros(1))
    chosen = [int(tokens)]
    for _ in range(len(reference.ids) - reference.prompt - 1):
        tokens = sample(generator.decode_one_token(tokens), Sampling(), torch.zeros(1))
        chosen.append(int(tokens))
    equal = 0
    for index, (ours, theirs) in enumerate(zip(chosen, reference.ids[reference.prompt :], strict=True)):
        if ours != theirs:
            best = expected[reference.prompt + index - 1].topk(2).values
            margin = float(best[0] - best[1])
            if spec.dtype == "float32" or margin >= tolerance:
                raise UserError(
                    f"{model} greedy decoding chose token {ours} at step {index} where the fp32 reference chose"
                    f" {theirs} by a margin of {margin:.3g} (tolerance {tolerance:.3g}), so nothing was timed"
                )
            break
        equal += 1
    return ReferenceAgreement(difference, tolerance, equal, len(chosen))
