"""A model that vLLM computes, for ``ladderize eval --backend vllm``: the accuracy of what is served."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ladderize.checkpoint.config import most_positions, parameter_count
from ladderize.checkpoint.opening import read_checkpoint
from ladderize.checkpoint.reading import FLOAT_DTYPES, Checkpoint
from ladderize.errors import UserError
from ladderize.eval.backends.base import AnsweringModel, open_tokenizer
from ladderize.eval.options import EvalOptions
from ladderize.families.registry import find_family
from ladderize.layout import Layout
from ladderize.runtime.requests.continuous import Prompt
from ladderize.runtime.requests.scoring import Ending, EndingScores, WindowScores
from ladderize.runtime.shards import check_runnable
from ladderize.vllm.engine import VLLMEngine, ends_of, start_engine
from ladderize.vllm.environment import check_vllm, installed_version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import RequestOutput


def open_vllm(name: str, folder: Path, options: EvalOptions, **more: Any) -> "VLLMModel":
    """Open a checked model, dense or converted, for ``ladderize.evaluate``. name: as the user gave it. more: arguments
    of vLLM's ``LLM``.

    Raises UserError or LayoutError: where vLLM is not there or cannot run it, or for another ``tp_size``.
    """
    check_vllm()
    checkpoint = read_checkpoint(folder)
    config = checkpoint.config
    if find_family(config) is not None:
        check_runnable(config, Layout.from_config(config), options.tp_size)
    tokenizer = open_tokenizer(name, folder, options)
    arguments = {
        "model": str(folder),
        "tensor_parallel_size": options.tp_size,
        "dtype": _dtype(checkpoint, options),
        "max_model_len": _positions(name, config, options) + 1,  # its last token is scored, and never read
        "max_num_seqs": options.batch_size,
        "seed": options.seed,
        "trust_remote_code": options.trust_remote_code,
        **ends_of(config),
        "skip_tokenizer_init": tokenizer is None,
        "disable_log_stats": True,
        **more,
    }
    return VLLMModel(name, checkpoint, options, tokenizer, start_engine(name, arguments))


class VLLMModel(AnsweringModel):
    """A model in vLLM's processes."""

    no_predictions = "vLLM tells the log-probabilities of single tokens, not of the whole vocabulary"

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        options: EvalOptions,
        tokenizer: "PreTrainedTokenizerBase | None",
        engine: VLLMEngine,
    ) -> None:
        from vllm.platforms import current_platform

        self.folder, self.batch_size, self.engine = checkpoint.folder, options.batch_size, engine
        served, config = engine.llm.llm_engine.model_config, checkpoint.config
        stored = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
        super().__init__(
            name,
            config,
            tokenizer,
            vocab_size=served.get_vocab_size(),
            positions=served.max_model_len - 1,
            hidden_size=served.get_hidden_size(),
            parameters=parameter_count(config) if find_family(config) is not None else stored,
            dtype=engine.dtype,
            device=current_platform.device_type,
            backend="vllm",
            tp_size=options.tp_size,
            vllm_version=installed_version(),
        )

    def score(
        self,
        windows: list[np.ndarray],
        *,
        batch_size: int,
        keep: Path | None = None,
        reference: Path | None = None,
        advance: Callable[[int], None] = lambda n: None,
    ) -> WindowScores:
        assert keep is None
        assert reference is None  # see ``no_predictions``
        return WindowScores(-self.score_endings([Ending(window, len(window) - 1) for window in windows], advance).sums)

    def score_endings(self, endings: list[Ending], advance: Callable[[int], Any]) -> EndingScores:
        """The last token of a text is the one token that vLLM may generate, and its log-probability, taken before that
        rule, is that of a free choice. The others are tokens of the prompt. All are of the softmax over the whole
        vocabulary, in fp32."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=1,
                allowed_token_ids=[int(ending.ids[-1])],
                logprobs=1,
                prompt_logprobs=1,
                ignore_eos=True,
                detokenize=False,
            )
            for ending in endings
        ]
        outputs = self.engine.generate([ending.ids[:-1].tolist() for ending in endings], sampling, advance)
        scores = [_ending_score(output, ending) for output, ending in zip(outputs, endings, strict=True)]
        return EndingScores(np.array([total for total, _ in scores]), np.array([greedy for _, greedy in scores]))

    def continue_prompts(self, prompts: list[Prompt], advance: Callable[[int], Any]) -> list[list[int]]:
        """The seed is another one for each prompt, so that a task that asks for the same several times gets several
        answers, and the same ones in every run."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=prompt.sampling.temperature,
                top_k=prompt.sampling.top_k,
                top_p=prompt.sampling.top_p,
                seed=prompt.sampling.seed + prompt.number if prompt.sampling.temperature > 0 else None,
                max_tokens=prompt.max_new_tokens,
                stop=list(prompt.stops),
                skip_special_tokens=False,  # a stop string may be one
            )
            for prompt in prompts
        ]
        outputs = self.engine.generate([prompt.ids for prompt in prompts], sampling, advance)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def harness(self, options: EvalOptions, add_bos: bool | None) -> Any:
        from ladderize.eval.backends.lm import AnsweringLM

        return AnsweringLM(self, add_bos)

    def close(self) -> None:
        self.engine.close()


def _ending_score(output: "RequestOutput", ending: Ending) -> tuple[float, bool]:
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    # one entry for each token of the text: the most likely one, and its own
    found: Sequence[Any] = [*output.prompt_logprobs, *output.outputs[0].logprobs][-ending.scored :]
    total, greedy = 0.0, True
    for token, known in zip(ending.ids[-ending.scored :].tolist(), found, strict=True):
        own = known[token].logprob
        total += own
        greedy &= own >= max(entry.logprob for entry in known.values())
    return total, greedy


def _dtype(checkpoint: Checkpoint, options: EvalOptions) -> str:
    """The dtype to compute in. vLLM's own "auto" takes 16 bits for what is stored in 32; ours is: as stored."""
    if options.dtype != "auto":
        return options.dtype
    norm = checkpoint.tensors.get("model.norm.weight")
    return FLOAT_DTYPES.get(norm.dtype, "auto") if norm is not None else "auto"


def _positions(name: str, config: dict[str, Any], options: EvalOptions) -> int:
    """Tokens of the longest text that is read, which vLLM keeps room for."""
    positions = most_positions(config)
    if options.max_length is not None and options.max_length > positions:
        raise UserError(f"--max-length {options.max_length} is more than the {positions} positions of {name}")
    return options.max_length or positions
