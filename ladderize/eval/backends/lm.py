"""lm-eval's model classes around models that are open already.

Chat templates are rendered with ours, which limits what a stranger's template can do. BOS is told explicitly, the same
for all models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    configure_pad_token,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from ladderize.chat_template import ChatRenderer, RefusedConversation
from ladderize.errors import UserError
from ladderize.eval.backends.base import AnsweringModel
from ladderize.files.documents import read_json
from ladderize.ranks.group import Ranks
from ladderize.runtime.requests.continuous import Prompt
from ladderize.runtime.requests.scoring import Ending
from ladderize.runtime.sampling import Sampling

GENERATION_ARGUMENTS = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
# transformers' own default where neither a task nor generation_config.json says anything
TRANSFORMERS_TOP_K = 50
# what transformers would change logits or texts by, with the value that, beside null, says that it does not
NEUTRAL_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "num_beams"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0),
    **{key: [] for key in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")},
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), None),
    "sequence_bias": {},
}

Tokens = Sequence[int]
Pair = tuple[tuple[str, str] | None, Tokens, Tokens]  # (the texts, if any), context, continuation


# ---- how a task wants its texts generated ----


@dataclass(frozen=True)
class Generation:
    """One request's wishes. stops: strings that end a text, that of the end of a text among them."""

    stops: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling


def generation_of(
    arguments: Mapping[str, Any], default_max_gen_toks: int, eos: str, folder: Path | None, seed: int
) -> Generation:
    """``generation_kwargs`` of a task, as lm-eval's HF backend understands them. Raises UserError for others.

    folder: the checkpoint's, whose generation_config.json has defaults for sampling.
    """
    try:
        given = dict(normalize_gen_kwargs(dict(arguments), default_max_gen_toks))
        for name in given:
            if name not in GENERATION_ARGUMENTS:
                raise UserError(
                    f"the task asks for generation with {name}, which only --backend hf does; the other backends do"
                    f" {', '.join(GENERATION_ARGUMENTS)}"
                )
        stops = handle_stop_sequences(given["until"], eos=eos)
        if not all(isinstance(stop, str) for stop in stops):
            raise ValueError("until holds what is no string")
        count = int(given["max_gen_toks"])
        sampling = _sampling(given, folder, seed) if given["do_sample"] else Sampling()
    except (ValueError, TypeError) as error:
        raise UserError(f"a task's generation_kwargs cannot be used: {' '.join(str(error).split())[:200]}") from None
    if count < 1:
        raise UserError(f"a task asks for max_gen_toks {count}; at least 1 token is generated")
    return Generation(tuple(stops), count, sampling)


def _sampling(given: Mapping[str, Any], folder: Path | None, seed: int) -> Sampling:
    temperature = float(given.get("temperature", 0.0))
    if temperature <= 0:
        raise UserError("a task asks for do_sample without a temperature above 0; give one, or leave do_sample out")
    defaults = _generation_config(folder)
    top_k = given.get("top_k", defaults.get("top_k", TRANSFORMERS_TOP_K))
    top_p = given.get("top_p", defaults.get("top_p", 1.0))
    return Sampling(temperature, int(top_k or 0), 1.0 if top_p is None else float(top_p), seed)


def refuse_other_defaults(name: str, folder: Path | None) -> None:
    """Raise UserError where generation_config.json changes what transformers generates in a way that we do not."""
    for key, value in _generation_config(folder).items():
        if key in NEUTRAL_DEFAULTS and value is not None and value != NEUTRAL_DEFAULTS[key]:
            raise UserError(f"{name}: generation_config.json sets {key}, which only --backend hf does")


def _generation_config(folder: Path | None) -> dict[str, Any]:
    path = folder / "generation_config.json" if folder is not None else None
    return read_json(path, advice="repair or delete it") if path is not None and path.exists() else {}


# ---- model classes ----


class LimitedChats(HFLM):
    """Renders conversations in a process with limits. name: of the model, for messages."""

    name: str

    @cached_property
    def renderer(self) -> ChatRenderer:
        """Raises UserError where the tokenizer has no chat template."""
        found = ChatRenderer.of(self.tokenizer)
        if found is None:
            raise UserError(f"{self.name} has no chat template, so --apply-chat-template has nothing to apply")
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation. As lm-eval's own it leaves the system's turns out where they are refused."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return self.renderer.render(chat_history, **how)
        except RefusedConversation:
            return self.renderer.render([turn for turn in chat_history if turn["role"] != "system"], **how)


