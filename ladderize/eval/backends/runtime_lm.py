"""lm-eval's model class on the tensor-parallel runtime: ``lm_eval --model ladderize``.

Texts become tokens exactly as in lm-eval's HF backend, whose methods for that it inherits; what is computed is
computed by ranks that wait for it (runtime/requests).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import configure_pad_token, postprocess_generated_text
from tqdm import tqdm

from ladderize.errors import UserError
from ladderize.eval.backends.chat import render_chats
from ladderize.eval.backends.generation_arguments import Generation, generation_of, refuse_other_defaults
from ladderize.eval.backends.rolling import Pair, check_scorable, rolling_log_likelihoods
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import default_device
from ladderize.runtime.requests.continuous import Prompt
from ladderize.runtime.requests.options import RequestOptions
from ladderize.runtime.requests.scoring import Ending
from ladderize.runtime.requests.service import Service, check_request, open_service
from ladderize.runtime.requests.worker import ContinueJob, Job, ScoreJob
from ladderize.runtime.spec import ModelSpec


@register_model("ladderize")
class RuntimeLM(HFLM):
    """A ladderized or plain Llama on ``tp_size`` processes, for lm-eval.

    pretrained: a folder or a hub id. batch_size: texts that are continued at a time. token_budget: tokens of a forward
    pass. Other arguments are as lm-eval's HF backend takes them. Raises UserError, also for an argument that is not
    known.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        tp_size: int = 1,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        token_budget: int | None = None,
        max_length: int | None = None,
        dtype: str = "auto",
        device: str | None = None,
        revision: str | None = None,
        backend: str = "auto",
        threads: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        trust_remote_code: bool = False,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise UserError(
                f"the model ladderize has no argument {next(iter(unknown))!r}; leave it out of --model_args"
            )
        TemplateLM.__init__(self)  # not HFLM's, which loads a model with transformers
        rows = RequestOptions.rows if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        # lm-eval's command line says cuda:0 where nothing was said, and its HF backend takes the CPU where it has none
        device = (device or default_device()).partition(":")[0]
        device = default_device() if device == "cuda" else device
        options = RequestOptions(
            tp_size=tp_size,
            rows=rows,
            token_budget=token_budget,
            max_length=max_length,
            backend=backend,  # type: ignore[arg-type]
            dtype=dtype,  # type: ignore[arg-type]
            device=device,  # type: ignore[arg-type]
            threads=threads,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        spec = check_request(str(pretrained), options)
        tokenizer = _tokenizer(spec, options, add_bos_token)
        self._use(spec, options, open_service(spec, options), tokenizer, add_bos_token, prefix_token_id)

    @classmethod
    def of(
        cls, spec: ModelSpec, options: RequestOptions, service: Service, tokenizer: Any, add_bos_token: bool | None
    ) -> "RuntimeLM":
        """Around a model that is open already, and is closed by whoever opened it."""
        made = cls.__new__(cls)
        TemplateLM.__init__(made)
        made._use(spec, options, service, tokenizer, add_bos_token, None)
        return made

    def _use(
        self,
        spec: ModelSpec,
        options: RequestOptions,
        service: Service,
        tokenizer: Any,
        add_bos_token: bool | None,
        prefix_token_id: int | None,
    ) -> None:
        self.spec, self.options, self.service, self.pretrained = spec, options, service, spec.name
        # what HFLM's methods for tokens ask for
        self.tokenizer = configure_pad_token(tokenizer)
        self.add_bos_token, self.custom_prefix_token_id = add_bos_token, prefix_token_id
        self.backend, self.truncation, self.enable_thinking = "causal", False, None
        self.chat_template_args: dict[str, Any] = {}
        self.batch_sizes: dict[int, int] = {}
        self.batch_size_per_gpu = options.rows
        self._max_length, self._device = options.max_length or spec.positions, torch.device(options.device)

    # ---- what lm-eval asks about the model ----

    @property
    def config(self) -> Mapping[str, Any]:
        return self.spec.config

    @property
    def max_length(self) -> int:
        return int(self._max_length)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results."""
        layout = self.spec.layout
        return {"model_dtype": self.spec.dtype, "layout": str(layout), "tp_size": self.options.tp_size}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; the template runs in a process with limits."""
        self.check_chat_template()
        text: str = vars(self)["apply_chat_template"](chat_history, add_generation_prompt)
        return text

    def check_chat_template(self) -> None:
        """Raise UserError where the model has no chat template."""
        if "apply_chat_template" not in vars(self):
            render_chats(self, self.pretrained, self.tokenizer)

    # ---- requests ----

    def _loglikelihood_tokens(self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any) -> list[Any]:
        """(log-likelihood in nats, whether it is greedy) of each continuation, given its context."""
        endings = [self._ending(request) for request in requests]
        scores = self._ask(ScoreJob(endings), len(endings), "Running loglikelihood requests", disable_tqdm)
        answers = list(zip(scores.sums.tolist(), scores.greedy.tolist(), strict=True))
        for (texts, _context, _continuation), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _ending(self, pair: Pair) -> Ending:
        """The last ``max_length`` + 1 tokens: the last one is predicted, and never read."""
        check_scorable(pair, self.max_length)
        _, context, continuation = pair
        return Ending(np.array([*context, *continuation][-(self.max_length + 1) :]), len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts, in windows of ``max_length``."""
        return rolling_log_likelihoods(self, requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model says after each context, up to a stop string, its end of text or ``max_gen_toks`` tokens."""
        refuse_other_defaults(self.spec.name, self.spec.folder)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        seed = torch.initial_seed() % (1 << 31)  # lm-eval has set it
        chosen = [
            generation_of(request.args[1], self.max_gen_toks, eos, self.spec.folder, seed) for request in requests
        ]
        prompts = [
            self._prompt(number, request.args[0], generation)
            for number, (request, generation) in enumerate(zip(requests, chosen, strict=True))
        ]
        made = self._ask(ContinueJob(prompts), len(prompts), "Running generate_until requests", disable_tqdm)
        texts = []
        for request, generation, ids in zip(requests, chosen, made, strict=True):
            texts.append(postprocess_generated_text(self.tok_decode(ids), list(generation.stops), None))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _prompt(self, number: int, context: str, generation: Generation) -> Prompt:
        room = self.max_length - generation.max_new_tokens
        if room < 1:
            raise UserError(
                f"max_gen_toks {generation.max_new_tokens} leaves no room for a context in the model's"
                f" {self.max_length} positions"
            )
        ids = self.tok_batch_encode([context], left_truncate_len=room)[0][0].tolist() if context else []
        if not ids:
            raise UserError("a context to generate from is empty, so there is nothing to continue")
        return Prompt(number, ids, generation.max_new_tokens, generation.sampling, generation.stops)

    def _ask(self, job: Job, total: int, what: str, disable_tqdm: bool) -> Any:
        with tqdm(total=total, disable=disable_tqdm, desc=what) as bar:
            return self.service.ask(job, bar.update)


def _tokenizer(spec: ModelSpec, options: RequestOptions, add_bos_token: bool | None) -> Any:
    assert spec.folder is not None
    more: dict[str, Any] = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    found = load_tokenizer(Path(spec.folder), trust_remote_code=options.trust_remote_code, **more)
    if found is None:
        raise UserError(f"{spec.name} has no tokenizer, and lm-eval's tasks are text")
    return found
