"""One rank of the engines under test: a process that imports vLLM once and then builds one LLM after another.

``python -m tests.vllm.rank`` reads jobs from stdin, a line of JSON each, and answers a line on stdout that begins with
ANSWER: the result, or the exception. Everything else that vLLM prints goes to stderr. The group is in RANK and
WORLD_SIZE; a job brings the port at which its ranks meet.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import traceback
import weakref
from typing import Any
from unittest import mock

from tests.vllm.jobs import ANSWER, IN_PIECES, SEGMENTS, Carrier, Counts, Generate, Job, Refused, Streams

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the tests
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed, in C++ too, is no answer
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # as every process of vLLM does
    import vllm  # noqa: F401
    from vllm.v1.worker import cpu_worker  # noqa: F401  (half of the import's seconds)

    name_segments()
    gc.collect()
    gc.freeze()  # what the imports made need not be looked through after every engine
    answers.write(f"{ANSWER}{json.dumps({'ready': os.getpid()})}\n")
    answers.flush()
    for line in sys.stdin:
        job = Job.from_json(line)
        try:
            with mock.patch.dict(os.environ, {"MASTER_PORT": str(job.port), **job.environment}):
                answer: dict[str, Any] = {"result": run(job)}
        except BaseException as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(f"{ANSWER}{json.dumps(answer)}\n")
        answers.flush()


def name_segments() -> None:
    """Give vLLM's shared memory a name that no other group on this machine has.

    With an external launcher it is named after the scheme of ``env://``: two groups at once, or one after another that
    was killed, would meet in one segment.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    named = _CPUSHMDistributed.make_group_name

    def ours(communicator: Any) -> str:
        return os.environ[SEGMENTS] + named(communicator).replace("/", "")

    _CPUSHMDistributed.make_group_name = staticmethod(ours)


def run(job: Job) -> list[Any]:
    """Build an engine, do the steps, take it down.

    The number of threads must stay. oneDNN packs a weight for as many as there are, and vLLM keeps oneDNN's kernels for
    the whole process, by the weight's shape alone. With another number, the next engine of this process may multiply by
    a weight that is packed otherwise: without AVX512 it does by one of 192 x 128.
    """
    if any(isinstance(step, Refused) for step in job.steps):
        return [refusal(job)]
    import torch
    from vllm import LLM

    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        if job.engine.get("compilation_config") == IN_PIECES:
            from tests.vllm.pieces import as_on_a_gpu

            stack.enter_context(as_on_a_gpu())
        llm = LLM(**job.engine)
        model = weakref.ref(model_of(llm))
        stack.callback(end, llm)
        results = [STEPS[type(step)](llm, step) for step in job.steps]
        del llm
    del stack
    gc.collect()
    assert model() is None, "the last engine's model is still referenced"
    now = torch.get_num_threads()
    assert now == threads, f"torch had {threads} threads before this engine and has {now} after it"
    return results


def end(llm: Any) -> None:
    """Take an engine down, and its process groups: the next one of this process begins anew."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    for messages in messages_of(llm):
        messages.collectives.settle()  # nothing may still listen when the group goes
    llm.llm_engine.engine_core.shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def model_of(llm: Any) -> Any:
    return runner_of(llm).get_model()


def generate(llm: Any, step: Generate) -> dict[str, Any]:
    """Greedy tokens, the log-probabilities of the best at each of them, and what vLLM counted on the way."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    steps = 0
    engine_step = llm.llm_engine.step

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return engine_step()

    llm.llm_engine.step = counted
    sampling = SamplingParams(
        max_tokens=step.tokens, temperature=0, logprobs=step.logprobs, ignore_eos=True, detokenize=False
    )
    names = sorted({name for name in step.adapters if name})
    requests = [
        LoRARequest(name, 1 + names.index(name), name) if name else None
        for name in step.adapters or [None] * len(step.prompts)
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in step.prompts],
        sampling,
        lora_request=requests if names else None,
        use_tqdm=False,
    )
    del llm.llm_engine.step
    return {
        "completions": [
            {
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [
                    {str(token): value.logprob for token, value in at.items()} for at in output.outputs[0].logprobs
                ],
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ],
        "steps": steps,
    }


def streams(llm: Any, step: Streams) -> list[list[list[float]]]:
    """What a drafter that reads hidden states is given: for each layer asked for, [tokens][hidden size]."""
    from vllm import SamplingParams

    runner, model = runner_of(llm), model_of(llm)
    seen: list[Any] = []
    model.set_aux_hidden_state_layers(tuple(step.layers))
    runner.use_aux_hidden_state_outputs = True
    forward = model.model.forward

    def seeing(*arguments: Any, **named: Any) -> Any:
        seen.append(forward(*arguments, **named))
        return seen[-1]

    model.model.forward = seeing  # vLLM's own __call__ of a model runs no hooks
    llm.generate([{"prompt_token_ids": step.prompt}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    del model.model.forward
    runner.use_aux_hidden_state_outputs = False
    model.set_aux_hidden_state_layers(())
    _, hidden = seen[0]
    return [tensor[: len(step.prompt)].tolist() for tensor in hidden]


def messages_of(llm: Any) -> list[Any]:
    from ladderize.vllm.messages import Messages

    contexts = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [found for found in contexts.values() if isinstance(found, Messages)]


def carrier(llm: Any, step: Carrier) -> str:
    (messages,) = messages_of(llm)
    return messages.collectives.name


def counts(llm: Any, step: Counts) -> dict[str, int]:
    from tests.vllm.pieces import COUNTED

    return dict(COUNTED)


def refusal(job: Job) -> str:
    """Why this engine is not even configured: that happens in the process of the user, before any worker exists."""
    from vllm import EngineArgs

    options = {name: value for name, value in job.engine.items() if name != "skip_tokenizer_init"}
    try:
        EngineArgs(**options, skip_tokenizer_init=True).create_engine_config()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the engine was configured")


STEPS = {Generate: generate, Streams: streams, Carrier: carrier, Counts: counts}


if __name__ == "__main__":
    main()