class SharedHFLM(LimitedChats):
    """lm-eval's HF backend on several processes, each with the whole model and its share of the questions.

    lm-eval's own asks Accelerate who it is and how to gather, but only where it has loaded the model itself; this one
    asks the ranks. Its logits_cache is off: lm-eval 0.4.13 scores a continuation of one token at a wrong position with
    it, where context and continuation together are another request's context.
    """

    def __init__(self, name: str, ranks: Ranks, **given: Any) -> None:
        super().__init__(**given, logits_cache=False)
        self.name, self.ranks = name, ranks
        self._rank, self._world_size = ranks.rank, ranks.size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """A number of each rank, in order: [ranks]."""
        return torch.stack(self.ranks.gather(tensor.detach().cpu()))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        found = self.ranks.gather(obj)
        return found if self.rank == dst else None

    def barrier(self) -> None:
        self.ranks.barrier()


class AnsweringLM(LimitedChats):
    """Texts become tokens exactly as in lm-eval's HF backend, whose methods for that it inherits; what is computed is
    computed by ``model``."""

    def __init__(self, model: AnsweringModel, add_bos_token: bool | None, prefix_token_id: int | None = None) -> None:
        TemplateLM.__init__(self)  # not HFLM's, which loads a model with transformers
        self.engine, self.name = model, model.name
        # what HFLM's methods for tokens ask for
        self.pretrained, self.tokenizer = model.name, configure_pad_token(model.tokenizer)
        self.add_bos_token, self.custom_prefix_token_id = add_bos_token, prefix_token_id
        self.backend, self.truncation, self.enable_thinking = "causal", False, None
        self.chat_template_args: dict[str, Any] = {}
        self.batch_sizes: dict[int, int] = {}
        self.batch_size_per_gpu = model.batch_size
        self._max_length, self._device = model.positions, torch.device(model.described.device)

    # ---- what lm-eval asks about the model ----

    @property
    def config(self) -> Mapping[str, Any]:
        return self.engine.config

    @property
    def max_length(self) -> int:
        return int(self._max_length)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results."""
        described = self.engine.described
        return {"model_dtype": described.dtype, "layout": described.layout, "tp_size": described.tp_size}

    # ---- requests ----

    def _loglikelihood_tokens(self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any) -> list[Any]:
        """(log-likelihood in nats, whether it is greedy) of each continuation, given its context."""
        endings = [self._ending(request) for request in requests]
        with tqdm(total=len(endings), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            scores = self.engine.score_endings(endings, bar.update)
        answers = list(zip(scores.sums.tolist(), scores.greedy.tolist(), strict=True))
        for (texts, _context, _continuation), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _ending(self, pair: Pair) -> Ending:
        """The last ``max_length`` + 1 tokens: the last one is predicted, and never read. Raises UserError for a
        continuation that cannot be scored."""
        texts, context, continuation = pair
        if not 0 < len(continuation) <= self.max_length or not context:
            shown = "" if texts is None else f" {texts[1][:80]!a}"
            raise UserError(
                f"the continuation{shown} has {len(continuation)} tokens after a context of {len(context)}; one of 1 to"
                f" {self.max_length} tokens can be scored, after a context of at least 1"
            )
        return Ending(np.array([*context, *continuation][-(self.max_length + 1) :]), len(continuation))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood in nats of whole texts, which are read in windows of ``max_length`` that do not overlap in
        what they score: those of lm-eval's HF class."""
        pairs: list[Pair] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [(None, *make_disjoint_window(window)) for window in windows]
            counts.append(len(own))
            pairs += own
        scores = iter(self._loglikelihood_tokens(pairs, disable_tqdm))
        sums = [float(sum(next(scores)[0] for _ in range(count))) for count in counts]
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model says after each context, up to a stop string, its end of text or ``max_gen_toks`` tokens."""
        model = self.engine
        refuse_other_defaults(model.name, model.folder)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        seed = torch.initial_seed() % (1 << 31)  # lm-eval has set it
        chosen = [generation_of(request.args[1], self.max_gen_toks, eos, model.folder, seed) for request in requests]
        prompts = [
            self._prompt(number, request.args[0], generation)
            for number, (request, generation) in enumerate(zip(requests, chosen, strict=True))
        ]
        with tqdm(total=len(prompts), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            made = model.continue_prompts(prompts, bar.update)
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
