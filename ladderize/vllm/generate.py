"""The command ``ladderize generate --engine vllm``: lines as of the runtime, computed by vLLM."""

from ladderize.console import Console
from ladderize.errors import UserError
from ladderize.ranks.environment import environment_with
from ladderize.runtime.generate import GenerateTask
from ladderize.runtime.launch import Report
from ladderize.vllm.engine import ends_of, engine_variables, reason_of
from ladderize.vllm.environment import check_vllm

BATCHES_AT_ONCE = 8  # vLLM starts a text when another has ended; lines are written when so many batches are complete


def answer_in_vllm(task: GenerateTask, done: int, report: Report, console: Console) -> None:
    """Answer the prompts that are not ``done``. This is an ``Engine`` of ``generate_file``.

    The draws are vLLM's. A text depends on its number and the seed, and is not the runtime's. Raises UserError if vLLM
    does not start.
    """
    check_vllm()
    from vllm import LLM, SamplingParams, TokensPrompt

    spec, options = task.spec, task.options
    with environment_with(engine_variables(options.tp_size)), console.stage("starting vLLM"):
        try:
            llm = LLM(
                model=str(spec.folder),
                tensor_parallel_size=options.tp_size,
                dtype=spec.dtype,
                max_model_len=task.longest + options.max_new_tokens,
                max_num_seqs=task.batch_size,
                skip_tokenizer_init=True,
                disable_log_stats=True,
                **ends_of(spec.config),
            )
        except Exception as error:
            raise UserError(f"vLLM cannot run {spec.name}: {reason_of(error)}") from error
    chosen = options.sampling
    for numbers in task.parts(done, BATCHES_AT_ONCE * task.batch_size):
        parameters = [
            SamplingParams(
                temperature=chosen.temperature,
                top_k=chosen.top_k,
                top_p=max(chosen.top_p, 1e-6),  # vLLM refuses 0, the likeliest token alone
                seed=chosen.seed + number if chosen.temperature > 0 else None,
                max_tokens=options.max_new_tokens,
                stop_token_ids=list(task.eos),
                ignore_eos=options.ignore_eos,
                detokenize=False,
            )
            for number in numbers
        ]
        prompts = [TokensPrompt(prompt_token_ids=task.prompts[number]) for number in numbers]
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        report((numbers[0], [list(output.outputs[0].token_ids) for output in outputs]))
